"""The laboratory: what measures, compares and draws. The product does not import it."""

__version__ = "0.4.0"
