"""What meets transformers: loading, saving, the Trainer. Nothing in the rest of zinf imports it."""
