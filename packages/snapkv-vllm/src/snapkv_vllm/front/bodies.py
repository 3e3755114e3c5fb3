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
    AGENT_HINT,
    COUNTING_ENDPOINTS,
    ENDPOINTS_WITHOUT_XARGS,
    PREFIX,
    SESSION,
    SESSION_ENDPOINTS,
    SESSION_ID,
    SPAN_ENDPOINTS,
    XARGS,
    correct_name,
    find_misspelled_fields,
    own_settings,
    printable,
    require_few_names,
    require_session_name,
    wrong,
)
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.admission.spans import SPANS_FIELD
from snapkv_vllm.front.request_context import current_context, record_refusals

_MAX_DEPTH = 100
"""Lists in lists and objects in objects of a body: far below what Python and the server can read,
which depends on the calls under way and on `sys.setrecursionlimit`."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Stands in every UTF-8 body that has half a surrogate pair, and in those that have whole ones."""

_SESSION = PREFIX + SESSION

_CLIENT_FIELDS = ("extra_body", "extra_args")
"""Fields of clients in Python, of which vLLM's server reads none."""


def check_body(text: bytes, settings: ServingSettings, path: str) -> bytes:
    """Return the body of a request as vLLM is to read it, with spans and a session moved inside.

    Notes in the current visit that the settings in the body were looked at.

    Raises:
        SnapKVError: a setting is wrong, misspelt, or in a place where it would be ignored, or the
            body is one that neither this package nor the engine's client can handle.
    """
    with record_refusals():
        body = _parse_body(text)
        admitted, called = _move_into_xargs(body, path, has_sessions=settings.sessions is not None)
        require_settings(admitted, settings, path, called)
    current_context().is_checked = body is not None
    return text if admitted is body else json.dumps(admitted).encode()


def _parse_body(text: bytes) -> object:
    """Return the body from JSON; None for what is no JSON, which the server says itself."""
    try:
        body = json.loads(text)
        is_deep = text.count(b"[") + text.count(b"{") > _MAX_DEPTH and _is_nested_deeper(
            body, _MAX_DEPTH
        )
    except ValueError:
        return None
    except RecursionError:
        is_deep = True
    if is_deep:
        raise wrong("body", f"at most {_MAX_DEPTH} lists in lists", "more", "nest them less deeply")
    if b"\0" in text or _SURROGATE.search(text):  # with zeros it is UTF-16 or UTF-32
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # the engine's client could not send it
            got = "half a surrogate pair"
            raise wrong("body", "texts of Unicode", got, "leave it out") from None
    return body


def _is_nested_deeper(body: Any, most: int) -> bool:
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


def _move_into_xargs(
    body: object, path: str, *, has_sessions: bool
) -> tuple[object, Mapping[str, str]]:
    """Return a body with its spans and session where vLLM hands them on; itself without any.

    Beside it, what the client calls the settings that were moved.
    """
    if not isinstance(body, dict):
        return body, {}
    called, found = dict[str, str](), dict[str, Any]()
    if SPANS_FIELD in body:
        found[SPANS_FIELD] = json.dumps(body[SPANS_FIELD])
    if (
        has_sessions
        and path not in COUNTING_ENDPOINTS
        and (named := _find_session(body)) is not None
    ):
        called[_SESSION], found[_SESSION] = named
    if not found:
        return body, {}
    inside = {} if (given := body.get(XARGS)) is None else given
    if not isinstance(inside, dict):
        raise wrong(XARGS, "an object", f"something of type {type(inside).__name__}", "pass one")
    for name in found.keys() & inside.keys():
        raise wrong(name, "it once", f"it inside {XARGS}, too", "leave one of them out")
    others = {name: value for name, value in body.items() if name != SPANS_FIELD}
    return {**others, XARGS: {**inside, **found}}, called


def _find_session(body: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the field of a body that names a session, as errors call it, and the name.

    The field is `agent_hint: session_id`, or `session_id`, which vLLM has itself for an identity
    that the requests of one agent share. None if no session is named.
    """
    inside, beside = _session_in_hint(body.get(AGENT_HINT)), body.get(SESSION_ID)
    if beside is None:
        return None if inside is None else (f"{AGENT_HINT}: {SESSION_ID}", inside)
    if inside is not None and inside != beside:
        raise wrong(
            SESSION_ID, f"the same name as in {AGENT_HINT}", "another", "leave one of them out"
        )
    return SESSION_ID, beside


def _session_in_hint(hint: object) -> Any:
    """Return the session that a hint names; None for none."""
    form = f'{{"{SESSION_ID}": "a-random-name"}}'
    if not isinstance(hint, dict | None):
        got = f"something of type {type(hint).__name__}"
        raise wrong(AGENT_HINT, f"an object such as {form}", got, "pass one")
    for name in hint or {}:
        if name != SESSION_ID:
            raise wrong(
                AGENT_HINT, f"the field {SESSION_ID} alone", f"'{printable(name)}'", f"write {form}"
            )
    return hint and hint.get(SESSION_ID)


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
    for name in _CLIENT_FIELDS:  # what clients wrap around the right place
        beside = _mapping(body.get(name))
        outside |= {name: beside, f"{name}: {XARGS}": _mapping(beside.get(XARGS))}
    for place, fields in outside.items():
        require_few_names(place, fields)
    for name, word in find_misspelled_fields(body):
        raise wrong(
            printable(name), word, f"'{printable(name)}', which is unknown", f"write {word}"
        )
    for name in chain.from_iterable(outside.values()):
        if (right := correct_name(name)) is not None:
            remedy = f'write "{XARGS}": {{"{printable(right)}": ...}}'
            raise wrong(
                printable(name), f"inside {XARGS}", "it outside, where it is ignored", remedy
            )
    inside, of_sampling = _mapping(body.get(XARGS)), _mapping(sampling.get("extra_args"))
    for given in (inside, of_sampling):
        _require_supported_endpoint(given, path, called)
    if path in ENDPOINTS_WITHOUT_XARGS and (own := own_settings(inside)):
        none, name = f"none inside {XARGS} at {path}, where it is ignored", PREFIX + next(iter(own))
        raise wrong(name, none, "it", "leave it out")
    for given in (inside, of_sampling):
        require_compatible(given=given, body=body, called=called)
        settings.policy_for_request(given)


def _require_supported_endpoint(
    given: Mapping[str, Any], path: str, called: Mapping[str, str]
) -> None:
    """Raise RefusedError for spans or a session that are not read there, or a wrong name of one."""
    for name, places in ((SPANS_FIELD, SPAN_ENDPOINTS), (_SESSION, SESSION_ENDPOINTS)):
        if name in given and path not in places:
            got, remedy = f"it in a request to {printable(path)}", "send the request there"
            said, where = called.get(name, name), " or ".join(places)
            raise wrong(said, f"it at {where}", got, f"{remedy}, or leave it out")
    if given.get(_SESSION) is not None:
        require_session_name(called.get(_SESSION, _SESSION), given[_SESSION])


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
