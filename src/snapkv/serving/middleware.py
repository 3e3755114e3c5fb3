"""Answers 400 to wrong settings before a response begins, streamed ones among them.

For vLLM's own ``--middleware snapkv.serving.middleware.SettingsCheck``; `snapkv serve` passes it.
vLLM itself looks at `extra_args` only when the engine is asked, and by then a streamed response has
begun with status 200.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import HTTPException

from snapkv.errors import SnapKVError
from snapkv.serving.bodies import require_settings
from snapkv.serving.settings import ServingSettings

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]

NAME = f"{__name__}.SettingsCheck"
"""What to pass to vLLM."""


class SettingsCheck:
    """An ASGI middleware that looks at a body when the server behind it has read all of it.

    Nothing is read that the server does not read itself, so that whoever is not let in (API keys)
    stays outside, and a body that is refused elsewhere is refused there. The server's settings are
    those in its ``--additional-config``.

    Args:
        app: what answers.
    """

    def __init__(self, app: _App) -> None:
        self._app = app
        self._settings: ServingSettings | None = None

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        settings, body = self._settings_of(scope), bytearray()

        async def receive_and_check() -> _Message:
            message = await receive()
            if message["type"] == "http.request":
                body.extend(message.get("body", b""))
                if not message.get("more_body", False):
                    _require_settings(bytes(body), settings)
                    body.clear()
            return message

        await self._app(scope, receive_and_check, send)

    def _settings_of(self, scope: _Message) -> ServingSettings:
        if self._settings is None:
            config = scope["app"].state.args.additional_config
            self._settings = ServingSettings.from_config(config or {})
        return self._settings


def _require_settings(text: bytes, settings: ServingSettings) -> None:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):  # not JSON: the server says so
        return
    try:
        require_settings(body, settings)
    except SnapKVError as error:
        # FastAPI answers with it wherever it comes up while a body is read.
        raise HTTPException(400, detail=str(error)) from error
