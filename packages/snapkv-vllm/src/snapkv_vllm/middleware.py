"""Answers 400 to wrong settings before a response begins, streamed ones among them.

For vLLM's own ``--middleware snapkv_vllm.middleware.SettingsCheck``; `snapkv serve` passes it.
vLLM itself looks at `extra_args` only when the engine is asked, and by then a streamed response has
begun with status 200. On a server that shares documents, it also joins them with requests.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from fastapi import HTTPException

from snapkv.errors import SnapKVError
from snapkv_vllm.documents.front import FrontEnd, Visit
from snapkv_vllm.plugin import end_with_parent
from snapkv_vllm.settings import ServingSettings, require_settings

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]

_DEEPEST = 100
"""Lists in lists and objects in objects of a body: far below what Python and the server can read,
which depends on the calls under way and on `sys.setrecursionlimit`."""

_TOO_DEEP = f"body: expected at most {_DEEPEST} lists in lists, got more; nest them less deeply"


class SettingsCheck:
    """An ASGI middleware that looks at a body when the server behind it reads it.

    Nothing is read that the server does not read itself, so that whoever is not let in (API keys)
    stays outside, and a body that is refused elsewhere is refused there. The server's settings are
    those in its ``--additional-config``.

    Args:
        app: what answers.
    """

    def __init__(self, app: _App) -> None:
        end_with_parent()  # one of several API servers has a parent
        self._app = app
        self._settings: ServingSettings | None = None
        self._documents: FrontEnd | None = None

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer one request, or the server's start, which is the first to come."""
        settings = self._settings_of(scope)
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif self._documents is None:
            await self._app(scope, _checking(receive, settings, None), send)
        else:
            async with self._documents.visit(scope) as visit:
                checking = _checking(receive, settings, visit)
                await self._app(scope, checking, visit.sending(send))

    def _settings_of(self, scope: _Message) -> ServingSettings:
        if self._settings is None:
            config = scope["app"].state.args.additional_config
            self._settings = ServingSettings.from_config(config or {})
            if self._settings.sharing is not None:
                self._documents = FrontEnd(scope["app"], self._settings)
        return self._settings


def _checking(receive: _Receive, settings: ServingSettings, visit: Visit | None) -> _Receive:
    """What receives a whole body in one message, checked, and joined with a document it names."""

    async def receive_whole() -> _Message:
        text = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return message
            text.extend(message.get("body", b""))
            more = message.get("more_body", False)
        body = _body_of(bytes(text))
        if visit is None or not visit.is_about_documents:
            _require_settings(body, settings)
        changed = None if visit is None else await visit.rewritten(body)
        whole = bytes(text) if changed is None else json.dumps(changed).encode()
        return {"type": "http.request", "body": whole, "more_body": False}

    return receive_whole


def _require_settings(body: object, settings: ServingSettings) -> None:
    try:
        require_settings(body, settings)
    except SnapKVError as error:
        # FastAPI answers with it wherever it comes up while a body is read.
        raise HTTPException(400, detail=str(error)) from error


def _body_of(text: bytes) -> object:
    """The body from JSON; None for what is no JSON, which the server says itself."""
    try:
        body = json.loads(text)
    except ValueError:
        return None
    except RecursionError as error:
        raise HTTPException(400, detail=_TOO_DEEP) from error
    if _is_too_deep(body):
        raise HTTPException(400, detail=_TOO_DEEP)
    return body


def _is_too_deep(body: object) -> bool:
    level = [body]
    for _ in range(_DEEPEST):
        level = [inner for one in level for inner in _inside(one) if isinstance(inner, dict | list)]
    return bool(level)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
