"""Decoding from heads that keep different numbers of tokens, against a uniform cache."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from snapkv import AdaKV, SnapKV
from snapkv.ops import RaggedLayout, ScoreOptions, ragged_attention
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.measuring import Turns
from snapkv_lab.experiments.pages import Table
from snapkv_lab.experiments.prompts import SEED, decoder, read_prompt
from snapkv_lab.experiments.records import Row


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Heads of one layer."""

    num_kv_heads: int
    group_size: int
    head_dim: int


SHAPES = {
    "demo model": Shape(num_kv_heads=3, group_size=3, head_dim=64),
    "Llama 3.1 8B": Shape(num_kv_heads=8, group_size=4, head_dim=128),
}


@torch.inference_mode()
def _measure(given: Given) -> Iterator[Row]:
    """The whole model, then one layer of each shape."""
    prompt = read_prompt(given.loaded.model, given.prompt(given.tokens))
    for budget in given.budgets:
        uniform = prompt.compressed(SnapKV(budget))
        ragged = prompt.compressed(AdaKV(SnapKV(budget)))
        settings = {
            "benchmark": "decode",
            "prompt_tokens": given.tokens,
            "budget": budget,
            "held_bytes": ragged.report().held_bytes,
            "uniform_bytes": uniform.report().held_bytes,
        }
        steps = {"uniform": decoder(prompt, uniform), "ragged": decoder(prompt, ragged)}
        yield from _compared(steps, given.new_tokens, settings)
    for name, shape in SHAPES.items():
        for batch in (1, 4):
            for budget in given.budgets:
                yield from _layer(given, name, shape, batch, budget)


def _layer(given: Given, name: str, shape: Shape, batch: int, budget: int) -> Iterator[Row]:
    """A layer on its own: attention only, and a layer that also stores the new token."""
    torch.manual_seed(SEED)
    H, D = shape.num_kv_heads, shape.head_dim
    head_tokens = _uneven(batch, H, budget)
    queries = torch.randn(batch, H * shape.group_size, 1, D)
    uniform, tail = (
        _filled(batch, H, tokens, D) for tokens in (budget + given.tail_tokens, given.tail_tokens)
    )
    states = torch.randn(2, batch * H * budget, D)
    layout = RaggedLayout(head_tokens, queries.device)
    module = SimpleNamespace(num_key_value_groups=shape.group_size, is_causal=True)

    def attend_uniform(keys: Tensor, values: Tensor) -> None:
        sdpa_attention_forward(module, queries, keys, values, None, scaling=D**-0.5)

    def attend_ragged(keys: Tensor, values: Tensor) -> None:
        ragged_attention(queries, *states, layout, keys, values, ScoreOptions(scaling=D**-0.5))

    new = torch.randn(2, batch, H, 1, D)
    kept = (uniform.keys, uniform.values), (tail.keys, tail.values)
    for benchmark, work in {
        "attention": {
            "uniform": lambda: attend_uniform(*kept[0]),
            "ragged": lambda: attend_ragged(*kept[1]),
        },
        "layer": {
            "uniform": lambda: attend_uniform(*uniform.update(*new)),
            "ragged": lambda: attend_ragged(*tail.update(*new)),
        },
    }.items():
        settings = {
            "benchmark": benchmark,
            "shape": name,
            **asdict(shape),
            "batch": batch,
            "budget": budget,
            "tail_tokens": given.tail_tokens,
            "longest_head_tokens": max(map(max, head_tokens)),
            "shortest_head_tokens": min(map(min, head_tokens)),
            "held_bytes": states.nbytes + tail.keys.nbytes + tail.values.nbytes,
            "uniform_bytes": uniform.keys.nbytes + uniform.values.nbytes,
        }
        yield from _compared(work, given.rounds, settings)


def _uneven(batch: int, heads: int, budget: int) -> tuple[tuple[int, ...], ...]:
    """Random budgets with the mean asked for: a fifth of it is every head's, as with AdaKV."""
    rows = []
    for weights in torch.rand(batch, heads) ** 3:
        counts = ((0.2 + 0.8 * heads * weights / weights.sum()) * budget).long().tolist()
        counts[0] += heads * budget - sum(counts)
        rows.append(tuple(counts))
    return tuple(rows)


def _filled(batch: int, heads: int, tokens: int, dim: int) -> DynamicLayer:
    layer = DynamicLayer()
    layer.update(*torch.randn(2, batch, heads, tokens, dim))
    return layer


def _compared(work: dict[str, Callable[[], Any]], rounds: int, settings: Row) -> Iterator[Row]:
    """A row of times for each of the two, then one of the ratios of their pairs."""
    turns = Turns(work, rounds=rounds, warmup_rounds=4)
    for name in turns:
        times = {"ms": turns.ms(name, 3), "cpu_ms": turns.ms(name, 3, "cpu_ms")}
        yield {**settings, "cache": name, "rounds": rounds, **times}
    yield {
        **settings,
        "pairs": rounds,
        "ratio": turns.ratio("ragged", "uniform", 3),
        "cpu_ratio": turns.ratio("ragged", "uniform", 3, "cpu_ms"),
    }


def _triples(rows: list[Row]) -> Iterable[Row]:
    for uniform, ragged, pairs in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        yield pairs | {"uniform": uniform["ms"], "ragged": ragged["ms"]}


def _table(title: str, benchmark: str, by: tuple[str, ...], digits: int) -> Table:
    columns = {
        **{name: f"{{{name}}}" for name in by},
        "uniform ms": f"{{uniform[p50]:.{digits}f}}",
        "uneven ms": f"{{ragged[p50]:.{digits}f}}",
        "time": "{ratio:spread|.2f}",
        "processor time": "{cpu_ratio:spread|.2f}",
    }
    return Table(columns, title, {"benchmark": benchmark}, _triples)


RAGGED = Experiment(
    name="ragged",
    title="Heads that keep different numbers of tokens",
    measure=_measure,
    threads=1,
    options={
        "tokens": Sized(4096, 160),
        "budgets": Sized((512, 2048), (64,)),
        "new_tokens": Sized(64, 2),
        "rounds": Sized(60, 2),
        "tail_tokens": 64,
    },
    fields={"seed": SEED},
    tables=[
        _table("Decoding with the whole model", "decode", ("budget",), 1),
        _table("One layer: store the token and attend", "layer", ("shape", "batch", "budget"), 2),
        _table("One layer: attention only", "attention", ("shape", "batch", "budget"), 2),
    ],
)
