"""Answers 400 to wrong settings before a response begins, streamed ones among them.

For vLLM's own ``--middleware snapkv_vllm.middleware.SettingsCheck``; `snapkv serve` passes it.
vLLM itself looks at `extra_args` only when the engine is asked, and by then a streamed response has
begun with status 200. It also knows whose a request is: what one API key's requests leave in the
cache is found by requests of the same key alone.
"""

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import HTTPException

from snapkv.errors import SnapKVError
from snapkv_vllm.admission import require_settings
from snapkv_vllm.agents.front import as_checked, moved_inside, resolve_requests
from snapkv_vllm.agents.routes import router
from snapkv_vllm.metrics import Refusals
from snapkv_vllm.plugin import end_with_parent
from snapkv_vllm.settings import ServingSettings
from snapkv_vllm.streams import FirstEvent, Message, Send
from snapkv_vllm.tenants import has_keys, kept_apart, tenant_of
from snapkv_vllm.visits import EVERYBODY, Visit, answering, before_engine, current, noting_refusals

_Receive = Callable[[], Awaitable[Message]]
_App = Callable[[Message, _Receive, Send], Awaitable[None]]

_DEEPEST = 100
"""Lists in lists and objects in objects of a body: far below what Python and the server can read,
which depends on the calls under way and on `sys.setrecursionlimit`."""

_TOO_DEEP = f"body: expected at most {_DEEPEST} lists in lists, got more; nest them less deeply"

_NO_TEXT = "body: expected texts of Unicode, got half a surrogate pair; leave it out"
"""The engine's client cannot send it."""

_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")
"""Stands in every UTF-8 body that has half a surrogate pair, and in those that have whole ones."""


class SettingsCheck:
    """An ASGI middleware that looks at a body when the server reads it.

    Nothing is read that the server does not read itself, so that whoever is not let in (API keys)
    stays outside, and a body that is refused elsewhere is refused there. A form is not read at all:
    settings in it are refused where they reach the engine's client. The server's settings are
    those in its ``--additional-config``.
    """

    def __init__(self, app: _App) -> None:
        end_with_parent()  # one of several API servers has a parent
        self._app = app
        self._settings: ServingSettings | None = None
        self._has_keys = False
        self._refusals: Refusals | None = None

    async def __call__(self, scope: Message, receive: _Receive, send: Send) -> None:
        """Answer one request, or the server's start, which is the first to come."""
        settings = self._settings_of(scope)
        has_owner = self._has_keys and "headers" in scope
        visit = Visit(tenant_of(scope["headers"]) if has_owner else EVERYBODY)
        if scope["type"] == "http" and self._refusals is not None:
            send = self._refusals.counting(visit, send)
        if scope["type"] == "http" and scope["method"] == "POST":
            visit.is_checked, path = False, scope["path"].removeprefix(scope.get("root_path", ""))
            receive = receive if _is_form(scope) else _checking(receive, settings, path)
            send = FirstEvent(send)
        with answering(visit):
            await self._app(scope, receive, send)

    def _settings_of(self, scope: Message) -> ServingSettings:
        if self._settings is None:
            app = scope["app"]
            state = app.state
            self._settings = ServingSettings.from_config(state.args.additional_config or {})
            self._has_keys = has_keys(state.args)
            if (client := getattr(state, "engine_client", None)) is not None:
                self._refusals = Refusals(client.vllm_config)
            resolve_requests(state, self._settings)
            before_engine(state, as_checked)
            before_engine(state, kept_apart)
            if self._settings.sessions is not None:
                app.include_router(router(state.engine_client))
        return self._settings


def _checking(receive: _Receive, settings: ServingSettings, path: str) -> _Receive:
    """What receives a whole body in one message, checked."""

    async def receive_whole() -> Message:
        text = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return message
            text.extend(message.get("body", b""))
            more = message.get("more_body", False)
        try:
            body = _body_of(bytes(text))
        except HTTPException:
            current().refused = "body"
            raise
        checked = _checked(body, settings, path)
        if checked is not body:
            text = bytearray(json.dumps(checked).encode())
        return {"type": "http.request", "body": bytes(text), "more_body": False}

    return receive_whole


def _checked(body: object, settings: ServingSettings, path: str) -> object:
    """As `moved_inside`."""
    try:
        with noting_refusals():
            has_sessions = settings.sessions is not None
            checked, called = moved_inside(body, path, has_sessions=has_sessions)
            require_settings(checked, settings, path, called)
    except SnapKVError as error:
        # FastAPI answers with it wherever it comes up while a body is read.
        raise HTTPException(400, detail=str(error)) from error
    current().is_checked = body is not None
    return checked


def _is_form(scope: Message) -> bool:
    """Whether a body may hold files, which the server does not hold in memory."""
    kinds = (value for name, value in scope["headers"] if name.lower() == b"content-type")
    kind = next(kinds, b"").partition(b";")[0].strip().lower()
    return bool(kind in (b"multipart/form-data", b"application/x-www-form-urlencoded"))


def _body_of(text: bytes) -> object:
    """The body from JSON; None for what is no JSON, which the server says itself."""
    try:
        body = json.loads(text)
    except ValueError:
        return None
    except RecursionError as error:
        raise HTTPException(400, detail=_TOO_DEEP) from error
    may_be_deep = text.count(b"[") + text.count(b"{") > _DEEPEST
    if may_be_deep and _is_deeper(body, _DEEPEST):
        raise HTTPException(400, detail=_TOO_DEEP)
    if b"\0" in text or _HALF_A_PAIR.search(text):  # with zeros it is UTF-16 or UTF-32
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise HTTPException(400, detail=_NO_TEXT) from error
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
