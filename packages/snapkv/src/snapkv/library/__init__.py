"""Documents that a model reads once and is asked about for ever."""

from snapkv.library.blending import blend
from snapkv.library.joining import Part, joined_ids

__all__ = ["Part", "blend", "joined_ids"]
