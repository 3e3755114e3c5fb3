"""Saving a cache to disk: sealed files, and the parts of a cache as tensors and JSON.

The package can be imported without torch, because `snapkv.cache.saving.writing` is used to write
every file of the product.
"""
