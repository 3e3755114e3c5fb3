"""The laboratory: what measures, compares and draws. The product does not import it."""
