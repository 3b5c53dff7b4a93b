"""Inference: from a checkpoint and arrays of item rows to ranked lists."""
