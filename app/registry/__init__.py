"""The registry of models: versions, their checkpoints, and the active version."""
