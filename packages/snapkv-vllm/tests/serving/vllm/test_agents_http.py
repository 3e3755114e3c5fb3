"""Spans and sessions over HTTP: vLLM's own renderer, what reaches the engine, what is answered."""

import asyncio
import json
from urllib.parse import quote

import pytest

from snapkv import default_policy
from snapkv.policies.default import adapt_to_question, by_layer
from snapkv_app.prompts import Prompt
from snapkv_vllm import Sessions
from snapkv_vllm.admission.names import find_misspelled_fields, require_session_name
from snapkv_vllm.admission.spans import SPANS_FIELD
from tests.serving.vllm.sites import Site

CHAT, TEXT, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
SYSTEM = "You answer by the tools' results. 🙂"
RESULTS = ("The sea is blue.\n" * 20, "The hill is green.", "  The road is long.  ")


def call(number):
    function = {"name": f"look_{number}", "arguments": "{}"}
    return {"id": f"call{number}", "type": "function", "function": function}


MESSAGES = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": [{"type": "text", "text": "What is blue?"}]},
    {"role": "assistant", "content": "<think>\nThe sea?\n</think>I look.", "tool_calls": [call(0)]},
    {"role": "tool", "tool_call_id": "call0", "content": RESULTS[0]},
    {"role": "assistant", "content": "Again.", "tool_calls": [call(1)]},
    {"role": "tool", "tool_call_id": "call1", "content": RESULTS[1]},
    {"role": "assistant", "content": "<think>Or the road?</think>Again.", "tool_calls": [call(2)]},
    {"role": "tool", "tool_call_id": "call2", "name": "look_2", "content": RESULTS[2]},
]


class Answering(Site):
    def answer(self, ids):
        return {"ids": ids, "usage": {}}


@pytest.fixture
def site(config, monkeypatch):
    return Answering(config, monkeypatch, keys=())


DROP = {"start": 1, "end": 4, "do": "drop"}


@pytest.mark.parametrize("path", [CHAT, TEXT, ANTHROPIC])
def test_spans_reach_the_engine_with_other_settings(client, site, path):
    body = {"model": "demo", "prompt": "One two three four five six seven", "max_tokens": 5}
    body |= {} if path == TEXT else {"messages": [{"role": "user", "content": QUESTION}]}
    body |= {"snapkv_spans": [DROP], "vllm_xargs": {"snapkv_budget": 300, "other": 1}}
    assert client.post(path, json=body).status_code == 200
    own, _ = site.seen[-1]
    assert json.loads(own.pop(SPANS_FIELD)) == [DROP]
    assert path == TEXT or own.pop("snapkv_voters")
    assert own == {"snapkv_budget": 300, "other": 1}


@pytest.mark.parametrize("path", [CHAT, ANTHROPIC])
def test_context_management_is_left_to_vllm_which_ignores_it(client, site, path):
    body = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 5}
    context = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    ids = [client.post(path, json=body | more).json()["ids"] for more in ({}, context)]
    assert ids[0] == ids[1]
    assert SPANS_FIELD not in site.seen[-1][0]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}], ids=str)
def test_request_without_api_key_is_not_read(config, monkeypatch, headers):
    found, site = [], Answering(config, monkeypatch, keys=("mine",))
    said = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": TEXT, "raw_path": TEXT.encode()}
    scope |= {"query_string": b"", "headers": [*said, (b"content-type", b"application/json")]}

    async def receive():
        raise AssertionError("somebody read the body")

    async def send(message):
        found.append(message)

    asyncio.run(site.app(scope, receive, send))
    assert found[0]["status"] == 401


def in_parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


QUESTION = "In which year does the gate open, and who has the key?"
CALLED = {"role": "assistant", "content": "I look.", "tool_calls": [call(0)]}
RESULT = {"role": "tool", "tool_call_id": "call0", "content": "In May."}
BEFORE = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"})
ASKED = [
    (QUESTION, []),
    ("  Why?\n", []),
    (in_parts(RESULTS[0], QUESTION), []),
    (QUESTION, [{"role": "assistant", "content": "In"}]),
    (QUESTION, [CALLED, RESULT]),
    (f"{RESULTS[0]}\n\n{QUESTION}", []),
]


@pytest.mark.parametrize(("content", "behind"), ASKED, ids=str)
@pytest.mark.parametrize("path", [CHAT, ANTHROPIC, RESPONSES])
def test_tokens_of_the_question_vote_as_in_the_library(client, site, path, content, behind):
    """From its first one to the prompt's end; a long text's none, and its last 16 tokens vote."""
    messages = [*BEFORE, {"role": "user", "content": content}, *behind]
    body = {"model": "demo", "messages": messages, "vllm_xargs": {"snapkv_budget": 70}}
    if path == ANTHROPIC:
        body |= {"messages": as_anthropic(messages), "system": SYSTEM, "max_tokens": 5}
    if path == RESPONSES:
        body |= {"input": [item for one in messages for item in as_items(one)]}
    assert client.post(path, json=body).status_code == 200
    own, (ids,) = site.seen[-1]
    tokenizer = site.app.state.online_renderer.renderer.get_tokenizer()
    text = content if isinstance(content, str) else content[-1]["text"]
    prompt = Prompt(text=tokenizer.decode(ids), has_special_tokens=True, question=text)
    asked = adapt_to_question(by_layer(default_policy()), prompt.question_tokens(tokenizer))
    assert own == {"snapkv_budget": 70} | ({"snapkv_voters": asked.voters} if asked.voters else {})
    assert (asked.voters is None) == text.startswith(RESULTS[0])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"vllm_xargs": {"snapkv_voters": 9}}),
        (CHAT, {"vllm_xargs": {"snapkv_window_size": 8}}),
        (CHAT, {"messages": [{"role": "system", "content": QUESTION}]}),
        (TEXT, {"vllm_xargs": {"snapkv_budget": 70}}),
    ],
    ids=str,
)
def test_voters_of_a_request_are_kept_and_no_question_means_the_default(client, site, path, body):
    chat = {"messages": [{"role": "user", "content": QUESTION}], "prompt": QUESTION}
    assert client.post(path, json={"model": "demo"} | chat | body).status_code == 200
    assert site.seen[-1][0] == body.get("vllm_xargs")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"agent_hints": {"session_id": "a"}}, "agent_hint"),
        ({"agentHint": {"session_id": "a"}}, "agent_hint"),
        ({"agent_hint": {"sesion_id": "a"}}, "session_id"),
        ({"agent_hint": {"sessionId": "a"}}, "session_id"),
        ({"vllm_xarg": {"snapkv_budget": 64}}, "vllm_xargs"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, ANTHROPIC])
def test_misspelled_field_is_refused_with_the_correct_name(client, site, path, body, word):
    answer = client.post(path, json={"model": "demo", "messages": MESSAGES} | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith(f"no field with this name. Write {word}.")
    assert not site.seen


def test_no_field_of_vllm_is_taken_for_a_misspelled_field():
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    for kind in (AnthropicMessagesRequest, ChatCompletionRequest, CompletionRequest):
        for field in kind.model_fields:
            assert not list(find_misspelled_fields({field: {"agent_id": 1, "latency": 2}})), field


def as_anthropic(messages):
    def blocks(message):
        if message["role"] == "tool":
            own = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            return "user", [{**own, "content": message["content"]}]
        calls = [
            {"type": "tool_use", "id": one["id"], "name": one["function"]["name"], "input": {}}
            for one in message.get("tool_calls", ())
        ]
        content = message["content"]
        texts = content if isinstance(content, list) else in_parts(content)
        return message["role"], [*texts, *calls]

    pairs = [blocks(one) for one in messages[1:]]
    return [{"role": role, "content": content} for role, content in pairs]


def as_items(message):
    """The same as input of OpenAI's responses."""
    if message["role"] == "tool":
        own = {"type": "function_call_output", "call_id": message["tool_call_id"]}
        return [{**own, "output": message["content"]}]
    content = message["content"]
    if isinstance(content, list):
        content = [{**part, "type": "input_text"} for part in content]
    calls = [
        {"type": "function_call", "call_id": one["id"], **one["function"]}
        for one in message.get("tool_calls", ())
    ]
    return [{"type": "message", "role": message["role"], "content": content}, *calls]


def named(session):
    """The ways in which a body names a session, with what errors call them."""
    yield "agent_hint: session_id", {"agent_hint": {"session_id": session}}
    yield "session_id", {"session_id": session}


def test_session_belongs_to_its_api_key_and_cannot_be_named_by_others(config, monkeypatch):
    site = Answering(config, monkeypatch, sessions=Sessions())
    hint = {"agent_hint": {"session_id": "run"}}
    bodies = [
        (hint, "mine"),
        (hint, "theirs"),
        ({"vllm_xargs": {"snapkv_session": "run"}}, "mine"),
        ({"session_id": "run", **hint}, "mine"),
        ({"session_id": "run"}, "mine"),
        ({"agent_hint": {"session_id": "other"}}, "mine"),
    ]
    with site.asking() as client:
        for path in (CHAT, TEXT, RESPONSES, ANTHROPIC):
            for body, key in bodies:
                own = {"model": "demo", "messages": MESSAGES, "prompt": "One two"}
                if path == ANTHROPIC:
                    own = {"model": "demo", "messages": as_anthropic(MESSAGES), "max_tokens": 5}
                elif path == RESPONSES:
                    own = {"model": "demo", "input": "One two"}
                headers = {"Authorization": f"Bearer {key}"}
                assert client.post(path, json=own | body, headers=headers).status_code == 200
            names = [xargs["snapkv_session"] for xargs, _ in site.seen[-len(bodies) :]]
            mine, theirs, *again, other = names
            assert {mine} == set(again)
            assert len({mine, theirs, other}) == 3
            assert mine.partition("/")[0] == other.partition("/")[0] != theirs.partition("/")[0]
        longest = "y" * 256
        for wrong in (7, "", "x" * 300, *(f"{owner}/{longest}" for owner in ("", "a" * 32, "x"))):
            for field, body in named(wrong):
                answer = client.post(
                    CHAT,
                    json={"model": "demo", "messages": [], **body},
                    headers={"Authorization": "Bearer mine"},
                )
                assert answer.status_code == 400
                said = answer.json()["error"]["message"]
                assert said.startswith(f"{field}: expected a text of 1 to 256 characters")
        body = {"model": "demo", "messages": MESSAGES, "agent_hint": "run"}
        answer = client.post(CHAT, json=body, headers={"Authorization": "Bearer mine"})
        assert answer.json()["error"]["message"].startswith(
            "agent_hint: expected a JSON object, but got"
        )
        twice = {"vllm_xargs": {"snapkv_session": "run"}, "agent_hint": {"session_id": "run"}}
        body = {"model": "demo", "messages": MESSAGES} | twice
        answer = client.post(CHAT, json=body, headers={"Authorization": "Bearer mine"})
        assert "snapkv_session: the request has this setting twice" in answer.text
        body = {"model": "demo", "messages": MESSAGES, "agent_hint": {"session_id": longest}}
        answer = client.post(CHAT, json=body, headers={"Authorization": "Bearer mine"})
        assert answer.status_code == 200


SALTED = [("mine", {}), ("mine", {}), ("theirs", {}), ("mine", 1), ("theirs", 1), ("mine", 1)]


def salts(config, monkeypatch, path, **own):
    """Of requests of two keys, some with a salt of their own, as the engine gets them."""
    site = Answering(config, monkeypatch, **own)
    with site.asking() as client:
        for key, salted in SALTED:
            body = {"model": "demo", "messages": MESSAGES, "prompt": "One two", "max_tokens": 2}
            if path == ANTHROPIC:
                body["messages"] = as_anthropic(MESSAGES)
            body |= {"cache_salt": "own"} if salted else {}
            headers = {"Authorization": f"Bearer {key}"}
            assert client.post(path, json=body, headers=headers).status_code == 200
    return [prompt.get("cache_salt") for prompt, _ in site.client.asked]


@pytest.mark.parametrize("path", [CHAT, TEXT, ANTHROPIC])
def test_api_key_reuses_no_cached_tokens_of_another_key(config, monkeypatch, path):
    mine, again, theirs, own, theirs_own, own_again = salts(config, monkeypatch, path)
    assert (mine, own) == (again, own_again)
    assert len({mine, theirs, own, theirs_own}) == 4
    assert None not in (mine, theirs)


def test_cache_salts_are_unchanged_on_a_server_without_api_keys(config, monkeypatch):
    expected = ["own" if salted else None for _, salted in SALTED]
    assert salts(config, monkeypatch, TEXT, keys=()) == expected


SESSION_PATH = "/v1/snapkv/sessions"


@pytest.mark.parametrize("key", ["mine", "theirs"])
def test_sessions_are_listed_and_deleted_by_their_api_key(config, monkeypatch, key):
    site = Answering(config, monkeypatch, sessions=Sessions())
    headers = {"Authorization": f"Bearer {key}"}
    with site.asking() as client:

        def asked(method, name=""):
            answer = client.request(method, SESSION_PATH + name, headers=headers)
            return answer.status_code, answer.text, site.client.asked[-1]

        hint = {"agent_hint": {"session_id": "a/b"}}
        body = {"model": "demo", "prompt": "One two", **hint}
        assert client.post(TEXT, json=body, headers=headers).status_code == 200
        owner = site.seen[-1][0]["snapkv_session"]
        site.client.told = [{"session": "a/b", "bytes": 9}]
        status, said, told = asked("GET")
        assert (status, json.loads(said)) == (200, 2 * site.client.told)
        assert told == ("snapkv_call_sessions", "list_sessions", [owner.removesuffix("a/b")], 1)
        for histories, requests, expected in ((2, 0, 204), (0, 0, 404), (2, 1, 409)):
            site.client.told = {"histories": histories, "requests": requests}
            status, said, told = asked("DELETE", "/a%2Fb")
            assert status == expected, said
            assert told == ("snapkv_call_sessions", "delete_session", [owner], 1)
            assert (expected == 204) == (said == "")
        assert client.get(SESSION_PATH).status_code == 401


NAMES = ["a b", "a/b", "/a/", "a//b", "a?b=c#d", "50%", "é🙂", "..a", "a.b/c..", "a+b;c&d", "~"]
NAMES += [*"\n\r\t\0\x1b\x7f\u2028\xa0\u200b", "a\nb", "run\n", ".", "..", "a/../b", "./a", "a/.."]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_started_session_can_be_deleted_by_name(config, monkeypatch, name):
    """The others are refused before any begins."""
    site = Answering(config, monkeypatch, keys=(), sessions=Sessions())
    site.client.told = {"histories": 1, "requests": 0}
    with site.asking() as client:
        answer = client.post(TEXT, json={"model": "demo", "prompt": "One two", "session_id": name})
        if answer.status_code == 400:
            assert "all of them printable" in answer.json()["error"]["message"]
            assert not site.client.asked
            return
        begun = site.seen[-1][0]["snapkv_session"]
        gone = client.delete(f"{SESSION_PATH}/{quote(name, safe='')}")
        assert gone.status_code == 204, gone.text
        assert site.client.asked[-1][2] == [begun]


def test_common_session_names_are_accepted():
    for name in NAMES[:11]:
        require_session_name("session_id", name)


@pytest.mark.parametrize("stray", ["id", "sessionid", "parent", "session-id"])
def test_unknown_field_of_agent_hint_is_refused_with_the_correct_one(config, monkeypatch, stray):
    site = Answering(config, monkeypatch, keys=(), sessions=Sessions())
    hint = {"session_id": "run", stray: "a"}
    with site.asking() as client:
        answer = client.post(TEXT, json={"model": "demo", "prompt": "One", "agent_hint": hint})
    said = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert said.startswith(
        f"agent_hint: the object can only have the field session_id, but got '{stray}'"
    )


def test_two_fields_with_different_sessions_are_refused(config, monkeypatch):
    site = Answering(config, monkeypatch, keys=(), sessions=Sessions())
    body = {"model": "demo", "prompt": "One", "agent_hint": {"session_id": "a"}, "session_id": "b"}
    with site.asking() as client:
        answer = client.post(TEXT, json=body)
    assert answer.status_code == 400
    assert "session_id: this is not the same session" in answer.json()["error"]["message"]


def test_server_without_sessions_ignores_the_hint_and_refuses_the_setting(client):
    body = {"model": "demo", "messages": MESSAGES}
    for _, hint in named("run\n"):
        assert client.post(CHAT, json=body | hint).status_code == 200
    answer = client.post(CHAT, json=body | {"vllm_xargs": {"snapkv_session": "run"}})
    assert answer.status_code == 400
    assert "--sessions" in answer.json()["error"]["message"]


def test_requests_without_spans_or_session_are_unchanged(client, site):
    answer = client.post(CHAT, json={"model": "demo", "messages": MESSAGES})
    assert answer.status_code == 200
    assert site.seen[-1][0] is None


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (
            TEXT,
            {"snapkv_spans": [{"start": 0, "end": 9, "do": "drop"}]},
            "ends at 3 or before",
        ),
        (CHAT, {"snapkv_spans": [{"start": 0, "end": 999, "do": "drop"}]}, "that ends at"),
        (CHAT, {"snapkv_spans": [{"role": "tool", "do": "drop"}]}, "the fields start, end, do"),
        (TEXT, {"snapkv_spans": "["}, "expected a list"),
        (
            TEXT,
            {"snapkv_spans": [{"start": 3, "end": 3, "do": "drop"}]},
            "the start must be less than the end",
        ),
        (
            TEXT,
            {"snapkv_spans": [{"start": 0, "end": 1, "do": "erase"}]},
            "drop, protect and compress",
        ),
        (TEXT, {"snapkv_spans": [{"start": 0, "end": 2**70, "do": "drop"}]}, "end"),
        (TEXT, {"snapkv_spans": [1]}, "every span must be an object"),
        (TEXT, {"snapkv_spans": [{"start": 0, "end": 1, "do": "drop"}] * 1025}, "at most 1,024"),
        (TEXT, {"vllm_xargs": {"snapkv_edits": "{}"}}, "snapkv_edits: this server has no setting"),
        (
            CHAT,
            {
                "snapkv_spans": [
                    {"start": 3, "end": 9, "do": "drop"},
                    {"start": 8, "end": 12, "do": "protect"},
                ]
            },
            "(protect) overlap",
        ),
        ("/v1/x", {"vllm_xargs": {SPANS_FIELD: "[]"}}, "Send the request to /v1/completions or"),
        ("/v1/x", {"snapkv_spans": []}, "Send the request to /v1/completions or"),
        (RESPONSES, {"snapkv_spans": []}, "Send the request to /v1/completions or"),
        (f"{ANTHROPIC}/count_tokens", {"snapkv_spans": []}, "ignores this setting"),
        (TEXT, {"snapkv_spans": [], "vllm_xargs": "x"}, "vllm_xargs: expected a JSON object"),
        (TEXT, {"snapkv_spans": [], "vllm_xargs": {SPANS_FIELD: "[]"}}, "has this setting twice"),
    ],
)
def test_wrong_spans_and_sessions_get_a_400_in_one_line(client, site, path, body, words):
    own = {"model": "demo", "prompt": "One two three four"}
    own = own if path == TEXT else {"model": "demo", "messages": MESSAGES}
    answer = client.post(path, json=own | body)
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]["message"]
    assert words in said
    assert "\n" not in said
    assert not site.seen
