"""The words of requests and responses, and what is said of a value that is refused.

Neither torch nor vLLM is needed here.
"""

from typing import Any

from snapkv.errors import InvalidArgumentError, InvalidTypeError, OutOfMemoryError, SnapKVError

PREFIX = "snapkv_"
"""What the names of a request's own settings begin with, in `extra_args` and `vllm_xargs`."""

XARGS = "vllm_xargs"
"""Where a body holds what reaches `SamplingParams.extra_args`."""

PROTECT_FIRST = "protect_first"

DECODE_BUDGET = "decode_budget"

HINT, HINTED = "agent_hint", "session_id"
"""The field of a body that says whose session a request belongs to, and the one inside.

The latter is also a field of vLLM's own beside it."""

SPANS = "spans"
"""Names what a request says of spans of its prompt."""

SESSION = "session"
"""Names whose history a request goes on from, on servers that hold some."""

ASKED = PREFIX + "asked"
"""The method of vLLM's engine that asks which sessions its scheduler holds."""

MESSAGES = "/v1/messages"
"""Anthropic's endpoint, of whose requests vLLM makes chats."""

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", MESSAGES)
"""Where requests may have spans and a session."""

OF_METHODS = ("window_size", "voters", "kernel_size", "pooling", "decay", "safeguard")
"""What a request may set for itself where the server's method has it."""

OF_A_REQUEST = ("budget", *OF_METHODS, PROTECT_FIRST, DECODE_BUDGET)
"""What a request may set for itself."""

SESSIONS_AT = (*ENDPOINTS, "/v1/responses")
"""Where a request may name the session that it goes on from."""

SILENT = (f"{MESSAGES}/count_tokens", "/tokenize")
"""Where bodies are those of chats, though nothing is generated: they may name a session as well."""

DEAF = (
    "/generative_scoring",
    "/v1/systemone",
    "/v1/decisions",
    "/cohere/v2/chat",
    "/inference/v1/generate",
)
"""Where vLLM generates, and reads no `XARGS`."""

LONGEST = 60
"""Characters of what a client sent that are said again, or looked at, in one piece."""

UNKNOWN, TAKEN, NO_ROOM = 404, 409, 507


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


_REASONS = {HINT, HINTED, XARGS, "body", "prompt", SESSION}
_REASONS |= {PREFIX + name for name in (*OF_A_REQUEST, SPANS, SESSION)}


def reason_of(error: Exception) -> str:
    """Return the field or setting that an error is about, which its message begins with.

    "other" stands for words that a client has made up, so that there are few reasons.
    """
    name = str(error).partition(":")[0]
    return name if name in _REASONS else "other"


def shown(name: str) -> str:
    """A name of any length and any characters, on one line of an error message."""
    plain = name.encode("unicode_escape").decode()
    return plain if len(plain) <= LONGEST else f"{plain[:LONGEST]}..."


def require_readable(name: str, value: Any) -> None:
    """Refuse a value that is none, or longer than any setting, before anybody prints it."""
    if value is None:
        raise InvalidTypeError(f"{name}: expected a value, got none; leave {name} out")
    try:
        fits = not isinstance(value, str | list | tuple | dict) or len(value) <= LONGEST
        fits = fits and len(repr(value)) <= 2 * LONGEST
    except (ValueError, RecursionError):  # a number of thousands of digits; lists in lists
        fits = False
    if not fits:
        got = f"something of type {type(value).__name__} that is longer than any of them"
        raise wrong(name, "a number, a word or a pair", got, "pass a shorter one")
