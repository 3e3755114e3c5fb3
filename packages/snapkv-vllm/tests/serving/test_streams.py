"""A stream that begins with an error gets the error's status, whatever pieces it arrives in."""

import asyncio

import pytest

from snapkv_vllm.front.streams import StreamGate

START = {
    "type": "http.response.start", "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}  # fmt: skip
CODED = b'data: {"error": {"message": "m", "code": 404}}\n\n'
NAMED = b'event: error\ndata: {"type": "error", "error": {"type": "invalid_request_error"}}\n\n'
SOUND = b'data: {"choices": [{"text": "error"}]}\n\ndata: [DONE]\n\n'


def sent(*bodies):
    """What a client gets of a stream of such bodies."""
    messages = []

    async def send(message):
        messages.append(message)

    async def run():
        first = StreamGate(send)
        await first(dict(START))
        for number, body in enumerate(bodies, 1):
            more = number < len(bodies)
            await first({"type": "http.response.body", "body": body, "more_body": more})

    asyncio.run(run())
    return messages[0]["status"], b"".join(each.get("body", b"") for each in messages)


@pytest.mark.parametrize(
    ("bodies", "status"),
    [
        ((CODED,), 404),
        ((CODED[:20], CODED[20:], b"data: [DONE]\n\n"), 404),
        ((b": ping\n\n", CODED), 404),
        ((NAMED,), 400),
        ((b'data: {"error": {"message": "m"}}\n\n',), 500),
        *(
            ((b'data: {"error": {"code": %s}}\n\n' % code,), status)
            for code, status in ((b"507", 507), (b"null", 500), (b"200", 500), (b'"400"', 500))
        ),
    ],
)
def test_stream_that_begins_with_an_error_has_the_status_of_the_error(bodies, status):
    told, body = sent(*bodies)
    assert told == status
    assert body.startswith(b"{")


@pytest.mark.parametrize(
    "bodies",
    [
        (SOUND,),
        (SOUND[:9], SOUND[9:]),
        (b": ping\n\n", SOUND),
        (SOUND[:40], CODED),
        (b'data: {"error": null}\n\n',),
        (b"",),
    ],
)
def test_other_streams_are_sent_on_unchanged(bodies):
    assert sent(*bodies) == (200, b"".join(bodies))
