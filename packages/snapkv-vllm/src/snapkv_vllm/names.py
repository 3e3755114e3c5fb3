"""How a request names its own settings, and what is said to those who misspell them.

Neither torch nor vLLM is needed here.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any

from snapkv.errors import InvalidArgumentError, InvalidTypeError, OutOfMemoryError, SnapKVError

PREFIX = "snapkv_"
"""What the names of a request's own settings begin with, in `extra_args` and `vllm_xargs`."""

XARGS = "vllm_xargs"
"""Where a body holds what reaches `SamplingParams.extra_args`."""

PROTECT_FIRST = "protect_first"

DECODE_BUDGET = "decode_budget"

CONTEXT = "context_management"
"""The field of a body that holds edits, and of a response that says which were applied."""

HINT, HINTED = "agent_hint", "session_id"
"""The field of a body that says whose session a request belongs to, and the one inside."""

SPANS, EDITS = "spans", "edits"
"""Name what a request says of spans of its prompt, and the edits that make spans of a chat."""

SESSION = "session"
"""Names whose history a request goes on from, on servers that hold some."""

_OF_AGENTS = (SPANS, EDITS, SESSION)

MESSAGES = "/v1/messages"
"""Anthropic's endpoint, of whose requests vLLM makes chats."""

COUNT = f"{MESSAGES}/count_tokens"

DOCUMENT = "document"
"""Names what a request's prompt begins with, on servers that share documents."""

ENDPOINTS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
"""Where requests may name a document, and the field that it is the beginning of."""

CHATS = ("/v1/chat/completions", MESSAGES)
"""Where a prompt is made of messages."""

_OF_METHODS = ("budget", "window_size", "kernel_size", "pooling", "decay", "safeguard")

OF_A_REQUEST = (*_OF_METHODS, PROTECT_FIRST, DECODE_BUDGET)
"""What a request may set for itself, where the server's method has it."""

_LONGEST_NAME = 100
"""Characters of a document's name."""

_LONGEST_PATH = 4096

_LONGEST_SESSION = 256

_LONGEST = 60
"""Characters of what a client sent that are said again, or looked at, in one piece."""

_MOST_FIELDS, _ALIKE = 100, 0.8
"""How many fields are compared with words of ours, and from which likeness on they are meant."""

UNKNOWN, TAKEN, BUSY, NO_ROOM = 404, 409, 503, 507


class RefusedError(InvalidArgumentError):
    """What a client has sent is refused, with the `status` of an HTTP response."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def wrong(name: str, expected: str, got: object, remedy: str, status: int = 400) -> RefusedError:
    """What is said of a value that is refused."""
    return RefusedError(f"{name}: expected {expected}, got {got}; {remedy}", status)


def status_of(error: SnapKVError) -> int:
    """The status of the HTTP response to an error of this package."""
    if isinstance(error, RefusedError):
        return error.status
    return NO_ROOM if isinstance(error, OutOfMemoryError) else 400


def own_settings(given: Mapping[Any, Any]) -> dict[str, Any]:
    """A request's settings by their names without the prefix; other names belong to others.

    A name that lacks the prefix, or spells it otherwise, is refused.
    """
    own = {}
    for name, value in given.items():
        right = meant(name)
        if right not in (None, name):
            expected = f"the name of a setting, such as {right}"
            raise wrong(shown(name), expected, shown(name), f"write {right}")
        if right is not None:
            own[name.removeprefix(PREFIX)] = value
    return own


def meant(name: object) -> str | None:
    """The right name of the setting that whoever wrote a name meant; None for names of others."""
    if not isinstance(name, str) or name.startswith(PREFIX):
        return name if isinstance(name, str) else None
    begun = name[: len(PREFIX) - 1].lower() == PREFIX[:-1]
    bare = name[len(PREFIX) - 1 :].lower().replace("-", "_").strip("_. ") if begun else name
    if bare in (*OF_A_REQUEST, DOCUMENT) or (begun and bare in _OF_AGENTS):
        return PREFIX + bare
    return f"{PREFIX}budget" if begun else None


def misspelt(body: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Fields of a body that are nearly words of this server's, and the right words."""
    hint = body.get(HINT)
    places = ((body, (CONTEXT, HINT, XARGS)), (hint if isinstance(hint, dict) else {}, (HINTED,)))
    for fields, words in places:
        for name in islice(fields, _MOST_FIELDS):
            if isinstance(name, str) and name not in words and len(name) <= _LONGEST:
                for right in get_close_matches(name.lower(), words, 1, _ALIKE):
                    yield name, right


def _text(argument: str, value: object) -> str:
    if isinstance(value, str):
        return value
    raise InvalidTypeError(
        f"{argument}: expected a document's name, got something of type {type(value).__name__}; "
        "pass a text such as contract"
    )


def require_named(argument: str, value: object) -> None:
    """Refuse what no document is called, be it of this server or a file's of a library."""
    name = _text(argument, value)
    if not (1 <= len(name) <= _LONGEST_PATH and name.isprintable()):
        characters = f"1 to {_LONGEST_PATH} printable characters"
        raise wrong(argument, characters, f"'{shown(name)}'", "pass a name such as contract")


def require_document_name(argument: str, value: object) -> None:
    """Refuse what is no name to register a document by; it also stands in the path of a URL."""
    name = _text(argument, value)
    fits = 1 <= len(name) <= _LONGEST_NAME and name.isprintable() and "/" not in name
    if not fits or not name.strip("."):
        characters = f"1 to {_LONGEST_NAME} printable characters"
        expected = f"{characters}, none of them a slash and not dots alone"
        raise wrong(argument, expected, f"'{shown(name)}'", "pass a name such as contract")


def require_session_name(argument: str, value: object) -> None:
    """Refuse what is no name of a session."""
    if not isinstance(value, str) or not 1 <= len(value) <= _LONGEST_SESSION:
        got = "a longer text" if isinstance(value, str) and value else "another value"
        expected = f"a text of 1 to {_LONGEST_SESSION} characters"
        raise wrong(argument, expected, got, "pass one, such as a random one")


def shown(name: str) -> str:
    """A name of any length and any characters, on one line of an error message."""
    plain = name.encode("unicode_escape").decode()
    return plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]}..."


def require_readable(name: str, value: Any) -> None:
    """Refuse a value that is none, or longer than any setting, before anybody prints it."""
    if value is None:
        raise InvalidTypeError(f"{name}: expected a value, got none; leave {name} out")
    try:
        fits = not isinstance(value, str | list | tuple | dict) or len(value) <= _LONGEST
        fits = fits and len(repr(value)) <= 2 * _LONGEST
    except (ValueError, RecursionError):  # a number of thousands of digits; lists in lists
        fits = False
    if not fits:
        got = f"something of type {type(value).__name__} that is longer than any of them"
        raise wrong(name, "a number, a word or a pair", got, "pass a shorter one")
