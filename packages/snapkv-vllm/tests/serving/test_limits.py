"""The limits of a server on the tokens of a request, and the settings that a request may choose."""

import pytest

from snapkv import RKV, TOVA, SnapKV, StreamingLLM
from snapkv.errors import InvalidArgumentError
from snapkv_vllm import Limits, ServingSettings
from snapkv_vllm.admission.plans import AnswerLimit

BOUNDED = ServingSettings(
    policy="snapkv",
    budget=64,
    parameters={"window_size": 8},
    limits=Limits(decode_budget=256, evict_every=32),
)


def plan(given, settings=BOUNDED):
    return settings.plan_request(given, prompt_tokens=1000)


def test_request_stays_within_the_servers_limits():
    policy = SnapKV(64, window_size=8)
    found = plan({})
    assert found.policy == policy
    evicting = RKV(budget=224, evict_every=32)
    assert found.answer_limit == AnswerLimit(policy=evicting, max_tokens=256, evict_every=32)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"snapkv_budget": 0}, "snapkv_budget: the value must be at least 1 on a server with"),
        ({"snapkv_budget": 225}, "snapkv_decode_budget: the value must be at least 257"),
        ({"snapkv_decode_budget": 257}, "snapkv_decode_budget: expected a value of at most 256"),
        ({"snapkv_decode_budget": 0}, "snapkv_decode_budget: expected a value of at least 1"),
        ({"snapkv_decode_budget": 95}, "snapkv_decode_budget: the value must be at least 96"),
        ({"snapkv_window_size": 65}, "snapkv_budget: "),
    ],
)
def test_request_above_the_servers_limits_is_refused_by_name(given, words):
    with pytest.raises(InvalidArgumentError, match=words):
        plan(given)


def test_decode_budget_is_refused_on_a_server_without_one():
    with pytest.raises(InvalidArgumentError, match="snapkv_decode_budget: this server does not"):
        plan({"snapkv_decode_budget": 200}, ServingSettings(budget=64))
    assert plan({"snapkv_decode_budget": 0}, ServingSettings(budget=64)).answer_limit is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": 0, "limits": Limits(decode_budget=256)}, "budget: .* a decode budget.* 128"),
        ({"budget": 64, "limits": Limits(decode_budget=180)}, "decode_budget: .* at least 192"),
        (
            {
                "budget": 600,
                "protect_first": 595,
                "parameters": {"window_size": 1},
                "limits": Limits(decode_budget=728),
            },
            "^protect_first: ",
        ),
    ],
)
def test_limits_that_contradict_other_settings_are_refused_at_the_start(settings, words):
    with pytest.raises(InvalidArgumentError, match=words):
        ServingSettings(**{"parameters": {"window_size": 8}, **settings})


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"decode_budget": 128}, "decode_budget: the value must be more than .* 128"),
        ({"decode_budget": 130}, "decode_budget: a value of 130 is not enough for the method r-kv"),
        ({"decode_budget": 256, "evict_every": 4}, "evict_every: the value must be at least 8"),
        ({"decode_policy": "h2o"}, "decode_policy: expected one of r-kv, tova, streaming-llm"),
        ({"evict_every": 0}, "evict_every: expected a value of at least 1"),
        ({"evict_every": 64}, "evict_every: this limit has no effect if decode_budget is not set"),
        ({"decode_policy": "tova"}, "decode_policy: this limit has no effect if"),
    ],
)
def test_contradictory_limits_are_refused(limits, words):
    with pytest.raises(InvalidArgumentError, match=words):
        Limits(**limits)


def test_unknown_limit_is_refused_by_name():
    with pytest.raises(
        InvalidArgumentError, match=r"limits: there is no limit with the name 'cap'"
    ):
        ServingSettings.from_config({"snapkv": {"limits": {"cap": 3}}})


@pytest.mark.parametrize(
    ("name", "policy"),
    [("tova", TOVA(128)), ("streaming-llm", StreamingLLM(128, positions="original"))],
)
def test_eviction_methods_are_built_with_parameters_that_can_be_served(name, policy):
    limits = Limits(decode_budget=256, decode_policy=name)
    settings = ServingSettings(budget=64, limits=limits)
    assert plan({}, settings).answer_limit.policy == policy
