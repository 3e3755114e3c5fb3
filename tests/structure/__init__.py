"""The shape of the source, read from its syntax trees alone: nothing of it is imported."""
