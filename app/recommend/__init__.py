"""Lists for users: recommend, rerank, compare, similar items and questions."""
