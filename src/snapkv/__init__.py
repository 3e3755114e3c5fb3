"""SnapKV: answer over very long prompts with a small key-value cache."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snapkv.cache.report import CacheReport
    from snapkv.document import Document
    from snapkv.errors import (
        CacheFileError,
        CacheMismatchError,
        DocumentError,
        InvalidArgumentError,
        InvalidTypeError,
        MissingDependencyError,
        ModelNotFoundError,
        OutOfMemoryError,
        OutputError,
        PromptTooLongError,
        SnapKVError,
        UnsupportedModelError,
    )
    from snapkv.hf.cache import CompressedCache
    from snapkv.hf.install import install, uninstall
    from snapkv.policies import (
        H2O,
        TOVA,
        AdaKV,
        CriticalKV,
        ExpectedAttention,
        FastGen,
        FullCache,
        KeyDiff,
        KVzip,
        PromptThenDecode,
        PyramidKV,
        Random,
        Scissorhands,
        SnapKV,
        StreamingLLM,
    )
__version__ = "0.1.0"

__all__ = [
    "AdaKV",
    "CacheFileError",
    "CacheMismatchError",
    "CacheReport",
    "CompressedCache",
    "CriticalKV",
    "Document",
    "DocumentError",
    "ExpectedAttention",
    "FastGen",
    "FullCache",
    "H2O",
    "InvalidArgumentError",
    "InvalidTypeError",
    "KVzip",
    "KeyDiff",
    "MissingDependencyError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "OutputError",
    "PromptThenDecode",
    "PromptTooLongError",
    "PyramidKV",
    "Random",
    "Scissorhands",
    "SnapKV",
    "SnapKVError",
    "StreamingLLM",
    "TOVA",
    "UnsupportedModelError",
    "install",
    "uninstall",
]

_ROOMS = {
    "snapkv.cache.report": ("CacheReport",),
    "snapkv.hf.cache": ("CompressedCache",),
    "snapkv.hf.install": ("install", "uninstall"),
    "snapkv.policies": (
        "AdaKV",
        "CriticalKV",
        "ExpectedAttention",
        "FastGen",
        "FullCache",
        "H2O",
        "KVzip",
        "KeyDiff",
        "PromptThenDecode",
        "PyramidKV",
        "Random",
        "Scissorhands",
        "SnapKV",
        "StreamingLLM",
        "TOVA",
    ),
    "snapkv.document": ("Document",),
}
_HOMES = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the command line starts without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'snapkv' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "snapkv.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
