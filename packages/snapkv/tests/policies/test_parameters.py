"""Parameters of the policies: refusals, stored values, and equality."""

import dataclasses
import json
import pickle
import re
from decimal import Decimal
from functools import partial

import numpy as np
import pytest
import torch

import snapkv.policies
from snapkv import InvalidArgumentError, InvalidTypeError, KVCodes, SnapKVError
from snapkv.policies import (
    H2O,
    POLICIES,
    RKV,
    TOVA,
    AdaKV,
    AutoBudget,
    ByteBudget,
    CriticalKV,
    EvictingPolicy,
    ExpectedAttention,
    FastGen,
    FullCache,
    KeyDiff,
    KVzip,
    LagKV,
    Policy,
    PrefixPolicy,
    PromptThenDecode,
    PyramidKV,
    Random,
    Scissorhands,
    SnapKV,
    StreamingLLM,
)
from snapkv.policies.spans import Spans
from snapkv.validation import require_fraction, require_int, require_ratio, require_share

WITH_SINKS = [
    policy
    for policy in POLICIES.values()
    if issubclass(policy, PrefixPolicy) and "sink_tokens" in policy.__dataclass_fields__
]
EVICTING = [
    policy
    for policy in POLICIES.values()
    if issubclass(policy, EvictingPolicy) and "budget" in policy.__dataclass_fields__
]
VALUE, TYPE = InvalidArgumentError, InvalidTypeError
NAN = float("nan")

BARELY = {"budget": 10, "window_size": 7, "sink_tokens": 4}

# method, what is passed, error, the argument it names first, what it says further on
REFUSED = [
    (SnapKV, {"budget": 0}, VALUE, "budget", "got 0"),
    (SnapKV, {"budget": 32}, VALUE, "budget", "got 32"),  # the window alone
    (SnapKV, {"window_size": 1024}, VALUE, "budget", "got 1024"),  # against the default
    (SnapKV, {"budget": 64.0}, TYPE, "budget", "got 64.0 of type float"),
    (SnapKV, {"budget": "many"}, TYPE, "budget", "such as '12%', but got 'm"),
    (SnapKV, {"budget": True}, TYPE, "budget", "got True of type bool"),
    (SnapKV, {"window_size": 0}, VALUE, "window_size", "got 0"),
    (SnapKV, {"window_size": None}, TYPE, "window_size", "got None of type NoneType"),
    (SnapKV, {"budget": "auto", "window_size": "x"}, TYPE, "window_size", "got 'x' of type str"),
    (SnapKV, {"budget": "12%", "sink_tokens": "x"}, TYPE, "sink_tokens", "got 'x' of type str"),
    (SnapKV, {"keep_ratio": 0}, VALUE, "keep_ratio", "got 0"),
    (SnapKV, {"keep_ratio": 1.01}, VALUE, "keep_ratio", "got 1.01"),
    (SnapKV, {"keep_ratio": NAN}, VALUE, "keep_ratio", "got nan"),
    (SnapKV, {"keep_ratio": True}, TYPE, "keep_ratio", "got True of type bool"),
    (SnapKV, {"budget": 64, "keep_ratio": 0.5}, VALUE, "budget and keep_ratio", "budget=64"),
    (SnapKV, {"budget": "auto", "keep_ratio": 0.5}, VALUE, "budget and keep_ratio", "=auto"),
    (SnapKV, {"budget": AutoBudget(most=40)}, VALUE, "budget, most", "got 40"),
    (SnapKV, {"budget": {"auto": 3}}, VALUE, "budget", "got {'auto': 3}"),
    (SnapKV, {"budget": {"auto": {"x": 1}}}, VALUE, "budget", "got {'auto'"),
    (SnapKV, {"budget": {"auto": {}, "z": 2}}, VALUE, "budget", "got {'auto'"),
    (PyramidKV, {"budget": "auto"}, VALUE, "budget", "but the method pyramidkv has no votes"),
    (KeyDiff, {"budget": "auto"}, VALUE, "budget", "keydiff"),
    (AutoBudget, {"lost_vote": 0}, VALUE, "lost_vote", "got 0"),
    (AutoBudget, {"lost_vote": True}, TYPE, "lost_vote", "got True"),
    (AutoBudget, {"least": 0}, VALUE, "least", "got 0"),
    (AutoBudget, {"least": 50, "most": 50}, VALUE, "most", "got 50"),
    (SnapKV, {"kernel_size": 2}, VALUE, "kernel_size", "got 2. Use 3"),
    (SnapKV, {"kernel_size": 5.0}, TYPE, "kernel_size", "got 5.0 of type float"),
    (SnapKV, {"kernel_size": (3,)}, VALUE, "kernel_size", "got (3,)"),
    (SnapKV, {"kernel_size": (-1, 2)}, VALUE, "kernel_size, before", "got -1"),
    (SnapKV, {"kernel_size": (0, 2.0)}, TYPE, "kernel_size, after", "got 2.0 of type"),
    (SnapKV, {"pooling": "fading", "decay": 1.0}, VALUE, "decay", "got 1.0"),
    (SnapKV, {"pooling": "fading", "decay": "0.9"}, TYPE, "decay", "got '0.9' of type str"),
    (SnapKV, {"decay": 0.9}, VALUE, "decay", "got 0.9"),
    (SnapKV, {"pooling": "fading", "kernel_size": 7}, VALUE, "kernel_size", "got 7"),
    (SnapKV, {"pooling": ["max"]}, VALUE, "pooling", "got ['max']"),
    (SnapKV, {"group_reduce": None}, VALUE, "group_reduce", "got None"),
    (SnapKV, {"window_reduce": "sum"}, VALUE, "window_reduce", "got 'sum'"),
    (SnapKV, {"voters": 0}, VALUE, "voters", "got 0"),
    (PyramidKV, {"beta": 0}, VALUE, "beta", "got 0"),
    (ExpectedAttention, {"future_tokens": 0}, VALUE, "future_tokens", "got 0"),
    (LagKV, {"lag_size": 1}, VALUE, "lag_size", "got 1"),
    (Random, {"seed": -1}, VALUE, "seed", "got -1"),
    *((policy, {"sink_tokens": -1}, VALUE, "sink_tokens", "got -1") for policy in WITH_SINKS),
    *(
        (policy, BARELY, VALUE, "budget", said)
        for policy in WITH_SINKS
        for said in ("at least window_size=7 + sink_tokens=4, which", "got 10")
    ),
    (AdaKV, {"policy": 36}, TYPE, "policy", "got 36"),
    (AdaKV, {"policy": H2O(36)}, TYPE, "policy", "got H2O("),
    (AdaKV, {"safeguard": 0}, VALUE, "safeguard", "(0, 1], but got 0"),
    *((policy, {"budget": "12%"}, VALUE, "budget", policy.name) for policy in EVICTING),
    (PyramidKV, {"budget": "12%", "published": True}, VALUE, "budget", "published"),
    (
        PromptThenDecode,
        {"prompt": SnapKV("12%"), "decode": TOVA(64)},
        VALUE,
        "prompt",
        "a budget in tokens",
    ),
    (CriticalKV, {"policy": AdaKV()}, TYPE, "policy", "wrap CriticalKV in AdaKV"),
    (CriticalKV, {"first_share": 0.0}, VALUE, "first_share", "got 0.0"),
    (H2O, {"budget": 10, "recent": 10, "heavy": 1}, VALUE, "budget", "got budget=10"),
    (H2O, {"budget": 10, "recent": 11}, VALUE, "budget", "heavy=-1"),
    (H2O, {"recent": 0, "heavy": 4}, VALUE, "recent", "got 0"),
    (StreamingLLM, {"budget": 4}, VALUE, "budget", "Use a budget of at least 5"),
    (StreamingLLM, {"start": -1}, VALUE, "start", "got -1"),
    (StreamingLLM, {"positions": "slot"}, VALUE, "positions", "got 'slot'"),
    (TOVA, {"budget": 0}, VALUE, "budget", "got 0"),
    (Scissorhands, {"budget": 10}, VALUE, "budget", "Use a budget of at least 11"),
    (Scissorhands, {"budget": 64, "drop": 55}, VALUE, "budget", "drop=55"),
    (Scissorhands, {"budget": 20, "gamma": 0.5}, VALUE, "gamma", "gamma=0.5"),
    (Scissorhands, {"gamma": 1}, VALUE, "gamma", "with gamma=1, a layer keeps"),
    (Scissorhands, {"gamma": "0.5"}, TYPE, "gamma", "got '0.5'"),
    (Scissorhands, {"threshold": "mean"}, VALUE, "threshold", "got 'mean'"),
    (Scissorhands, {"recent": 0}, VALUE, "recent", "got 0"),
    (RKV, {"budget": 8}, VALUE, "budget", "got 8"),
    (RKV, {"budget": "auto"}, TYPE, "budget", "an integer, but got 'auto'"),
    (RKV, {"evict_every": 0}, VALUE, "evict_every", "got 0"),
    (RKV, {"kernel_size": (0, 3)}, TYPE, "kernel_size", "got (0, 3)"),
    (RKV, {"mix_lambda": 1.5}, VALUE, "mix_lambda", "[0, 1], but got 1.5"),
    (RKV, {"exempt": -1}, VALUE, "exempt", "got -1"),
    (FastGen, {"recovery": 1.01}, VALUE, "recovery", "(0, 1], but got 1.01"),
    (FastGen, {"local_ratio": 0}, VALUE, "local_ratio", "got 0"),
    (FastGen, {"special_ids": [1, 2]}, TYPE, "special_ids", "token ids, but got [1, 2] of type"),
    (FastGen, {"special_ids": (1, "2")}, TYPE, "special_ids", "contains '2'"),
    (FastGen, {"special_ids": ((),)}, TYPE, "special_ids", "contains ()"),
    (FastGen, {"punctuation_ids": (1, -2)}, VALUE, "punctuation_ids", "got -2"),
    (PromptThenDecode, {"prompt": H2O(64)}, TYPE, "prompt", "got h2o"),
    (PromptThenDecode, {"prompt": 64}, TYPE, "prompt", "got 64"),
    (PromptThenDecode, {"decode": SnapKV(64)}, TYPE, "decode", "a method that evicts while"),
    (PromptThenDecode, {"decode": SnapKV(64)}, TYPE, "decode", "got snapkv"),
    (PromptThenDecode, {"decode": PromptThenDecode()}, TYPE, "decode", "got prompt-then-decode"),
    (PromptThenDecode, {"prompt": AdaKV(SnapKV(64))}, VALUE, "prompt", "got AdaKV"),
    (PromptThenDecode, {"prompt": KVzip(64)}, VALUE, "prompt", "Use this method"),
    *(
        (PromptThenDecode, {"prompt": policy}, VALUE, "prompt", said)
        for policy in (SnapKV(keep_ratio=0.5), SnapKV("auto"), SnapKV("12%"), FullCache())
        for said in ("a method with a budget in tokens", repr(policy))
    ),
    (SnapKV, {"budget": 0.25}, TYPE, "budget", "Use keep_ratio=0.25"),
    (SnapKV, {"budget": 64.0}, TYPE, "budget", "Use an integer of at least 33"),
    (SnapKV, {"budget": True}, TYPE, "budget", "Use an integer of at least 33"),
    (AdaKV, {"keep_ratio": 0.25}, TYPE, "keep_ratio", "AdaKV(SnapKV(keep_ratio=0.25))"),
    (PromptThenDecode, {"budget": 9}, TYPE, "budget", "PromptThenDecode(prompt=SnapKV(budget=9))"),
    (SnapKV, {"max_capacity_prompt": 2048}, TYPE, "max_capacity_prompt", "Write budget=2048, see"),
    (SnapKV, {"window": 16}, TYPE, "window", "Write window_size=16, see docs/migrating.md"),
    (SnapKV, {"windowsize": 16}, TYPE, "windowsize", "Use window_size"),
    (H2O, {"hh_size": 16}, TYPE, "hh_size", "Write heavy=16, see docs/migrating.md"),
    (StreamingLLM, {"start_size": 4}, TYPE, "start_size", "Write start=4, see docs/migrating"),
    (AutoBudget, {"lostvote": 0.1}, TYPE, "lostvote", "Use lost_vote"),
    (KVCodes, {"exact_layers": 1}, TYPE, "exact_layers", "Remove this argument"),
    *(
        (policy, {"colour": 1}, TYPE, "colour", said)
        for policy in POLICIES.values()
        for said in (f"the method {policy.__name__} has no such argument", "Remove this argument")
    ),
    *(
        (policy, {"keep_ratio": 0.25}, TYPE, "keep_ratio", "Use the argument budget, which is")
        for policy in EVICTING
    ),
    (PromptThenDecode, {"decode": TOVA(63)}, VALUE, "decode", "of at least 1024"),
    (PromptThenDecode, {"decode": FastGen()}, VALUE, "decode", "heads of FastGen"),
    (PromptThenDecode, {"decode": StreamingLLM()}, VALUE, "decode", "positions='original'"),
    (
        PromptThenDecode,
        {"prompt": CriticalKV(PyramidKV(64)), "decode": H2O(95)},
        VALUE,
        "decode",
        "may keep 96 tokens",
    ),
]


@pytest.mark.parametrize(("make", "given", "error", "argument", "said"), REFUSED)
def test_bad_parameter_is_refused_in_one_line(make, given, error, argument, said):
    """The line names the argument, the problem and the remedy, in this order."""
    with pytest.raises(error) as caught:
        make(**given)
    line = str(caught.value)
    assert re.fullmatch(rf"{re.escape(argument)}: .+\. [A-Z].+\.", line), line
    assert said in line
    assert isinstance(caught.value, SnapKVError)
    assert isinstance(caught.value, TypeError if error is TYPE else ValueError)


def test_smallest_parameters_are_accepted_and_positional_ones_refused():
    policy = SnapKV(budget=2, window_size=1, kernel_size=1)
    assert (policy.budget, policy.window_size, policy.kernel_size) == (2, 1, 1)
    assert SnapKV(keep_ratio=1e-9).keep_ratio == 1e-9
    assert SnapKV(window_size=1023).budget == 1024
    for method in WITH_SINKS:
        assert method(12, window_size=8, sink_tokens=4).budget == 12
    for policy, args, said in (
        (
            SnapKV,
            (512, 16),
            r"expected budget by position, but got 2 arguments\. .*keep_ratio=",
        ),
        (
            PromptThenDecode,
            (SnapKV(64),),
            r"expected no argument by position.*prompt=SnapKV\(budget",
        ),
        (FullCache, (1024,), "expected no argument by position"),
    ):
        with pytest.raises(InvalidTypeError, match=said):
            policy(*args)


def test_parameters_are_stored_unchanged_and_defaults_are_filled_in():
    given = {"budget": 77, "window_size": 9, "kernel_size": 3, "pooling": "avg"}
    given |= {
        "group_reduce": "sum",
        "window_reduce": "max",
        "voters": 64,
        "keep_ratio": None,
        "decay": None,
        "sink_tokens": 0,
    }
    assert dataclasses.asdict(SnapKV(**given)) == given
    usual = {"budget": 1024, "keep_ratio": None, "window_size": 32, "sink_tokens": 0}
    pooling = {"kernel_size": 7, "pooling": "max", "decay": None, "group_reduce": "mean"}
    pooling |= {"window_reduce": "mean", "voters": None}
    assert dataclasses.asdict(SnapKV()) == usual | pooling
    assert dataclasses.asdict(Random(seed=3)) == usual | {"seed": 3}
    assert SnapKV(keep_ratio=0.25).budget is None
    assert SnapKV(kernel_size=[0, 12]).kernel_size == (0, 12)  # as a file has it
    fading = SnapKV(pooling="fading")
    assert (fading.kernel_size, fading.decay, fading.sink_tokens) == (None, 0.935, 4)
    assert SnapKV(pooling="fading", sink_tokens=0).sink_tokens == 0


def test_policies_with_equal_parameters_are_equal():
    """Equal parameters make equal policies, usable as keys; any difference makes another."""
    plain = SnapKV()
    assert plain == SnapKV(1024)
    assert hash(plain) == hash(SnapKV(1024))
    for change in (
        {"budget": 512},
        {"budget": None, "keep_ratio": 0.5},
        {"kernel_size": (3, 3)},
        {"pooling": "fading", "kernel_size": None},
        {"group_reduce": "max"},
        {"window_reduce": "max"},
        {"voters": 8},
    ):
        other = dataclasses.replace(plain, **change)
        assert len({plain, SnapKV(), other, dataclasses.replace(plain, **change)}) == 2
        assert eval(repr(other), {"SnapKV": SnapKV}) == other
        assert pickle.loads(pickle.dumps(other)) == other
    assert FullCache() == FullCache() != plain != Random()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plain.budget = 5


def test_registry_contains_every_method_under_its_name():
    names = snapkv.policies.__all__
    assert sorted(set(names)) == names
    public = [getattr(snapkv.policies, name) for name in names]
    methods = {
        found
        for found in public
        if isinstance(found, type)
        and issubclass(found, Policy)
        and not getattr(found, "__abstractmethods__", None)
    }
    assert set(POLICIES.values()) == methods
    for name, method in POLICIES.items():
        assert method.name == name == name.lower()
        assert dataclasses.is_dataclass(method)
        assert method.__doc__
        method()  # every method has usable defaults


def test_wrapper_describes_itself_and_its_inner_policy():
    inner = SnapKV(64).describe()
    critical = CriticalKV(SnapKV(64))
    assert critical.describe() == {"name": "criticalkv", "policy": inner, "first_share": 0.5}
    assert (critical.budget, critical.window_size) == (64, 32)


@pytest.mark.parametrize(("ratio", "kept"), [(0.4, "0.6"), (2, "0.25"), ("half", "0.25")])
def test_error_for_compression_ratio_suggests_the_equal_keep_ratio(ratio, kept):
    with pytest.raises(InvalidTypeError, match=rf"Write SnapKV\(keep_ratio={kept}, window_size=64"):
        SnapKV(compression_ratio=ratio)


@pytest.mark.parametrize("name", ["replace_llama", "replace_mistral", "SnapKVCluster"])
def test_error_for_names_of_the_authors_package_names_the_migration_page(name):
    with pytest.raises(
        ImportError, match=rf"{name} is a name of the authors'.*see docs/migrating\.md"
    ):
        getattr(snapkv, name)


@pytest.mark.parametrize("name", ["Library", "app", "cli", "library", "plan"])
def test_error_for_a_moved_name_names_its_new_package(name):
    with pytest.raises(ImportError, match=rf"^snapkv: {name} is in .*import snapkv_app"):
        getattr(snapkv, name)


# Numbers of other libraries: what is made is what Python's numbers make.

INTEGERS = [np.int64, np.int32, np.uint8, np.array, torch.tensor, torch.tensor([0]).new_tensor]
NUMBERS = [np.float32, np.float64, np.float16, np.array, torch.tensor]
HALF = 0.5  # which all of them hold


@pytest.mark.parametrize("number", INTEGERS)
def test_integers_of_other_libraries_are_converted_to_int(number):
    n = number
    pairs = [
        (SnapKV(n(64), window_size=n(8), voters=n(9)), SnapKV(64, window_size=8, voters=9)),
        (SnapKV(kernel_size=(n(0), n(12))), SnapKV(kernel_size=(0, 12))),
        (SnapKV(AutoBudget(least=n(4))), SnapKV(AutoBudget(least=4))),
        (SnapKV({"auto": {"least": n(4)}}), SnapKV({"auto": {"least": 4}})),
        (SnapKV(ByteBudget(bytes=n(99))), SnapKV(ByteBudget(bytes=99))),
        (AdaKV(SnapKV(n(64)), safeguard=0.5), AdaKV(SnapKV(64), safeguard=0.5)),
        (FastGen(special_ids=(n(1), (n(2), n(3)))), FastGen(special_ids=(1, (2, 3)))),
        (KVCodes(n(8), n(4)), KVCodes(8, 4)),
        (Random(64, seed=n(3)), Random(64, seed=3)),
        (LagKV(64, lag_size=n(3)), LagKV(64, lag_size=3)),
        *((policy(n(64)), policy(64)) for policy in EVICTING),
    ]
    for found, expected in pairs:
        assert found == expected
        assert repr(found) == repr(expected)
        assert hash(found) == hash(expected)
        assert json.dumps(dataclasses.asdict(found)) == json.dumps(dataclasses.asdict(expected))
    assert Spans.of("protect", [(n(0), n(9))]) == Spans(((0, 9),))
    assert type(require_int("count", n(7), minimum=0)) is int


@pytest.mark.parametrize("number", NUMBERS)
def test_floats_of_other_libraries_are_converted_to_float(number):
    half = number(HALF)
    pairs = [
        (SnapKV(keep_ratio=half), SnapKV(keep_ratio=HALF)),
        (SnapKV(pooling="fading", decay=half), SnapKV(pooling="fading", decay=HALF)),
        (SnapKV(AutoBudget(lost_vote=half)), SnapKV(AutoBudget(lost_vote=HALF))),
        (SnapKV(ByteBudget(share=half)), SnapKV(ByteBudget(share=HALF))),
        (AdaKV(safeguard=half), AdaKV(safeguard=HALF)),
        (RKV(mix_lambda=half), RKV(mix_lambda=HALF)),
        (FastGen(half), FastGen(HALF)),
        (Scissorhands(gamma=half, threshold="slots"), Scissorhands(gamma=HALF, threshold="slots")),
    ]
    for found, expected in pairs:
        assert repr(found) == repr(expected)
        assert json.dumps(found.describe()) == json.dumps(expected.describe())
    for require in (require_ratio, partial(require_share, example="1"), require_fraction):
        arguments = ("0.1",) if require is require_fraction else ()
        assert type(require("share", half, *arguments)) is float


@pytest.mark.parametrize("truth", [True, np.True_, torch.tensor(True)])
def test_booleans_are_refused_as_numbers(truth):
    for make in (
        lambda: SnapKV(truth),
        lambda: SnapKV(window_size=truth),
        lambda: SnapKV(keep_ratio=truth),
        lambda: require_int("count", truth, minimum=0),
        lambda: require_ratio("share", truth),
    ):
        with pytest.raises(InvalidTypeError, match="got True"):
            make()
    assert PyramidKV(published=truth).published is True


def test_values_that_are_not_integers_are_refused_as_budget():
    for given in (np.array([64]), np.float64(64), torch.tensor(64.0), "64", Decimal(64)):
        with pytest.raises(InvalidTypeError, match="budget: expected"):
            SnapKV(given)


@pytest.mark.parametrize("name", POLICIES)
def test_error_for_kvpress_idioms_names_the_migration_page(name):
    with pytest.raises(
        InvalidTypeError, match=r"expected either keep_ratio.*[Ss]ee docs/migrating\.md"
    ):
        POLICIES[name](compression_ratio=0.5)
    with pytest.raises(InvalidTypeError, match=r"CompressedCache\(model, .*see docs/migrating\.md"):
        SnapKV()(object())
    press = f"{POLICIES[name].__name__}Press"
    with pytest.raises(
        ImportError, match=rf"{press} is a name from kvpress.*[Ss]ee docs/migrating\.md"
    ):
        getattr(snapkv, press)
