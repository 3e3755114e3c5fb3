"""What a request may ask for, and what is said to those who misspell or misplace it.

What does not go together is in `compatibility`, and what the server makes of the rest in
`settings`. No vLLM is needed here.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import chain, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from snapkv.errors import InvalidTypeError
from snapkv_vllm.agents.edits import edits_of
from snapkv_vllm.compatibility import require_compatible
from snapkv_vllm.names import (
    CHATS,
    CONTEXT,
    DEAF,
    DOCUMENT,
    EDITS,
    ENDPOINTS,
    HINT,
    HINTED,
    LONGEST,
    MESSAGES,
    OF_A_REQUEST,
    PREFIX,
    SESSION,
    SESSIONS_AT,
    SPANS,
    XARGS,
    shown,
    wrong,
)
from snapkv_vllm.spans import entries_of

if TYPE_CHECKING:  # which asks for what is here
    from snapkv_vllm.settings import ServingSettings

_OF_AGENTS = (SPANS, EDITS, SESSION)

_LONGEST_NAME = 100
"""Characters of a document's name."""

_LONGEST_PATH = 4096

_LONGEST_SESSION = 256

_SESSION = re.compile(rf".{{1,{_LONGEST_SESSION}}}", re.DOTALL)

OWNED_SESSION = re.compile(rf"(([0-9a-f]{{32}})?/)?{_SESSION.pattern}", re.DOTALL)
"""A session's name inside the engine, with its tenant before it, see `tenants.owned`."""

_MOST_FIELDS, _ALIKE = 100, 0.8
"""How many fields are compared with words of ours, and from which likeness on they are meant."""


_MOST_NAMES = 1000
"""Fields of a body, and settings inside: far more than any server knows. What a client sends is
looked at on the loop that answers all requests, and again in the scheduler."""


# Names and what they stand for.


def require_few_names(argument: str, given: Mapping[Any, Any]) -> None:
    """Raise InvalidArgumentError unless an object has at most 1,000 names."""
    if len(given) > _MOST_NAMES:
        most = f"at most {_MOST_NAMES:,} names in the object"
        raise wrong(argument, most, f"{len(given):,}", "leave out what no server reads")


def own_settings(given: Mapping[Any, Any]) -> dict[str, Any]:
    """A request's settings by their names without the prefix; other names belong to others.

    A name that lacks the prefix, or spells it otherwise, is refused, and so are too many names.
    """
    require_few_names(XARGS, given)
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
            if isinstance(name, str) and name not in words and len(name) <= LONGEST:
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


def require_session_name(argument: str, value: object, pattern: re.Pattern[str] = _SESSION) -> None:
    """Raise RefusedError unless `value` can name a session.

    The name becomes the end of a URL's path, by which the session is deleted. Clients and proxies
    change control characters and segments of dots there, even if these are percent-encoded.
    """
    expected = f"a text of 1 to {_LONGEST_SESSION} characters"
    remedy = "pass one, such as a random one"
    if not isinstance(value, str) or not pattern.fullmatch(value):
        got = "a longer text" if isinstance(value, str) and value else "another value"
        raise wrong(argument, expected, got, remedy)
    if not value.isprintable() or {".", ".."} & set(value.split("/")):
        expected += ", all of them printable, without . or .. between slashes"
        raise wrong(argument, expected, f"'{shown(value)}'", remedy)


# Bodies.

_BESIDE = ("extra_body", "extra_args")
"""Fields of clients in Python, of which vLLM's server reads none."""


def require_settings(
    body: object,
    settings: "ServingSettings",
    path: str = "",
    called: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Refuse a request's JSON body with a wrong setting, or one that would be ignored.

    `called` is what the client calls settings that are inside under other names.
    """
    if not isinstance(body, dict):
        return
    sampling = _mapping(body.get("sampling_params"))  # of /inference/v1/generate
    outside = {"body": body, "sampling_params": sampling}
    for name in _BESIDE:  # what clients wrap around the right place
        beside = _mapping(body.get(name))
        outside |= {name: beside, f"{name}: {XARGS}": _mapping(beside.get(XARGS))}
    for place, fields in outside.items():
        require_few_names(place, fields)
    for name, word in misspelt(body):
        raise wrong(shown(name), word, f"'{shown(name)}', which is unknown", f"write {word}")
    for name in chain.from_iterable(outside.values()):
        if (right := meant(name)) is not None:
            remedy = f'write "{XARGS}": {{"{shown(right)}": ...}}'
            raise wrong(shown(name), f"inside {XARGS}", "it outside, where it is ignored", remedy)
    if path in DEAF and (own := own_settings(_mapping(body.get(XARGS)))):
        none, name = f"none inside {XARGS} at {path}, where it is ignored", PREFIX + next(iter(own))
        raise wrong(called.get(name, name), none, "it", "leave it out")
    beside, found = _mapping(sampling.get("extra_args")), path in ENDPOINTS
    for given, is_read in ((_mapping(body.get(XARGS)), found), (beside, False)):
        require_compatible(given=given, body=body, called=called)
        settings.for_request(_of_a_prompt(given, path, called))
        if PREFIX + DOCUMENT in given and not is_read:
            expected = f"inside {XARGS} at {' or '.join(ENDPOINTS)}"
            got, remedy = f"it in a request to {shown(path)}", "send the request there"
            raise wrong(PREFIX + DOCUMENT, expected, got, f"{remedy}, or leave it out")


def _of_a_prompt(
    given: Mapping[str, Any], path: str, called: Mapping[str, str]
) -> Mapping[str, Any]:
    """Settings as they are when the prompt is known, once what it takes to know it is checked."""
    own = dict(given)
    spans, edits, session = PREFIX + SPANS, PREFIX + EDITS, PREFIX + SESSION
    places = {spans: (*ENDPOINTS, MESSAGES), edits: CHATS, session: SESSIONS_AT}
    for name, where in places.items():
        if name in own and path not in where:
            got, remedy = f"it in a request to {shown(path)}", "send the request there"
            said = called.get(name, name)
            raise wrong(said, f"it at {' or '.join(where)}", got, f"{remedy}, or leave it out")
    if own.get(session) is not None:
        require_session_name(called.get(session, session), own[session])
    if edits in own:
        edits_of(own.pop(edits))
    if spans in own and path in CHATS:
        own[spans] = [one.as_json for one in entries_of(own[spans]) if one.span is not None]
    return own


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
