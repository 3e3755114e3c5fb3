"""The words of requests and responses, how clients spell them, and what is said of a refused value.

Neither torch nor vLLM is needed here.
"""

import re
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

AGENT_HINT, SESSION_ID = "agent_hint", "session_id"
"""The field of a body that says whose session a request belongs to, and the one inside.

The latter is also a field of vLLM's own beside it."""

SPANS = "spans"
"""Names what a request says of spans of its prompt."""

SESSION = "session"
"""Names whose history a request goes on from, on servers that hold some."""

SESSIONS_METHOD = PREFIX + "asked"
"""The method of vLLM's engine that asks which sessions its scheduler holds."""

MESSAGES = "/v1/messages"
"""Anthropic's endpoint, of whose requests vLLM makes chats."""

SPAN_ENDPOINTS = ("/v1/completions", "/v1/chat/completions", MESSAGES)
"""Where requests may have spans and a session."""

METHOD_SETTINGS = ("window_size", "voters", "kernel_size", "pooling", "decay", "safeguard")
"""What a request may set for itself where the server's method has it."""

REQUEST_SETTINGS = ("budget", *METHOD_SETTINGS, PROTECT_FIRST, DECODE_BUDGET)
"""What a request may set for itself."""

SESSION_ENDPOINTS = (*SPAN_ENDPOINTS, "/v1/responses")
"""Where a request may name the session that it goes on from."""

COUNTING_ENDPOINTS = (f"{MESSAGES}/count_tokens", "/tokenize")
"""Where bodies are those of chats, though nothing is generated: they may name a session as well."""

ENDPOINTS_WITHOUT_XARGS = (
    "/generative_scoring",
    "/v1/systemone",
    "/v1/decisions",
    "/cohere/v2/chat",
    "/inference/v1/generate",
)
"""Where vLLM generates, and reads no `XARGS`."""

MAX_SHOWN_CHARACTERS = 60
"""Characters of what a client sent that are said again, or looked at, in one piece."""

NOT_FOUND, CONFLICT, INSUFFICIENT_STORAGE = 404, 409, 507


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
    return INSUFFICIENT_STORAGE if isinstance(error, OutOfMemoryError) else 400


_REASONS = {AGENT_HINT, SESSION_ID, XARGS, "body", "prompt", SESSION}
_REASONS |= {PREFIX + name for name in (*REQUEST_SETTINGS, SPANS, SESSION)}


def reason_of(error: Exception) -> str:
    """Return the field or setting that an error is about, which its message begins with.

    "other" stands for words that a client has made up, so that there are few reasons.
    """
    name = str(error).partition(":")[0]
    return name if name in _REASONS else "other"


def printable(name: str) -> str:
    """A name of any length and any characters, on one line of an error message."""
    plain = name.encode("unicode_escape").decode()
    return plain if len(plain) <= MAX_SHOWN_CHARACTERS else f"{plain[:MAX_SHOWN_CHARACTERS]}..."


def require_readable(name: str, value: Any) -> None:
    """Refuse a value that is none, or longer than any setting, before anybody prints it."""
    if value is None:
        raise InvalidTypeError(f"{name}: expected a value, got none; leave {name} out")
    try:
        fits = (
            not isinstance(value, str | list | tuple | dict) or len(value) <= MAX_SHOWN_CHARACTERS
        )
        fits = fits and len(repr(value)) <= 2 * MAX_SHOWN_CHARACTERS
    except (ValueError, RecursionError):  # a number of thousands of digits; lists in lists
        fits = False
    if not fits:
        got = f"something of type {type(value).__name__} that is longer than any of them"
        raise wrong(name, "a number, a word or a pair", got, "pass a shorter one")


# How clients spell names.

_AGENT_SETTINGS = (SPANS, SESSION)

_MAX_SESSION_CHARACTERS = 256

_SESSION_PATTERN = re.compile(rf".{{1,{_MAX_SESSION_CHARACTERS}}}", re.DOTALL)

TENANT_SESSION_PATTERN = re.compile(rf"(([0-9a-f]{{32}})?/)?{_SESSION_PATTERN.pattern}", re.DOTALL)
"""A session's name inside the engine, with its tenant before it, see `front.request_context.owned`."""

_MAX_COMPARED_FIELDS, _MIN_SIMILARITY = 100, 0.8
"""How many fields are compared with words of ours, and from which likeness on they are meant."""

_MAX_NAMES = 1000
"""Fields of a body, and settings inside: far more than any server knows. What a client sends is
looked at on the loop that answers all requests, and again in the scheduler."""


def require_few_names(argument: str, given: Mapping[Any, Any]) -> None:
    """Raise InvalidArgumentError unless an object has at most 1,000 names."""
    if len(given) > _MAX_NAMES:
        most = f"at most {_MAX_NAMES:,} names in the object"
        raise wrong(argument, most, f"{len(given):,}", "leave out what no server reads")


def own_settings(given: Mapping[Any, Any]) -> dict[str, Any]:
    """A request's settings by their names without the prefix; other names belong to others.

    A name that lacks the prefix, or spells it otherwise, is refused, and so are too many names.
    """
    require_few_names(XARGS, given)
    own = {}
    for name, value in given.items():
        right = correct_name(name)
        if right not in (None, name):
            expected = f"the name of a setting, such as {right}"
            raise wrong(printable(name), expected, printable(name), f"write {right}")
        if right is not None:
            own[name.removeprefix(PREFIX)] = value
    return own


def correct_name(name: object) -> str | None:
    """The right name of the setting that whoever wrote a name meant; None for names of others."""
    if not isinstance(name, str) or name.startswith(PREFIX):
        return name if isinstance(name, str) else None
    begun = name[: len(PREFIX) - 1].lower() == PREFIX[:-1]
    bare = name[len(PREFIX) - 1 :].lower().replace("-", "_").strip("_. ") if begun else name
    if bare in REQUEST_SETTINGS or (begun and bare in _AGENT_SETTINGS):
        return PREFIX + bare
    return f"{PREFIX}budget" if begun else None


def find_misspelled_fields(body: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Fields of a body that are nearly words of this server's, and the right words."""
    hint = body.get(AGENT_HINT)
    places = ((body, (AGENT_HINT, XARGS)), (hint if isinstance(hint, dict) else {}, (SESSION_ID,)))
    for fields, words in places:
        for name in islice(fields, _MAX_COMPARED_FIELDS):
            if isinstance(name, str) and name not in words and len(name) <= MAX_SHOWN_CHARACTERS:
                for right in get_close_matches(name.lower(), words, 1, _MIN_SIMILARITY):
                    yield name, right


def require_session_name(
    argument: str, value: object, pattern: re.Pattern[str] = _SESSION_PATTERN
) -> None:
    """Raise RefusedError unless `value` can name a session.

    The name becomes the end of a URL's path, by which the session is deleted. Clients and proxies
    change control characters and segments of dots there, even if these are percent-encoded.
    """
    expected = f"a text of 1 to {_MAX_SESSION_CHARACTERS} characters"
    remedy = "pass one, such as a random one"
    if not isinstance(value, str) or not pattern.fullmatch(value):
        got = "a longer text" if isinstance(value, str) and value else "another value"
        raise wrong(argument, expected, got, remedy)
    if not value.isprintable() or {".", ".."} & set(value.split("/")):
        expected += ", all of them printable, without . or .. between slashes"
        raise wrong(argument, expected, f"'{printable(value)}'", remedy)
