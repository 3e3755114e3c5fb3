"""Checks of the JSON body of a request, and where its settings are moved to.

Clients send spans and a session beside their other fields, as ``extra_body`` of OpenAI's and
Anthropic's clients does. Inside vLLM both become settings of `vllm_xargs`, spans as JSON text.
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
    describe,
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
"""The largest depth of lists and objects in a body. It is far below the depth that Python can read,
which depends on `sys.setrecursionlimit` and on the calls that are active.
"""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Matches every UTF-8 body that may have half of a surrogate pair. It also matches complete pairs.
"""

_SESSION = PREFIX + SESSION

_CLIENT_FIELDS = ("extra_body", "extra_args")
"""Fields of clients in Python that vLLM's server ignores."""


def check_body(text: bytes, settings: ServingSettings, path: str) -> bytes:
    """Check the settings in the body of a request, and return the body that vLLM will read instead.

    Spans and a session are moved into `vllm_xargs`; without either, `text` itself is returned. In
    the current `RequestContext` it is recorded that the body was checked, if it is JSON, or why the
    request is refused.

    Args:
        text: the body as it was sent; if it is not JSON it is returned unchanged, because vLLM
            refuses it.
        settings: the settings of the server.
        path: the path of the endpoint.

    Raises:
        SnapKVError: a setting is wrong, misspelled, or at a place where it would be ignored; or the
            body cannot be sent on to the engine.
    """
    with record_refusals():
        body = _parse_body(text)
        admitted, names = _move_into_xargs(body, path, has_sessions=settings.sessions is not None)
        require_settings(admitted, settings, path, names)
    current_context().is_checked = body is not None
    return text if admitted is body else json.dumps(admitted).encode()


def _parse_body(text: bytes) -> object:
    """Parse the body of a request as JSON. The result is None if it is not JSON, or if it is null.

    Raises:
        RefusedError: the body is nested too deeply, or has half of a surrogate pair, which vLLM
            cannot send to its engine.
    """
    try:
        body = json.loads(text)
        is_deep = text.count(b"[") + text.count(b"{") > _MAX_DEPTH and _is_deeper(body, _MAX_DEPTH)
    except ValueError:
        return None
    except RecursionError:
        is_deep = True
    if is_deep:
        problem = f"more than {_MAX_DEPTH} lists or objects are nested in each other"
        raise wrong("body", problem, "Use fewer levels of nested lists and objects")
    if b"\0" in text or _SURROGATE.search(text):  # a zero byte means UTF-16 or UTF-32
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # vLLM could not send it to its engine
            problem = "a text has half of a surrogate pair, which is not valid Unicode"
            raise wrong("body", problem, "Remove this character from the text") from None
    return body


def _is_deeper(body: Any, most: int) -> bool:
    """Whether more than `most` lists and objects are nested inside each other, including `body`
    itself, which is any value that `json.loads` returns.
    """
    nests = (dict, list)  # `json.loads` returns exactly these types
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
    """Move the spans and the session of a request to the field that vLLM passes on to the engine.

    Spans become JSON text, and are not checked. A session stays in its own field as well. It is
    ignored on a server without sessions and at endpoints that only count tokens.

    Args:
        body: the parsed body, which is not changed.
        path: the path of the endpoint.
        has_sessions: whether the server has sessions.

    Returns:
        A new body, or `body` itself if it has neither; and the names under which the client sent
        the settings that were moved, by their names in `vllm_xargs`.

    Raises:
        RefusedError: `vllm_xargs` is no object or has the same setting, the session is named in two
            ways, or `agent_hint` has another form.
    """
    if not isinstance(body, dict):
        return body, {}
    client_names, moved = dict[str, str](), dict[str, Any]()
    if SPANS_FIELD in body:
        moved[SPANS_FIELD] = json.dumps(body[SPANS_FIELD])
    reads_session = has_sessions and path not in COUNTING_ENDPOINTS
    if reads_session and (named := _find_session(body)) is not None:
        client_names[_SESSION], moved[_SESSION] = named
    if not moved:
        return body, {}
    xargs = {} if (sent := body.get(XARGS)) is None else sent
    if not isinstance(xargs, dict):
        raise wrong(
            XARGS, f"expected a JSON object, but got {describe(xargs)}", "Send a JSON object"
        )
    for name in moved.keys() & xargs.keys():
        problem = f"the request has this setting twice, inside and outside of {XARGS}"
        raise wrong(name, problem, "Remove one of the two")
    others = {name: value for name, value in body.items() if name != SPANS_FIELD}
    return {**others, XARGS: {**xargs, **moved}}, client_names


def _find_session(body: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Find the name of the session in the body of a request. It may be in `agent_hint`, or in
    `session_id`, which is a field of vLLM itself.

    Returns:
        The name of the field, for error messages, and the name of the session, which is not
        checked; None if there is none.

    Raises:
        RefusedError: the two fields name different sessions, or `agent_hint` has another form.
    """
    hinted, direct = _session_in_hint(body.get(AGENT_HINT)), body.get(SESSION_ID)
    if direct is None:
        return None if hinted is None else (f"{AGENT_HINT}: {SESSION_ID}", hinted)
    if hinted is not None and hinted != direct:
        problem = f"this is not the same session as in {AGENT_HINT}"
        raise wrong(SESSION_ID, problem, "Remove one of the two fields")
    return SESSION_ID, direct


def _session_in_hint(hint: object) -> Any:
    """Return the name of the session in the field `agent_hint` of a body, which is not checked and
    may be any JSON value.

    Args:
        hint: the value of the field; None if the body does not have it.

    Returns:
        The name; None if there is no hint, or if it has no name or null in its place.

    Raises:
        RefusedError: the hint is no object, or has a field other than `session_id`.
    """
    form = f'{{"{SESSION_ID}": "a-random-name"}}'
    if not isinstance(hint, dict | None):
        problem = f"expected a JSON object, but got {describe(hint)}"
        raise wrong(AGENT_HINT, problem, f"Send an object such as {form}")
    for name in hint or {}:
        if name != SESSION_ID:
            problem = f"the object can only have the field {SESSION_ID}, but got {describe(name)}"
            raise wrong(AGENT_HINT, problem, f"Send an object such as {form}")
    return (hint or {}).get(SESSION_ID)


def require_settings(
    body: object,
    settings: ServingSettings,
    path: str = "",
    client_names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Check that the JSON body of a request has no setting that is wrong or that would be ignored.

    Args:
        body: the body, whose spans and session have been moved into `vllm_xargs`; anything but an
            object is left to vLLM.
        settings: the settings of the server.
        path: the path of the endpoint; without one, spans and a session are refused.
        client_names: the names under which the client sent settings that were moved, by their names
            in `vllm_xargs`, for error messages.

    Raises:
        SnapKVError: a setting is wrong, misspelled, or at a place where it would be ignored.
    """
    if not isinstance(body, dict):
        return
    sampling = _mapping(body.get("sampling_params"))  # a field of /inference/v1/generate
    outside = {"body": body, "sampling_params": sampling}
    for name in _CLIENT_FIELDS:  # some clients put the settings in here
        client_fields = _mapping(body.get(name))
        outside |= {name: client_fields, f"{name}: {XARGS}": _mapping(client_fields.get(XARGS))}
    for place, fields in outside.items():
        require_few_names(place, fields)
    for name, word in find_misspelled_fields(body):
        raise wrong(printable(name), "there is no field with this name", f"Use {word} instead")
    for name in chain.from_iterable(outside.values()):
        if (right := correct_name(name)) is not None:
            remedy = f'Write "{XARGS}": {{"{printable(right)}": ...}}'
            problem = f"this setting is ignored unless it is inside the field {XARGS}"
            raise wrong(printable(name), problem, remedy)
    xargs, of_sampling = _mapping(body.get(XARGS)), _mapping(sampling.get("extra_args"))
    for extra_args in (xargs, of_sampling):
        _require_endpoint(extra_args, path, client_names)
    if path in ENDPOINTS_WITHOUT_XARGS and (own := own_settings(xargs)):
        problem = f"the endpoint {path} ignores all settings in {XARGS}"
        raise wrong(PREFIX + next(iter(own)), problem, "Remove this setting from the request")
    for extra_args in (xargs, of_sampling):
        require_compatible(extra_args=extra_args, body=body, client_names=client_names)
        settings.policy_for_request(extra_args)


def _require_endpoint(own: Mapping[str, Any], path: str, client_names: Mapping[str, str]) -> None:
    """Check that a request has no spans or session that its endpoint would ignore, and that the
    name of its session is correct.

    Args:
        own: the settings of the request, by their names with the prefix.
        path: the path of the endpoint.
        client_names: as in `require_settings`.

    Raises:
        RefusedError: the endpoint ignores the setting, or the session's name is wrong.
    """
    for name, places in ((SPANS_FIELD, SPAN_ENDPOINTS), (_SESSION, SESSION_ENDPOINTS)):
        if name in own and path not in places:
            problem = f"the endpoint {printable(path)} ignores this setting"
            remedy = f"Send the request to {' or '.join(places)}, or remove the setting"
            raise wrong(client_names.get(name, name), problem, remedy)
    if own.get(_SESSION) is not None:
        require_session_name(client_names.get(_SESSION, _SESSION), own[_SESSION])


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
