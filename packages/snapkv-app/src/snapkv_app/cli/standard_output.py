"""Standard output, whose errors name it, and standard error, which a command may hide."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from snapkv.errors import OutputError
from snapkv.validation import without_controls

FAILED = 1
"""Exit status of a command that finished although a part of its work failed."""


@contextlib.contextmanager
def named_output() -> Iterator[None]:
    """In this block, failed writes to standard output raise OutputError; flushed at the end."""
    stream = sys.stdout
    if stream is None:
        raise OutputError("output: expected an open standard output, got a closed one; open it")
    sys.stdout = cast(Any, _Named(stream))
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = stream


def has_written() -> bool:
    """Return whether anything was written in the newest block of `named_output`."""
    return _Named.has_written


def hide_messages(is_quiet: bool) -> bool:
    """Discard what is written to standard error until `messages_shown` ends, if `is_quiet`."""
    if is_quiet:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 # closed below
    return is_quiet


@contextlib.contextmanager
def messages_shown() -> Iterator[None]:
    """Give standard error back after the block, in which a command may have hidden it."""
    before: TextIO = sys.stderr
    try:
        yield
    finally:
        hidden, sys.stderr = sys.stderr, before
        if hidden is not before:
            hidden.close()


class _Named:
    """A stream whose errors say which stream failed."""

    has_written = False  # by the newest stream of the process

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        _Named.has_written = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        _Named.has_written = True
        return self._naming(self._stream.write, text)

    def flush(self) -> None:
        self._naming(self._stream.flush)

    def _naming(self, call: Any, *arguments: str) -> Any:
        try:
            return call(*arguments)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(
                f"output: expected to write to standard output, got: {error.strerror or error}; "
                "free disk space, or redirect it elsewhere"
            ) from error


def write(text: str) -> None:
    """Write to standard output; on a terminal, control characters are escaped."""
    write_drawn(without_controls(text) if sys.stdout.isatty() else text)


def write_drawn(text: str) -> None:
    """Write what may move a terminal's cursor; characters outside its encoding are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def write_json(record: dict[str, Any], *, indent: int | None = 2) -> None:
    """Write one JSON object to standard output; numbers of a list, such as tokens, on one line."""
    text = json.dumps(record, indent=indent)
    write(_NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n")


_NUMBERS = re.compile(r"(?<=\[)\n[-+.\deE,\s]+(?=\])")
"""What is between the brackets of such a list; texts in JSON have no line breaks of their own."""
