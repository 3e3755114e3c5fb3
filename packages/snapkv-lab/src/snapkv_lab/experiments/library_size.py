"""What a library's folder costs by the number of its documents, however they are read.

Paragraphs of SQuAD, each under as many names as it takes, are added to one library by a model of
one small random layer, so that reading is cheap and what is left is the folder's. At every size:
what a document cost since the last size, how long the first search after that takes, which brings
the index up to date, how long a new `Library` takes for its first search then, the slowest of five,
and how long searches take after that.
"""

import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from snapkv_app import Library
from snapkv_lab.evaluate.corpora import load_corpus
from snapkv_lab.experiments.experiment import RunContext
from snapkv_lab.measure.timing import measure_time
from snapkv_lab.rows import Row

SEED, QUESTIONS, OPENINGS, SETTLING_SECONDS = 19, 100, 5, 3


def rows_by_size(given: RunContext) -> Iterator[Row]:
    corpus, tokenizer = load_corpus("squad"), given.loaded.tokenizer
    model = _small_model(len(tokenizer))
    drawn = random.Random(SEED).sample(list(corpus.questions), QUESTIONS)
    questions = [each.text for each in drawn]
    copies = (
        (f"{passage.title}, copy {number}", passage.text)
        for number in itertools.count()
        for passage in corpus.passages
    )
    with tempfile.TemporaryDirectory() as folder:
        there = 0
        for size in given.documents_added:
            new = list(itertools.islice(copies, size - there))
            library = Library(folder)
            seconds = _seconds(library.add, model, tokenizer, new)
            yield {
                "benchmark": "library",
                "documents": size,
                "add_ms": round(1e3 * seconds / len(new), 2),
                **_searched(folder, questions),
                "record_bytes": _bytes(Path(folder) / "documents") // size,
                "index_bytes": (Path(folder) / "words.sqlite").stat().st_size // size,
            }
            there = size


def _searched(folder: str, questions: Sequence[str]) -> Row:
    """How long it takes to find documents: right after adding, in a new `Library`, and later."""
    first = _seconds(lambda: Library(folder).search(questions[0]))
    time.sleep(SETTLING_SECONDS)
    opened = [_seconds(lambda: Library(folder).search(questions[0])) for _ in range(OPENINGS)]
    library = Library(folder)
    each = [1e3 * _seconds(library.search, question) for question in questions]
    return {
        "first_search_seconds": first,
        "opening_seconds": max(opened),
        "search_ms": median(each),
        "slowest_search_ms": max(each),
    }


def _small_model(vocabulary: int) -> Any:
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).eval()


def _seconds(run: Callable[..., object], *given: Any) -> float:
    return round(measure_time(lambda: run(*given)).wall_ms / 1000, 5)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
