"""A/B tests of model versions, and the click-through of their lists."""
