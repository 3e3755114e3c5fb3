"""Parameters of the policies: what is refused, and how; what is stored; what is equal."""

import dataclasses
import pickle

import pytest

import snapkv.policies
from snapkv import (
    ExpectedAttention,
    FullCache,
    InvalidArgumentError,
    InvalidTypeError,
    Random,
    SnapKV,
    SnapKVError,
)
from snapkv.policies import POLICIES, Policy, PrefixPolicy

PREFIX_POLICIES = [SnapKV, Random, ExpectedAttention]
WITH_SINKS = [
    policy
    for policy in POLICIES.values()
    if issubclass(policy, PrefixPolicy)
    and any(field.name == "sink_tokens" for field in dataclasses.fields(policy))
]

# parameters, error, the argument it must name, what it must say was given
BAD_LIMITS = [
    ({"budget": 0}, InvalidArgumentError, "budget", "0"),
    ({"budget": -5}, InvalidArgumentError, "budget", "-5"),
    ({"budget": 32}, InvalidArgumentError, "budget", "32"),  # the window alone
    ({"budget": 16, "window_size": 16}, InvalidArgumentError, "budget", "16"),
    ({"budget": 15, "window_size": 16}, InvalidArgumentError, "budget", "15"),
    ({"window_size": 1024}, InvalidArgumentError, "budget", "1024"),  # against the default
    ({"budget": 64.0}, InvalidTypeError, "budget", "64.0 of type float"),
    ({"budget": "64"}, InvalidTypeError, "budget", "'64' of type str"),
    ({"budget": True}, InvalidTypeError, "budget", "True of type bool"),
    ({"window_size": 0}, InvalidArgumentError, "window_size", "0"),
    ({"window_size": -1}, InvalidArgumentError, "window_size", "-1"),
    ({"window_size": 8.0}, InvalidTypeError, "window_size", "8.0 of type float"),
    ({"window_size": None}, InvalidTypeError, "window_size", "None of type NoneType"),
    ({"window_size": False}, InvalidTypeError, "window_size", "False of type bool"),
    ({"keep_ratio": 0}, InvalidArgumentError, "keep_ratio", "0"),
    ({"keep_ratio": 0.0}, InvalidArgumentError, "keep_ratio", "0.0"),
    ({"keep_ratio": -0.5}, InvalidArgumentError, "keep_ratio", "-0.5"),
    ({"keep_ratio": 1.01}, InvalidArgumentError, "keep_ratio", "1.01"),
    ({"keep_ratio": 25}, InvalidArgumentError, "keep_ratio", "25"),
    ({"keep_ratio": float("nan")}, InvalidArgumentError, "keep_ratio", "nan"),
    ({"keep_ratio": float("inf")}, InvalidArgumentError, "keep_ratio", "inf"),
    ({"keep_ratio": "0.5"}, InvalidTypeError, "keep_ratio", "'0.5' of type str"),
    ({"keep_ratio": True}, InvalidTypeError, "keep_ratio", "True of type bool"),
    ({"budget": 64, "keep_ratio": 0.5}, InvalidArgumentError, "budget and keep_ratio", "64"),
]

BAD_PARAMETERS = [
    *((policy, *case) for policy in PREFIX_POLICIES for case in BAD_LIMITS),
    (SnapKV, {"kernel_size": 0}, InvalidArgumentError, "kernel_size", "0"),
    (SnapKV, {"kernel_size": -3}, InvalidArgumentError, "kernel_size", "-3"),
    (SnapKV, {"kernel_size": 2}, InvalidArgumentError, "kernel_size", "2; pass 3"),
    (SnapKV, {"kernel_size": 5.0}, InvalidTypeError, "kernel_size", "5.0 of type float"),
    (SnapKV, {"kernel_size": True}, InvalidTypeError, "kernel_size", "True of type bool"),
    (SnapKV, {"kernel_size": "7"}, InvalidTypeError, "kernel_size", "'7' of type str"),
    (SnapKV, {"kernel_size": ()}, InvalidArgumentError, "kernel_size", "()"),
    (SnapKV, {"kernel_size": (3,)}, InvalidArgumentError, "kernel_size", "(3,)"),
    (SnapKV, {"kernel_size": [0, 1, 2]}, InvalidArgumentError, "kernel_size", "[0, 1, 2]"),
    (SnapKV, {"kernel_size": (-1, 2)}, InvalidArgumentError, "kernel_size, before", "-1"),
    (SnapKV, {"kernel_size": (0, -2)}, InvalidArgumentError, "kernel_size, behind", "-2"),
    (SnapKV, {"kernel_size": (0, 2.0)}, InvalidTypeError, "kernel_size, behind", "2.0 of type"),
    (SnapKV, {"kernel_size": (True, 2)}, InvalidTypeError, "kernel_size, before", "True of type"),
    (SnapKV, {"kernel_size": (None, 2)}, InvalidTypeError, "kernel_size, before", "None of type"),
    *(
        (SnapKV, {"pooling": "fading", "decay": value}, error, "decay", got)
        for value, error, got in (
            (0, InvalidArgumentError, "0"),
            (0.0, InvalidArgumentError, "0.0"),
            (1, InvalidArgumentError, "1"),
            (1.0, InvalidArgumentError, "1.0"),
            (-0.5, InvalidArgumentError, "-0.5"),
            (1.5, InvalidArgumentError, "1.5"),
            (float("nan"), InvalidArgumentError, "nan"),
            (float("inf"), InvalidArgumentError, "inf"),
            ("0.9", InvalidTypeError, "'0.9' of type str"),
            (True, InvalidTypeError, "True of type bool"),
            ([0.9], InvalidTypeError, "[0.9] of type list"),
        )
    ),
    (SnapKV, {"decay": 0.9}, InvalidArgumentError, "decay", "0.9"),
    (SnapKV, {"pooling": "avg", "decay": 0.9}, InvalidArgumentError, "decay", "0.9"),
    (SnapKV, {"pooling": "fading", "kernel_size": 7}, InvalidArgumentError, "kernel_size", "7"),
    (
        SnapKV,
        {"pooling": "fading", "kernel_size": (0, 12)},
        InvalidArgumentError,
        "kernel_size",
        "(0, 12)",
    ),
    (SnapKV, {"pooling": "mean"}, InvalidArgumentError, "pooling", "'mean'"),
    (SnapKV, {"pooling": "MAX"}, InvalidArgumentError, "pooling", "'MAX'"),
    (SnapKV, {"pooling": None}, InvalidArgumentError, "pooling", "None"),
    (SnapKV, {"pooling": ["max"]}, InvalidArgumentError, "pooling", "['max']"),
    (SnapKV, {"group_reduce": "avg"}, InvalidArgumentError, "group_reduce", "'avg'"),
    (SnapKV, {"group_reduce": None}, InvalidArgumentError, "group_reduce", "None"),
    (ExpectedAttention, {"future_tokens": 0}, InvalidArgumentError, "future_tokens", "0"),
    *(
        (policy, {"sink_tokens": value}, error, "sink_tokens", got)
        for policy in WITH_SINKS
        for value, error, got in (
            (-1, InvalidArgumentError, "-1"),
            (4.0, InvalidTypeError, "4.0 of type float"),
            (True, InvalidTypeError, "True of type bool"),
            (None, InvalidTypeError, "None of type NoneType"),
        )
        if value is not None or not issubclass(policy, SnapKV)  # which goes by its pooling then
    ),
    *(
        (policy, {"budget": 10, "window_size": 7, "sink_tokens": 4}, InvalidArgumentError, *said)
        for policy in WITH_SINKS
        for said in [("budget", "10")]
    ),
    (Random, {"seed": -1}, InvalidArgumentError, "seed", "-1"),
    (Random, {"seed": 1.0}, InvalidTypeError, "seed", "1.0 of type float"),
    (Random, {"seed": None}, InvalidTypeError, "seed", "None of type NoneType"),
]


@pytest.mark.parametrize(
    ("policy", "parameters", "error", "argument", "got"),
    BAD_PARAMETERS,
    ids=[f"{case[0].__name__}-{case[1]}" for case in BAD_PARAMETERS],
)
def test_a_bad_parameter_is_refused_in_one_line(policy, parameters, error, argument, got):
    """The line says argument, expected, got and remedy, in this order."""
    with pytest.raises(error) as caught:
        policy(**parameters)
    message = str(caught.value)
    named, _, rest = message.partition(": expected ")
    assert named == argument
    assert f"got {got}" in rest or f"got budget={got}" in rest
    _, _, remedy = rest.partition("; ")
    assert remedy
    assert "\n" not in message
    assert isinstance(caught.value, SnapKVError)


def test_errors_are_the_builtin_kinds_too():
    with pytest.raises(ValueError, match="budget"):
        SnapKV(budget=1)
    with pytest.raises(TypeError, match="budget"):
        SnapKV(budget="1")


def test_the_papers_settings_are_accepted():
    for window_size, kernel_size in ((16, 5), (32, 7), (64, 13)):
        policy = SnapKV(budget=4096, window_size=window_size, kernel_size=kernel_size)
        assert policy.query_tokens == window_size


def test_the_smallest_parameters_are_accepted():
    policy = SnapKV(budget=2, window_size=1, kernel_size=1)
    assert (policy.budget, policy.window_size, policy.kernel_size) == (2, 1, 1)
    assert SnapKV(keep_ratio=1e-9).keep_ratio == 1e-9
    assert SnapKV(keep_ratio=1).keep_ratio == 1
    assert SnapKV(window_size=1023).budget == 1024


def test_the_budget_is_the_only_positional_parameter():
    assert SnapKV(512) == SnapKV(budget=512)
    assert Random(512) == Random(budget=512)
    with pytest.raises(TypeError):
        SnapKV(512, 16)


def test_parameters_are_stored_unchanged_and_the_default_budget_is_filled_in():
    given = {
        "budget": 77,
        "window_size": 9,
        "kernel_size": 3,
        "pooling": "avg",
        "group_reduce": "sum",
    }
    assert dataclasses.asdict(SnapKV(**given)) == {
        **given,
        "keep_ratio": None,
        "decay": None,
        "sink_tokens": 0,
    }
    assert dataclasses.asdict(SnapKV()) == {
        "budget": 1024,
        "keep_ratio": None,
        "window_size": 32,
        "kernel_size": 7,
        "pooling": "max",
        "decay": None,
        "sink_tokens": 0,
        "group_reduce": "mean",
    }
    assert SnapKV(keep_ratio=0.25).budget is None
    assert dataclasses.asdict(Random(seed=3)) == {
        "budget": 1024,
        "keep_ratio": None,
        "window_size": 32,
        "seed": 3,
        "sink_tokens": 0,
    }


def test_a_pair_is_stored_as_a_tuple_and_the_default_decay_is_filled_in():
    forward = SnapKV(kernel_size=[0, 12])
    assert forward.kernel_size == (0, 12)
    assert forward == SnapKV(kernel_size=(0, 12))
    assert hash(forward) == hash(SnapKV(kernel_size=(0, 12)))
    fading = SnapKV(pooling="fading")
    assert (fading.kernel_size, fading.decay, fading.sink_tokens) == (None, 0.935, 4)
    assert SnapKV(pooling="fading", sink_tokens=0).sink_tokens == 0
    assert fading == SnapKV(pooling="fading", decay=0.935)
    assert fading != SnapKV(pooling="fading", decay=0.8)


@pytest.mark.parametrize(
    "policy", [SnapKV(), Random(), FullCache()], ids=lambda policy: policy.name
)
def test_a_policy_is_frozen(policy):
    name = dataclasses.fields(policy)[0].name if dataclasses.fields(policy) else "budget"
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(policy, name, 5)


@pytest.mark.parametrize(
    "change",
    [
        {"budget": 512},
        {"budget": None, "keep_ratio": 0.5},
        {"window_size": 16},
        {"kernel_size": 5},
        {"kernel_size": (3, 3)},
        {"pooling": "avg"},
        {"pooling": "fading", "kernel_size": None},
        {"group_reduce": "max"},
    ],
    ids=str,
)
def test_policies_are_values(change):
    """Equal parameters make equal policies, usable as keys; any difference makes another."""
    plain = SnapKV()
    assert plain == SnapKV(budget=1024)
    assert hash(plain) == hash(SnapKV(budget=1024))
    other = dataclasses.replace(plain, **change)
    assert other != plain
    assert other == dataclasses.replace(plain, **change)
    assert len({plain, SnapKV(), other}) == 2


def test_policies_of_different_methods_are_never_equal():
    assert SnapKV() != Random()
    assert FullCache() == FullCache()
    assert FullCache() != SnapKV()


def test_the_repr_states_every_parameter_and_makes_the_policy_again():
    for policy in (
        SnapKV(keep_ratio=0.25, pooling="avg"),
        SnapKV(kernel_size=(0, 12)),
        SnapKV(pooling="fading", decay=0.8),
    ):
        assert eval(repr(policy), {"SnapKV": SnapKV}) == policy


def test_policies_survive_pickling():
    policy = Random(budget=99, seed=4)
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_the_registry_holds_every_method_by_its_own_name():
    public = [getattr(snapkv.policies, name) for name in snapkv.policies.__all__]
    methods = {
        found
        for found in public
        if isinstance(found, type)
        and issubclass(found, Policy)
        and not getattr(found, "__abstractmethods__", None)
    }
    assert set(POLICIES.values()) == methods
    for name, method in POLICIES.items():
        assert method.name == name
        assert name == name.lower()
        assert dataclasses.is_dataclass(method)
        assert method.__doc__
        method()  # every method has usable defaults


def test_public_names_are_listed_once_and_exist():
    names = snapkv.policies.__all__
    assert len(set(names)) == len(names)
    assert all(hasattr(snapkv.policies, name) for name in names)
