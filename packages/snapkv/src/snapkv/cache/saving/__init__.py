"""A cache is written to disk: sealed files, and how parts of a cache become tensors and JSON.

Importable without torch, for `snapkv.cache.saving.writing` writes every file of the package.
"""
