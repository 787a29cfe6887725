"""How zinf is used from other libraries: what their users bring along, understood as it stands. Nothing in the engine imports it."""
