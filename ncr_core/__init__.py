"""Neural collaborative ranking: data, models, training, ranking and evaluation. No web, no SQL."""
