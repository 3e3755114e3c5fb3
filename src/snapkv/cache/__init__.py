"""Where the kept keys and values live."""

from snapkv.cache.amounts import format_bytes
from snapkv.cache.compressed import CompressedCache
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.report import CacheReport

__all__ = ["CacheReport", "CompressedCache", "CompressedLayer", "format_bytes"]
