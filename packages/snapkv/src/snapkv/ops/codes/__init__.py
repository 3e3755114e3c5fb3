"""Keys and values in few bits: what the codes are, and attention that reads them."""
