"""How votes are computed, pooled and ranked, and what is kept of keys and values gathered."""
