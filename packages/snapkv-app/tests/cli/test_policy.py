"""Policies on the command line: every dataclass in the registry can be configured."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import pytest

from snapkv import (
    H2O,
    TOVA,
    AcrossLayers,
    AdaKV,
    AutoBudget,
    ByteBudget,
    CriticalKV,
    FullCache,
    KeyDiff,
    KVzip,
    LagKV,
    PromptThenDecode,
    PyramidKV,
    Random,
    SnapKV,
)
from snapkv.errors import SnapKVError
from snapkv.policies import POLICIES
from snapkv.policies.default import method_name
from snapkv_app.cli.methods import known_method, methods
from snapkv_app.cli.options import RunOptions
from snapkv_app.cli.policy import build_policy, named_policies
from tests.cli.methods import described, told_of


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
    monkeypatch.setitem(methods(), "newcomer", told_of(Newcomer, Newcomer()))


def built(policy, set_="", **options):
    assignments = set_.split(";") if set_ else None
    return build_policy(RunOptions(**{"policy": policy, "set_": assignments} | options))


FADING = SnapKV(64, pooling="fading", decay=0.8)
FADES = {"budget": 64, "pooling": "fading", "decay": 0.8}


@pytest.mark.parametrize(
    ("name", "set_", "options", "policy"),
    [
        ("snapkv", "", {}, SnapKV()),
        ("snapkv", "", {"budget": 64, "pooling": "avg"}, SnapKV(64, pooling="avg")),
        ("snapkv", "", {"keep_ratio": 0.25, "group_reduce": "none"},
         SnapKV(keep_ratio=0.25, group_reduce="none")),
        ("snapkv", "", {"kernel_size": "0+12"}, SnapKV(kernel_size=(0, 12))),
        ("snapkv", "kernel_size=0+12", {}, SnapKV(kernel_size=(0, 12))),
        ("snapkv", "window-size=16;kernel_size = 5", {}, SnapKV(window_size=16, kernel_size=5)),
        ("snapkv", "", FADES, FADING),
        ("snapkv", "pooling=fading", {"budget": 64, "decay": 0.8}, FADING),
        ("lagkv", "lag_size=16;cross_scoring=true", {"budget": 64},
         LagKV(64, lag_size=16, cross_scoring=True)),
        ("full", "", {"seed": 3}, FullCache()),
        ("random", "", {"seed": 3}, Random(seed=3)),
        ("newcomer", "decay=0.5;greedy=true;mode=slow", {"budget": 8},
         Newcomer(budget=8, decay=0.5, greedy=True, mode="slow")),
        # a wrapper hands on what it does not have itself
        ("adakv", "", FADES, AdaKV(FADING)),
        ("criticalkv", "first_share=0.25", FADES, CriticalKV(FADING, first_share=0.25)),
        ("pyramidkv", "", FADES, PyramidKV(64, pooling="fading", decay=0.8)),
        ("adakv", "safeguard=0.5", {"budget": 64, "kernel_size": "5"},
         AdaKV(SnapKV(64, kernel_size=5), safeguard=0.5)),
        ("adakv", "policy=criticalkv", {"budget": 64}, AdaKV(CriticalKV(SnapKV(64)))),
        ("adakv", "policy=kvzip;sink_tokens=2;plus=true", {"budget": 64},
         AdaKV(KVzip(64, sink_tokens=2, plus=True))),
        ("adakv", "budget=auto:least=8", {"seed": 3}, AdaKV(SnapKV(AutoBudget(least=8)))),
        ("adakv", "", {"budget": "12%"}, AdaKV(SnapKV("12%"))),
        ("criticalkv", "budget=64MiB", {}, CriticalKV(SnapKV(ByteBudget(bytes=2**26)))),
        ("prompt-then-decode", "", FADES, PromptThenDecode(prompt=FADING, decode=TOVA(64))),
        ("prompt-then-decode", "prompt=keydiff;decode=h2o;window_size=8;heavy=9", {"budget": 64},
         PromptThenDecode(prompt=KeyDiff(64, window_size=8), decode=H2O(64, heavy=9))),
        ("prompt-then-decode", "prompt.budget=64;decode.budget=80", {"kernel_size": "5"},
         PromptThenDecode(prompt=SnapKV(64, kernel_size=5), decode=TOVA(80))),
        ("prompt-then-decode", "prompt=random", {"seed": 3},
         PromptThenDecode(prompt=Random(seed=3))),
    ],
    ids=str,
)  # fmt: skip
def test_options_build_the_expected_policy(name, set_, options, policy):
    assert built(name, set_, **options) == policy


LARGEST = {"window_size": 16, "window_reduce": "max", "group_reduce": "max"}
VOTED = AutoBudget(lost_vote=0.004)


def default(budget=VOTED, *, pooling="fading", **changes):
    return AcrossLayers(SnapKV(budget, pooling=pooling, **{**LARGEST, **changes}))


@pytest.mark.parametrize(
    ("set_", "options", "policy", "name"),
    [
        ("", {}, default(), "default"),
        ("budget=auto", {}, default(), "default"),
        ("", {"budget": 64}, default(64), "default"),
        ("keep_ratio=0.25", {}, default(None, keep_ratio=0.25), "default"),
        ("", {"kernel_size": "5"}, default(pooling="max", kernel_size=5), "across-layers"),
        ("kernel_size=0+12", {}, default(pooling="max", kernel_size=(0, 12)), "across-layers"),
        ("pooling=max", {}, default(pooling="max"), "across-layers"),
        ("", {"window_size": 32}, default(window_size=32), "across-layers"),
        ("sink_tokens=0", {"decay": 0.8}, default(decay=0.8, sink_tokens=0), "across-layers"),
        ("budget=auto:most=4k", {}, default(replace(VOTED, most=4096)), "default"),
        ("", {"budget": {"auto": {"lost_vote": 0.01}}}, default(AutoBudget(lost_vote=0.01)), None),
    ],
    ids=str,
)  # fmt: skip
def test_default_policy_is_used_without_a_named_method(set_, options, policy, name):
    found = built("default", set_, **options)
    assert found == policy
    assert name is None or method_name(found.describe()) == name


@pytest.mark.parametrize(
    ("name", "set_", "options", "message"),
    [
        ("snapvk", "", {}, "got 'snapvk'. Did you mean snapkv"),
        ("full", "", {"budget": 64}, "full, which has none, but got budget=64"),
        ("newcomer", "", {"kernel_size": "5"}, "which has budget, decay, greedy, mode"),
        (
            "snapkv",
            "budget=128",
            {"budget": 64},
            "budget: this can only have one value, but got 64 and 128",
        ),
        (
            "snapkv",
            "sink-tokens=1;sink_tokens=2",
            {},
            "sink_tokens: this can only have one value, but got 1 and 2",
        ),
        ("default", "kernelsize=5", {}, "got kernelsize=5. Did you mean kernel_size"),
        (
            "default",
            "kernel_size",
            {},
            "expected a parameter in the form NAME=VALUE, but got 'kernel_size'",
        ),
        ("default", "=5", {}, "expected a parameter in the form NAME=VALUE"),
        ("default", "budget=auto:some=4", {}, "budget: the budget auto can only have"),
        (
            "default",
            "seed=1",
            {},
            "this is not a parameter of snapkv, which has budget, keep_ratio",
        ),
        ("default", "kernel_size=wide", {}, "kernel_size: expected a width such as 7"),
        ("default", "pooling=fading;decay=much", {}, "decay: expected a number in (0, 1), but got"),
        ("h2o", "", {"pooling": "fading"}, "pooling: this is not a parameter of h2o"),
        (
            "adakv",
            "policy=keydiff",
            {"kernel_size": "5"},
            "kernel_size: this is not a parameter of k",
        ),
        ("prompt-then-decode", "windw_size=8", {}, "a parameter of snapkv or tova, which has bud"),
        ("prompt-then-decode", "decode.heavy=8", {}, "heavy: this is not a parameter of tova"),
        ("prompt-then-decode", "decode=tofa", {}, "policy: expected one of"),
    ],
)
def test_wrong_parameter_of_a_policy_is_refused(name, set_, options, message):
    with pytest.raises(SnapKVError) as error:
        built(name, set_, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_policies_appear_at_every_budget_unless_they_set_one():
    several = ["snapkv:kernel_size=13,pooling=avg, adakv", "snapkv:budget=64", "fastgen"]
    found = named_policies(["full", "none"], several, ["12%", {"auto": {"most": 256}}])
    assert [label for label, _ in found] == [
        "full",
        "snapkv:kernel_size=13,pooling=avg@12%",
        "snapkv:kernel_size=13,pooling=avg@auto:most=256",
        "adakv@12%",
        "adakv@auto:most=256",
        "snapkv:budget=64",
        "fastgen",
    ]
    assert found[1][1] == SnapKV("12%", kernel_size=13, pooling="avg")


def test_recorded_methods_equal_the_classes():
    """Else `cd packages/snapkv && python -m tests.cli.methods` records it."""
    assert list(methods()) == list(described())
    assert methods() == described()


@pytest.mark.parametrize("name", POLICIES)
def test_method_can_be_named_by_its_class(name):
    assert known_method(POLICIES[name].__name__) == known_method(name) == name
    assert RunOptions(policy=POLICIES[name].__name__).policy == name


def test_policies_lists_every_method_and_parameter(snapkv):
    done = snapkv("policies")
    assert "newcomer: A policy with fields of every kind." in done.out
    assert "    decay=None  (float or None)" in done.out
    assert "    kernel_size=7  (int or pair of int or None)" in done.out
    assert "    pooling=max  (max, avg, fading)" in done.out
    default, _, others = done.out.partition("\nsnapkv: ")
    assert default.startswith("default: Return the default method, which shares one budget")
    assert "\n    budget=auto  (int or auto or bytes or None)\n" in default
    assert "\n    budget=1024  (int or auto or bytes or None)\n" in others
    listed = json.loads(snapkv("policies", "--json").out)
    assert list(listed) == ["default", *POLICIES]
    budget = {"type": "int or auto or bytes or None", "default": 1024}
    assert listed["snapkv"]["parameters"]["budget"] == budget
    own = {name: each["default"] for name, each in listed["default"]["parameters"].items()}
    assert own == {
        "budget": "auto", "keep_ratio": None, "window_size": 16, "kernel_size": None,
        "pooling": "fading", "decay": 0.935, "sink_tokens": 4, "group_reduce": "max",
        "window_reduce": "max", "voters": None,
    }  # fmt: skip
    assert listed["full"]["parameters"] == {}
