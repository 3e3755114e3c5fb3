"""The settings of a server and of a single request."""

import functools
import json
from dataclasses import replace

import pytest
import torch

from snapkv import TOVA, SnapKV, SnapKVError, StreamingLLM, default_policy
from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.policies.default import adapt_to_question, by_layer
from snapkv.policies.spans import Spans
from snapkv_vllm.admission.limits import Limits, Sessions
from snapkv_vllm.admission.methods import WithSpans
from snapkv_vllm.admission.settings import ServingSettings
from snapkv_vllm.admission.spans import RequestSpans
from tests.ops.states import random_layer

PAPERS = functools.partial(ServingSettings, policy="snapkv")
DEFAULTS = by_layer(default_policy(1024))


def test_default_settings_equal_those_of_the_library():
    assert ServingSettings().policy_for_request(None) == DEFAULTS
    assert ServingSettings().policy_for_request({"other": 1}) == DEFAULTS
    assert PAPERS().policy_for_request(None) == SnapKV()
    own = {"snapkv_kernel_size": 5, "snapkv_voters": 40}
    asked = default_policy(64, kernel_size=5, voters=40)
    assert ServingSettings(budget=64).policy_for_request(own) == by_layer(asked)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 65, 100, 101])
@pytest.mark.parametrize("own", [{}, {"voters": 30}, {"pooling": "avg"}, {"decay": 0.8}], ids=str)
def test_tokens_of_a_question_vote_as_in_the_library(tokens, own):
    expected = adapt_to_question(by_layer(default_policy(**own)), tokens)
    server = ServingSettings(parameters=own)
    assert server.count_voters({"snapkv_budget": 300}, tokens) == expected.voters
    shared = ServingSettings(policy="across-layers", parameters=own)
    assert shared.count_voters({"snapkv_budget": 300}, tokens) == expected.voters
    given = {f"snapkv_{name}": value for name, value in own.items()}
    assert ServingSettings(budget=0).count_voters(given, tokens) == expected.voters
    assert ServingSettings(max_window_size=60).count_voters({}, 64) is None
    for policy in ("snapkv", "tova", "adakv"):
        assert ServingSettings(policy=policy).count_voters({}, tokens) is None


def test_request_overrides_only_the_settings_that_it_names():
    settings = PAPERS(budget=512, parameters={"kernel_size": 13, "window_size": 16})
    given = {"snapkv_budget": 300, "snapkv_pooling": "avg"}
    expected = SnapKV(300, kernel_size=13, window_size=16, pooling="avg")
    assert settings.policy_for_request(given) == expected
    assert settings.policy_for_request({}) == SnapKV(512, kernel_size=13, window_size=16)


def test_request_may_choose_another_pooling_than_the_server():
    wide = PAPERS(budget=512, parameters={"kernel_size": [0, 12]})
    assert wide.policy_for_request(None) == SnapKV(512, kernel_size=(0, 12))
    fading = {"snapkv_pooling": "fading"}
    assert wide.policy_for_request(fading) == SnapKV(512, pooling="fading")
    expected = SnapKV(512, pooling="fading", decay=0.8)
    assert wide.policy_for_request({**fading, "snapkv_decay": 0.8}) == expected
    faded = PAPERS(budget=512, parameters={"pooling": "fading", "decay": 0.8})
    assert faded.policy_for_request({"snapkv_decay": 0.7}) == replace(expected, decay=0.7)
    assert faded.policy_for_request(fading) == expected
    assert faded.policy_for_request({"snapkv_pooling": "max"}) == SnapKV(512)
    both = {"snapkv_pooling": "max", "snapkv_kernel_size": [0, 12]}
    assert faded.policy_for_request(both) == SnapKV(512, kernel_size=(0, 12))


def test_budget_of_zero_disables_compression_for_a_server_or_request():
    assert PAPERS(budget=512).policy_for_request({"snapkv_budget": 0}) is None
    off = PAPERS(budget=0)
    assert off.policy_for_request(None) is None
    assert off.policy_for_request({"snapkv_budget": 64}) == SnapKV(64)


def test_summary_names_every_setting_that_decides_what_is_kept():
    assert ServingSettings().summary == (
        "policy default, budget 1024, window_size 16, pooling fading, decay 0.935, sink_tokens 4, "
        "group_reduce max, window_reduce max, protect_first 0, max_window_size 128, "
        "max_kernel_size 129, "
        "decode_budget 0, decode_policy r-kv, evict_every 128, sessions no"
    )
    own = {"safeguard": 0.5, "pooling": "fading", "decay": 0.9}
    said = ServingSettings(policy="adakv", budget=0, parameters=own).summary.split(", ")
    assert {"policy adakv", "budget 0", "decay 0.9", "safeguard 0.5"} < {*said}
    assert "decode_budget 4096" in ServingSettings(limits=Limits(decode_budget=4096)).summary
    said = ServingSettings(sessions=Sessions(most_bytes=2 << 30)).summary
    assert said.endswith("sessions 2.0 GiB")


def test_other_methods_keep_positions_and_accept_their_own_parameters():
    streaming = ServingSettings(policy="streaming-llm", budget=64, parameters={"start": 8})
    assert streaming.policy_for_request(None) == StreamingLLM(64, start=8, positions="original")
    assert streaming.policy_for_request({"snapkv_budget": 32}) == StreamingLLM(
        32, start=8, positions="original"
    )
    assert ServingSettings(policy="tova", budget=9).policy_for_request(None) == TOVA(9)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policy": "pyramidkv"}, "for which across-layers"),
        ({"policy": "adakv", "parameters": {"safeguard": 0}}, "safeguard"),
        ({"policy": "adakv", "parameters": {"policy": "snapkv"}}, "the method adakv has only"),
        ({"policy": "adakv", "budget": 16}, "window_size=32"),
        ({"parameters": {"safeguard": 0.5}}, "the method default has only"),
        ({"policy": "snapvk"}, "Did you mean snapkv"),
        ({"policy": ["snapkv"]}, "the method must be one of"),
        ({"budget": -1}, "at least 0"),
        ({"budget": 1.5}, "an integer"),
        ({"budget": 2}, "window_size=2"),
        ({"parameters": {"budget": 64}}, "budget: the method default has only"),
        (
            {"parameters": {"voters": 129}},
            "voters: the value can be at most 128 .* --max-window-size 129",
        ),
        ({"policy": "tova", "parameters": {"voters": 8}}, "the method tova has only"),
        ({"parameters": {"kernel": 3}}, "Did you mean kernel_size"),
        ({"parameters": {"kernel_size": 4}}, "odd"),
        ({"parameters": {"group_reduce": "none"}}, "stored per KV head"),
        ({"parameters": {"keep_ratio": 0.5}}, "the method default has only"),
        ({"policy": "streaming-llm", "parameters": {"positions": "cache"}}, "not rotated"),
        ({"policy": "streaming-llm", "budget": 3}, "expected the sum of start"),
    ],
)
def test_settings_that_cannot_be_served_are_refused_at_the_start(given, words):
    with pytest.raises(SnapKVError, match=words):
        ServingSettings(**given)


@pytest.mark.parametrize("budget", [0, 512])
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"snapkv_budget": "512"}, InvalidTypeError, "snapkv_budget: expected an integer"),
        ({"snapkv_budget": -5}, InvalidArgumentError, "at least 0"),
        ({"snapkv_decay": None}, InvalidTypeError, "snapkv_decay: the value must not be null"),
        ({"snapkv_budget": 8}, InvalidArgumentError, "window_size=32"),
        ({"snapkv_window_size": 0}, InvalidArgumentError, "window_size"),
        (
            {"snapkv_voters": 0},
            InvalidArgumentError,
            "snapkv_voters: expected a value of at least 1",
        ),
        (
            {"snapkv_voters": 129},
            InvalidArgumentError,
            "snapkv_voters: the value can be at most 128",
        ),
        (
            {"snapkv_voters": 8, "snapkv_window_size": 129},
            InvalidArgumentError,
            "snapkv_window_size: the value can be at most 128",
        ),
        ({"snapkv_pooling": ["max"]}, InvalidArgumentError, "pooling"),
        (
            {"snapkv_decay": 0.9},
            InvalidArgumentError,
            "decay: this argument cannot be used with pooling",
        ),
        ({"snapkv_pooling": "fading", "snapkv_decay": "0.9"}, InvalidTypeError, "decay"),
        (
            {"snapkv_pooling": "fading", "snapkv_kernel_size": 5},
            InvalidArgumentError,
            "cannot be used with pooling='fading'",
        ),
        ({"snapkv_kernel_size": [1]}, InvalidArgumentError, "pair"),
        ({"snapkv_kernel": 5}, InvalidArgumentError, "Did you mean snapkv_kernel_size"),
        ({"snapkv_policy": "tova"}, InvalidArgumentError, "snapkv_policy"),
        ({"snapkv_": 1}, InvalidArgumentError, "snapkv_"),
    ],
)
def test_wrong_settings_of_a_request_are_refused_by_name(budget, given, error, words):
    with pytest.raises(error, match=words):
        PAPERS(budget=budget).policy_for_request(given)


@pytest.mark.parametrize("policy", ["tova", "streaming-llm"])
def test_voters_are_refused_for_a_method_without_them(policy):
    with pytest.raises(InvalidArgumentError, match=r"^snapkv_voters: this server has no setting"):
        ServingSettings(policy=policy).policy_for_request({"snapkv_voters": 8})


def test_first_tokens_are_protected_by_the_server_or_the_request():
    settings = PAPERS(budget=64, protect_first=20)
    plan = settings.plan_request(None, 100)
    assert (plan.policy, plan.protect_first) == (SnapKV(64), 20)
    assert settings.policy_for_request({"snapkv_protect_first": 0}) == SnapKV(64)
    plan = settings.plan_request({"snapkv_protect_first": 32}, 100)
    assert plan.next_compression(0, 0).kept_tokens == 64
    for value, words in ((33, "at most 32 tokens.* got 33"), (-1, "at least 0")):
        with pytest.raises(InvalidArgumentError, match=words):
            settings.policy_for_request({"snapkv_protect_first": value})
    with pytest.raises(InvalidTypeError, match="snapkv_protect_first: expected an integer"):
        settings.policy_for_request({"snapkv_protect_first": 2.5})
    with pytest.raises(InvalidArgumentError, match=r"^protect_first: expected at most"):
        ServingSettings(policy="tova", budget=9, protect_first=9)


@pytest.mark.parametrize(
    ("policy", "first"),
    [("default", 10), ("default", 32), ("tova", 10), ("streaming-llm", 10), ("adakv", 10)],
)
def test_protected_first_tokens_are_kept_within_the_budget(policy, first):
    """Sinks count among them, so the whole budget outside the window can be protected."""
    plan = ServingSettings(policy=policy, budget=48, protect_first=first).plan_request(None, 90)
    end = plan.next_compression(0, 0)
    layer = random_layer(0, prompt_tokens=90, query_tokens=end.selector.query_tokens)
    kept = end.selector.select(layer)
    by_spans = WithSpans(plan.policy, RequestSpans(protect=Spans(((0, first),))))
    assert torch.equal(kept, by_spans.select(layer).keep_indices)
    assert (kept >= 0).sum(-1).float().mean() == end.kept_tokens == 48
    assert all(set(range(first)) <= set(row.tolist()) for row in kept.flatten(0, 1))


@pytest.mark.parametrize(
    ("own", "entry"),
    [
        ({}, {}),
        ({"protect_first": 20}, {"protect_first": 20}),
        ({"sessions": Sessions(most_bytes=4)}, {"sessions": {"most_bytes": 4}}),
        ({"limits": Limits(decode_budget=256)}, {"limits": {"decode_budget": 256}}),
        ({"parameters": {"decay": 0.9}}, {"decay": 0.9}),
    ],
    ids=str,
)
def test_settings_survive_a_round_trip_through_json(own, entry):
    settings = ServingSettings(**{"budget": 64, **own})
    config = json.loads(json.dumps({"mine": 1, **settings.to_config()}))
    assert config["snapkv"] == {"policy": "default", "budget": 64, **entry}
    assert ServingSettings.from_config(config) == settings
    assert ServingSettings.from_config({}) == ServingSettings()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"most_bytes": -1}, "most_bytes: expected a value of at least 0"),
        ({"most_bytes": "2GiB"}, "most_bytes: expected an integer"),
        ({"bytes": 1}, "sessions: there is no limit .* only most_bytes"),
    ],
)
def test_wrong_values_of_sessions_are_refused_by_name(entry, words):
    with pytest.raises(SnapKVError, match=words):
        ServingSettings.from_config({"snapkv": {"sessions": entry}})


@pytest.mark.parametrize(("budget", "tokens"), [("12%", ", 983 for 8k"), ("64MiB", "")])
def test_budget_in_bytes_is_refused_with_the_command_that_gives_tokens(budget, tokens):
    said = f"snapkv plan --context N --budget {budget} shows for N tokens{tokens}."
    with pytest.raises(InvalidArgumentError) as error:
        ServingSettings(budget=budget)
    assert str(error.value) == (
        f"budget: the budget of a server must be a number of tokens, but got '{budget}'. "
        f"Use the number that {said}"
    )
    with pytest.raises(
        InvalidArgumentError, match=r"^snapkv_budget: the budget of a server must be a number of"
    ):
        ServingSettings().policy_for_request({"snapkv_budget": budget})
