"""vLLM with compressed prompts, over the demo model in this process.

`serving`: against stock vLLM, in turns. `shared_documents`: many questions about one document, that
was compressed once, behind a cached prefix as stock vLLM has it, and, for some, reading all of it.

Import this before vLLM: one engine after the other, threads as the system gives them. Needs `make
.venv-vllm/.installed`, whose Python runs these experiments.
"""

import contextlib
import gc
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from snapkv import AdaKV, CompressedCache, SnapKV
from snapkv.app.models import place_of
from snapkv.policies.kvzip import INSTRUCTION
from snapkv_lab.evaluate.haystack import encode, load_haystack
from snapkv_lab.experiments.experiment import Experiment, RunContext, Size
from snapkv_lab.experiments.measuring import Turns
from snapkv_lab.experiments.pages import Listing
from snapkv_lab.experiments.prompts import Document, generate
from snapkv_lab.experiments.records import describe_environment
from snapkv_lab.measure.timing import spent_on, spread
from snapkv_lab.report.tables import cell, markdown_table
from snapkv_lab.rows import Row, grouped, of
from snapkv_vllm import engine_args
from snapkv_vllm.documents import protocol
from snapkv_vllm.documents.sharing import Sharing
from snapkv_vllm.versions import installed

VOTES = {"kernel_size": 13}
BLOCK_TOKENS = 128
ANSWER_TOKENS = 32


class Engine:
    """vLLM, stock or with compressed prompts; options are those of `vllm.LLM`."""

    def __init__(self, model: str, **options: Any) -> None:
        from vllm import LLM

        settings = {"enforce_eager": True, "disable_log_stats": True} | options
        self.llm = LLM(place_of(model), **settings)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.pool = self.core.scheduler.kv_cache_manager.block_pool

    def send(self, prompts: Sequence[list[int]], tokens: int, **more: Any) -> list[list[int]]:
        """Greedy answers of exactly so many tokens."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)
        asked: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.llm.generate(asked, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """Give the memory back."""
        self.core.shutdown()
        del self.llm, self.core, self.pool
        gc.collect()


class StepEngine(Engine):
    """One that works step by step; without a budget it is stock vLLM."""

    def __init__(
        self,
        given: RunContext,
        budget: int | None,
        *,
        dtype: str,
        blocks: int,
        most_tokens: int,
        policy: str = SnapKV.name,
        cache_dtype: str = "auto",
    ) -> None:
        text = given.loaded.model.config
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        layers_heads = text.num_hidden_layers * text.num_key_value_heads
        token_bytes = 2 * layers_heads * head_dim * torch.finfo(getattr(torch, dtype)).bits // 8
        options: dict[str, Any] = {
            "dtype": dtype,
            "kv_cache_dtype": cache_dtype,
            "max_model_len": most_tokens,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": blocks * BLOCK_TOKENS * token_bytes,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 2048,
        }
        if budget is not None:
            options = engine_args(budget=budget, policy=policy, parameters=VOTES, **options)
        super().__init__(given.model, **options)
        schedule, self._computed = self.core.scheduler.schedule, list[int]()

        def schedule_and_note(*args: Any, **kwargs: Any) -> Any:
            scheduled = schedule(*args, **kwargs)
            self._computed = list(scheduled.num_scheduled_tokens.values())
            return scheduled

        self.core.scheduler.schedule = schedule_and_note

    def start(self, prompts: Sequence[list[int]], tokens: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens)
        for number, ids in enumerate(prompts):
            self.llm.llm_engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)

    def step(self) -> tuple[list[int], Any]:
        """One step: how many tokens of each request it computed, and what it puts out."""
        outputs = self.llm.llm_engine.step()
        return self._computed, outputs

    def answers(self, prompts: Sequence[list[int]], tokens: int) -> tuple[list[list[int]], Row]:
        """Greedy answers of all prompts sent at once, and what the steps took."""
        self.start(prompts, tokens)
        found: dict[int, list[int]] = {}
        prefill, decode, running = [], [], []
        while self.llm.llm_engine.has_unfinished_requests():
            start = time.perf_counter()
            computed, outputs = self.step()
            some = prefill if any(count > 1 for count in computed) else decode
            some.append(time.perf_counter() - start)
            running.append(len(computed))
            for one in outputs:
                found[int(one.request_id)] = list(one.outputs[0].token_ids)
        return [found[number] for number in range(len(prompts))], {
            "prefill_seconds": round(sum(prefill), 2),
            "decode_seconds": round(sum(decode), 2),
            "decode_steps": len(decode),
            "most_running": max(running),
        }

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


@contextlib.contextmanager
def _engines(given: RunContext, made: dict[str, dict[str, Any]], **room: Any) -> Iterator[Any]:
    found = {name: StepEngine(given, **own, **room) for name, own in made.items()}
    yield found
    for engine in found.values():
        engine.close()


def _ids(given: RunContext, count: int, tokens: int) -> list[list[int]]:
    return [document.prompt_ids for document in given.documents(tokens, count)]


def _equal(given: RunContext) -> Iterator[Row]:
    """How many prompts within the budget have stock vLLM's tokens."""
    most = given.equal_tokens
    found = _ids(given, given.equal_prompts, most)
    prompts = [ids[-(most - 7 * number) :] for number, ids in enumerate(found)]
    answers = []
    for budget in (None, most):
        with _engines(given, {"": {"budget": budget}}, **_FLOATS, blocks=40) as engines:
            answers.append(engines[""].answers(prompts, ANSWER_TOKENS)[0])
    same = sum(map(list.__eq__, *answers))
    yield {"prompts": len(prompts), "same_answers": same} | _on(given, "float32")


_FLOATS = {"dtype": "float32", "most_tokens": 2048}


def _like_the_library(given: RunContext) -> Iterator[Row]:
    """How many kept sets are the library's, and answers, against stock and transformers."""
    model, count, tokens = given.loaded.model, given.library_prompts, given.library_tokens
    found = _ids(given, count, tokens + count)
    prompts = [ids[-(tokens + number) :] for number, ids in enumerate(found)]
    with _engines(given, {"": {"budget": given.budget}}, **_FLOATS, blocks=60) as engines:
        kept = engines[""].kept_sets()
        mine = engines[""].answers(prompts, ANSWER_TOKENS)[0]
    with _engines(given, {"": {"budget": None}}, **_FLOATS, blocks=60) as engines:
        stock = engines[""].answers(prompts, ANSWER_TOKENS)[0]
    sets = same_sets = same = same_stock = 0
    for ids, answer, whole in zip(prompts, mine, stock, strict=True):
        cache = CompressedCache(model, SnapKV(given.budget, **VOTES))
        same += answer == generate(model, ids, cache, ANSWER_TOKENS)
        same_stock += whole == generate(model, ids, None, ANSWER_TOKENS)
        for layer, keep in enumerate(kept[len(ids)]):
            theirs = cache.kept_positions(layer)[..., : given.budget]
            sets += keep.shape[1]
            same_sets += int((keep == theirs).all(dim=-1).sum())
    yield {
        "prompts": count,
        "budget": given.budget,
        "sets": sets,
        "same_sets": same_sets,
        "same_answers": same,
        "stock_like_transformers": same_stock,
    } | _on(given, "float32")


def _on(given: RunContext, dtype: str) -> Row:
    model = given.loaded.description() | {"attn_implementation": "vLLM CPU_ATTN", "dtype": dtype}
    return {"model": model, "environment": describe_environment() | {"vllm": installed()}}


def _both(given: RunContext) -> dict[str, dict[str, Any]]:
    """Stock vLLM and the plugin."""
    return {"stock": {"budget": None}, "snapkv": {"budget": given.budget}}


@contextlib.contextmanager
def _warm(
    given: RunContext, prompt: list[int], blocks: int, made: dict[str, dict[str, Any]]
) -> Iterator[dict[str, StepEngine]]:
    """Engines side by side, ready all the time."""
    most = given.prompt_tokens + given.new_tokens
    with _engines(given, made, dtype="bfloat16", blocks=blocks, most_tokens=most) as engines:
        for engine in engines.values():
            engine.answers([prompt], 2)
        yield engines


def _ample_blocks(given: RunContext) -> int:
    """Enough for every request whole, and one that vLLM keeps for itself."""
    tokens = given.prompt_tokens + given.new_tokens
    return given.requests * -(-tokens // BLOCK_TOKENS) + 1


def _reading(at_once: str, given: RunContext) -> Iterator[Row]:
    """Prompts up to their first tokens by either engine in turns, so many at once."""
    prompts, count = _ids(given, given.requests, given.prompt_tokens), getattr(given, at_once)
    blocks = _ample_blocks(given)
    with _warm(given, prompts[0], blocks, _both(given)) as engines:
        work = {name: _read(engine, prompts, count) for name, engine in engines.items()}
        turns = Turns(work, rounds=given.pairs)
    yield {
        "prompts_at_once": count,
        "prompt_tokens": given.prompt_tokens,
        "pairs": given.pairs,
        "budget": given.budget,
        "blocks": blocks,
        **_clocks(turns, "snapkv", "stock"),
    }


def _read(engine: StepEngine, prompts: list[list[int]], at_once: int) -> Callable[[], object]:
    again = itertools.cycle(prompts)
    return lambda: engine.answers(list(itertools.islice(again, at_once)), 1)


def _clocks(turns: Turns, ours: str, other: str) -> Row:
    """Seconds by either clock, and the ratios of their pairs."""
    row: Row = {}
    for key, clock in (("", "wall_ms"), ("processor_", "cpu_ms")):
        for name in turns:
            seconds = [ms / 1000 for ms in turns.samples(name, clock)]
            row[f"{name}_{key}seconds"] = spread(seconds, 4)
        row[f"{key}against_{other}"] = turns.ratio(ours, other, clock=clock)
    return row


def _speed(given: RunContext) -> Iterator[Row]:
    """The same requests by every engine in turns, each in a pool of as many bytes."""
    documents = given.documents(given.prompt_tokens, given.requests)
    prompts = [document.prompt_ids for document in documents]
    made = _both(given)
    if torch.backends.cpu.get_cpu_capability() == "AVX512":  # vLLM has it on no other
        made |= {f"{name}, fp8": own | {"cache_dtype": "fp8"} for name, own in made.items()}
    with _warm(given, prompts[0], given.blocks, made) as engines:
        for number in range(given.rounds):
            for name in list(engines)[:: -1 if number % 2 else 1]:
                start, processor = time.perf_counter(), time.process_time()
                answers, steps = engines[name].answers(prompts, given.new_tokens)
                seconds = time.perf_counter() - start
                print(f"round {number}, {name}: {seconds:.1f} s", file=sys.stderr)
                yield {
                    "engine": name,
                    "round": number,
                    "requests": given.requests,
                    "prompt_tokens": given.prompt_tokens,
                    "new_tokens": given.new_tokens,
                    "blocks": given.blocks,
                    "budget": made[name]["budget"],
                    "seconds": round(seconds, 2),
                    "processor_seconds": round(time.process_time() - processor, 2),
                    **steps,
                    "needles": _right(documents, answers),
                }


def _right(documents: Sequence[Document], answers: Sequence[list[int]]) -> int:
    pairs = zip(documents, answers, strict=True)
    return sum(answer[: len(one.answer_ids)] == one.answer_ids for one, answer in pairs)


def _heads(given: RunContext) -> Iterator[Row]:
    """Steps that only generate, with equal heads and with heads that share out the same budget."""
    prompts = _ids(given, given.requests, given.heads_tokens)
    tokens = given.new_tokens + 2 * len(prompts)  # the first generate while the last are read
    most, rounds = given.heads_tokens + tokens, given.new_tokens - 2
    made = {
        name: {"budget": given.budget, "policy": policy.name}
        for name, policy in (("equal_heads", SnapKV), ("adakv", AdaKV))
    }
    blocks = {}
    room = {"dtype": "bfloat16", "blocks": _ample_blocks(given), "most_tokens": most}
    with _engines(given, made, **room) as engines:
        for name, engine in engines.items():
            engine.start(prompts, tokens)
            while engine.step()[0] != [1] * len(prompts):
                pass
            pool = engine.pool
            blocks[name] = int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        turns = Turns({name: engine.step for name, engine in engines.items()}, rounds=rounds)
    yield {
        "requests": len(prompts),
        "prompt_tokens": given.heads_tokens,
        "budget": given.budget,
        "steps": rounds,
        "blocks_held": blocks,
        **_clocks(turns, "adakv", "equal_heads"),
    }


HEADS = "heads of different length"
_PAIRS = {
    "reading": ("reading", "stock", "snapkv", "{:.2f} s", 1),
    "reading at once": ("reading at once", "stock", "snapkv", "{:.2f} s", 1),
    HEADS: ("a step, equal heads against adakv", "equal_heads", "adakv", "{:.0f} ms", 1000),
}
"""By part: what is done, the two in its rows, how a time is told, units in a second."""


def _pairs(rows: list[Row]) -> Iterable[Row]:
    for row in (row for row in rows if row["part"] in _PAIRS):
        work, other, ours, told, units = _PAIRS[row["part"]]
        for clock, key in (("", "seconds"), (", processor time", "processor_seconds")):
            against = f"{key.removesuffix('seconds')}against_{other}"
            if against in row:
                yield {
                    "work": work + clock,
                    "other": told.format(units * row[f"{other}_{key}"]["p50"]),
                    "snapkv": told.format(units * row[f"{ours}_{key}"]["p50"]),
                    "ratio": cell(f"{{{against}:spread|.3f}}", row),
                    "commit": row["environment"]["commit"],
                }


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
                ("stock vLLM's answers", "transformers", library, _STOCK, "prompts"),
            )
        ],
    )


_STOCK = "stock_like_transformers"
_MEDIANS = ("seconds", "prefill_seconds", "decode_seconds", "decode_steps", "most_running")


def _medians(rows: list[Row]) -> Iterable[Row]:
    """Of some rounds the first, with the medians of what was measured in all."""
    for own in grouped(rows, "engine").values():
        yield own[0] | {key: median(row[key] for row in own) for key in (*_MEDIANS, "needles")}


def _engine_name(row: Row) -> str:
    return row["engine"] + (f", budget {row['budget']}" if row["budget"] else "")


_SERVING = [
    Listing(
        {
            "blocks": "{blocks}",
            "engine": _engine_name,
            "seconds": "{seconds:.1f}",
            "prefill s": "{prefill_seconds:.1f}",
            "decode s": "{decode_seconds:.1f}",
            "decode steps": "{decode_steps:.0f}",
            "most at once": "{most_running:.0f}",
            "found": "{needles:.0f}/{requests}",
        },
        "{requests} requests of {prompt_tokens:,} tokens at once",
        {"part": "speed"},
        _medians,
    ),
    Listing(
        {name: f"{{{name}}}" for name in ("work", "other", "snapkv", "ratio", "commit")},
        "In pairs",
        made=_pairs,
    ),
    Listing(
        {"equal heads": "{blocks_held[equal_heads]}", "adakv": "{blocks_held[adakv]}"},
        "Blocks held with heads of different length",
        {"part": HEADS},
    ),
]

SERVING = Experiment(
    name="serving",
    title="Serving: stock vLLM and compressed prompts",
    takes="hours",
    measure={
        "budget of the prompt": _equal,
        "library": _like_the_library,
        "reading": partial(_reading, "alone"),
        "reading at once": partial(_reading, "at_once"),
        "speed": _speed,
        HEADS: _heads,
    },
    options={
        "equal_prompts": Size(64, 3),
        "equal_tokens": Size(1000, 200),
        "library_prompts": Size(16, 2),
        "library_tokens": Size(1500, 300),
        "requests": Size(16, 3),
        "prompt_tokens": Size(4000, 600),
        "new_tokens": Size(256, 16),
        "blocks": Size(112, 12),
        "heads_tokens": Size(2000, 600),
        "rounds": Size(2, 1),
        "budget": Size(512, 128),
        "pairs": Size(16, 2),
        "alone": 1,
        "at_once": Size(8, 2),
    },
    fields={"votes": VOTES},
    described=lambda given: _on(given, "bfloat16"),
    tables=lambda rows: itertools.chain(
        ["## The same answers", _same(rows)], *(each.parts(rows) for each in _SERVING)
    ),
)


SHARED_BLOCK_TOKENS = 32
ALIKE = {"snapkv": "alike", "adakv": "of different length"}
PLACES = ("Berlin", "Cairo", "Lisbon", "Moscow", "Oslo", "Sydney", "Tokyo", "Vienna")
ASKED = (
    "What is the special magic number for {place}?",
    "Which number is special and magic for {place}?",
    "I forgot the special magic number for {place}. What is it?",
    "Please look up the magic number of {place}.",
    "{place} has a special magic number. Say it.",
    "Which four digits belong to {place}?",
    "The text names a magic number for {place}: which one?",
    "What does the text say about the number for {place}?",
)


def _text(tokenizer: Any, most_tokens: int) -> list[int]:
    facts = [
        f" Special magic number for {place} is {number}." for place, number in _numbers().items()
    ]
    prose = load_haystack().text.replace("\n", " ")
    sentences = [f"{one}." for one in prose.split(".")[:400]]
    ids: list[int] = []
    for taken in range(1, len(sentences)):
        places = [len(facts) * place // taken for place in range(taken + 1)]
        pieces = [
            sentences[place] + "".join(facts[places[place] : places[place + 1]])
            for place in range(taken)
        ]
        longer = tokenizer("".join(pieces))["input_ids"]
        if len(longer) > most_tokens:
            break
        ids = longer
    return ids


def _numbers() -> dict[str, str]:
    draw = random.Random(1)
    return {place: str(draw.randrange(1000, 10_000)) for place in PLACES}


def _shared(given: RunContext) -> Iterator[Row]:
    """With heads that keep as many tokens, and with heads that do not."""
    text = _text(given.loaded.tokenizer, given.tokens)
    for policy in ALIKE:
        options = engine_args(
            budget=given.budgets[0],
            policy=policy,
            sharing=Sharing(),
            max_model_len=8192,
            block_size=SHARED_BLOCK_TOKENS,
            dtype="bfloat16",
            kv_cache_memory_bytes=2 << 30,
            enable_prefix_caching=True,
        )
        engine = Engine(given.model, **options)
        common = {"document_tokens": len(text), "questions": given.questions, "policy": policy}
        yield from (common | row for row in _shared_rows(engine, text, given))
        engine.close()


def _shared_rows(engine: Engine, text: list[int], given: RunContext) -> Iterator[Row]:
    """A row for reading and for every way to ask."""
    whole: Row = {"extra_args": {"snapkv_budget": 0}}
    engine.send([text[1:]], 1, **whole)  # the first request of all takes longer
    read = spent_on(lambda: engine.send([[*text, 1]], 1, **whole))
    ways: dict[str, tuple[Row, int]] = {
        "whole, prefix cached": (whole, given.questions),
        "whole, read anew": (whole | {"skip_reading_prefix_cache": True}, given.read_whole),
    }
    for budget in given.budgets:
        name, free = f"shared, {budget} tokens", engine.pool.get_num_free_blocks()
        instruction = encode(given.loaded.tokenizer, INSTRUCTION)
        own = {protocol.REGISTER: name, protocol.INSTRUCTION: instruction, protocol.BUDGET: budget}
        spent = spent_on(partial(engine.send, [[*text, 1]], 1, extra_args=own))
        yield {
            "part": "register",
            "way": name,
            "budget": budget,
            "seconds": spent.wall_ms / 1000,
            "read_once_seconds": read.wall_ms / 1000,
            "blocks": free - engine.pool.get_num_free_blocks(),
        }
        ways[name] = ({"extra_args": {protocol.DOCUMENT: name}}, given.questions)
    yield from _asked(engine, text, ways, given)


def _asked(
    engine: Engine, text: list[int], ways: dict[str, Any], given: RunContext
) -> Iterator[Row]:
    """Every question in every way, in turns."""
    tokenizer, first, right = (
        given.loaded.tokenizer,
        {name: [] for name in ways},
        dict.fromkeys(ways, 0),
    )
    numbers = list(itertools.product(ASKED, _numbers().items()))[: given.questions]
    for place, (asked, (city, expected)) in enumerate(numbers):
        question = (
            f"\n\nQuestion: {asked.format(place=city)}"
            f"\nAnswer: The special magic number for {city} is"
        )
        ids = text + encode(tokenizer, question)
        for name, (own, questions) in ways.items():
            if place < questions:
                first[name].append(spent_on(partial(engine.send, [ids], 1, **own)).wall_ms)
                plain = {"extra_args": own["extra_args"]}
                (answer,) = engine.send([ids], 6, **plain)
                right[name] += tokenizer.decode(answer).strip().startswith(expected)
    for name, times in first.items():
        row = {"part": "ask", "way": name, "asked": len(times), "right": right[name]}
        yield row | {"first_token_ms": times}


def _alike(row: Row) -> str:
    return ALIKE[row["policy"]]


def _shared_tables(rows: list[Row]) -> Iterator[str]:
    registered, asked = of(rows, part="register"), of(rows, part="ask")
    blocks = {(row["policy"], row["way"]): row["blocks"] for row in registered}
    whole = -(-rows[0]["document_tokens"] // SHARED_BLOCK_TOKENS)
    ms = {(row["policy"], row["way"]): median(row["first_token_ms"]) for row in asked}

    def of_cached(row: Row) -> str:
        ours, cached = (ms[row["policy"], way] for way in (row["way"], "whole, prefix cached"))
        return f"{ours / cached:.2f}"

    columns = {
        "document": "{way}",
        "heads": _alike,
        "blocks held": lambda row: str(blocks.get((row["policy"], row["way"]), whole)),
        "first token ms": lambda row: f"{ms[row['policy'], row['way']]:.0f}",
        "of prefix cached": of_cached,
        "right": "{right}/{asked}",
    }
    yield from Listing(columns).parts(asked)
    columns = {
        "tokens kept": "{budget:,}",
        "heads": _alike,
        "seconds": "{seconds:.0f}",
        "of reading it once": lambda row: f"{row['seconds'] / row['read_once_seconds']:.1f}",
    }
    yield from Listing(columns, "Registering a document").parts(registered)


SHARED_DOCUMENTS = Experiment(
    name="shared_documents",
    title="One document, 64 questions, in vLLM",
    measure=_shared,
    options={
        "tokens": Size(4000, 400),
        "budgets": Size((1024, 2048), (128,)),
        "questions": Size(64, 2),
        "read_whole": Size(8, 1),
    },
    described=lambda given: _on(given, "bfloat16"),
    tables=_shared_tables,
)
