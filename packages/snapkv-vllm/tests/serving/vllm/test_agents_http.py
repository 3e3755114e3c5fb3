"""Spans and sessions over HTTP: vLLM's own renderer, engine inputs and responses."""

import asyncio
import functools
import json
from urllib.parse import quote

import pytest

from snapkv import default_policy
from snapkv.policies.default import MOST_CHAT_VOTERS, adapt_to_question, by_layer
from snapkv_app.prompts import Prompt
from snapkv_vllm import Sessions
from snapkv_vllm.admission.names import find_misspelled_fields, require_session_name
from snapkv_vllm.admission.spans import SPANS_FIELD
from tests.serving.vllm.sites import Site

CHAT, TEXT, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
QUESTION = "In which year does the gate open, and who has the key?"
MESSAGES = [{"role": "user", "content": QUESTION}]
BODY = {"model": "demo", "messages": MESSAGES, "prompt": "One two", "max_tokens": 2}


@pytest.fixture(scope="module")
def sites(config):
    """Makes a site of each kind once."""
    return functools.cache(functools.partial(Site, config))


@pytest.fixture
def make_site(sites):
    """Makes a site that has seen no request."""

    def make(**own):
        site = sites(**own)
        site.seen.clear()
        site.client.asked.clear()
        return site

    return make


@pytest.fixture
def site(make_site):
    return make_site(keys=())


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
def test_context_management_has_no_effect(client, site, path):
    edits = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    plain, edited = (client.post(path, json=BODY | more).json() for more in ({}, edits))
    assert plain["ids"] == edited["ids"]
    assert SPANS_FIELD not in site.seen[-1][0]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}], ids=str)
def test_request_without_api_key_is_not_read(make_site, headers):
    found, site = [], make_site(keys=("mine",))
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


LONG = "The sea is blue.\n" * 20
CALL = {"id": "call", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call", "content": "In May."}
TOOL_USE = [
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "a", "content": "In May."}],
    },
]
FUNCTION_CALL = [
    {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "In May."},
]
BEFORE = [{"role": "system", "content": "Be brief. 🙂"}, {"role": "user", "content": "Hello"}]
ASKED = [
    *((path, QUESTION, []) for path in (CHAT, ANTHROPIC, RESPONSES)),
    *((path, "  Why?\n", []) for path in (CHAT, ANTHROPIC, RESPONSES)),
    *((path, f"{LONG}\n\n{QUESTION}", []) for path in (CHAT, ANTHROPIC, RESPONSES)),
    *((path, in_parts(LONG, QUESTION), []) for path in (CHAT, ANTHROPIC)),
    (CHAT, QUESTION, [{"role": "assistant", "content": "In"}]),
    (CHAT, QUESTION, [CALLED, RESULT]),
    (ANTHROPIC, QUESTION, TOOL_USE),
    (RESPONSES, QUESTION, FUNCTION_CALL),
]


@pytest.mark.parametrize(("path", "content", "behind"), ASKED, ids=str)
def test_tokens_of_the_question_vote_as_in_the_library(client, site, path, content, behind):
    """Tokens vote from the question's first one on, or the last 16 if the question is long."""
    messages = [*BEFORE, {"role": "user", "content": content}, *behind]
    body = {"model": "demo", "messages": messages, "vllm_xargs": {"snapkv_budget": 70}}
    if path == ANTHROPIC:
        body |= {"messages": messages[1:], "system": messages[0]["content"], "max_tokens": 5}
    if path == RESPONSES:
        body |= {"input": messages}
    assert client.post(path, json=body).status_code == 200
    own, (ids,) = site.seen[-1]
    tokenizer = site.app.state.online_renderer.renderer.get_tokenizer()
    text = content if isinstance(content, str) else content[-1]["text"]
    prompt = Prompt(text=tokenizer.decode(ids), has_special_tokens=True, question=text)
    tokens = prompt.question_tokens(tokenizer)
    voters = None if tokens > MOST_CHAT_VOTERS else tokens
    asked = adapt_to_question(by_layer(default_policy()), voters)
    assert own == {"snapkv_budget": 70} | ({"snapkv_voters": asked.voters} if asked.voters else {})
    assert (asked.voters is None) == text.startswith(LONG)


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


def test_no_field_of_vllm_is_taken_for_a_misspelled_field():
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    for kind in (AnthropicMessagesRequest, ChatCompletionRequest, CompletionRequest):
        for field in kind.model_fields:
            assert not list(find_misspelled_fields({field: {"agent_id": 1, "latency": 2}})), field


def test_session_belongs_to_its_api_key_and_cannot_be_named_by_others(make_site):
    site = make_site(sessions=Sessions())
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
                own = {"model": "demo", "input": "One two"} if path == RESPONSES else BODY
                headers = {"Authorization": f"Bearer {key}"}
                assert client.post(path, json=own | body, headers=headers).status_code == 200
            names = [xargs["snapkv_session"] for xargs, _ in site.seen[-len(bodies) :]]
            mine, theirs, *again, other = names
            assert {mine} == set(again)
            assert len({mine, theirs, other}) == 3
            assert mine.partition("/")[0] == other.partition("/")[0] != theirs.partition("/")[0]


SALTED = [("mine", {}), ("mine", {}), ("theirs", {}), ("mine", 1), ("theirs", 1), ("mine", 1)]


def salts(make_site, path, **own):
    """Of requests of two keys, some with a salt of their own, as the engine gets them."""
    site = make_site(**own)
    with site.asking() as client:
        for key, salted in SALTED:
            body = BODY | ({"cache_salt": "own"} if salted else {})
            headers = {"Authorization": f"Bearer {key}"}
            assert client.post(path, json=body, headers=headers).status_code == 200
    return [prompt.get("cache_salt") for prompt, _ in site.client.asked]


@pytest.mark.parametrize("path", [CHAT, TEXT, ANTHROPIC])
def test_api_key_reuses_no_cached_tokens_of_another_key(make_site, path):
    mine, again, theirs, own, theirs_own, own_again = salts(make_site, path)
    assert (mine, own) == (again, own_again)
    assert len({mine, theirs, own, theirs_own}) == 4
    assert None not in (mine, theirs)


def test_cache_salts_are_unchanged_on_a_server_without_api_keys(make_site):
    expected = ["own" if salted else None for _, salted in SALTED]
    assert salts(make_site, TEXT, keys=()) == expected


SESSION_PATH = "/v1/snapkv/sessions"


@pytest.mark.parametrize("key", ["mine", "theirs"])
def test_sessions_are_listed_and_deleted_by_their_api_key(make_site, key):
    site = make_site(sessions=Sessions())
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
def test_started_session_can_be_deleted_by_name(make_site, name):
    """Names that cannot be deleted are refused before a session begins."""
    site = make_site(keys=(), sessions=Sessions())
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


def test_server_without_sessions_ignores_the_hint_and_refuses_the_setting(client):
    for hint in ({"agent_hint": {"session_id": "run\n"}}, {"session_id": "run\n"}):
        assert client.post(CHAT, json=BODY | hint).status_code == 200
    answer = client.post(CHAT, json=BODY | {"vllm_xargs": {"snapkv_session": "run"}})
    assert answer.status_code == 400
    assert "--sessions" in answer.json()["error"]["message"]


def test_spans_of_several_prompts_are_refused(client, site):
    body = BODY | {"prompt": ["One two three", "Four"], "snapkv_spans": [DROP | {"end": 2}]}
    answer = client.post(TEXT, json=body)
    assert (answer.status_code, "only one prompt, but got 2" in answer.text) == (400, True)
    assert not site.seen


@pytest.mark.parametrize(
    ("path", "spans", "words"),
    [
        (TEXT, [{"start": 0, "end": 9, "do": "drop"}], "ends at position 1 or earlier"),
        (CHAT, [{"start": 0, "end": 999, "do": "drop"}], "that ends at"),
        (TEXT, "[", "expected a list"),
        ("/v1/x", [], "Send the request to /v1/completions or"),
        (RESPONSES, [], "Send the request to /v1/completions or"),
        (f"{ANTHROPIC}/count_tokens", [], "ignores this setting"),
    ],
)
def test_wrong_spans_get_a_400_in_one_line(client, site, path, spans, words):
    answer = client.post(path, json=BODY | {"snapkv_spans": spans})
    assert answer.status_code == 400, answer.text
    said = answer.json()["error"]["message"]
    assert words in said
    assert "\n" not in said
    assert not site.seen
