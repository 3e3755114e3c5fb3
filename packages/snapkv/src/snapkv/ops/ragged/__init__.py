"""Attention to heads that hold different numbers of tokens (varlen)."""
