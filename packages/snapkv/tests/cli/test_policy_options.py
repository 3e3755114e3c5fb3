"""Policies on the command line: any dataclass in the table, with nothing written for it here."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import pytest

from snapkv import (
    H2O,
    TOVA,
    AdaKV,
    AutoBudget,
    Compactor,
    CriticalKV,
    FullCache,
    KeyDiff,
    KVzip,
    LagKV,
    PromptThenDecode,
    PyramidKV,
    Random,
    ScoreThreshold,
    SnapKV,
)
from snapkv.cli.options import RunOptions
from snapkv.cli.policy import build_policy
from snapkv.errors import InvalidArgumentError, SnapKVError
from snapkv.policies import POLICIES
from snapkv.policies.default import method_name


@dataclass(frozen=True, kw_only=True)
class Newcomer(FullCache):
    """A policy with fields of every kind."""

    name: ClassVar[str] = "newcomer"

    budget: int = 64
    decay: float | None = None
    greedy: bool = False
    mode: Literal["fast", "slow"] = "fast"


@pytest.fixture(autouse=True)
def newcomer(monkeypatch):
    monkeypatch.setitem(POLICIES, "newcomer", Newcomer)


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"policy": "snapkv"}, SnapKV()),
        ({"policy": "snapkv", "budget": 64, "pooling": "avg"}, SnapKV(64, pooling="avg")),
        (
            {"policy": "snapkv", "keep_ratio": 0.25, "window_size": 8},
            SnapKV(keep_ratio=0.25, window_size=8),
        ),
        (
            {"policy": "snapkv", "group_reduce": "none", "kernel_size": "5"},
            SnapKV(group_reduce="none", kernel_size=5),
        ),
        ({"policy": "snapkv", "kernel_size": "0+12"}, SnapKV(kernel_size=(0, 12))),
        ({"policy": "snapkv", "set_": ["kernel_size=0+12"]}, SnapKV(kernel_size=(0, 12))),
        ({"policy": "snapkv", "pooling": "fading"}, SnapKV(pooling="fading", decay=0.935)),
        (
            {"policy": "snapkv", "pooling": "fading", "decay": 0.8},
            SnapKV(pooling="fading", decay=0.8),
        ),
        (
            {"policy": "snapkv", "set_": ["pooling=fading", "decay=0.8"]},
            SnapKV(pooling="fading", decay=0.8),
        ),
        (
            {"policy": "snapkv", "set_": ["pooling=fading"], "decay": 0.8},
            SnapKV(pooling="fading", decay=0.8),
        ),
        (
            {"policy": "snapkv", "set_": ["window-size=16", "kernel_size = 5"]},
            SnapKV(window_size=16, kernel_size=5),
        ),
        (
            {"policy": "lagkv", "budget": 64, "set_": ["lag_size=16", "cross_scoring=true"]},
            LagKV(64, lag_size=16, cross_scoring=True),
        ),
        ({"policy": "compactor", "budget": 64, "seed": 3}, Compactor(64, seed=3)),
        ({"policy": "compactor", "set_": ["blending=0.5"]}, Compactor(blending=0.5)),
        (
            {"policy": "adakv", "set_": ["policy=kvzip", "plus=true"]},
            AdaKV(KVzip(plus=True)),
        ),
        ({"policy": "full"}, FullCache()),
        ({"policy": "random", "seed": 3}, Random(seed=3)),
        ({"policy": "full", "seed": 3}, FullCache()),
        ({"policy": "newcomer", "budget": 8}, Newcomer(budget=8)),
        (
            {"policy": "newcomer", "set_": ["decay=0.5", "greedy=true", "mode=slow"]},
            Newcomer(decay=0.5, greedy=True, mode="slow"),
        ),
    ],
    ids=lambda value: str(value),
)
def test_options_become_the_policy(options, policy):
    assert build_policy(RunOptions(**options)) == policy


AUTO = SnapKV("auto", window_size=16, pooling="fading")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "default"),
        ({"budget": 64}, "default"),
        ({"keep_ratio": 0.25}, "default"),
        ({"policy": "snapkv"}, "snapkv"),
        ({"pooling": "max"}, "snapkv"),
        ({"window_size": 32}, "snapkv, fading"),
        ({"policy": "full"}, "full"),
        ({"policy": "adakv", "set_": ["policy.pooling=fading"]}, "adakv"),
    ],
    ids=str,
)
def test_the_papers_name_stands_for_the_papers_method_alone(options, name):
    assert method_name(build_policy(RunOptions(**options)).describe()) == name


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, AUTO),
        ({"budget": "auto"}, AUTO),
        ({"set_": ["budget=auto"]}, AUTO),
        ({"budget": 64}, replace(AUTO, budget=64)),
        ({"set_": ["budget=64"]}, replace(AUTO, budget=64)),
        ({"keep_ratio": 0.25}, replace(AUTO, budget=None, keep_ratio=0.25)),
        ({"set_": ["keep_ratio=0.25"]}, replace(AUTO, budget=None, keep_ratio=0.25)),
        ({"kernel_size": "5"}, SnapKV("auto", window_size=16, kernel_size=5)),
        ({"set_": ["kernel_size=0+12"]}, SnapKV("auto", window_size=16, kernel_size=(0, 12))),
        (
            {"kernel_size": "5", "pooling": "avg"},
            SnapKV("auto", window_size=16, kernel_size=5, pooling="avg"),
        ),
        ({"pooling": "max"}, SnapKV("auto", window_size=16)),
        ({"set_": ["pooling=max"]}, SnapKV("auto", window_size=16)),
        ({"decay": 0.8}, replace(AUTO, decay=0.8)),
        ({"set_": ["decay=0.8"]}, replace(AUTO, decay=0.8)),
        ({"window_size": 8}, replace(AUTO, window_size=8)),
        ({"set_": ["window-size=8", "sink_tokens=0"]}, replace(AUTO, window_size=8, sink_tokens=0)),
        ({"group_reduce": "sum", "seed": 3}, replace(AUTO, group_reduce="sum")),
        (
            {"budget": {"auto": {"lost_vote": 0.01, "most": 96}}},
            replace(AUTO, budget=AutoBudget(lost_vote=0.01, most=96)),
        ),
        ({"set_": ["budget=auto:most=4k"]}, replace(AUTO, budget=AutoBudget(most=4096))),
        ({"policy": "snapkv", "budget": "auto"}, SnapKV("auto")),
        ({"policy": "adakv", "budget": "auto"}, AdaKV(SnapKV("auto"))),
        ({"policy": "adakv", "set_": ["budget=auto:least=8"]}, AdaKV(SnapKV(AutoBudget(least=8)))),
    ],
    ids=str,
)
def test_who_names_no_method_gets_the_default(options, policy):
    assert build_policy(RunOptions(**options)) == policy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "snapvk"}, "did you mean snapkv?"),
        ({"policy": "full", "budget": 64}, "full, which has none, got budget=64"),
        ({"policy": "newcomer", "kernel_size": "5"}, "which has budget, decay, greedy, mode"),
        ({"set_": ["kernelsize=5"]}, "did you mean kernel_size?"),
        ({"set_": ["kernel_size"]}, "expected NAME=VALUE, got 'kernel_size'"),
        ({"set_": ["=5"]}, "expected NAME=VALUE"),
        ({"set_": ["budget=many"]}, "budget: expected an integer, got 'many'"),
        ({"set_": ["budget=auto:some=4"]}, "budget: expected auto with lost_vote, least or most"),
        ({"set_": ["seed=1"]}, "expected a parameter of default, which has budget, keep_ratio"),
        ({"policy": "snapkv", "budget": 32}, "budget: expected more than window_size=32"),
        ({"budget": 16}, "budget: expected more than window_size=16"),
        ({"budget": 19}, "budget: expected at least window_size=16 + sink_tokens=4"),
        ({"budget": "auto", "keep_ratio": 0.5}, "budget and keep_ratio: expected one of them"),
        ({"budget": {"auto": {"most": 16, "least": 4}}}, "budget: expected more than window_size"),
        ({"budget": {"auto": {"lost_vote": 1.0}}}, "lost_vote: expected a number in (0, 1)"),
        ({"policy": "pyramidkv", "budget": "auto"}, "expected a number of tokens with pyramidkv"),
        ({"policy": "keydiff", "budget": "auto"}, "expected a number of tokens with keydiff"),
        ({"policy": "lagkv", "budget": "auto"}, "expected a number of tokens with lagkv"),
        ({"policy": "lagkv", "set_": ["lag_size=1"]}, "lag_size: expected at least 2, got 1"),
        ({"policy": "h2o", "budget": "auto"}, "budget: expected an integer, got 'auto'"),
        ({"budget": 0}, "budget: expected at least 1, got 0"),
        ({"budget": 64, "keep_ratio": 0.5}, "budget and keep_ratio: expected one of them"),
        ({"keep_ratio": 1.5}, "keep_ratio: expected a number in (0, 1], got 1.5"),
        ({"kernel_size": "6"}, "kernel_size: expected an odd number"),
        ({"window_size": -1}, "window_size: expected at least 1, got -1"),
        ({"kernel_size": "0+x"}, "kernel_size: expected a width such as 7, or how far before"),
        ({"set_": ["kernel_size=wide"]}, "kernel_size: expected a width such as 7"),
        ({"kernel_size": "0+12", "pooling": "fading"}, "kernel_size: expected none with pooling="),
        ({"decay": 0.9, "pooling": "max"}, "decay: expected none with pooling='max'"),
        ({"decay": 0.9, "kernel_size": "5"}, "decay: expected none with pooling='max'"),
        ({"policy": "snapkv", "decay": 0.9}, "decay: expected none with pooling='max'"),
        ({"decay": 1.0, "pooling": "fading"}, "decay: expected a number in (0, 1), got 1.0"),
        ({"set_": ["pooling=fading", "decay=much"]}, "decay: expected a number in (0, 1), got"),
        ({"policy": "h2o", "pooling": "fading"}, "pooling: expected a parameter of h2o"),
        ({"pooling": "median"}, "pooling: expected one of max, avg, fading"),
        ({"group_reduce": "min"}, "group_reduce: expected one of mean, max, sum, none"),
        ({"policy": "fastgen", "set_": ["recovery=1.5"]}, "recovery: expected a number in (0, 1]"),
        ({"policy": "fastgen", "set_": ["special_ids=5"]}, "special_ids: expected token ids, got"),
        ({"policy": "duo-attention", "set_": ["keep_heads=2"]}, "keep_heads: expected a number in"),
        (
            {"policy": "duo-attention", "set_": ["pattern=no.json"]},
            "got 'no.json', which cannot be",
        ),
        (
            {"policy": "duo-attention", "budget": 64},
            "budget: expected a parameter of duo-attention",
        ),
        ({"policy": "fastgen", "budget": 64}, "budget: expected a parameter of fastgen"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_a_policy_cannot_take_is_refused(options, message):
    with pytest.raises(SnapKVError) as error:
        build_policy(RunOptions(**options))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_list_names_every_policy_and_parameter(snapkv):
    done = snapkv("policies")
    assert done.status == 0
    assert "newcomer: A policy with fields of every kind." in done.out
    assert "    decay=None  (float or None)" in done.out
    assert "    kernel_size=7  (int or pair of int or None)" in done.out
    assert "    pooling=max  (max, avg, fading)" in done.out
    default, _, others = done.out.partition("\nsnapkv: ")
    assert default.startswith("default: SnapKV with fading pooling and a small window")
    assert "\n    budget=auto  (int or auto or None)\n" in default
    assert "\n    window_size=16  (int)\n" in default
    assert "\n    budget=1024  (int or auto or None)\n" in others


def test_the_list_in_json(snapkv):
    listed = json.loads(snapkv("policies", "--json").out)
    assert list(listed) == ["default", *POLICIES]
    budget = {"type": "int or auto or None", "default": 1024}
    assert listed["snapkv"]["parameters"]["budget"] == budget
    own = {name: each["default"] for name, each in listed["default"]["parameters"].items()}
    assert own == {
        "budget": "auto", "keep_ratio": None, "window_size": 16, "kernel_size": None,
        "pooling": "fading", "decay": 0.935, "sink_tokens": 4, "group_reduce": "mean",
    }  # fmt: skip
    assert listed["full"]["parameters"] == {}


def test_a_wrapper_hands_on_what_it_does_not_have_itself():
    fading = SnapKV(64, pooling="fading", decay=0.8)
    for name, policy in (
        ("adakv", AdaKV(fading)),
        ("criticalkv", CriticalKV(fading)),
        ("score-threshold", ScoreThreshold(fading)),
        ("pyramidkv", PyramidKV(64, pooling="fading", decay=0.8)),
        ("prompt-then-decode", PromptThenDecode(prompt=fading, decode=TOVA(64))),
    ):
        options = RunOptions(policy=name, budget=64, pooling="fading", decay=0.8)
        assert build_policy(options) == policy
    options = RunOptions(policy="adakv", kernel_size="0+12")
    assert build_policy(options) == AdaKV(SnapKV(kernel_size=(0, 12)))
    options = RunOptions(policy="adakv", budget=64, kernel_size="5", set_=["safeguard=0.5"])
    assert build_policy(options) == AdaKV(SnapKV(64, kernel_size=5), safeguard=0.5)
    options = RunOptions(policy="criticalkv", budget=64, set_=["first_share=0.25"])
    assert build_policy(options) == CriticalKV(SnapKV(64), first_share=0.25)
    options = RunOptions(policy="score-threshold", keep_ratio=1.0, set_=["at-least=0.001"])
    assert build_policy(options) == ScoreThreshold(SnapKV(keep_ratio=1.0), at_least=0.001)
    options = RunOptions(
        policy="score-threshold", budget=64, set_=["policy=keydiff", "at_least=-0.5"]
    )
    assert build_policy(options) == ScoreThreshold(KeyDiff(64), at_least=-0.5)
    options = RunOptions(policy="adakv", budget=64, set_=["policy=criticalkv"])
    assert build_policy(options) == AdaKV(CriticalKV(SnapKV(64)))
    options = RunOptions(policy="adakv", budget=64, set_=["policy=keydiff"])
    assert build_policy(options) == AdaKV(KeyDiff(64))
    options = RunOptions(policy="kvzip", budget=64, set_=["sink-tokens=0"])
    assert build_policy(options) == KVzip(64, sink_tokens=0)
    options = RunOptions(policy="adakv", budget=64, set_=["policy=kvzip", "sink_tokens=2"])
    assert build_policy(options) == AdaKV(KVzip(64, sink_tokens=2))
    with pytest.raises(InvalidArgumentError, match=r"kernel_size: expected a parameter of keydiff"):
        build_policy(RunOptions(policy="adakv", kernel_size="5", set_=["policy=keydiff"]))


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({}, PromptThenDecode()),
        ({"budget": 64}, PromptThenDecode(prompt=SnapKV(64), decode=TOVA(64))),
        (
            {"set_": ["prompt=keydiff", "decode=h2o", "window_size=8", "heavy=9"], "budget": 64},
            PromptThenDecode(prompt=KeyDiff(64, window_size=8), decode=H2O(64, heavy=9)),
        ),
        (
            {"set_": ["prompt.budget=64", "decode.budget=80"], "kernel_size": "5"},
            PromptThenDecode(prompt=SnapKV(64, kernel_size=5), decode=TOVA(80)),
        ),
        ({"seed": 3}, PromptThenDecode()),
        ({"seed": 3, "set_": ["prompt=random"]}, PromptThenDecode(prompt=Random(seed=3))),
    ],
    ids=str,
)
def test_a_wrapper_of_two_hands_on_to_each_what_it_has(options, policy):
    assert build_policy(RunOptions(policy="prompt-then-decode", **options)) == policy


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("windw_size=8", "expected a parameter of snapkv or tova, which has budget, "),
        ("decode.heavy=8", "heavy: expected a parameter of tova"),
        ("decode=snapkv", "decode: expected a method that evicts while generating"),
        ("decode=tofa", "policy: expected one of"),
    ],
)
def test_what_neither_part_has_is_refused(assignment, message):
    with pytest.raises(SnapKVError) as error:
        build_policy(RunOptions(policy="prompt-then-decode", set_=[assignment]))
    assert message in str(error.value)


def test_a_seed_for_sampling_is_no_error_where_the_wrapped_method_has_none():
    assert build_policy(RunOptions(policy="adakv", seed=3)) == AdaKV()
