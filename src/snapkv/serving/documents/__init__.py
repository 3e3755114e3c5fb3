"""Documents that a server reads once, keeps compressed, and shares among requests."""
