"""Every error the package raises on purpose.

    SnapKVError
    ├── InvalidArgumentError (ValueError)   a value is out of range or contradicts another
    │   ├── PromptTooLongError              more tokens than the model has positions
    │   ├── ModelNotFoundError              no model under that name, folder or file
    │   ├── DocumentError                   a document is missing, empty or not text
    │   ├── CacheFileError                  a saved cache is missing, damaged or cannot be written
    │   └── CacheMismatchError              the cache belongs to another model, batch or prompt
    ├── InvalidTypeError (TypeError)        an argument has the wrong type
    ├── UnsupportedModelError (ValueError)  the model or its mask cannot be compressed correctly
    ├── MissingDependencyError (ImportError) an optional package is not installed
    ├── OutputError (OSError)               a file cannot be written: the disk is full, or says no
    └── OutOfMemoryError (MemoryError)      the device is full; the message says what would fit

Each message names the argument, what was expected, what was given and what to do.
"""


class SnapKVError(Exception):
    """Root of all errors raised by this package."""


class InvalidArgumentError(SnapKVError, ValueError):
    """An argument's value is out of range or contradicts another."""


class PromptTooLongError(InvalidArgumentError):
    """The prompt has more tokens than the model has positions."""


class ModelNotFoundError(InvalidArgumentError):
    """No model under that hub id, folder or file name."""


class DocumentError(InvalidArgumentError):
    """A document is missing, empty, or not readable as text."""


class CacheFileError(InvalidArgumentError):
    """A saved cache is missing, altered, not one at all, or cannot be written."""


class CacheMismatchError(InvalidArgumentError):
    """The cache is used with another model, batch size or prompt than it was filled with."""


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
