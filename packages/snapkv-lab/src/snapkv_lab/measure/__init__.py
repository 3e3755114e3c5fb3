"""Measurements of time and memory for a model with each kind of cache."""
