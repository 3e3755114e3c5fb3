"""Time and memory of a model with each kind of cache."""
