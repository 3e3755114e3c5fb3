"""SnapKV: answer over very long prompts with a small key-value cache."""

__version__ = "0.1.0"
