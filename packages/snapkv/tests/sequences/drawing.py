"""Draw random sequences. The same seed and number give the same sequence."""

import functools
import random
from collections.abc import Callable
from typing import Any

from transformers import DynamicCache

import snapkv as kv
from snapkv.hf.build import grows
from snapkv.policies import EvictingPolicy, Policy, PrefixPolicy
from snapkv.storage.bits import KVCodes
from tests.families import KINDS, small_config
from tests.gates import drawn_gate
from tests.sequences import operations as do

Draw = random.Random


def drawn(seed: int, number: int) -> do.Sequence:
    """Draw a sequence; the default method, which most people use, has every third one."""
    draw = Draw(f"{seed}/{number}")
    model = draw.choice(list(KINDS))
    policy = _policy(draw, model) if number % 3 else _default(draw)
    operations, options = _operations(draw, policy), _options(draw, policy, model)
    recorded, waiting = draw.random() < 0.5, draw.choice([0, 20_000, 1 << 30])
    return do.Sequence(model, policy, operations, options, recorded, waiting)


# Policies.


def _limits(draw: Draw, sinks: int = 0) -> dict[str, Any]:
    window = draw.choice([1, 2, 4, 6, 8, 12])
    if draw.random() < 0.3:
        return {"keep_ratio": draw.choice([0.1, 0.2, 0.4, 0.7]), "window_size": window}
    return {"budget": window + sinks + draw.choice([2, 4, 8, 12, 20, 30]), "window_size": window}


def _voting(draw: Draw) -> kv.SnapKV:
    pooling = draw.choice(["max", "max", "avg", "fading"])
    sinks = draw.choice([0, 1, 4]) if pooling == "fading" else 0
    options = {**_limits(draw, sinks), "group_reduce": draw.choice(["mean", "mean", "max", "sum"])}
    options |= _reduced(options)
    if pooling == "fading":
        return kv.SnapKV(**options, pooling=pooling, sink_tokens=sinks)
    kernel = draw.choice([1, 3, 5, 7, (0, 4)])
    if draw.random() < 0.15:
        options.pop("budget", None)
        options |= {"keep_ratio": None, "budget": _auto(draw)}
    return kv.SnapKV(**options, pooling=pooling, kernel_size=kernel)


def _reduced(options: dict[str, Any]) -> dict[str, Any]:
    """Drawn from what is drawn, so that all else stays as it was before these could be drawn."""
    draw = Draw(str(options))
    return {
        "window_reduce": draw.choice(["mean", "mean", "max"]),
        "voters": draw.choice([None, None, None, 2, 20]),
    }


def _auto(draw: Draw) -> kv.AutoBudget:
    return kv.AutoBudget(lost_vote=draw.choice([0.01, 0.03, 0.1]), least=draw.choice([1, 4, 8]))


def _scoring(draw: Draw) -> PrefixPolicy:
    """A method that others go around."""
    number = {"budget": draw.choice([12, 16, 24]), "window_size": draw.choice([1, 4, 8])}
    return draw.choice(
        [
            lambda: _voting(draw),
            lambda: _voting(draw),
            lambda: _voting(draw),
            lambda: kv.KeyDiff(**number),
            lambda: kv.ExpectedAttention(**number),
            lambda: kv.LagKV(**number, lag_size=8),
            lambda: kv.Random(**number),
        ]
    )()


@functools.cache
def _sizes(model: str) -> tuple[int, int]:
    """Layers that are compressed, and KV heads of each."""
    config = small_config(model)
    heads = 1 if getattr(config, "kv_lora_rank", None) else config.num_key_value_heads
    return sum(map(grows, DynamicCache(config=config).layers)), heads


_PREFIX: list[Callable[[Draw], Policy]] = [
    *[_voting] * 6,
    lambda draw: kv.SnapKV(group_reduce="none", **_limits(draw)),
    lambda draw: kv.PyramidKV(budget=draw.choice([16, 24, 40]), window_size=draw.choice([2, 6])),
    *[lambda draw: kv.AdaKV(_scoring(draw))] * 3,
    *[lambda draw: kv.CriticalKV(_scoring(draw), first_share=draw.choice([0.3, 0.5, 1.0]))] * 2,
    lambda draw: kv.AdaKV(kv.CriticalKV(_scoring(draw))),
    lambda draw: kv.ExpectedAttention(**_limits(draw, 4)),
    lambda draw: kv.KeyDiff(**_limits(draw), sink_tokens=draw.choice([0, 1, 2])),
    lambda draw: kv.LagKV(**_limits(draw, 4), lag_size=draw.choice([3, 8])),
    lambda draw: kv.Random(**_limits(draw)),
    lambda draw: kv.FullCache(),
]
_EVICTING: list[Callable[[Draw], Policy]] = [
    lambda draw: kv.H2O(draw.choice([8, 16, 24])),
    lambda draw: kv.StreamingLLM(
        draw.choice([8, 16, 24]), positions=draw.choice(["original", "cache"])
    ),
    lambda draw: kv.TOVA(draw.choice([8, 16, 24])),
    lambda draw: kv.Scissorhands(draw.choice([16, 24]), history=6, recent=4),
    lambda draw: kv.Scissorhands(24, history=6, recent=6, drop=3, threshold="slots"),
    lambda draw: kv.RKV(draw.choice([12, 24]), window_size=4, evict_every=draw.choice([1, 4])),
    lambda draw: kv.FastGen(draw.choice([0.5, 0.8]), special_ids=(3, 4), punctuation_ids=(5, 6, 7)),
    lambda draw: kv.PromptThenDecode(
        prompt=kv.SnapKV(16, window_size=4), decode=draw.choice([kv.H2O, kv.TOVA])(20)
    ),
]


_FULL = ("llama", "eager", "qk-norm", "part-rope", "latent")
"""Kinds of full attention in every layer; contexts of others are refused."""


def _of_context(draw: Draw, model: str) -> Policy:
    """A method that chooses before any question is known, by head or layer or not."""
    limits = _limits(draw, 4)
    if "budget" in limits and draw.random() < 0.2:
        limits["budget"] = draw.choice(["40%", "70%"])
    kvzip = kv.KVzip(**limits, chunk_tokens=draw.choice([8, 2048]))
    kvzap = kv.KVzap(**limits, gate=drawn_gate(*_sizes(model)))
    return draw.choice(
        [kvzip, kv.AdaKV(kvzip), *[kv.AcrossLayers(kvzip)] * 3, *[kv.AcrossLayers(kvzap)] * 2]
    )


def _default(draw: Draw) -> Policy:
    """Draw the default method, with windows so small that short prompts are compressed, too."""
    window = draw.choice([1, 2, 4, 6, 8])
    voters = draw.choice([None, None, 2, 12, 40])
    options: dict[str, Any] = {"window_size": window, "voters": voters}
    if draw.random() < 0.25:
        options["pooling"] = "max"
    else:
        options["sink_tokens"] = draw.choice([0, 1, 4])
    least = window + options.get("sink_tokens", 0)
    budgets: list[Any] = [
        least + draw.choice([2, 4, 8, 12, 20]),
        draw.choice(["12%", "20%", "30%", "50%", "70%"]),
        kv.AutoBudget(lost_vote=draw.choice([0.03, 0.1, 0.3]), least=draw.choice([4, 8])),
    ]
    return kv.default_policy(draw.choice(budgets), **options)


def _policy(draw: Draw, model: str) -> Policy:
    chance = draw.random()
    if chance < 0.06:
        return kv.KVzap(**_limits(draw, 4), gate=drawn_gate(*_sizes(model)))
    if chance < 0.11 and (model in _FULL or chance < 0.065):
        return _of_context(draw, model)
    return draw.choice(_EVICTING if chance < 0.25 else _PREFIX)(draw)


# Options.


def _options(draw: Draw, policy: Policy, model: str) -> dict[str, Any]:
    """Mostly such as go with the policy and the model; a few that are refused."""
    options: dict[str, Any] = {}
    if isinstance(policy, EvictingPolicy) and draw.random() < 0.95:
        return options
    if _sizes(model)[1] == 1 and draw.random() < 0.9:  # latents
        return draw.choice([options, {"turns": "compress"}, {"recall": "host"}])
    later = draw.choice([*["append"] * 2, "compress", *["recall"] * 4])
    if policy.needs_reconstruction_pass and draw.random() < 0.9:
        later = "append"
    has_budget = isinstance(getattr(policy, "budget", None), int) and policy.most_tokens is not None
    if later == "compress" and (has_budget or draw.random() < 0.1):
        options["turns"] = "compress"
    elif later == "recall":
        options["recall"] = "host"
    if draw.random() < 0.15:
        options["quantize"] = draw.choice(["K8V4", "int8", KVCodes(4, 8)])
    return options


# Operations.


def _operations(draw: Draw, policy: Policy) -> tuple[do.Operation, ...]:
    drawing = [_first(draw, policy)]
    for _ in range(draw.randint(2, 7)):
        drawing.append(_next(draw, policy))
        if isinstance(drawing[-1], do.Reset):
            drawing.append(_first(draw, policy))
    return tuple(drawing)


def _first(draw: Draw, policy: Policy) -> do.Operation:
    tokens = draw.choice([draw.randint(4, 20), draw.randint(20, 50), draw.randint(40, 80)])
    rows = draw.choice([1, 1, 2, 2, 3])
    pads = (0,) * rows
    if policy.needs_reconstruction_pass:
        return do.Turn(tokens, "context", pads=pads)
    if rows > 1 and draw.random() < 0.6:
        pads = (0, *(draw.randint(0, tokens - 1) for _ in range(rows - 1)))
        pads = tuple(draw.sample(pads, rows))
    if draw.random() < 0.12:
        return do.Begin(draw.randint(1, tokens), of=tokens + draw.randint(1, 20), pads=pads)
    hows = ["call", "call", "told", "pieces", "layers", "generate"]
    return _turn(draw, tokens, draw.choice(hows), pads)


def _turn(draw: Draw, tokens: int, how: str, pads: tuple[int, ...]) -> do.Turn:
    numbers: dict[str, int] = {}
    if how in ("pieces", "layers"):
        numbers["piece"] = draw.randint(1, max(2, tokens - 1))
    if how == "generate":
        numbers["answer"] = draw.randint(1, 6)
        if draw.random() < 0.3:
            numbers["piece"] = draw.randint(1, max(2, tokens - 1))
    return do.Turn(tokens, how, pads=pads, **numbers)


def _later(draw: Draw) -> do.Operation:
    tokens = draw.choice([draw.randint(1, 6), draw.randint(4, 25)])
    if draw.random() < 0.15:
        return do.Begin(draw.randint(1, tokens), of=tokens + draw.randint(1, 10))
    hows = ["told", "told", "pieces", "layers", "generate", "generate"]
    return _turn(draw, tokens, draw.choice(hows), (0,))


def _rows(draw: Draw) -> do.Operation:
    how = draw.choice(["batch_repeat_interleave", "batch_select_indices", "reorder_cache"])
    if how == "batch_repeat_interleave":
        return do.Rows(how, (2,))
    return do.Rows(how, tuple(draw.randint(0, 3) for _ in range(draw.randint(1, 3))))


def _crop(draw: Draw) -> do.Crop:
    return do.Crop(draw.choice([draw.randint(1, 3), draw.randint(1, 8), draw.randint(1, 30)]))


def _drop(draw: Draw) -> do.Drop:
    spans = []
    for _ in range(draw.choice([1, 1, 2])):
        start = draw.randint(0, draw.choice([10, 60]))
        spans.append((start, start + draw.choice([draw.randint(1, 4), draw.randint(1, 30)])))
    return do.Drop(tuple(spans), draw.choice([0, 0, 1, 5]))


def _next(draw: Draw, policy: Policy) -> do.Operation:
    choices: list[tuple[float, Callable[[Draw], do.Operation]]] = [
        (5, _later),
        (4, lambda draw: do.Step(draw.randint(1, 5), draw.random() < 0.4)),
        (0.5 if isinstance(policy, EvictingPolicy) else 3, _crop),
        (0.5 if isinstance(policy, EvictingPolicy) else 3, _drop),
        (2.5, _rows),
        (1, lambda draw: do.Copy(draw.random() < 0.5, draw.choice(["copy", "original"]))),
        (0.7, lambda draw: do.Swap()),
        (1, lambda draw: do.Save()),
        (0.5, lambda draw: do.Reset()),
    ]
    weights, kinds = zip(*choices, strict=True)
    return draw.choices(kinds, weights)[0](draw)
