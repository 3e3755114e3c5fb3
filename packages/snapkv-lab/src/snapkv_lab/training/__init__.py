"""Training Medusa heads on a model's own answers."""
