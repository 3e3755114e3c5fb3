"""A tiny random model with the demo's tokenizer, methods for it, and a task of a few words."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM

from snapkv import FullCache, SnapKV
from snapkv_app.models import LoadedModel
from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.task import Task
from snapkv_lab.rows import Row, read_rows
from tests.families import tiny_config

METHODS = (
    Method(label="full", policy=FullCache()),
    Method(label="snapkv@64", policy=SnapKV(64)),
    Method(label="snapkv@40", policy=SnapKV(40)),
)

TIMES = ("token_ms", "first_token_ms")


def tiny_loaded(
    tokenizer: Any, positions: int = 512, family: str = "llama", layers: int = 2, **changed: Any
) -> LoadedModel:
    """Return the model, whose answers are noise but always the same."""
    torch.manual_seed(0)
    config = tiny_config(
        family,
        vocab_size=len(tokenizer),
        num_hidden_layers=layers,
        max_position_embeddings=positions,
        eos_token_id=tokenizer.eos_token_id,
        **changed,
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    return LoadedModel(model=model, tokenizer=tokenizer, name="tiny", revision=None)


def save_tiny(folder: Path, tokenizer: Any, positions: int = 512) -> Path:
    tiny_loaded(tokenizer, positions).model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def records(folder: Path) -> list[Row]:
    """Return the answers of a run."""
    return read_rows(folder / "samples.jsonl")


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records without the fields that differ from run to run."""
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records]


@dataclass(frozen=True, kw_only=True)
class Keys(Task):
    """Where the key is, in a text of a given number of sentences.

    Args:
        sentences: before the question.
        each: samples of every length.
    """

    name: ClassVar[str] = "keys"
    metric: ClassVar[str] = "accuracy"
    axes: ClassVar[tuple[str, ...]] = ("sentences",)

    sentences: tuple[int, ...] = (8, 16)
    each: int = 2

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        for count in self.sentences:
            for number in range(self.each):
                yield Sample(
                    name=f"{count}/{number}",
                    cell={"sentences": count},
                    context=f"Door {number}. " + "The key is under the blue stone. " * count,
                    question="\n\nWhere is the key?",
                    plain_question="\n\nQuestion: Where is the key?\nAnswer:",
                    references=("under the blue stone",),
                    settings=GenerationSettings(max_new_tokens=3),
                )

    def score(self, sample: Sample, prediction: str) -> float:
        return float(sample.references[0] in prediction)
