"""The ways to compute Algorithm 1's lists, and their kernels."""
