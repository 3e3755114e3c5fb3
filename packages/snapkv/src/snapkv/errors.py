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
    ├── OutputError (OSError)               a file cannot be written, for example on a full disk
    └── OutOfMemoryError (MemoryError)      the device is full; the message names what would fit

Each message names the argument, the problem with the value, and the remedy. If an optional package
is missing, it names the command that installs it.
"""

import contextlib
import re


class SnapKVError(Exception):
    """The base class of all errors that this package raises on purpose."""


class InvalidArgumentError(SnapKVError, ValueError):
    """An argument's value is out of range or contradicts another."""


class PromptTooLongError(InvalidArgumentError):
    """The prompt has more tokens than the model has positions."""


class BudgetTooSmallError(InvalidArgumentError):
    """A budget in bytes is too small for the tokens of a prompt that must be kept."""


class ModelNotFoundError(InvalidArgumentError):
    """There is no model with this name, neither on the hub nor as a folder or a file."""


class DocumentError(InvalidArgumentError):
    """A document is missing, empty, or not readable as text."""


class CacheFileError(InvalidArgumentError):
    """A saved cache is missing or damaged, is another kind of file, or cannot be written."""


class CacheMismatchError(InvalidArgumentError):
    """The cache cannot continue with this model, batch or prompt.

    It was filled with another model, batch size or prompt, or a forward pass was interrupted and
    its layers have seen different numbers of tokens.
    """


class LibraryError(InvalidArgumentError):
    """A folder is not a library, or its library is damaged, in use, or of another model."""


class InvalidTypeError(SnapKVError, TypeError):
    """An argument has the wrong type."""


class UnsupportedModelError(SnapKVError, ValueError):
    """The model, its attention implementation or the mask cannot be compressed correctly."""


class MissingDependencyError(SnapKVError, ImportError):
    """An optional package is not installed; the message names the command that installs it."""


class OutputError(SnapKVError, OSError):
    """A file cannot be written. If there was a file of the same name, it is unchanged."""


class OutOfMemoryError(SnapKVError, MemoryError):
    """A device has run out of memory, or the limit `recall_bytes` has been reached.

    The message says what would fit, or how to make it fit.
    """


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
        The error, for the caller to raise; nothing is raised here. Its message is "argument:
        problem. Remedy." A text that ends with a question mark gets no full stop.
    """
    sentences = (text if text.endswith("?") else f"{text}." for text in (problem, remedy))
    return error_type(f"{argument}: {' '.join(sentences)}")


def missing_package(purpose: str, *packages: str) -> MissingDependencyError:
    """Build the error for missing packages.

    Args:
        purpose: what needs the packages, such as "plot: drawing figures".
        packages: their names on the package index.

    Returns:
        The error, for the caller to raise; nothing is raised here. Its message ends with the
        command that installs the packages.
    """
    names = " and ".join(packages)
    return MissingDependencyError(
        f"{purpose} needs the package {names}, which is not installed. Run "
        f"{install_command(*packages)}"
    )


def install_command(*packages: str) -> str:
    """Return the pip command that installs packages in the versions that snapkv needs.

    The versions come from the requirements of the installed packages of this repository. A package
    that none of them requires is named without a version. The command does not name an extra such
    as ``snapkv[app]``, because this package is on no index where pip could find it.

    Args:
        packages: names on the package index, in any spelling that the index accepts.
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
    """Return a package name in the normal form by which package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()
