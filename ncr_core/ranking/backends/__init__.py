"""The backends of Algorithm 1, and their kernels."""
