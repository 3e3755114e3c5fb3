"""Answer questions about files and libraries of documents: the command line and what is below it.

Importing this file loads no torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snapkv_app.library.library import Library

__version__ = "0.4.0"

__all__ = ["Library"]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that the command line starts without torch.

    Raises:
        AttributeError: the package has no public name `name`.
    """
    if name not in __all__:
        raise AttributeError(f"module 'snapkv_app' has no attribute {name!r}")
    from snapkv_app.library import library

    return getattr(library, name)
