"""Durable jobs: the queue of background work, and the triggers that fill it."""
