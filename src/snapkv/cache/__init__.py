"""Where the kept keys and values live."""

from snapkv.cache.candidates import keep_path, verifying
from snapkv.cache.compressed import CompressedCache
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.report import CacheReport, format_bytes

__all__ = [
    "CacheReport",
    "CompressedCache",
    "CompressedLayer",
    "format_bytes",
    "keep_path",
    "verifying",
]
