"""Inference in a server: loaded models, their caches, and the batcher before them."""
