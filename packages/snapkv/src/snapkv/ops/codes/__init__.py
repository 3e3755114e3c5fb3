"""Attention to heads whose keys and values are quantized."""
