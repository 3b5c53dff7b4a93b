"""The training pipeline, which runs in a worker's child process."""
