"""Every error the package raises on purpose.

    SnapKVError
    ├── InvalidArgumentError (ValueError)   a value is out of range or contradicts another
    │   ├── PromptTooLongError              more tokens than the model has positions
    │   ├── BudgetTooSmallError             fewer bytes than a prompt's window and sinks take
    │   ├── ModelNotFoundError              no model under that name, folder or file
    │   ├── DocumentError                   a document is missing, empty or not text
    │   ├── CacheFileError                  a saved cache is missing, damaged or cannot be written
    │   ├── CacheMismatchError              the cache belongs to another model, batch or prompt
    │   └── LibraryError                    a library is none, damaged, in use, or of another model
    ├── InvalidTypeError (TypeError)        an argument has the wrong type
    ├── UnsupportedModelError (ValueError)  the model or its mask cannot be compressed correctly
    ├── MissingDependencyError (ImportError) an optional package is not installed
    ├── OutputError (OSError)               a file cannot be written: the disk is full, or says no
    └── OutOfMemoryError (MemoryError)      the device is full; the message says what would fit

Each message names the argument, what was expected, what was given and what to do; where an optional
package is missing, the command that brings it, as the installed package itself says.
"""

import contextlib
import re


class SnapKVError(Exception):
    """Root of all errors raised by this package."""


class InvalidArgumentError(SnapKVError, ValueError):
    """An argument's value is out of range or contradicts another."""


class PromptTooLongError(InvalidArgumentError):
    """The prompt has more tokens than the model has positions."""


class BudgetTooSmallError(InvalidArgumentError):
    """A budget of bytes has no room for what must stay of a prompt."""


class ModelNotFoundError(InvalidArgumentError):
    """No model under that hub id, folder or file name."""


class DocumentError(InvalidArgumentError):
    """A document is missing, empty, or not readable as text."""


class CacheFileError(InvalidArgumentError):
    """A saved cache is missing, altered, not one at all, or cannot be written."""


class CacheMismatchError(InvalidArgumentError):
    """The cache is used with another model, batch size or prompt than it was filled with."""


class LibraryError(InvalidArgumentError):
    """A folder is no library, or one that is damaged, in use, or was read by another model."""


class InvalidTypeError(SnapKVError, TypeError):
    """An argument has the wrong type."""


class UnsupportedModelError(SnapKVError, ValueError):
    """The model, its attention implementation or the mask cannot be compressed correctly."""


class MissingDependencyError(SnapKVError, ImportError):
    """An optional package is not installed; the message names the command that installs it."""


class OutputError(SnapKVError, OSError):
    """A file of results cannot be written; what stood under its name still does."""


class OutOfMemoryError(SnapKVError, MemoryError):
    """The device has no memory left; the message says what would fit."""


def wrong(
    argument: str,
    problem: str,
    remedy: str,
    error_type: type[SnapKVError] = InvalidArgumentError,
) -> SnapKVError:
    """Build the error that says what is wrong with an argument and what to do instead.

    Args:
        argument: the name of the argument, option or field, with which the message begins.
        problem: what is wrong, with the value that was given; no capital, no full stop.
        remedy: what to do instead, as an imperative with a capital; no full stop.
        error_type: the class of the error.

    Returns:
        The error, for the caller to raise. Its message is "argument: problem. Remedy."
    """
    return error_type(f"{argument}: {problem}. {remedy}.")


def missing_package(purpose: str, *packages: str) -> MissingDependencyError:
    """The error that says which packages a purpose, such as "plot: drawing figures", needs."""
    return MissingDependencyError(
        f"{purpose} needs the package {' and '.join(packages)}, which is not installed; run "
        f"{install_command(*packages)}"
    )


def install_command(*packages: str) -> str:
    """What installs packages in the releases that the installed parts of this repository ask for.

    It names the packages and not an extra of this one, which pip finds in no index.
    """
    from importlib.metadata import (  # 40 ms, that no other error needs
        PackageNotFoundError,
        requires,
    )

    lines: list[str] = []
    for part in ("snapkv", "snapkv-app", "snapkv-lab", "snapkv-vllm"):
        with contextlib.suppress(PackageNotFoundError):
            lines += requires(part) or []
    asked = [line.partition(";")[0].strip() for line in reversed(lines)]  # the first one counts
    wanted = {_normal(re.split(r"[^\w.-]", each)[0]): each for each in asked}
    return "pip install " + " ".join(f"'{wanted.get(_normal(each), each)}'" for each in packages)


def _normal(name: str) -> str:
    """A name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()
