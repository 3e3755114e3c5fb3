"""Reading with fewer tokens from the middle of the model on: how much sooner, how much worse.

The parts: `time` of reading on the demo model, `shape`, the same at a longer prompt on a model of
random weights, and `quality` at one budget.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from snapkv.app.likelihood import log_likelihood
from snapkv.app.models import LoadedModel, load
from snapkv.app.prefills import Exact, GemFilter, Prefill, Selective
from snapkv.policies import default_policy
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.task import Task
from snapkv_lab.evaluate.tasks import Lines, Needle
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, of, pivot, table
from snapkv_lab.experiments.magic_number import SEED, make_documents
from snapkv_lab.experiments.records import Row, environment_line
from snapkv_lab.measure.contenders import compressed
from snapkv_lab.measure.random_models import random_model
from snapkv_lab.measure.timing import alternate, ratios

LAYER, RATIO = 18, 0.15
"""What `snapkv study early-layer` has found of the demo model, and the default share."""

LAYERS = (16, 19)
RATIOS = (0.3,)
BUDGET = 256
SHAPE, SHAPE_LAYERS = "smollm2-135m", 6


def selective(layer: int = LAYER, keep_ratio: float = RATIO) -> Selective:
    """Selective reading in which the share alone says how many tokens go on."""
    return Selective(layer=layer, keep_ratio=keep_ratio, least_tokens=0)


def gemfilter(keep_ratio: float = RATIO) -> GemFilter:
    """GemFilter at the same layer, with the share alone."""
    return GemFilter(layer=LAYER, keep_ratio=keep_ratio, least_tokens=0)


WAYS: tuple[Prefill, ...] = (
    Exact(),
    selective(),
    *(selective(keep_ratio=ratio) for ratio in RATIOS),
    *(selective(layer=layer) for layer in LAYERS),
    gemfilter(),
)
TIMED: tuple[Prefill, ...] = (
    Exact(),
    selective(),
    selective(keep_ratio=RATIOS[-1]),
    *(selective(layer=layer) for layer in LAYERS),
    gemfilter(),
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        tokens: of the prompt that is timed on the demo model.
        rounds: of the timing there.
        shape_tokens: of the prompt on the model of random weights.
        shape_rounds: of the timing there.
        documents: with a magic number, of every length.
        lengths: of the prompts of the three tasks.
        depths: of needles and lines, of every length.
        each: samples of every length and depth.
    """

    tokens: int = 4096
    rounds: int = 4
    shape_tokens: int = 16384
    shape_rounds: int = 2
    documents: int = 10
    lengths: tuple[int, ...] = (1024,)
    depths: int = 5
    each: int = 2


SMALL = Size(
    tokens=1024,
    rounds=2,
    shape_tokens=2048,
    shape_rounds=2,
    documents=2,
    lengths=(768,),
    depths=2,
    each=1,
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt and its right answer.

    Attributes:
        prompt: (1, T) int64.
        answer: (1, N) int64.
    """

    prompt: Tensor
    answer: Tensor


def times(model: Any, ids: Tensor, ways: Sequence[Prefill], rounds: int) -> Iterator[Row]:
    """A row for each way of reading a prompt, (1, T); ratios are of one round, against the first.

    A round before those that count warms up.
    """
    policy = default_policy(BUDGET)
    readers = {
        str(number): replace(compressed(str(number), policy), prefill=way).reader(
            model, ids, lambda _: contextlib.nullcontext()
        )
        for number, way in enumerate(ways)
    }
    runs = alternate(readers, rounds=rounds, warmup_rounds=1)
    for way, samples in zip(ways, runs.values(), strict=True):
        yield {
            "prefill": way.describe(),
            "prompt_tokens": ids.shape[1],
            "policy": policy.describe(),
            "rounds": rounds,
            "ms": _spread(samples, 1),
            "ratio": _spread(ratios(samples, runs["0"]), 4),
            "samples_ms": [round(ms, 1) for ms in samples],
        }


def _spread(values: Sequence[float], digits: int) -> dict[str, float]:
    found = {"p50": median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


def quality(
    loaded: LoadedModel, tasks: dict[str, Sequence[Question]], ways: Sequence[Prefill]
) -> Iterator[Row]:
    """A row for each task and way of reading: right answers, and the loss of their tokens."""
    policy = default_policy(BUDGET)
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


def questions(tokenizer: Any, size: Size) -> dict[str, Sequence[Question]]:
    """The prompts of every task, with answers begun for the model, without a chat template."""
    haystack = load_haystack()
    documents = [
        document
        for tokens in size.lengths
        for document in make_documents(
            tokenizer, haystack, prompt_tokens=tokens, count=size.documents
        )
    ]
    magic = [
        Question(
            prompt=torch.tensor([document.prompt_ids]), answer=torch.tensor([document.answer_ids])
        )
        for document in documents
    ]
    needle = Needle(
        lengths=size.lengths,
        depths=size.depths,
        permutations=size.each,
        digits=5,
        cloze=True,
        buffer_tokens=100,
    )
    lines = Lines(
        lengths=size.lengths,
        positions=size.depths,
        samples_each=size.each,
        examples=3,
        cloze=True,
    )
    return {
        "magic number": magic,
        "needle": _asked(needle, tokenizer, " "),
        "lines": _asked(lines, tokenizer, ""),
    }


def _asked(task: Task, tokenizer: Any, between: str) -> list[Question]:
    """The samples of a task; `between` stands between the answer's beginning and the answer."""

    def answer(sample: Sample) -> Tensor:
        ids: Tensor = tokenizer(
            between + sample.references[0], add_special_tokens=False, return_tensors="pt"
        )["input_ids"]
        return ids

    return [
        Question(
            prompt=sample.prompt(tokenizer, "none", "visible").token_ids(tokenizer),
            answer=answer(sample),
        )
        for sample in task.samples(tokenizer)
    ]


def _time(size: Size) -> Iterator[Row]:
    loaded = load("demo")
    (document,) = make_documents(
        loaded.tokenizer, load_haystack(), prompt_tokens=size.tokens, count=1
    )
    ids = torch.tensor([document.prompt_ids])
    for row in times(loaded.model, ids, TIMED, size.rounds):
        yield row | {"seed": SEED, "model": loaded.description()}


def _shape(size: Size) -> Iterator[Row]:
    model = random_model(
        SHAPE, device=torch.device("cpu"), dtype=torch.float32, layers=SHAPE_LAYERS
    )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, size.shape_tokens), generator=generator)
    about = {
        "name": f"random weights of {SHAPE}",
        "layers": SHAPE_LAYERS,
        "dtype": "float32",
        "attn_implementation": "sdpa",
        "device": "cpu",
    }
    for row in times(model, ids, (Exact(), selective(SHAPE_LAYERS // 2)), size.shape_rounds):
        yield row | {"model": about}


def _quality(size: Size) -> Iterator[Row]:
    loaded = load("demo")
    for row in quality(loaded, questions(loaded.tokenizer, size), WAYS):
        yield row | {"seed": SEED, "model": loaded.description()}


_PARTS: dict[str, Callable[[Size], Iterator[Row]]] = {
    "time": _time,
    "shape": _shape,
    "quality": _quality,
}


def measure(given: Given) -> Iterator[Row]:
    """The rows of some parts."""
    for part in given.parts:
        for row in _PARTS[part](SMALL if given.small else Size()):
            yield {"part": part, **row}


def _tables(rows: list[Row]) -> Iterator[str]:
    timed = {
        "reading": _label,
        "seconds": "{ms[p50]:seconds|.2f}",
        "of the exact time": _ratio,
    }
    if own := of(rows, part="time"):
        yield "## Time on the demo model"
        yield table(own, timed)
    if own := of(rows, part="shape"):
        yield (
            "## Time at {prompt_tokens:,} tokens, {model[layers]} layers of random weights"
        ).format_map(own[0])
        yield table(own, timed)
    if own := of(rows, part="quality"):
        everywhere = [
            row | {"label": label, "task": "all", "cell": f"{_share(own, label):.2f}"}
            for label in dict.fromkeys(map(_label, own))
            for row in own[:1]
        ]
        cells = [row | {"label": _label(row), "cell": _cell(row)} for row in own]
        yield "## Right answers"
        yield pivot([*cells, *everywhere], "reading", "{label}", "{task}", "{cell}")


def _line(rows: list[Row]) -> str:
    found = (of(rows, part=part) for part in _PARTS)
    return "; ".join(dict.fromkeys(environment_line(own) for own in found if own))


def _share(rows: Sequence[Row], label: str) -> float:
    own = [row for row in rows if _label(row) == label]
    return float(sum(row["right"] for row in own) / sum(row["prompts"] for row in own))


def _label(row: Row) -> str:
    prefill = row["prefill"]
    exact = prefill["name"] == "exact"
    return "exact" if exact else "{name}, {layer}, {keep_ratio:.0%}".format_map(prefill)


def _ratio(row: Row) -> str:
    exact = row["prefill"]["name"] == "exact"
    return "1.00" if exact else "{p50:.2f} ({min:.2f} to {max:.2f})".format_map(row["ratio"])


def _cell(row: Row) -> str:
    return f"{row['right'] / row['prompts']:.2f} ({row['loss']:.3f})"


EXPERIMENT = Experiment(
    name="selective",
    title="Reading fewer tokens in the upper half of the model",
    measure=measure,
    small=True,
    parts=tuple(_PARTS),
    measured=_line,
    tables=_tables,
    shown={
        "selective": Shown(
            "Time on the demo model",
            ("reading", "of the exact time"),
            ("exact", "selective, 16, 15%", "gemfilter, 16, 15%"),
        ),
        "selective-right": Shown(
            "Right answers",
            ("reading", "lines", "all"),
            ("exact", "selective, 16, 15%", "gemfilter, 16, 15%"),
        ),
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
