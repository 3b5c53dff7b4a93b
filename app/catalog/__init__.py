"""The catalogue: items that can be recommended."""
