"""Answers 400 to wrong settings before a response begins, streamed ones among them.

For vLLM's own ``--middleware snapkv_vllm.middleware.SettingsCheck``; `snapkv serve` passes it.
vLLM itself looks at `extra_args` only when the engine is asked, and by then a streamed response has
begun with status 200. It also knows whose a request is: what one API key's requests leave in the
cache is found by requests of the same key alone.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import HTTPException

from snapkv.errors import SnapKVError
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.front.bodies import check_body
from snapkv_vllm.front.rendering import resolve_requests
from snapkv_vllm.front.request_context import (
    SHARED_TENANT,
    RequestContext,
    check_prompts,
    tenant_of,
    use_context,
)
from snapkv_vllm.front.routes import router
from snapkv_vllm.front.streams import Message, Send, StreamGate
from snapkv_vllm.metrics import Metrics, labels_of
from snapkv_vllm.plugin import end_with_parent

_Receive = Callable[[], Awaitable[Message]]
_App = Callable[[Message, _Receive, Send], Awaitable[None]]


class Refusals(Metrics):
    """Counts the requests that a front end refuses."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(**labels_of(vllm_config) | {"engine": ""})

    def counting(self, visit: RequestContext, send: Send) -> Send:
        """Return what sends a response, and counts it if `visit` says that it is a refusal."""

        async def send_and_count(message: Message) -> None:
            starts = message["type"] == "http.response.start"
            if starts and visit.refused is not None and message["status"] >= 400:
                self.count("refusals", status=str(message["status"]), reason=visit.refused)
            await send(message)

        return send_and_count


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
        visit = RequestContext(tenant_of(scope["headers"]) if has_owner else SHARED_TENANT)
        if scope["type"] == "http" and self._refusals is not None:
            send = self._refusals.counting(visit, send)
        if scope["type"] == "http" and scope["method"] == "POST":
            visit.is_checked, path = False, scope["path"].removeprefix(scope.get("root_path", ""))
            receive = receive if _is_form(scope) else _checking(receive, settings, path)
            send = StreamGate(send)
        with use_context(visit):
            await self._app(scope, receive, send)

    def _settings_of(self, scope: Message) -> ServingSettings:
        if self._settings is None:
            from vllm import envs

            app = scope["app"]
            state = app.state
            self._settings = ServingSettings.from_config(state.args.additional_config or {})
            self._has_keys = any(state.args.api_key or [envs.VLLM_API_KEY])
            if (client := getattr(state, "engine_client", None)) is not None:
                self._refusals = Refusals(client.vllm_config)
                check_prompts(client)
            if (renderer := getattr(state, "online_renderer", None)) is not None:
                resolve_requests(renderer, self._settings)
            if self._settings.sessions is not None:
                app.include_router(router(client))
        return self._settings


def _checking(receive: _Receive, settings: ServingSettings, path: str) -> _Receive:
    """Return what receives a whole body in one message, checked."""

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
            body = check_body(bytes(text), settings, path)
        except SnapKVError as error:
            # FastAPI answers with it wherever it comes up while a body is read.
            raise HTTPException(400, detail=str(error)) from error
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_whole


def _is_form(scope: Message) -> bool:
    """Whether a body may hold files, which the server does not hold in memory."""
    kinds = (value for name, value in scope["headers"] if name.lower() == b"content-type")
    kind = next(kinds, b"").partition(b";")[0].strip().lower()
    return bool(kind in (b"multipart/form-data", b"application/x-www-form-urlencoded"))
