"""The paper's tables and figures, and the comparison with strong baselines, as repeatable runs."""
