"""vLLM with compressed prompts beside stock vLLM, in turns, in one process.

Needs `make .venv-vllm/.installed`.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from snapkv import AdaKV, CompressedCache, SnapKV
from snapkv.app.models import LoadedModel
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.engine import Engine, measured_on
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, cell, of, table
from snapkv_lab.experiments.magic_number import Document, make_documents
from snapkv_lab.experiments.records import Row, environment_line, markdown_table
from snapkv_lab.measure.timing import Spent, alternate, ratios, spent_on, spread
from snapkv_vllm import engine_args


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        equal_prompts: prompts of the comparison with stock vLLM, of `equal_tokens` and fewer.
        library_prompts: prompts of the comparison with the library.
        requests: sent at once in the comparison of speed, `rounds` times.
        blocks: what the tight pool holds, of 128 tokens; the ample one has room for all requests.
        heads_tokens: of the prompts whose heads hold different numbers of tokens.
        pairs: how often prompts are read by either engine, alone and `at_once`.
    """

    equal_prompts: int = 64
    equal_tokens: int = 1000
    library_prompts: int = 16
    library_tokens: int = 1500
    requests: int = 16
    prompt_tokens: int = 4000
    new_tokens: int = 256
    blocks: int = 112
    heads_tokens: int = 2000
    rounds: int = 2
    budget: int = 512
    pairs: int = 16
    at_once: int = 8

    @property
    def ample_blocks(self) -> int:
        """Enough for every request whole, and one that vLLM keeps for itself."""
        return self.requests * -(-(self.prompt_tokens + self.new_tokens) // BLOCK_TOKENS) + 1


SMALL = Sizes(
    equal_prompts=3,
    equal_tokens=200,
    library_prompts=2,
    library_tokens=300,
    requests=3,
    prompt_tokens=600,
    new_tokens=16,
    blocks=12,
    heads_tokens=600,
    rounds=1,
    budget=128,
    pairs=2,
    at_once=2,
)
VOTES = {"kernel_size": 13}
BLOCK_TOKENS = 128
ANSWER_TOKENS = 32
ALONE, AT_ONCE = "reading", "reading at once"
"""Parts that read prompts up to their first tokens: one, and several."""
HEADS = "heads of different length"

Documents = Callable[[int, int], list[Document]]
"""Makes so many prompts of so many tokens."""


@dataclass
class Steps:
    """What the steps of a batch took.

    Attributes:
        prefill: seconds of steps with prompt tokens.
        decode: seconds of steps with none.
        running: requests in each step.
    """

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)


class StepEngine(Engine):
    """vLLM over the demo model, stock or with compressed prompts, step by step."""

    def __init__(
        self,
        *,
        budget: int | None,
        dtype: str,
        blocks: int,
        most_tokens: int,
        policy: str = SnapKV.name,
    ) -> None:
        bytes_each = torch.finfo(getattr(torch, dtype)).bits // 8
        options: dict[str, Any] = {
            "dtype": dtype,
            "max_model_len": most_tokens,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": blocks * BLOCK_TOKENS * 30 * 3 * 64 * 2 * bytes_each,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 2048,
        }
        if budget is not None:
            options = engine_args(budget=budget, policy=policy, parameters=VOTES, **options)
        super().__init__(**options)

    def answers(self, prompts: Sequence[list[int]], tokens: int) -> tuple[list[list[int]], Steps]:
        """Greedy answers of all prompts sent at once, and what the steps took."""
        self.start(prompts, tokens)
        found: dict[int, list[int]] = {}
        steps = Steps()
        while self.llm.llm_engine.has_unfinished_requests():
            start = time.perf_counter()
            outputs = self.llm.llm_engine.step()
            self._note(steps, time.perf_counter() - start)
            for one in outputs:
                found[int(one.request_id)] = list(one.outputs[0].token_ids)
        return [found[number] for number in range(len(prompts))], steps

    def start(self, prompts: Sequence[list[int]], tokens: int) -> None:
        """Send prompts, whose answers have exactly so many tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens)
        for number, ids in enumerate(prompts):
            self.llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)

    def step(self) -> list[int]:
        """One step, and how many tokens of each request it computed."""
        self.llm.llm_engine.step()
        return list(self._scheduled.num_scheduled_tokens.values())

    @property
    def held_blocks(self) -> int:
        """Blocks that are not free."""
        return int(self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks())

    def watch_steps(self) -> None:
        """Keep the numbers of tokens that each step computes."""
        schedule = self.core.scheduler.schedule

        def schedule_and_note(*args: Any, **kwargs: Any) -> Any:
            self._scheduled = schedule(*args, **kwargs)
            return self._scheduled

        self.core.scheduler.schedule = schedule_and_note

    def _note(self, steps: Steps, seconds: float) -> None:
        scheduled = getattr(self, "_scheduled", None)
        if scheduled is None:
            return
        tokens = scheduled.num_scheduled_tokens
        prefill = any(count > 1 for count in tokens.values())
        (steps.prefill if prefill else steps.decode).append(seconds)
        steps.running.append(len(tokens))

    def kept_sets(self) -> dict[int, list[torch.Tensor]]:
        """From now on, what every layer keeps, by the length of the prompt."""
        compressor = self.core.model_executor.driver_worker.worker.model_runner._compressor
        keep, noted = compressor._keep_indices, {}

        def keep_and_note(*args: Any) -> torch.Tensor:
            indices: torch.Tensor = keep(*args)
            noted.setdefault(args[2].seen_tokens, []).extend(indices.split(1))
            return indices

        compressor._keep_indices = keep_and_note
        return noted


def equal_to_stock(sizes: Sizes, documents: list[Document]) -> Row:
    """Share of prompts within the budget whose tokens are stock vLLM's."""
    most = sizes.equal_tokens
    prompts = [d.prompt_ids[-(most - 7 * n) :] for n, d in enumerate(documents)]
    room = {"dtype": "float32", "blocks": 40, "most_tokens": 2048}
    answers = []
    for budget in (None, most):
        engine = StepEngine(budget=budget, **room)
        answers.append(engine.answers(prompts, ANSWER_TOKENS)[0])
        engine.close()
    same = sum(mine == stock for stock, mine in zip(*answers, strict=True))
    return {"part": "budget of the prompt", "prompts": len(prompts), "same_answers": same}


def like_the_library(sizes: Sizes, documents: list[Document], loaded: LoadedModel) -> Row:
    """Share of kept sets that are the library's, and of answers, beside stock and transformers."""
    prompts = [d.prompt_ids[-(sizes.library_tokens + n) :] for n, d in enumerate(documents)]
    room = {"dtype": "float32", "blocks": 60, "most_tokens": 2048}
    engine = StepEngine(budget=sizes.budget, **room)
    kept = engine.kept_sets()
    mine = engine.answers(prompts, ANSWER_TOKENS)[0]
    engine.close()
    engine = StepEngine(budget=None, **room)
    stock = engine.answers(prompts, ANSWER_TOKENS)[0]
    engine.close()
    sets = same_sets = same = same_stock = 0
    for ids, answer, whole in zip(prompts, mine, stock, strict=True):
        cache = CompressedCache(loaded.model, SnapKV(sizes.budget, **VOTES))
        same += answer == _generate(loaded, ids, cache)
        same_stock += whole == _generate(loaded, ids, None)
        for layer, keep in enumerate(kept[len(ids)]):
            theirs = cache.kept_positions(layer)[..., : sizes.budget]
            sets += keep.shape[1]
            same_sets += int((keep == theirs).all(dim=-1).sum())
    return {
        "part": "library",
        "prompts": len(prompts),
        "budget": sizes.budget,
        "sets": sets,
        "same_sets": same_sets,
        "same_answers": same,
        "stock_like_transformers": same_stock,
    }


def _generate(loaded: LoadedModel, ids: list[int], cache: CompressedCache | None) -> list[int]:
    prompt = torch.tensor([ids])
    output = loaded.model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=ANSWER_TOKENS,
        min_new_tokens=ANSWER_TOKENS,
        do_sample=False,
    )
    answer: list[int] = output[0, len(ids) :].tolist()
    return answer


@contextlib.contextmanager
def both_engines(sizes: Sizes, prompt: list[int], blocks: int) -> Iterator[dict[str, StepEngine]]:
    """Stock vLLM and the plugin side by side, warm and ready all the time."""
    room = {
        "dtype": "bfloat16",
        "blocks": blocks,
        "most_tokens": sizes.prompt_tokens + sizes.new_tokens,
    }
    engines = {
        "stock": StepEngine(budget=None, **room),
        "snapkv": StepEngine(budget=sizes.budget, **room),
    }
    for engine in engines.values():
        engine.watch_steps()
        engine.answers([prompt], 2)
    yield engines
    for engine in engines.values():
        engine.close()


def reading(sizes: Sizes, documents: list[Document], part: str, at_once: int) -> Iterator[Row]:
    """Prompts up to their first tokens by either engine in turns, so many at once.

    Either engine begins every other pair.
    """
    blocks = sizes.ample_blocks
    with both_engines(sizes, documents[0].prompt_ids, blocks) as engines:
        spent = alternate(
            {name: _read(engine, documents, at_once) for name, engine in engines.items()},
            rounds=sizes.pairs,
            warmup_rounds=1,
        )
        row = {
            "part": part,
            "prompts_at_once": at_once,
            "prompt_tokens": sizes.prompt_tokens,
            "pairs": sizes.pairs,
            "budget": sizes.budget,
            "blocks": blocks,
        }
        yield row | _wall_and_processor_time(spent, "snapkv", "stock")


def _read(engine: StepEngine, documents: list[Document], at_once: int) -> Callable[[], Spent]:
    prompts = itertools.cycle([document.prompt_ids for document in documents])

    def once() -> Spent:
        some = list(itertools.islice(prompts, at_once))
        return spent_on(lambda: engine.answers(some, 1))

    return once


def _wall_and_processor_time(spent: dict[str, list[Spent]], ours: str, other: str) -> Row:
    row: Row = {}
    for key, clock in (("", "wall_ms"), ("processor_", "cpu_ms")):
        seconds = {
            name: [getattr(one, clock) / 1000 for one in of_engine]
            for name, of_engine in spent.items()
        }
        row |= {f"{name}_{key}seconds": spread(of, 4) for name, of in seconds.items()}
        row[f"{key}against_{other}"] = spread(ratios(seconds[ours], seconds[other]), 4)
    return row


def speed(sizes: Sizes, documents: list[Document]) -> Iterator[Row]:
    """The same requests by either engine in turns, in a tight pool and in an ample one."""
    for blocks in (sizes.blocks, sizes.ample_blocks):
        with both_engines(sizes, documents[0].prompt_ids, blocks) as engines:
            yield from _rounds(sizes, documents, engines, blocks)


def _rounds(
    sizes: Sizes, documents: list[Document], engines: dict[str, StepEngine], blocks: int
) -> Iterator[Row]:
    prompts = [document.prompt_ids for document in documents]
    for number in range(sizes.rounds):
        for name in list(engines)[:: -1 if number % 2 else 1]:
            start, processor = time.perf_counter(), time.process_time()
            answers, steps = engines[name].answers(prompts, sizes.new_tokens)
            seconds = time.perf_counter() - start
            processor = time.process_time() - processor
            print(f"round {number}, {name}: {seconds:.1f} s", file=sys.stderr)
            yield {
                "part": "speed",
                "engine": name,
                "round": number,
                "requests": len(prompts),
                "prompt_tokens": sizes.prompt_tokens,
                "new_tokens": sizes.new_tokens,
                "blocks": blocks,
                "budget": sizes.budget if name == "snapkv" else None,
                "seconds": round(seconds, 2),
                "processor_seconds": round(processor, 2),
                "prefill_seconds": round(sum(steps.prefill), 2),
                "decode_seconds": round(sum(steps.decode), 2),
                "decode_steps": len(steps.decode),
                "most_running": max(steps.running),
                "needles": _found(documents, answers),
            }


def heads(sizes: Sizes, documents: list[Document]) -> Iterator[Row]:
    """Steps that only generate, with equal heads and with heads that share out the same budget."""
    prompts = [document.prompt_ids for document in documents]
    tokens = sizes.new_tokens + 2 * len(prompts)  # the first generate while the last are read
    most = len(prompts[0]) + tokens
    room = {"dtype": "bfloat16", "blocks": sizes.ample_blocks, "most_tokens": most}
    engines = {
        name: StepEngine(budget=sizes.budget, policy=policy, **room)
        for name, policy in (("equal_heads", SnapKV.name), ("adakv", AdaKV.name))
    }
    blocks = {}
    for name, engine in engines.items():
        engine.watch_steps()
        engine.start(prompts, tokens)
        while engine.step() != [1] * len(prompts):
            pass
        blocks[name] = engine.held_blocks
    spent = alternate(
        {name: partial(spent_on, engine.step) for name, engine in engines.items()},
        rounds=sizes.new_tokens - 2,
        warmup_rounds=1,
    )
    for engine in engines.values():
        engine.close()
    yield {
        "part": HEADS,
        "requests": len(prompts),
        "prompt_tokens": len(prompts[0]),
        "budget": sizes.budget,
        "steps": sizes.new_tokens - 2,
        "blocks_held": blocks,
        **_wall_and_processor_time(spent, "adakv", "equal_heads"),
    }


def _found(documents: Sequence[Document], answers: Sequence[list[int]]) -> int:
    return sum(
        answer[: len(document.answer_ids)] == document.answer_ids
        for document, answer in zip(documents, answers, strict=True)
    )


_PARTS: dict[str, Callable[[Sizes, Documents, LoadedModel], Iterable[Row]]] = {
    "budget of the prompt": lambda sizes, documents, loaded: [
        equal_to_stock(sizes, documents(sizes.equal_prompts, sizes.equal_tokens))
    ],
    "library": lambda sizes, documents, loaded: [
        like_the_library(
            sizes,
            documents(sizes.library_prompts, sizes.library_tokens + sizes.library_prompts),
            loaded,
        )
    ],
    ALONE: lambda sizes, documents, loaded: reading(
        sizes, documents(sizes.requests, sizes.prompt_tokens), ALONE, at_once=1
    ),
    AT_ONCE: lambda sizes, documents, loaded: reading(
        sizes, documents(sizes.requests, sizes.prompt_tokens), AT_ONCE, at_once=sizes.at_once
    ),
    "speed": lambda sizes, documents, loaded: speed(
        sizes, documents(sizes.requests, sizes.prompt_tokens)
    ),
    HEADS: lambda sizes, documents, loaded: heads(
        sizes, documents(sizes.requests, sizes.heads_tokens)
    ),
}


def measure(given: Given) -> Iterator[Row]:
    """Some parts; every row says with what it was measured."""
    loaded, haystack = given.loaded, load_haystack()

    def documents(count: int, tokens: int) -> list[Document]:
        return make_documents(loaded.tokenizer, haystack, prompt_tokens=tokens, count=count)

    for name in given.parts:
        dtype = "float32" if name in ("budget of the prompt", "library") else "bfloat16"
        measured = measured_on(loaded, dtype=dtype)
        for row in _PARTS[name](SMALL if given.small else Sizes(), documents, loaded):
            yield {**row, "votes": VOTES, **measured}


def _tables(rows: list[Row]) -> list[str]:
    fast = of(rows, part="speed")
    pools = sorted({row["blocks"] for row in fast})
    pairs = [
        line for row in rows if row["part"] in _PAIRS for line in _pair(row, *_PAIRS[row["part"]])
    ]
    return [
        "## The same answers",
        _same(rows),
        f"## {fast[0]['requests']} requests of {fast[0]['prompt_tokens']:,} tokens at once",
        table(
            [
                _medians(of(fast, engine=name, blocks=blocks))
                for blocks in pools
                for name in ("stock", "snapkv")
            ],
            {
                "blocks": "{blocks}",
                "engine": lambda row: (
                    row["engine"] + (f", budget {row['budget']}" if row["budget"] else "")
                ),
                "seconds": "{seconds:.1f}",
                "prefill s": "{prefill_seconds:.1f}",
                "decode s": "{decode_seconds:.1f}",
                "decode steps": "{decode_steps:.0f}",
                "most at once": "{most_running:.0f}",
                "found": "{needles:.0f}/{requests}",
            },
        ),
        "## In pairs",
        markdown_table(("work", "other", "snapkv", "ratio", "commit"), pairs),
        "## Blocks held with heads of different length",
        table(
            of(rows, part=HEADS),
            {"equal heads": "{blocks_held[equal_heads]}", "adakv": "{blocks_held[adakv]}"},
        ),
    ]


_PAIRS = {
    ALONE: ("reading", "stock", "snapkv", "{:.2f} s", 1),
    AT_ONCE: ("reading at once", "stock", "snapkv", "{:.2f} s", 1),
    HEADS: ("a step, equal heads beside adakv", "equal_heads", "adakv", "{:.0f} ms", 1000),
}
"""By part: what is done, the two in its rows, how a time is told, units in a second."""


def _pair(row: Row, work: str, other: str, ours: str, told: str, units: int) -> Iterator[list[str]]:
    for clock, key in (("", "seconds"), (", processor time", "processor_seconds")):
        against = f"{key.removesuffix('seconds')}against_{other}"
        if against in row:
            times = (units * row[f"{name}_{key}"]["p50"] for name in (other, ours))
            ratio = cell(f"{{{against}:spread|.3f}}", row)
            yield [work + clock, *map(told.format, times), ratio, row["environment"]["commit"]]


def _same(rows: Sequence[Row]) -> str:
    """Of answers and kept sets, how many are those of stock vLLM, the library, transformers."""
    (equal,), (library,) = of(rows, part="budget of the prompt"), of(rows, part="library")
    return markdown_table(
        ("what", "equal to those of", "equal", "of"),
        [
            [what, whose, str(row[same]), str(row[whole])]
            for what, whose, row, same, whole in (
                ("answers, budget of the prompt", "stock vLLM", equal, "same_answers", "prompts"),
                ("kept sets", "the library", library, "same_sets", "sets"),
                ("answers", "the library", library, "same_answers", "prompts"),
                (
                    "stock vLLM's answers",
                    "transformers",
                    library,
                    "stock_like_transformers",
                    "prompts",
                ),
            )
        ],
    )


def _medians(rows: Sequence[Row]) -> Row:
    """The first of some rounds, with the medians of what was measured in all."""
    keys = ("seconds", "prefill_seconds", "decode_seconds", "decode_steps", "most_running")
    return rows[0] | {key: median(row[key] for row in rows) for key in (*keys, "needles")}


EXPERIMENT = Experiment(
    name="serving",
    title="Serving: stock vLLM and compressed prompts",
    takes="hours",
    measure=measure,
    small=True,
    parts=tuple(_PARTS),
    measured=lambda rows: environment_line(of(rows, part="speed")),
    tables=_tables,
    shown={
        "serving": Shown(
            "16 requests of 4,000 tokens at once",
            ("engine", "seconds", "prefill s", "decode s", "most at once"),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
