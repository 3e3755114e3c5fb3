"""The middleware that checks request bodies, alone and inside vLLM's application."""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Annotated

import pytest

from snapkv.errors import SnapKVError
from snapkv_vllm.admission.settings import ServingSettings

WRONG = {"prompt": "a", "stream": True, "vllm_xargs": {"snapkv_budget": 2}}
RIGHT = {"prompt": "a", "stream": True, "vllm_xargs": {"snapkv_budget": 300}}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def client():
    from fastapi import FastAPI, Form, Request
    from fastapi.responses import StreamingResponse
    from starlette.testclient import TestClient
    from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
    from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest

    from snapkv_vllm.middleware import SettingsCheck

    app = FastAPI()
    config = ServingSettings(budget=512, max_window_size=40).to_config()
    app.state.args = SimpleNamespace(additional_config=config, api_key=None, log_error_stack=False)
    engine = SimpleNamespace(
        generate=lambda prompt, sampling_params: sampling_params.extra_args,
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0),
            model_config=SimpleNamespace(served_model_name="demo"),
        ),
    )
    app.state.engine_client = engine
    app.exception_handler(ValueError)(exception_handler)
    app.add_middleware(SettingsCheck)

    @app.post("/raw")
    async def raw(request: Request) -> StreamingResponse:
        return StreamingResponse(iter([await request.body()]))

    @app.post("/stream")
    async def stream(body: dict) -> StreamingResponse:
        events = [f"data: {json.dumps(body)}\n\n"]
        return StreamingResponse(iter(events), media_type="text/event-stream")

    @app.post("/pieces")
    async def pieces(request: Request) -> int:
        return len([piece async for piece in request.stream() if piece])

    @app.post("/form")
    async def form(request: Annotated[TranscriptionRequest, Form()]) -> dict | None:
        sampling = SimpleNamespace(extra_args=request.vllm_xargs)
        return app.state.engine_client.generate("prompt", sampling_params=sampling)

    @app.post("/closed")
    async def closed() -> str:
        return "nobody read it"

    return TestClient(app)


def test_wrong_settings_get_a_400_and_correct_bodies_are_unchanged(client):
    assert client.post("/raw", json=RIGHT).json() == RIGHT
    refused = client.post("/raw", json=WRONG)
    assert refused.status_code == 400
    assert refused.json()["detail"].startswith(
        "snapkv_budget: expected a value above window_size=2"
    )


def test_stream_refused_by_the_engine_has_the_status_of_the_error(client):
    """vLLM sends such a stream if its engine refuses a request; see also `test_streams`."""
    error = {"error": {"message": "budget: expected none", "code": 507}}
    answer = client.post("/stream", json=error)
    assert (answer.status_code, answer.json()) == (507, error)
    assert answer.headers["content-type"] == "application/json"


def test_limits_of_the_server_apply_to_requests(client):
    body = {"vllm_xargs": {"snapkv_window_size": 41}}
    assert "at most 40 on this server" in client.post("/raw", json=body).text


def test_form_with_too_many_names_is_refused(client):
    fields = {"vllm_xargs": json.dumps(FOREIGN), "stream": "true"}
    refused = client.post("/form", data=fields, files={"file": b"a sound"})
    said = "vllm_xargs: expected at most 1,000 names in the object, but got 30,000"
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(said)


@pytest.mark.parametrize("name", ["snapkv_budget", "snapkv_forget", "snapkv-session", "budget"])
def test_setting_in_a_form_is_refused(client, name):
    def sent(xargs):
        fields = {"vllm_xargs": json.dumps(xargs), "stream": "true"}
        return client.post("/form", data=fields, files={"file": b"a sound"})

    assert sent({"session_id": "theirs"}).json() == {"session_id": "theirs"}
    refused = sent({name: "run"})
    said = f"{name}: settings can only be sent as JSON and not in a form. Send the request as JSON."
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, said)


def refusals():
    """How many requests were refused, by the status of the answer and the reason."""
    from prometheus_client import REGISTRY

    return {
        (sample.labels["status"], sample.labels["reason"]): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "snapkv:refusals_total" and sample.labels["engine"] == ""
    }


REFUSED = [
    ({"json": WRONG}, "snapkv_budget"),
    ({"json": {"snapkv_budget": 64}}, "snapkv_budget"),
    ({"json": {"agent_hints": {}}}, "other"),
    ({"json": {"vllm_xargs": {"snapkv_mine": 1}}}, "other"),
    ({"json": {"vllm_xargs": {"snapkv_session": "a"}}}, "snapkv_session"),
    ({"content": b"[" * 200 + b"]" * 200, "headers": JSON}, "body"),
    ({"content": b'{"a": "\\ud800"}', "headers": JSON}, "body"),
]


@pytest.mark.parametrize(("sent", "reason"), REFUSED, ids=[str(n) for n in range(len(REFUSED))])
def test_every_refusal_is_counted_once_by_status_and_reason(client, sent, reason):
    client.post("/raw", json=RIGHT)  # counts nothing
    before = refusals()
    assert client.post("/raw", **sent).status_code == 400
    counted = {key: value for key, value in refusals().items() if value != before.get(key, 0)}
    assert counted == {("400", reason): before.get(("400", reason), 0) + 1}


def test_refused_form_is_counted_and_a_server_error_is_not(client):
    before = refusals()
    fields = {"vllm_xargs": json.dumps({"snapkv_budget": 64})}
    assert client.post("/form", data=fields, files={"file": b"a sound"}).status_code == 400
    assert client.post("/stream", content=b"{", headers=JSON).status_code == 422
    key = "400", "snapkv_budget"
    assert refusals() == before | {key: before.get(key, 0) + 1}


@pytest.mark.parametrize(("kind", "pieces"), [(b"Multipart/Form-Data; boundary=x", 3), (b"", 1)])
def test_form_is_not_kept_in_memory(client, kind, pieces):
    parts = [{"body": one, "more_body": one != b"}"} for one in (b"{", b" ", b"}")]
    coming = iter([{"type": "http.request", **part} for part in parts])
    sent = []

    async def receive():
        return next(coming)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/pieces", "query_string": b""}
    asyncio.run(client.app(scope | {"headers": [(b"content-type", kind)]}, receive, send))
    assert json.loads(sent[-1]["body"]) == pieces


def test_body_that_the_server_does_not_read_is_not_checked(client):
    assert client.post("/closed", json=WRONG).status_code == 200


def test_body_may_arrive_in_pieces(client):
    for body, status in ((RIGHT, 200), (WRONG, 400)):
        text = json.dumps(body).encode()
        pieces = (text[at : at + 7] for at in range(0, len(text), 7))
        assert client.post("/raw", content=pieces, headers=JSON).status_code == status


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"9" * 5000, b"NaN"])
def test_invalid_json_is_left_to_the_server(client, text):
    assert client.post("/raw", content=text).content == text


@pytest.mark.parametrize("limit", [1000, 20_000])
@pytest.mark.parametrize("opening", ["[", '{"a": '])
def test_depth_limit_does_not_depend_on_the_recursion_limit(client, limit, opening):
    """The limit is 100 levels with the body's own object."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        for depth in (1, 98, 99, 100, 101, 400, 900, 1900, 100_000):
            closing = "]" if opening == "[" else "}"
            deep = opening * depth + ("" if closing == "]" else "1") + closing * depth
            body = f'{{"vllm_xargs": {{"snapkv_register": "x"}}, "deep": {deep}}}'
            answer = client.post("/raw", content=body, headers=JSON)
            names = "snapkv_register" if depth < 100 else "body: more than 100 lists"
            assert answer.status_code == 400
            assert answer.json()["detail"].startswith(names), depth
    finally:
        sys.setrecursionlimit(usual)


def test_brackets_in_a_text_do_not_count_as_depth(client):
    assert client.post("/raw", json={"prompt": "[" * 5000}).status_code == 200


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("where", ["value", "name", "deep"])
def test_half_of_a_surrogate_pair_is_found_in_every_encoding_and_place(client, encoding, where):
    """The half is written directly or as an escape; whole pairs are accepted."""
    for text, status in (("\ud800", 400), ("x\udfff", 400), ("\U0001f642", 200)):
        for is_escaped in (True, False):
            body = {"value": {"a": text}, "name": {text: 1}, "deep": {"a": [[{"b": [text]}]]}}
            written = json.dumps(body[where], ensure_ascii=is_escaped)
            content = written.encode(encoding, "surrogatepass")
            answer = client.post("/raw", content=content)
            assert answer.status_code == status, (text, is_escaped)
            half = "body: a text has half of a surrogate pair"
            assert status == 200 or answer.json()["detail"].startswith(half)
    assert client.post("/raw", content=b'{"a": "\\\\ud800"}').status_code == 200


class Calls:
    """Counts calls of functions in Python and in C while it is entered."""

    number = 0

    def __enter__(self):
        sys.setprofile(self._count)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def _count(self, frame, event, called):
        self.number += event in ("call", "c_call")


SIZE = 30_000
FOREIGN = {f"theirs_{number}": number for number in range(SIZE)}


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ({"vllm_xargs": FOREIGN}, True),
        (FOREIGN, True),
        ({"sampling_params": FOREIGN}, True),
        ({"extra_body": {"vllm_xargs": FOREIGN}}, True),
        ({"metadata": FOREIGN}, False),
        ({"vllm_xargs": {"theirs": FOREIGN}}, False),
        ({"prompt": list(range(SIZE)), "vllm_xargs": {"snapkv_budget": 300}}, False),
        ({"metadata": [[number] for number in range(SIZE)]}, False),
        ({"prompt": "\U0001f642" * SIZE}, False),
    ],
    ids=["xargs", "fields", "sampling", "beside", "others", "inside", "ids", "lists", "pairs"],
)
def test_work_for_a_body_does_not_grow_with_unrelated_fields(body, is_refused):
    """Python code for every field would delay all other requests."""
    from snapkv_vllm.front.bodies import check_body

    settings, refused, text = ServingSettings(budget=512), False, json.dumps(body).encode()
    with Calls() as calls:
        try:
            check_body(text, settings, "/v1/completions")
        except SnapKVError:
            refused = True
    assert refused == is_refused
    assert calls.number < 3000 < SIZE
