"""The costs of a library's folder by the number of its documents.

Paragraphs of SQuAD, each under as many names as needed, are added to one library by a model with
one small random layer. Reading is then cheap, and what remains are the costs of the folder.
Measured at every size are: the time to add a document since the last size; the time of the first
search after that, which updates the index; the time that a new `Library` takes for its first
search, the slowest of five; and the time of later searches.
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


def rows_by_size(context: RunContext) -> Iterator[Row]:
    """Yield a row with times and bytes for each size of the library, in ascending order.

    The sizes are `documents_added` of the run. The library is in a temporary folder.
    """
    corpus, tokenizer = load_corpus("squad"), context.loaded.tokenizer
    model = _small_model(len(tokenizer))
    chosen = random.Random(SEED).sample(list(corpus.questions), QUESTIONS)
    questions = [each.text for each in chosen]
    copies = (
        (f"{passage.title}, copy {number}", passage.text)
        for number in itertools.count()
        for passage in corpus.passages
    )
    with tempfile.TemporaryDirectory() as folder:
        added = 0
        for size in context.documents_added:
            new = list(itertools.islice(copies, size - added))
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
            added = size


def _searched(folder: str, questions: Sequence[str]) -> Row:
    """Measure the times of searches in a library, to which documents have just been added.

    Returns:
        A dictionary with "first_search_seconds", the time of the first search, which updates the
        index; "opening_seconds", the slowest first search of a new `Library`; and "search_ms" and
        "slowest_search_ms", the median and the largest time of later searches.
    """
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
    """Return a model of one small layer with random weights, which are always the same."""
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


def _seconds(run: Callable[..., object], *context: Any) -> float:
    return round(measure_time(lambda: run(*context)).wall_ms / 1000, 5)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
