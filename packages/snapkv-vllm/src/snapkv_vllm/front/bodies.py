"""What the JSON body of a request says about compression: read, moved to its place, and judged.

Bodies hold spans and a session next to their other fields, as clients of OpenAI and Anthropic send
them (``extra_body``); inside vLLM they travel among the request's own settings, spans as JSON.
"""

import json
import re
from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

from snapkv_vllm.admission.compatibility import require_compatible
from snapkv_vllm.admission.names import (
    DEAF,
    ENDPOINTS,
    HINT,
    HINTED,
    PREFIX,
    SESSION,
    SESSIONS_AT,
    SILENT,
    XARGS,
    meant,
    misspelt,
    own_settings,
    require_few_names,
    require_session_name,
    shown,
    wrong,
)
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.admission.spans import NAME
from snapkv_vllm.front.visits import current, noting_refusals

_DEEPEST = 100
"""Lists in lists and objects in objects of a body: far below what Python and the server can read,
which depends on the calls under way and on `sys.setrecursionlimit`."""

_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Stands in every UTF-8 body that has half a surrogate pair, and in those that have whole ones."""

_SESSION = PREFIX + SESSION

_BESIDE = ("extra_body", "extra_args")
"""Fields of clients in Python, of which vLLM's server reads none."""


def admit(text: bytes, settings: ServingSettings, path: str) -> bytes:
    """Return the body of a request as vLLM is to read it, with spans and a session moved inside.

    Notes in the current visit that the settings in the body were looked at.

    Raises:
        SnapKVError: a setting is wrong, misspelt, or in a place where it would be ignored, or the
            body is one that neither this package nor the engine's client can handle.
    """
    with noting_refusals():
        body = _body_of(text)
        admitted, called = _moved_inside(body, path, has_sessions=settings.sessions is not None)
        require_settings(admitted, settings, path, called)
    current().is_checked = body is not None
    return text if admitted is body else json.dumps(admitted).encode()


def _body_of(text: bytes) -> object:
    """Return the body from JSON; None for what is no JSON, which the server says itself."""
    try:
        body = json.loads(text)
        is_deep = text.count(b"[") + text.count(b"{") > _DEEPEST and _is_deeper(body, _DEEPEST)
    except ValueError:
        return None
    except RecursionError:
        is_deep = True
    if is_deep:
        raise wrong("body", f"at most {_DEEPEST} lists in lists", "more", "nest them less deeply")
    if b"\0" in text or _HALF_A_PAIR.search(text):  # with zeros it is UTF-16 or UTF-32
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # the engine's client could not send it
            got = "half a surrogate pair"
            raise wrong("body", "texts of Unicode", got, "leave it out") from None
    return body


def _is_deeper(body: Any, most: int) -> bool:
    """Whether more than `most` lists and objects lie in each other."""
    nests = (dict, list)  # exactly these are made from JSON
    level = [body] if type(body) in nests else []
    for _ in range(most):
        level = [
            inner
            for one in level
            for inner in (one.values() if type(one) is dict else one)
            if type(inner) in nests
        ]
    return bool(level)


def _moved_inside(
    body: object, path: str, *, has_sessions: bool
) -> tuple[object, Mapping[str, str]]:
    """Return a body with its spans and session where vLLM hands them on; itself without any.

    Beside it, what the client calls the settings that were moved.
    """
    if not isinstance(body, dict):
        return body, {}
    called, found = dict[str, str](), dict[str, Any]()
    if NAME in body:
        found[NAME] = json.dumps(body[NAME])
    if has_sessions and path not in SILENT and (named := _session_named(body)) is not None:
        called[_SESSION], found[_SESSION] = named
    if not found:
        return body, {}
    inside = {} if (given := body.get(XARGS)) is None else given
    if not isinstance(inside, dict):
        raise wrong(XARGS, "an object", f"something of type {type(inside).__name__}", "pass one")
    for name in found.keys() & inside.keys():
        raise wrong(name, "it once", f"it inside {XARGS}, too", "leave one of them out")
    others = {name: value for name, value in body.items() if name != NAME}
    return {**others, XARGS: {**inside, **found}}, called


def _session_named(body: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the field of a body that names a session, as errors call it, and the name.

    The field is `agent_hint: session_id`, or `session_id`, which vLLM has itself for an identity
    that the requests of one agent share. None if no session is named.
    """
    inside, beside = _hinted(body.get(HINT)), body.get(HINTED)
    if beside is None:
        return None if inside is None else (f"{HINT}: {HINTED}", inside)
    if inside is not None and inside != beside:
        raise wrong(HINTED, f"the same name as in {HINT}", "another", "leave one of them out")
    return HINTED, beside


def _hinted(hint: object) -> Any:
    """Return the session that a hint names; None for none."""
    form = f'{{"{HINTED}": "a-random-name"}}'
    if not isinstance(hint, dict | None):
        got = f"something of type {type(hint).__name__}"
        raise wrong(HINT, f"an object such as {form}", got, "pass one")
    for name in hint or {}:
        if name != HINTED:
            raise wrong(HINT, f"the field {HINTED} alone", f"'{shown(name)}'", f"write {form}")
    return hint and hint.get(HINTED)


def require_settings(
    body: object,
    settings: ServingSettings,
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
    inside, of_sampling = _mapping(body.get(XARGS)), _mapping(sampling.get("extra_args"))
    for given in (inside, of_sampling):
        _require_of_a_prompt(given, path, called)
    if path in DEAF and (own := own_settings(inside)):
        none, name = f"none inside {XARGS} at {path}, where it is ignored", PREFIX + next(iter(own))
        raise wrong(name, none, "it", "leave it out")
    for given in (inside, of_sampling):
        require_compatible(given=given, body=body, called=called)
        settings.for_request(given)


def _require_of_a_prompt(given: Mapping[str, Any], path: str, called: Mapping[str, str]) -> None:
    """Raise RefusedError for spans or a session that are not read there, or a wrong name of one."""
    for name, places in ((NAME, ENDPOINTS), (_SESSION, SESSIONS_AT)):
        if name in given and path not in places:
            got, remedy = f"it in a request to {shown(path)}", "send the request there"
            said, where = called.get(name, name), " or ".join(places)
            raise wrong(said, f"it at {where}", got, f"{remedy}, or leave it out")
    if given.get(_SESSION) is not None:
        require_session_name(called.get(_SESSION, _SESSION), given[_SESSION])


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
