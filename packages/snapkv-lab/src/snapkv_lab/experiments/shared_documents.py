"""Many questions about one document in vLLM: shared and compressed, or read with every request.

One engine answers every question in turns: from the document that was compressed once, behind a
cached prefix as stock vLLM does, and, for some questions, reading all of it. Needs
`make .venv-vllm/.installed`.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

from snapkv.app.models import LoadedModel
from snapkv.policies.kvzip import INSTRUCTION
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.engine import Engine, measured_on
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, of, table
from snapkv_lab.experiments.records import Row, environment_line
from snapkv_vllm import engine_args
from snapkv_vllm.documents import words
from snapkv_vllm.documents.sharing import Sharing

DOCUMENT_TOKENS = 4000
BUDGETS = (1024, 2048)
READ_WHOLE = 8
BLOCK_TOKENS = 32
HEADS = {"snapkv": "alike", "adakv": "of different length"}
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


class DocumentEngine(Engine):
    """vLLM over the demo model, which shares documents."""

    def __init__(self, policy: str) -> None:
        options = engine_args(
            budget=BUDGETS[0],
            policy=policy,
            sharing=Sharing(),
            max_model_len=MOST_TOKENS,
            block_size=BLOCK_TOKENS,
            dtype="bfloat16",
            kv_cache_memory_bytes=2 << 30,
            enable_prefix_caching=True,
        )
        super().__init__(**options)

    @property
    def free_blocks(self) -> int:
        """Those that hold nothing that anybody needs."""
        return int(self.pool.get_num_free_blocks())

    def send(self, ids: list[int], own: dict[str, Any], tokens: int, **more: Any) -> Any:
        """What the engine puts out, greedily."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=own, **more
        )
        (output,) = self.llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        return output


def measure(given: Given) -> Iterator[Row]:
    """With heads that keep as many tokens, and with heads that do not."""
    text, measured = make_text(given.loaded.tokenizer), measured_on(given.loaded, dtype="bfloat16")
    for policy in HEADS:
        engine = DocumentEngine(policy)
        for row in rows_of(engine, text, given.loaded):
            yield row | {"policy": policy, **measured}
        engine.close()


def rows_of(engine: DocumentEngine, text: Text, loaded: LoadedModel) -> Iterator[Row]:
    """A row for reading and for every way to ask."""
    instruction = loaded.tokenizer(INSTRUCTION, add_special_tokens=False)["input_ids"]
    common = {
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


def ask(engine: DocumentEngine, text: Text, ways: dict[str, Any], tokenizer: Any) -> Iterator[Row]:
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


def _tables(rows: list[Row]) -> list[str]:
    registered = [
        row | {"heads": HEADS[row["policy"]], "of_once": row["seconds"] / row["read_once_seconds"]}
        for row in of(rows, part="register")
    ]
    blocks = {(row["policy"], row["way"]): row["blocks"] for row in registered}
    whole_blocks = -(-rows[0]["document_tokens"] // BLOCK_TOKENS)
    asked = [
        row
        | {"heads": HEADS[row["policy"]], "ms": median(row["first_token_ms"])}
        | {"blocks": blocks.get((row["policy"], row["way"]), whole_blocks)}
        for row in of(rows, part="ask")
    ]
    cached = {row["policy"]: row["ms"] for row in of(asked, way="whole, prefix cached")}
    return [
        table(
            asked,
            {
                "document": "{way}",
                "heads": "{heads}",
                "blocks held": "{blocks}",
                "first token ms": "{ms:.0f}",
                "of prefix cached": lambda row: f"{row['ms'] / cached[row['policy']]:.2f}",
                "right": "{right}/{asked}",
            },
        ),
        "## Registering a document",
        table(
            registered,
            {
                "tokens kept": "{budget:,}",
                "heads": "{heads}",
                "seconds": "{seconds:.0f}",
                "of reading it once": "{of_once:.1f}",
            },
        ),
    ]


EXPERIMENT = Experiment(
    name="shared_documents",
    title="One document, 64 questions, in vLLM",
    measure=measure,
    measured=lambda rows: environment_line(of(rows, part="ask")),
    tables=_tables,
    shown={
        "registering": Shown(
            "Registering a document",
            ("tokens kept", "heads", "seconds", "of reading it once"),
            ("1,024 | alike", "1,024 | of different length"),
        ),
        "documents": Shown(
            "One document, 64 questions, in vLLM",
            ("document", "heads", "blocks held", "of prefix cached", "right"),
            (
                "whole, prefix cached | alike",
                "shared, 1024 tokens | alike",
                "shared, 1024 tokens | of different length",
                "shared, 2048 tokens | of different length",
            ),
        ),
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
