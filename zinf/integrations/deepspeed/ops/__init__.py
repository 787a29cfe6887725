"""deepspeed.ops: optimizers that a script builds and gives to `initialize`. They describe; the engine steps."""
