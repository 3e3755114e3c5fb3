"""Decoding from heads that keep different numbers of tokens, against a uniform cache."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from snapkv import AdaKV, CompressedCache, SnapKV
from snapkv.app.models import LoadedModel
from snapkv.ops import RaggedLayout, ScoreOptions, ragged_attention
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, of, table
from snapkv_lab.experiments.magic_number import SEED, make_documents
from snapkv_lab.experiments.reading import read_prompt
from snapkv_lab.experiments.records import (
    Row,
)
from snapkv_lab.measure.timing import Spent, alternate, ratios, spent_on, spread

PROMPT_TOKENS = 4096
BUDGETS = (512, 2048)
TOKENS = 64
"""Tokens that every cache of the model decodes."""
ROUNDS = 60
"""Tokens that every layer on its own decodes."""
TAIL_TOKENS = 64
"""Tokens that stand behind the prompt when a layer on its own begins."""


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

Contender = Callable[[], Spent]


def measure(given: Given) -> Iterator[Row]:
    """The whole model, then one layer of each shape."""
    for row in itertools.chain(_decode(given.loaded), _layers()):
        yield row | {"seed": SEED}


@torch.inference_mode()
def _decode(loaded: LoadedModel) -> Iterator[Row]:
    """The demo model with SnapKV and with AdaKV around it, one token each in turn."""
    document, *_ = make_documents(
        loaded.tokenizer, load_haystack(), prompt_tokens=PROMPT_TOKENS, count=1
    )
    prompt = read_prompt(loaded.model, document.prompt_ids)
    token = prompt.last_logits[:, -1:].argmax(dim=-1)
    for budget in BUDGETS:
        uniform = prompt.compressed(SnapKV(budget))
        ragged = prompt.compressed(AdaKV(SnapKV(budget)))
        settings = {
            "benchmark": "decode",
            "prompt_tokens": PROMPT_TOKENS,
            "budget": budget,
            "held_bytes": ragged.report().held_bytes,
            "uniform_bytes": uniform.report().held_bytes,
        }
        decoders = {
            name: partial(spent_on, _Decoder(loaded.model, cache, token))
            for name, cache in (("uniform", uniform), ("ragged", ragged))
        }
        yield from _compare(decoders, TOKENS, settings)


class _Decoder:
    """Decodes one greedy token a call."""

    def __init__(self, model: Any, cache: CompressedCache, token: Tensor) -> None:
        self._model, self._cache, self._token = model, cache, token

    def __call__(self) -> None:
        logits = self._model(self._token, past_key_values=self._cache).logits
        self._token = logits[:, -1:].argmax(dim=-1)


@torch.inference_mode()
def _layers() -> Iterator[Row]:
    """Layers on their own: attention only, and a layer that also stores the new token."""
    for name, shape in SHAPES.items():
        for batch in (1, 4):
            for budget in BUDGETS:
                yield from _layer(name, shape, batch, budget)


def _layer(name: str, shape: Shape, batch: int, budget: int) -> Iterator[Row]:
    torch.manual_seed(SEED)
    H, D = shape.num_kv_heads, shape.head_dim
    head_tokens = _uneven(batch, H, budget)
    queries = torch.randn(batch, H * shape.group_size, 1, D)
    uniform, tail = (_filled(batch, H, tokens, D) for tokens in (budget + TAIL_TOKENS, TAIL_TOKENS))
    states = torch.randn(2, batch * H * budget, D)
    layout = RaggedLayout(head_tokens, queries.device)
    module = SimpleNamespace(num_key_value_groups=shape.group_size, is_causal=True)

    def attend_uniform(keys: Tensor, values: Tensor) -> None:
        sdpa_attention_forward(module, queries, keys, values, None, scaling=D**-0.5)

    def attend_ragged(keys: Tensor, values: Tensor) -> None:
        ragged_attention(queries, *states, layout, keys, values, ScoreOptions(scaling=D**-0.5))

    new = torch.randn(2, batch, H, 1, D)
    contenders: dict[str, dict[str, Contender]] = {
        "attention": {
            "uniform": partial(spent_on, partial(attend_uniform, uniform.keys, uniform.values)),
            "ragged": partial(spent_on, partial(attend_ragged, tail.keys, tail.values)),
        },
        "layer": {
            "uniform": lambda: spent_on(lambda: attend_uniform(*uniform.update(*new))),
            "ragged": lambda: spent_on(lambda: attend_ragged(*tail.update(*new))),
        },
    }
    for benchmark, pair in contenders.items():
        settings = {
            "benchmark": benchmark,
            "shape": name,
            **asdict(shape),
            "batch": batch,
            "budget": budget,
            "tail_tokens": TAIL_TOKENS,
            "longest_head_tokens": max(map(max, head_tokens)),
            "shortest_head_tokens": min(map(min, head_tokens)),
            "held_bytes": states.nbytes + tail.keys.nbytes + tail.values.nbytes,
            "uniform_bytes": uniform.keys.nbytes + uniform.values.nbytes,
        }
        yield from _compare(pair, ROUNDS, settings)


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


def _compare(contenders: dict[str, Contender], rounds: int, settings: Row) -> Iterator[Row]:
    """A row of times for each of the two, then one of the ratios of their pairs."""
    spent = alternate(contenders, rounds=rounds, warmup_rounds=4)
    wall = {name: [one.wall_ms for one in of_name] for name, of_name in spent.items()}
    cpu = {name: [one.cpu_ms for one in of_name] for name, of_name in spent.items()}
    for name in contenders:
        times = {"ms": spread(wall[name], 3), "cpu_ms": spread(cpu[name], 3)}
        yield {**settings, "cache": name, "rounds": rounds, **times}
    yield {
        **settings,
        "pairs": rounds,
        "ratio": spread(ratios(wall["ragged"], wall["uniform"]), 3),
        "cpu_ratio": spread(ratios(cpu["ragged"], cpu["uniform"]), 3),
    }


def _tables(rows: list[Row]) -> Iterator[str]:
    names = ("shape", "batch", "budget")
    for title, benchmark, by, digits in (
        ("Decoding with the whole model", "decode", names[-1:], 1),
        ("One layer: store the token and attend", "layer", names, 2),
        ("One layer: attention only", "attention", names, 2),
    ):
        own = of(rows, benchmark=benchmark)
        triples = [
            {**pairs, "uniform": uniform["ms"], "ragged": ragged["ms"]}
            for uniform, ragged, pairs in zip(own[::3], own[1::3], own[2::3], strict=True)
        ]
        yield f"## {title}"
        yield table(
            triples,
            {
                **{name: f"{{{name}}}" for name in by},
                "uniform ms": f"{{uniform[p50]:.{digits}f}}",
                "uneven ms": f"{{ragged[p50]:.{digits}f}}",
                "time": "{ratio:spread|.2f}",
                "processor time": "{cpu_ratio:spread|.2f}",
            },
        )


EXPERIMENT = Experiment(
    name="ragged",
    title="Heads that keep different numbers of tokens",
    measure=measure,
    tables=_tables,
    shown={
        "uneven": Shown(
            "One layer: store the token and attend",
            ("shape", "batch", "budget", "time"),
            (
                "demo model | 1 | 512",
                "demo model | 4 | 2048",
                "Llama 3.1 8B | 1 | 512",
                "Llama 3.1 8B | 4 | 2048",
            ),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
