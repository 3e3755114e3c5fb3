"""Many questions about one document in vLLM: shared and compressed, or read with every request.

    .venv-vllm/bin/python -m snapkv_lab.experiments shared_documents  measure and render the page
    .venv-vllm/bin/python -m snapkv_lab.experiments shared_documents --render
        only render it from the rows

One engine answers every question in turns: from the document that was compressed once, behind a
cached prefix as stock vLLM does, and, for some questions, reading all of it. Needs
`make .venv-vllm/.installed`. Rows: `docs/results/shared_documents.jsonl`.
"""

import os

# One engine in this process, threads as the system gives them.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import gc
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from snapkv.app.models import LoadedModel, load, place_of
from snapkv.policies.kvzip import INSTRUCTION
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.environment import describe_environment
from snapkv_lab.experiments.records import (
    RESULTS,
    TABLES,
    Row,
    environment_line,
    markdown_table,
    measure_or_render,
    tables_page,
)
from snapkv_vllm import engine_args
from snapkv_vllm.documents import words
from snapkv_vllm.documents.sharing import Sharing
from snapkv_vllm.versions import installed

ROWS = RESULTS / "shared_documents.jsonl"
PAGE = TABLES / "shared_documents.md"

DOCUMENT_TOKENS = 4000
BUDGETS = (1024, 2048)
READ_WHOLE = 8
BLOCK_TOKENS = 32
HEADS = {"snapkv": "alike", "adakv": "of different length"}
POLICIES = tuple(HEADS)
MOST_TOKENS = 8192
ANSWER_TOKENS = 6

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


@dataclass(frozen=True, kw_only=True)
class Text:
    """A document with a few facts, each asked for in several ways.

    Attributes:
        ids: its tokens.
        questions: token ids that follow it.
        answers: the digits each should be answered with.
    """

    ids: list[int]
    questions: list[list[int]]
    answers: list[str]


def make_text(tokenizer: Any) -> Text:
    """Prose, between whose sentences the numbers of all places stand."""
    draw = random.Random(1)
    numbers = [draw.randrange(1000, 10_000) for _ in PLACES]
    facts = [
        f" Special magic number for {place} is {number}."
        for place, number in zip(PLACES, numbers, strict=True)
    ]
    prose = load_haystack().text.replace("\n", " ")
    sentences = [f"{one}." for one in prose.split(".")[:400]]
    ids: list[int] = []
    for taken in range(1, len(sentences)):
        spread = [len(facts) * place // taken for place in range(taken + 1)]
        pieces = [
            sentences[place] + "".join(facts[spread[place] : spread[place + 1]])
            for place in range(taken)
        ]
        longer = tokenizer("".join(pieces))["input_ids"]
        if len(longer) > DOCUMENT_TOKENS:
            break
        ids = longer
    pairs = [
        (asked, place, number)
        for asked in ASKED
        for place, number in zip(PLACES, numbers, strict=True)
    ]
    questions = [
        f"\n\nQuestion: {asked.format(place=place)}"
        f"\nAnswer: The special magic number for {place} is"
        for asked, place, _ in pairs
    ]
    return Text(
        ids=ids,
        questions=tokenizer(questions, add_special_tokens=False)["input_ids"],
        answers=[str(number) for _, _, number in pairs],
    )


class Engine:
    """vLLM over the demo model, which shares documents."""

    def __init__(self, policy: str) -> None:
        from vllm import LLM

        options = engine_args(
            budget=BUDGETS[0],
            policy=policy,
            sharing=Sharing(),
            max_model_len=MOST_TOKENS,
            block_size=BLOCK_TOKENS,
            dtype="bfloat16",
            kv_cache_memory_bytes=2 << 30,
            enable_prefix_caching=True,
            enforce_eager=True,
            disable_log_stats=True,
        )
        self._llm = LLM(place_of("demo"), **options)
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._pool = self._core.scheduler.kv_cache_manager.block_pool

    @property
    def free_blocks(self) -> int:
        """Those that hold nothing that anybody needs."""
        return int(self._pool.get_num_free_blocks())

    def close(self) -> None:
        """Give the memory back."""
        self._core.shutdown()
        del self._llm, self._core, self._pool
        gc.collect()

    def send(self, ids: list[int], own: dict[str, Any], tokens: int, **more: Any) -> Any:
        """What the engine puts out, greedily."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=own, **more
        )
        (output,) = self._llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        return output


def measure() -> Iterator[Row]:
    """With heads that keep as many tokens, and with heads that do not."""
    loaded = load("demo")
    text, environment = make_text(loaded.tokenizer), describe_environment()
    for policy in POLICIES:
        engine = Engine(policy)
        for row in rows_of(engine, text, loaded):
            yield row | {"policy": policy, "environment": environment | {"vllm": installed()}}
        engine.close()


def rows_of(engine: Engine, text: Text, loaded: LoadedModel) -> Iterator[Row]:
    """A row for reading and for every way to ask."""
    instruction = loaded.tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]
    common = {
        "model": loaded.description()
        | {"attn_implementation": "vLLM CPU_ATTN", "dtype": "bfloat16"},
        "document_tokens": len(text.ids),
        "questions": len(text.questions),
    }
    whole: dict[str, Any] = {"snapkv_budget": 0}
    engine.send(text.ids[1:], whole, 1)  # the first request of all takes longer
    read, _ = timed(lambda: engine.send([*text.ids, 1], whole, 1))
    ways: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
        "whole, prefix cached": (whole, {}, len(text.questions)),
        "whole, read anew": (whole, {"skip_reading_prefix_cache": True}, READ_WHOLE),
    }
    for budget in BUDGETS:
        name, free = f"shared, {budget} tokens", engine.free_blocks
        own = {words.REGISTER: name, words.INSTRUCTION: instruction, words.BUDGET: budget}
        seconds, _ = timed(lambda own=own: engine.send([*text.ids, 1], own, 1))
        yield common | {
            "part": "register",
            "way": name,
            "budget": budget,
            "seconds": seconds,
            "read_once_seconds": read,
            "blocks": free - engine.free_blocks,
        }
        ways[name] = ({words.DOCUMENT: name}, {}, len(text.questions))
    yield from (common | row for row in ask(engine, text, ways, loaded.tokenizer))


def ask(engine: Engine, text: Text, ways: dict[str, Any], tokenizer: Any) -> Iterator[Row]:
    """Every question in every way, in turns."""
    first: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, list[list[int]]] = {name: [] for name in ways}
    for number, question in enumerate(text.questions):
        for name, (own, more, questions) in ways.items():
            if number < questions:
                ids = text.ids + question
                seconds, _ = timed(
                    lambda ids=ids, own=own, more=more: engine.send(ids, own, 1, **more)
                )
                first[name].append(seconds)
                output = engine.send(ids, own, ANSWER_TOKENS)
                found[name].append(list(output.outputs[0].token_ids))
    for name, answers in found.items():
        right = [
            tokenizer.decode(ids).strip().startswith(expected)
            for ids, expected in zip(answers, text.answers, strict=False)
        ]
        yield {
            "part": "ask",
            "way": name,
            "asked": len(answers),
            "right": sum(right),
            "first_token_ms": [1000 * seconds for seconds in first[name]],
        }


def timed(work: Any) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    start = time.perf_counter()
    done = work()
    return time.perf_counter() - start, done


def render(rows: Sequence[Row]) -> str:
    """The tables of these rows."""
    registered = [row for row in rows if row["part"] == "register"]
    blocks = {(row["policy"], row["way"]): row["blocks"] for row in registered}
    asked = [row for row in rows if row["part"] == "ask"]
    whole_blocks = -(-rows[0]["document_tokens"] // BLOCK_TOKENS)
    cached = {
        row["policy"]: median(row["first_token_ms"])
        for row in asked
        if row["way"] == "whole, prefix cached"
    }
    lines = []
    for row in asked:
        middle = median(row["first_token_ms"])
        lines.append(
            (
                row["way"],
                HEADS[row["policy"]],
                str(blocks.get((row["policy"], row["way"]), whole_blocks)),
                f"{middle:.0f}",
                f"{middle / cached[row['policy']]:.2f}",
                f"{row['right']}/{row['asked']}",
            )
        )
    header = ("document", "heads", "blocks held", "first token ms", "of prefix cached", "right")
    reading = [
        (
            f"{row['budget']:,}",
            HEADS[row["policy"]],
            f"{row['seconds']:.0f}",
            f"{row['seconds'] / row['read_once_seconds']:.1f}",
        )
        for row in registered
    ]
    return tables_page(
        "shared_documents",
        "One document, 64 questions, in vLLM",
        environment_line(asked),
        markdown_table(header, lines),
        "## Registering a document",
        markdown_table(("tokens kept", "heads", "seconds", "of reading it once"), reading),
    )


if __name__ == "__main__":
    measure_or_render(__doc__, measure, render, rows=ROWS, page=PAGE)
