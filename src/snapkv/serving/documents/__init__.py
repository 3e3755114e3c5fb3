"""Documents that requests share."""
