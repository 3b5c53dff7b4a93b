"""The worker: claims jobs, runs them in child processes, publishes their results."""
