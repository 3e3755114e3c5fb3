"""Streams that begin with an error, which are answered with its status instead."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class FirstEvent:
    """Holds the start of a stream back until its first event, which says whether it is refused.

    vLLM asks its engine when the response has begun, with status 200.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._is_refused = False

    async def __call__(self, message: Message) -> None:
        """Send one of the application's messages on."""
        if message["type"] == "http.response.start" and _is_stream(message):
            self._start = message
        elif self._start is not None:
            start, self._start = self._start, None
            error = _error_in(message.get("body", b""))
            self._is_refused = error is not None
            if error is None:
                await self._send(start)
                await self._send(message)
            else:
                await self._refuse(error)
        elif not self._is_refused:
            await self._send(message)

    async def _refuse(self, error: Message) -> None:
        code, body = error["error"].get("code"), json.dumps(error).encode()
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        size = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), size]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _is_stream(message: Message) -> bool:
    kind: bytes = dict(message["headers"]).get(b"content-type", b"")
    return message["status"] == 200 and kind.startswith(b"text/event-stream")


def _error_in(body: bytes) -> Message | None:
    """The first event, where it is an error."""
    for line in body.split(b"\n"):
        if line.startswith(b"data: {") and b'"error"' in line:
            event: Message = json.loads(line.removeprefix(b"data: "))
            return event if isinstance(event.get("error"), dict) else None
        if line.startswith(b"data: "):
            return None
    return None
