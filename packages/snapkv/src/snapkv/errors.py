"""Every error that the package raises on purpose.

    SnapKVError
    ├── InvalidArgumentError (ValueError)   a value is out of range or contradicts another
    │   ├── PromptTooLongError              the prompt has more tokens than the model has positions
    │   ├── BudgetTooSmallError             the bytes cannot hold a prompt's window and sinks
    │   ├── ModelNotFoundError              there is no model with that name, folder or file
    │   ├── DocumentError                   a document is missing, empty or not text
    │   ├── CacheFileError                  a saved cache is missing, damaged or cannot be written
    │   ├── CacheMismatchError              the cache belongs to another model, batch or prompt
    │   └── LibraryError                    a library is damaged, in use, or of another model
    ├── InvalidTypeError (TypeError)        an argument has the wrong type
    ├── UnsupportedModelError (ValueError)  the model or its mask cannot be compressed correctly
    ├── MissingDependencyError (ImportError) an optional package is not installed
    ├── OutputError (OSError)               a file cannot be written, for instance on a full disk
    └── OutOfMemoryError (MemoryError)      the device is full; the message names what would fit

Each message names the argument, the problem with the value, and the remedy. If an optional package
is missing, it names the command that installs it.
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
    """A budget in bytes cannot hold the tokens of a prompt that must be kept."""


class ModelNotFoundError(InvalidArgumentError):
    """No model was found under the given name: it is no hub id, folder or file."""


class DocumentError(InvalidArgumentError):
    """A document is missing, empty, or not readable as text."""


class CacheFileError(InvalidArgumentError):
    """A saved cache is missing or damaged, is another kind of file, or cannot be written."""


class CacheMismatchError(InvalidArgumentError):
    """The cache is used with another model, batch size or prompt than it was filled with."""


class LibraryError(InvalidArgumentError):
    """A library cannot be used.

    The folder is not a library, or the library is damaged, in use, or was read by another model.
    """


class InvalidTypeError(SnapKVError, TypeError):
    """An argument has the wrong type."""


class UnsupportedModelError(SnapKVError, ValueError):
    """The model, its attention implementation or the mask cannot be compressed correctly."""


class MissingDependencyError(SnapKVError, ImportError):
    """An optional package is not installed; the message names the command that installs it."""


class OutputError(SnapKVError, OSError):
    """A result file cannot be written; a file that had its name before is unchanged."""


class OutOfMemoryError(SnapKVError, MemoryError):
    """A device has run out of memory. The message says how to make the prompt fit."""


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
        The error, for the caller to raise. Its message is "argument: problem. Remedy." A question
        mark at the end of either text stays.
    """
    sentences = (text if text.endswith("?") else f"{text}." for text in (problem, remedy))
    return error_type(f"{argument}: {' '.join(sentences)}")


def missing_package(purpose: str, *packages: str) -> MissingDependencyError:
    """Build the error for missing packages.

    Args:
        purpose: what needs the packages, such as "plot: drawing figures".
        packages: their names on the index.

    Returns:
        The error, for the caller to raise. Its message ends with the command that installs the
        packages.
    """
    names = " and ".join(packages)
    return MissingDependencyError(
        f"{purpose} needs the package {names}, which is not installed. Run "
        f"{install_command(*packages)}"
    )


def install_command(*packages: str) -> str:
    """Return the pip command that installs packages in the releases that this repository requires.

    It names the packages and not an extra of this package, which pip finds on no index.
    """
    from importlib.metadata import (  # takes 40 ms, which no other error needs
        PackageNotFoundError,
        requires,
    )

    lines: list[str] = []
    for part in ("snapkv", "snapkv-app", "snapkv-lab", "snapkv-vllm"):
        with contextlib.suppress(PackageNotFoundError):
            lines += requires(part) or []
    # Reversed, so that the first requirement of a package replaces the later ones.
    requirements = [line.partition(";")[0].strip() for line in reversed(lines)]
    known = {_normal(re.split(r"[^\w.-]", each)[0]): each for each in requirements}
    return "pip install " + " ".join(f"'{known.get(_normal(each), each)}'" for each in packages)


def _normal(name: str) -> str:
    """Return the form of a package name that indexes compare."""
    return re.sub(r"[-_.]+", "-", name).lower()
