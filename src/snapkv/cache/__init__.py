"""Where the kept keys and values live."""

from snapkv.cache.candidates import keep_path, verifying
from snapkv.cache.compressed import CompressedCache
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.report import CacheReport
from snapkv.cache.turns import Turns

__all__ = [
    "CacheReport",
    "CompressedCache",
    "CompressedLayer",
    "Turns",
    "keep_path",
    "verifying",
]
