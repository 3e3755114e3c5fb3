"""Answers wrong settings with status 400 before a response begins, also for streams.

It is the value ``snapkv_vllm.middleware.SettingsCheck`` of vLLM's ``--middleware``, which `snapkv
serve` sets. vLLM itself checks `extra_args` only when the engine is called, and by then a stream
has begun with status 200. The middleware also knows the tenant of a request: only requests with the
same API key reuse each other's cached tokens.
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
    """Counts the requests that are refused by a web server."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(**labels_of(vllm_config) | {"engine": ""})

    def counting(self, context: RequestContext, send: Send) -> Send:
        """Wrap the ASGI function `send`, so that refused requests are counted.

        Returns:
            A function that sends each message with `send`. Before the message that begins a
            response, it counts the response if the status is at least 400 and `context` says why
            the request was refused.
        """

        async def send_and_count(message: Message) -> None:
            starts = message["type"] == "http.response.start"
            if starts and context.refusal is not None and message["status"] >= 400:
                self.count("refusals", status=str(message["status"]), reason=context.refusal)
            await send(message)

        return send_and_count


class SettingsCheck:
    """An ASGI middleware that checks the settings in the body of a request when the server reads
    this body.

    It reads nothing that the server does not read. So requests without a valid API key, or that the
    server refuses for another reason, are not affected. Forms are not read; settings in them are
    refused where they reach the engine's client. The settings of the server are in its
    ``--additional-config``.
    """

    def __init__(self, app: _App) -> None:
        end_with_parent()  # several API servers are children of one process
        self._app = app
        self._settings: ServingSettings | None = None
        self._has_keys = False
        self._refusals: Refusals | None = None

    async def __call__(self, scope: Message, receive: _Receive, send: Send) -> None:
        """Answer one request of the server by calling the application.

        If it is a POST request, its settings are checked when the application reads the body,
        unless the body is a form, and a stream that begins with an error is answered with the
        status of the error. The first call of all, which comes when the server starts, prepares the
        server; see `_settings_of`.
        """
        settings = self._settings_of(scope)
        has_owner = self._has_keys and "headers" in scope
        context = RequestContext(tenant_of(scope["headers"]) if has_owner else SHARED_TENANT)
        if scope["type"] == "http" and self._refusals is not None:
            send = self._refusals.counting(context, send)
        if scope["type"] == "http" and scope["method"] == "POST":
            context.is_checked, path = False, scope["path"].removeprefix(scope.get("root_path", ""))
            receive = receive if _is_form(scope) else _checking(receive, settings, path)
            send = StreamGate(send)
        with use_context(context):
            await self._app(scope, receive, send)

    def _settings_of(self, scope: Message) -> ServingSettings:
        """Return the settings of the server.

        The first call reads them from the options of the server. It also patches vLLM's client and
        renderer if the application has them, and adds the routes of sessions if sessions are
        enabled.

        Raises:
            InvalidArgumentError: the settings have an unknown name or a value that is out of range.
            InvalidTypeError: a value of the settings has the wrong type.
        """
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
    """Wrap the ASGI function `receive` so that it returns the whole body of the request as one
    message, after checking it and moving its settings to where vLLM reads them.

    A message that is not part of the body, such as a disconnect, is returned unchanged. The wrapped
    function raises HTTPException with status 400 if a setting is wrong.

    Args:
        receive: the ASGI function that returns the next message of the client.
        settings: the settings of the server.
        path: the path of the endpoint, without the server's root path.
    """

    async def receive_checked() -> Message:
        """Receive the whole body, and check the settings in it.

        Raises:
            HTTPException: a setting is wrong; the status is 400.
        """
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
            # FastAPI turns this error into a response wherever a body is read.
            raise HTTPException(400, detail=str(error)) from error
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_checked


def _is_form(scope: Message) -> bool:
    """Whether the body of a request is a form by its content type. A form may contain files that
    the server does not keep in memory.
    """
    content_types = (value for name, value in scope["headers"] if name.lower() == b"content-type")
    content_type = next(content_types, b"").partition(b";")[0].strip().lower()
    return bool(content_type in (b"multipart/form-data", b"application/x-www-form-urlencoded"))
