"""Streams that begin with an error, which are answered with its status instead."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
_STATUS = {"invalid_request_error": 400, "not_found_error": 404, "rate_limit_error": 429}
"""Of Anthropic's errors, which have no code."""

Send = Callable[[Message], Awaitable[None]]


class StreamGate:
    """Holds the start of a stream back until its first event, which says whether it is refused.

    vLLM asks its engine when the response has begun, with status 200.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._withheld: list[Message] = []  # what came before the first event was whole
        self._is_refused = False

    async def __call__(self, message: Message) -> None:
        """Send one of the application's messages on."""
        if message["type"] == "http.response.start" and _is_stream(message):
            self._start = message
        elif self._start is not None:
            self._withheld.append(message)
            event = _first_event(b"".join(each.get("body", b"") for each in self._withheld))
            if event is None and message.get("more_body", False):
                return
            start, self._start = self._start, None
            self._is_refused = _is_error(event)
            if self._is_refused:
                await self._raise_unsupported(event)
                return
            for each in (start, *self._withheld):
                await self._send(each)
        elif not self._is_refused:
            await self._send(message)

    async def _raise_unsupported(self, error: Message) -> None:
        told, body = error["error"], json.dumps(error).encode()
        code = told.get("code", _STATUS.get(told.get("type"), 500))
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        size = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), size]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _is_stream(message: Message) -> bool:
    kind: bytes = dict(message["headers"]).get(b"content-type", b"")
    return message["status"] == 200 and kind.startswith(b"text/event-stream")


def _first_event(body: bytes) -> Any:
    """The first event with data; None where it is still coming, or is no object."""
    for event in body.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
        data = [line[len(b"data:") :] for line in event.split(b"\n") if line.startswith(b"data:")]
        if data:
            try:
                return json.loads(b"\n".join(data))
            except ValueError:
                return {}  # such as [DONE]
    return None


def _is_error(event: Any) -> bool:
    return isinstance(event, dict) and isinstance(event.get("error"), dict)
