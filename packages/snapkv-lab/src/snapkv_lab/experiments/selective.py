"""Reading with fewer tokens from the middle of the model on: how much sooner, how much worse.

The parts: `time` of reading on the demo model, `shape`, the same at a longer prompt on a model of
random weights, and `quality` at one budget.
"""

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from snapkv.app.likelihood import log_likelihood
from snapkv.app.models import LoadedModel
from snapkv.app.prefills import Exact, GemFilter, Prefill, Selective
from snapkv.policies import Policy, default_policy
from snapkv_lab.evaluate.task import Task
from snapkv_lab.evaluate.tasks import Lines, Needle
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.measuring import Turns
from snapkv_lab.experiments.pages import Pivot, Table
from snapkv_lab.experiments.prompts import SEED, encode
from snapkv_lab.experiments.records import Row, grouped
from snapkv_lab.measure.contenders import compressed
from snapkv_lab.measure.random_models import random_model
from snapkv_lab.measure.timing import ratios

SHAPE, SHAPE_LAYERS = "smollm2-135m", 6


def ways(layers: Sequence[int]) -> list[Prefill]:
    """How a prompt is read; in the small shares the share alone says how many tokens go on.

    The first layer is what `snapkv study early-layer` has found of the demo model.
    """
    found, *others = layers
    return [
        Exact(),
        *(Selective(layer=found, keep_ratio=ratio, least_tokens=0) for ratio in (0.15, 0.3)),
        *(Selective(layer=layer, keep_ratio=0.15, least_tokens=0) for layer in others),
        GemFilter(layer=found, keep_ratio=0.15, least_tokens=0),
    ]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt, (1, T) int64, and its right answer, (1, N)."""

    prompt: Tensor
    answer: Tensor


def times(
    model: Any, ids: Tensor, ways: Sequence[Prefill], rounds: int, policy: Policy
) -> Iterator[Row]:
    """A row for each way of reading a prompt, (1, T), against the first."""
    readers = {
        way: replace(compressed(way.name, policy), prefill=way).reader(
            model, ids, lambda _: contextlib.nullcontext()
        )
        for way in ways
    }
    turns = Turns(readers, rounds=rounds)
    base = turns.samples(ways[0])
    for way in turns:
        samples = turns.samples(way)
        yield {
            "prefill": way.describe(),
            "prompt_tokens": ids.shape[1],
            "policy": policy.describe(),
            "rounds": rounds,
            "ms": _spread(samples, 1),
            "ratio": _spread(ratios(samples, base), 4),
            "samples_ms": [round(ms, 1) for ms in samples],
        }


def _spread(values: Sequence[float], digits: int) -> dict[str, float]:
    found = {"p50": median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


def quality(
    loaded: LoadedModel,
    tasks: Mapping[str, Sequence[Question]],
    ways: Sequence[Prefill],
    policy: Policy,
) -> Iterator[Row]:
    """A row for each task and way of reading: right answers, and the loss of their tokens."""
    for (task, questions), way in itertools.product(tasks.items(), ways):
        print(f"{task}: {way.describe()}", file=sys.stderr)
        with way.within(loaded.model):
            answers = [
                log_likelihood(loaded, each.prompt, each.answer, policy) for each in questions
            ]
        losses = [
            -chance / each.answer.shape[1]
            for (chance, _), each in zip(answers, questions, strict=True)
        ]
        yield {
            "task": task,
            "prefill": way.describe(),
            "policy": policy.describe(),
            "prompts": len(questions),
            "prompt_tokens": round(fmean(each.prompt.shape[1] for each in questions)),
            "right": sum(right for _, right in answers),
            "loss": round(fmean(losses), 4),
        }


def questions(given: Given) -> dict[str, list[Question]]:
    """The prompts of every task, with answers begun for the model, without a chat template."""
    tokenizer, each, length = given.loaded.tokenizer, given.each, given.length
    magic = [
        Question(
            prompt=torch.tensor([document.prompt_ids]), answer=torch.tensor([document.answer_ids])
        )
        for document in given.documents(length, given.count)
    ]
    shape = {"lengths": (length,), "cloze": True}
    needle = Needle(**shape, depths=given.depths, permutations=each, digits=5, buffer_tokens=100)
    lines = Lines(**shape, positions=given.depths, samples_each=each, examples=3)
    return {
        "magic number": magic,
        "needle": _asked(needle, tokenizer, " "),
        "lines": _asked(lines, tokenizer, ""),
    }


def _asked(task: Task, tokenizer: Any, between: str) -> list[Question]:
    """The samples of a task; `between` stands between the answer's beginning and the answer."""
    return [
        Question(
            prompt=sample.prompt(tokenizer, "none", "visible").token_ids(tokenizer),
            answer=torch.tensor([encode(tokenizer, between + sample.references[0])]),
        )
        for sample in task.samples(tokenizer)
    ]


def _time(given: Given) -> Iterator[Row]:
    ids, policy = torch.tensor([given.prompt(given.tokens)]), default_policy(given.budget)
    rows = times(given.loaded.model, ids, ways(given.layers), given.rounds, policy)
    return (row | {"seed": SEED} for row in rows)


def _shape(given: Given) -> Iterator[Row]:
    cpu = torch.device("cpu")
    model = random_model(SHAPE, device=cpu, dtype=torch.float32, layers=SHAPE_LAYERS)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, given.shape_tokens), generator=generator)
    about = {
        "name": f"random weights of {SHAPE}",
        "layers": SHAPE_LAYERS,
        "dtype": "float32",
        "attn_implementation": "sdpa",
        "device": "cpu",
    }
    half = ways([SHAPE_LAYERS // 2])[:2]
    for row in times(model, ids, half, given.shape_rounds, default_policy(given.budget)):
        yield row | {"model": about}


def _quality(given: Given) -> Iterator[Row]:
    policy, asked = default_policy(given.budget), questions(given)
    rows = quality(given.loaded, asked, ways(given.layers), policy)
    return (row | {"seed": SEED} for row in rows)


def _label(row: Row) -> str:
    prefill = row["prefill"]
    exact = prefill["name"] == "exact"
    return "exact" if exact else "{name}, {layer}, {keep_ratio:.0%}".format_map(prefill)


def _ratio(row: Row) -> str:
    exact = row["prefill"]["name"] == "exact"
    return "1.00" if exact else "{p50:.2f} ({min:.2f} to {max:.2f})".format_map(row["ratio"])


_TIMED = {
    "reading": _label,
    "seconds": "{ms[p50]:seconds|.2f}",
    "of the exact time": _ratio,
}


def _with_all(rows: list[Row]) -> Iterable[Row]:
    for row in rows:
        told = f"{row['right'] / row['prompts']:.2f} ({row['loss']:.3f})"
        yield {"label": _label(row), "task": row["task"], "cell": told}
    for label, own in grouped(rows, _label).items():
        share = sum(row["right"] for row in own) / sum(row["prompts"] for row in own)
        yield {"label": label, "task": "all", "cell": f"{share:.2f}"}


SELECTIVE = Experiment(
    name="selective",
    title="Reading fewer tokens in the upper half of the model",
    measure={"time": _time, "shape": _shape, "quality": _quality},
    options={
        "layers": Sized((18, 16, 19), (1,)),
        "budget": Sized(256, 48),
        "tokens": Sized(4096, 160),
        "rounds": Sized(4, 2),
        "shape_tokens": Sized(16384, 128),
        "shape_rounds": 2,
        "count": Sized(20, 2),
        "length": Sized(1024, 512),
        "depths": Sized(5, 1),
        "each": Sized(4, 1),
    },
    tables=[
        Table(_TIMED, "Time on the demo model", {"part": "time"}),
        Table(
            _TIMED,
            "Time at {prompt_tokens:,} tokens, {model[layers]} layers of random weights",
            {"part": "shape"},
        ),
        Table(
            Pivot("reading", "{label}", "{task}", "{cell}"),
            "Right answers",
            {"part": "quality"},
            _with_all,
        ),
    ],
)
