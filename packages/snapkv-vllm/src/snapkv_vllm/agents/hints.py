"""Which session the body of a request names."""

from collections.abc import Mapping
from typing import Any

from snapkv_vllm.names import HINT, HINTED, SESSIONS_AT, SILENT, shown, wrong


def session_named(body: Mapping[str, Any], path: str) -> tuple[str, Any] | None:
    """Return the field of a body that names a session, and the name.

    The field is `agent_hint: session_id`, or `session_id`, which vLLM has itself for an identity
    that the requests of one agent share.

    Args:
        body: the JSON object that a client has sent to a server that holds sessions.
        path: the endpoint.

    Returns:
        The field as errors call it, and its value, whose form is not checked here; None if no
        session is named.

    Raises:
        RefusedError: the hint has another form than ours, the two fields name different sessions,
            or a session is named at an endpoint that cannot go on from one.
    """
    if path in SILENT:
        return None
    inside, beside = _hinted(body.get(HINT)), body.get(HINTED)
    if inside is None and beside is None:
        return None
    field, name = (f"{HINT}: {HINTED}", inside) if beside is None else (HINTED, beside)
    if path not in SESSIONS_AT:
        got, remedy = f"it in a request to {shown(path)}", "send the request there, or leave it out"
        raise wrong(field, f"it at {' or '.join(SESSIONS_AT)}", got, remedy)
    if inside is not None and inside != name:
        raise wrong(field, f"the same name as in {HINT}", "another", "leave one of them out")
    return field, name


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
