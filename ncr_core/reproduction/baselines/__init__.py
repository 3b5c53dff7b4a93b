"""Baselines of the comparison: methods of others, by their papers or by public libraries."""
