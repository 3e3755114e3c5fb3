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

from snapkv_vllm.compatibility import require_compatible
from snapkv_vllm.names import (
    DEAF,
    ENDPOINTS,
    HINT,
    HINTED,
    LONGEST,
    OF_A_REQUEST,
    PREFIX,
    SESSION,
    SESSIONS_AT,
    SPANS,
    XARGS,
    shown,
    wrong,
)

if TYPE_CHECKING:  # which asks for what is here
    from snapkv_vllm.settings import ServingSettings

_OF_AGENTS = (SPANS, SESSION)

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
    if bare in OF_A_REQUEST or (begun and bare in _OF_AGENTS):
        return PREFIX + bare
    return f"{PREFIX}budget" if begun else None


def misspelt(body: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Fields of a body that are nearly words of this server's, and the right words."""
    hint = body.get(HINT)
    places = ((body, (HINT, XARGS)), (hint if isinstance(hint, dict) else {}, (HINTED,)))
    for fields, words in places:
        for name in islice(fields, _MOST_FIELDS):
            if isinstance(name, str) and name not in words and len(name) <= LONGEST:
                for right in get_close_matches(name.lower(), words, 1, _ALIKE):
                    yield name, right


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
    for given in (_mapping(body.get(XARGS)), _mapping(sampling.get("extra_args"))):
        require_compatible(given=given, body=body, called=called)
        _require_of_a_prompt(given, path, called)
        settings.for_request(given)


def _require_of_a_prompt(given: Mapping[str, Any], path: str, called: Mapping[str, str]) -> None:
    """Raise RefusedError for spans or a session that are not read there, or a wrong name of one."""
    session = PREFIX + SESSION
    for name, places in ((PREFIX + SPANS, ENDPOINTS), (session, SESSIONS_AT)):
        if name in given and path not in places:
            got, remedy = f"it in a request to {shown(path)}", "send the request there"
            said, where = called.get(name, name), " or ".join(places)
            raise wrong(said, f"it at {where}", got, f"{remedy}, or leave it out")
    if given.get(session) is not None:
        require_session_name(called.get(session, session), given[session])


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
