"""The registry of models: versions, their checkpoints, and which one is active."""
