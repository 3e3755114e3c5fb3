"""Streams whose first event is an error are answered with the status of the error instead."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
_STATUS = {"invalid_request_error": 400, "not_found_error": 404, "rate_limit_error": 429}
"""The status of each type of Anthropic's errors, which have no code."""

Send = Callable[[Message], Awaitable[None]]


class StreamGate:
    """Withholds the beginning of a stream until its first event, which shows whether the request is
    refused. Each response needs a gate of its own.

    vLLM asks its engine only after the response has begun with status 200.

    Args:
        send: the ASGI function that sends a message to the client.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._withheld: list[Message] = []  # messages before the end of the first event
        self._is_refused = False

    async def __call__(self, message: Message) -> None:
        """Send a message of the application to the client, or withhold it until the first event is
        complete.

        If that event is an error, it is sent as a response with its own status, and the rest of the
        stream is thrown away. Messages of a response that is not a stream of events with status 200
        are sent at once.
        """
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
                await self._refuse(event)
                return
            for each in (start, *self._withheld):
                await self._send(each)
        elif not self._is_refused:
            await self._send(message)

    async def _refuse(self, error: Message) -> None:
        """Send the error as a response of its own, with the HTTP status that belongs to its code or
        type. The status is 500 if neither says one.
        """
        fields, body = error["error"], json.dumps(error).encode()
        code = fields.get("code", _STATUS.get(fields.get("type"), 500))
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        size = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), size]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _is_stream(message: Message) -> bool:
    content_type: bytes = dict(message["headers"]).get(b"content-type", b"")
    return message["status"] == 200 and content_type.startswith(b"text/event-stream")


def _first_event(body: bytes) -> Any:
    """Return the first event that contains data in the beginning of a stream, parsed as JSON. The
    result is None if no such event is complete yet, and {} if its data is not JSON.
    """
    for event in body.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]:
        data = [line[len(b"data:") :] for line in event.split(b"\n") if line.startswith(b"data:")]
        if data:
            try:
                return json.loads(b"\n".join(data))
            except ValueError:
                return {}  # for example [DONE]
    return None


def _is_error(event: Any) -> bool:
    """Whether the first event of a stream, parsed as JSON, is an object with an "error" that is an
    object.
    """
    return isinstance(event, dict) and isinstance(event.get("error"), dict)
