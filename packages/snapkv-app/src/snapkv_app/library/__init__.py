"""Documents that a model reads once, for any number of later questions."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snapkv_app.library.blending import blend
    from snapkv_app.library.joining import Part, joined_ids

__all__ = ["Part", "blend", "joined_ids"]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that listing documents does not import torch.

    Raises:
        AttributeError: the package has no public name `name`.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "blending" if name == "blend" else "joining"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
