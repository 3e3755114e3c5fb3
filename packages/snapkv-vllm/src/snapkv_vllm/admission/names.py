"""Names of request fields, checks of client input, and the error that refuses a request.

This module imports neither torch nor vLLM.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any

from snapkv import errors
from snapkv.errors import InvalidArgumentError, InvalidTypeError, OutOfMemoryError, SnapKVError

PREFIX = "snapkv_"
"""The prefix of all snapkv settings in `extra_args` and `vllm_xargs`."""

XARGS = "vllm_xargs"
"""The field of a JSON body whose content vLLM passes on as `SamplingParams.extra_args`."""

PROTECT_FIRST = "protect_first"

DECODE_BUDGET = "decode_budget"

AGENT_HINT, SESSION_ID = "agent_hint", "session_id"
"""The field of a body that names the session of a request, and the name of its only field.

vLLM also knows `session_id` as a field of the body itself.
"""

SPANS = "spans"
"""The setting that lists spans of the prompt to drop, protect or compress."""

SESSION = "session"
"""The setting that names the session whose history a request continues."""

SESSIONS_METHOD = PREFIX + "call_sessions"
"""The method that the plugin adds to vLLM's `EngineCore` so that the web server can call
`SessionStore`.
"""

MESSAGES = "/v1/messages"
"""Anthropic's endpoint, whose requests vLLM converts to chats."""

SPAN_ENDPOINTS = ("/v1/completions", "/v1/chat/completions", MESSAGES)
"""The endpoints whose requests may contain spans."""

METHOD_SETTINGS = ("window_size", "voters", "kernel_size", "pooling", "decay", "safeguard")
"""The parameters of methods that a request may set, if the server's method has them."""

REQUEST_SETTINGS = ("budget", *METHOD_SETTINGS, PROTECT_FIRST, DECODE_BUDGET)
"""Every setting of compression that a request may contain."""

SESSION_ENDPOINTS = (*SPAN_ENDPOINTS, "/v1/responses")
"""The endpoints whose requests may name a session."""

COUNTING_ENDPOINTS = (f"{MESSAGES}/count_tokens", "/tokenize")
"""The endpoints that only count tokens. They accept the bodies of chats, so a session is ignored
there.
"""

ENDPOINTS_WITHOUT_XARGS = (
    "/generative_scoring",
    "/v1/systemone",
    "/v1/decisions",
    "/cohere/v2/chat",
    "/inference/v1/generate",
)
"""The endpoints that generate text but ignore `vllm_xargs`."""

MAX_SHOWN = 60
"""The number of characters of a client's text that an error message repeats."""

NOT_FOUND, CONFLICT, INSUFFICIENT_STORAGE = 404, 409, 507


class RefusedError(InvalidArgumentError):
    """The error that is raised if a request is refused.

    Args:
        message: what is wrong, and what to do instead.
        status: the HTTP status of the response.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def wrong(argument: str, problem: str, remedy: str, status: int = 400) -> RefusedError:
    """Build the error that says what is wrong with a field or setting of a request, and what to do
    instead.

    Args:
        argument: the name of the field or setting, with which the message begins.
        problem: what is wrong, with the value that was given; no capital, no full stop.
        remedy: what to do instead, as an imperative with a capital; no full stop.
        status: the HTTP status of the response.

    Returns:
        The error, for the caller to raise. Its message is "argument: problem. Remedy."
    """
    return RefusedError(str(errors.wrong(argument, problem, remedy)), status)


def status_of(error: SnapKVError) -> int:
    """Return the HTTP status with which the server answers an error of this package: that of a
    `RefusedError`, 507 if memory is missing, and 400 otherwise.
    """
    if isinstance(error, RefusedError):
        return error.status
    return INSUFFICIENT_STORAGE if isinstance(error, OutOfMemoryError) else 400


_REASONS = {AGENT_HINT, SESSION_ID, XARGS, "body", "prompt", SESSION}
_REASONS |= {PREFIX + name for name in (*REQUEST_SETTINGS, SPANS, SESSION)}


def reason_of(error: Exception) -> str:
    """Return the name of the field or setting that an error is about, as a label for metrics.

    The name is the part of the message before the first colon. Names that a client has made up, and
    errors about anything else, are all counted as "other", so that the number of labels is limited.
    """
    name = str(error).partition(":")[0]
    return name if name in _REASONS else "other"


def printable(name: str) -> str:
    """Return a name with escapes for control characters and everything outside ASCII, so that it
    fits on one line of an error message. After `MAX_SHOWN` characters it is cut off with "...".
    """
    plain = name.encode("unicode_escape").decode()
    return plain if len(plain) <= MAX_SHOWN else f"{plain[:MAX_SHOWN]}..."


def describe(value: object) -> str:
    """Describe a value that a client has sent, for an error message: a text in quotes, escaped and
    shortened by `printable`, and any other value by its type.
    """
    if isinstance(value, str):
        return f"'{printable(value)}'"
    return f"a value of type {type(value).__name__}"


def require_readable(name: str, value: Any) -> None:
    """Check that a value is short enough to be printed in an error message: at most `MAX_SHOWN`
    entries or characters, and at most twice as many characters when printed.

    Args:
        name: the name of the setting, for the error.
        value: any value that JSON can have.

    Raises:
        InvalidTypeError: the value is None.
        RefusedError: the value is longer than any setting may be, or nested too deeply to be
            printed.
    """
    if value is None:
        raise InvalidTypeError(
            f"{name}: the value must not be null. Remove {name} from the request."
        )
    try:
        fits = not isinstance(value, str | list | tuple | dict) or len(value) <= MAX_SHOWN
        fits = fits and len(repr(value)) <= 2 * MAX_SHOWN
    except (ValueError, RecursionError):  # thousands of digits, or too deeply nested
        fits = False
    if not fits:
        got = f"a {type(value).__name__} that is longer than the value of any setting"
        raise wrong(
            name, f"expected a number, a word or a pair, but got {got}", "Use a shorter value"
        )


# Names that clients write.

_AGENT_SETTINGS = (SPANS, SESSION)

_MAX_SESSION_CHARACTERS = 256

_SESSION = re.compile(rf".{{1,{_MAX_SESSION_CHARACTERS}}}", re.DOTALL)

TENANT_SESSION_PATTERN = re.compile(rf"(([0-9a-f]{{32}})?/)?{_SESSION.pattern}", re.DOTALL)
"""The pattern of a session's name inside the engine: the tenant, a slash, and the name that the
client sent. See `front.request_context.add_tenant`.
"""

_MAX_COMPARED_FIELDS, _MIN_SIMILARITY = 100, 0.8
"""The number of fields that are compared with known names, and the similarity from which a field
counts as misspelled.
"""

_MAX_NAMES = 1000
"""The largest number of names in an object of a request. The check runs on the event loop that
answers all requests, so its time must be limited.
"""


def require_few_names(argument: str, fields: Mapping[Any, Any]) -> None:
    """Check that an object of a request does not have more than `_MAX_NAMES` names.

    Args:
        argument: the name of the object, for the error.
        fields: the object.

    Raises:
        RefusedError: the object has too many names.
    """
    if len(fields) > _MAX_NAMES:
        problem = f"expected at most {_MAX_NAMES:,} names in the object, but got {len(fields):,}"
        raise wrong(argument, problem, "Remove the names that the server does not know")


def own_settings(extra_args: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the settings of a request that belong to this package, in a new dictionary, by their
    names without the prefix "snapkv_". Neither the names after the prefix nor the values are
    checked.

    Args:
        extra_args: all settings of the request. Those of other software are ignored.

    Raises:
        RefusedError: there are too many names, or a setting is written without its prefix or with a
            misspelled one.
    """
    require_few_names(XARGS, extra_args)
    own = {}
    for name, value in extra_args.items():
        right = correct_name(name)
        if right not in (None, name):
            raise wrong(
                printable(name), "there is no setting with this name", f"Use {right} instead"
            )
        if right is not None:
            own[name.removeprefix(PREFIX)] = value
    return own


def correct_name(name: object) -> str | None:
    """Return the name of the setting that a client has probably meant, or None if the name is not
    related to any setting of this package.

    A name that begins with the prefix is returned unchanged, even if there is no such setting. A
    name of `REQUEST_SETTINGS` without the prefix gets it. A name that begins with the prefix in
    another form, such as "SnapKV-", becomes the setting with the same name, or else the budget.
    """
    if not isinstance(name, str) or name.startswith(PREFIX):
        return name if isinstance(name, str) else None
    begun = name[: len(PREFIX) - 1].lower() == PREFIX[:-1]
    bare = name[len(PREFIX) - 1 :].lower().replace("-", "_").strip("_. ") if begun else name
    if bare in REQUEST_SETTINGS or (begun and bare in _AGENT_SETTINGS):
        return PREFIX + bare
    return f"{PREFIX}budget" if begun else None


def find_misspelled_fields(body: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Yield each field of a body whose name is almost the name of a known field, together with the
    correct name.

    The known fields are `AGENT_HINT` and `XARGS` in the body, and `SESSION_ID` inside `AGENT_HINT`.
    Only the first 100 fields of each object are compared.
    """
    hint = body.get(AGENT_HINT)
    places = ((body, (AGENT_HINT, XARGS)), (hint if isinstance(hint, dict) else {}, (SESSION_ID,)))
    for fields, words in places:
        for name in islice(fields, _MAX_COMPARED_FIELDS):
            if isinstance(name, str) and name not in words and len(name) <= MAX_SHOWN:
                for right in get_close_matches(name.lower(), words, 1, _MIN_SIMILARITY):
                    yield name, right


def require_session_name(argument: str, value: object, pattern: re.Pattern[str] = _SESSION) -> None:
    """Check that a value can be used as the name of a session.

    The name becomes the last part of a URL path, where it is used to delete the session. Clients
    and proxies change control characters and segments of dots in a path, even if they are
    percent-encoded.

    Args:
        argument: the name of the field, for the error.
        value: the value that the client has sent.
        pattern: what the whole name must match; by default 1 to 256 characters of any kind.

    Raises:
        RefusedError: the value is no text that matches `pattern`, has a character that is not
            printable, or has a segment "." or "..".
    """
    problem = f"expected a text of 1 to {_MAX_SESSION_CHARACTERS} characters"
    remedy = "Use a different name, for example a random one"
    if not isinstance(value, str) or not pattern.fullmatch(value):
        got = "a longer text" if isinstance(value, str) and value else "another value"
        raise wrong(argument, f"{problem}, but got {got}", remedy)
    if not value.isprintable() or {".", ".."} & set(value.split("/")):
        problem += ", all of them printable, without . or .. between slashes"
        raise wrong(argument, f"{problem}, but got '{printable(value)}'", remedy)
