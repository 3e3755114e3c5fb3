"""Write to standard output with errors that name it, and hide standard error on request."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from snapkv.errors import OutputError, wrong
from snapkv.validation import without_controls

FAILED = 1
"""The exit status of a command that ran to its end although a part of its work failed."""


@contextlib.contextmanager
def named_output() -> Iterator["NamedStream"]:
    """Let failed writes to standard output raise OutputError in this block, and flush at its end.

    `sys.stdout` is replaced within the block. If the block raises, nothing is flushed.

    Yields:
        The stream that is the standard output in the block.

    Raises:
        OutputError: standard output is closed, or cannot be written to.
        BrokenPipeError: the reader of standard output has closed it, which is no error.
    """
    stream = sys.stdout
    if stream is None:
        problem = "standard output is closed"
        raise wrong(
            "output", problem, "Open standard output, or redirect it to a file", OutputError
        )
    named = NamedStream(stream)
    sys.stdout = cast(Any, named)
    try:
        yield named
        named.flush()
    finally:
        sys.stdout = stream


def hide_messages(is_quiet: bool) -> bool:
    """If `is_quiet`, discard all messages on standard error until `messages_shown` ends.

    `sys.stderr` is replaced.

    Returns:
        `is_quiet`, because this is the callback of the option `--quiet`.
    """
    if is_quiet:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 # closed below
    return is_quiet


@contextlib.contextmanager
def messages_shown() -> Iterator[None]:
    """Let `hide_messages` hide standard error only until the end of this block.

    The replaced `sys.stderr` is closed then, and the one from before the block is set again.
    """
    before: TextIO = sys.stderr
    try:
        yield
    finally:
        hidden, sys.stderr = sys.stderr, before
        if hidden is not before:
            hidden.close()


class NamedStream:
    """A stream whose errors name it as the standard output.

    Attributes:
        has_written: whether anything was written to it.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.has_written = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        self.has_written = True
        return self._call(self._stream.write, text)

    def flush(self) -> None:
        self._call(self._stream.flush)

    def _call(self, call: Any, *arguments: str) -> Any:
        """Call a method of the stream.

        Raises:
            OutputError: the stream cannot be written to.
            BrokenPipeError: the reader of the stream has closed it, which is no error.
        """
        try:
            return call(*arguments)
        except BrokenPipeError:
            raise
        except OSError as error:
            problem = f"standard output could not be written ({error.strerror or error})"
            remedy = "Free some disk space, or redirect the output to a different file"
            raise wrong("output", problem, remedy, OutputError) from error


def write(text: str) -> None:
    """Write a text to standard output at once, with control characters escaped on a terminal.

    Characters that standard output cannot encode are escaped, too. A failed write raises an
    OutputError within `named_output`.
    """
    write_drawn(without_controls(text) if sys.stdout.isatty() else text)


def write_drawn(text: str) -> None:
    """Write a text to standard output at once, with its control characters, such as colors.

    Characters that standard output cannot encode are escaped.
    """
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def write_json(record: dict[str, Any], *, indent: int | None = 2) -> None:
    """Write one JSON object and a line break to standard output.

    Each list of numbers is on one line. With `indent` None, the whole object is on one line. A
    failed write raises an OutputError within `named_output`.
    """
    text = json.dumps(record, indent=indent)
    write(_NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n")


_NUMBERS = re.compile(r"(?<=\[)\n[-+.\deE,\s]+(?=\])")
"""Matches the numbers of a list in indented JSON. A text in JSON never contains a line break."""
