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
        LibraryError,
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
        RKV,
        TOVA,
        AcrossLayers,
        AdaKV,
        AutoBudget,
        ByteBudget,
        CriticalKV,
        ExpectedAttention,
        FastGen,
        FullCache,
        KeyDiff,
        KVzap,
        KVzip,
        LagKV,
        PromptThenDecode,
        PyramidKV,
        Random,
        Scissorhands,
        SnapKV,
        StreamingLLM,
        default_policy,
    )
    from snapkv.storage.bits import KVCodes
__version__ = "0.4.0"

__all__ = [
    "AcrossLayers",
    "AdaKV",
    "AutoBudget",
    "BudgetTooSmallError",
    "ByteBudget",
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
    "KVCodes",
    "KVzap",
    "KVzip",
    "KeyDiff",
    "LagKV",
    "LibraryError",
    "MissingDependencyError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "OutputError",
    "PromptThenDecode",
    "PromptTooLongError",
    "PyramidKV",
    "RKV",
    "Random",
    "Scissorhands",
    "SnapKV",
    "SnapKVError",
    "StreamingLLM",
    "TOVA",
    "UnsupportedModelError",
    "default_policy",
    "install",
    "uninstall",
]

_HOMES = {
    "CacheReport": "snapkv.cache.report",
    "CompressedCache": "snapkv.hf.cache",
    "Document": "snapkv.document",
    "KVCodes": "snapkv.storage.bits",
    "install": "snapkv.hf.install",
    "uninstall": "snapkv.hf.install",
}
"""The module of each public name that is neither a policy nor an error."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the command line starts without torch.

    The imported object is stored in this module, so Python does not call this function for it
    again.

    Raises:
        ImportError: the name belongs to kvpress or to the authors' code, or it has moved to another
            package; the message says what to write.
        AttributeError: the name is unknown.
    """
    if name not in __all__:
        from snapkv.kvpress_names import advice_for

        if message := advice_for(name):  # `from snapkv import` would hide that of an AttributeError
            raise ImportError(f"snapkv: {message}")
        raise AttributeError(f"module 'snapkv' has no attribute {name!r}")
    usual = "snapkv.errors" if name.endswith("Error") else "snapkv.policies"
    value = getattr(importlib.import_module(_HOMES.get(name, usual)), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
