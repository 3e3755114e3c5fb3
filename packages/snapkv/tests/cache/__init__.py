"""The cache: turns, recall, saving."""
