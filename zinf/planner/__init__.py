"""Says before any work whether a model trains on a machine, how fast, what limits it, and what would help. Reads configs only."""
