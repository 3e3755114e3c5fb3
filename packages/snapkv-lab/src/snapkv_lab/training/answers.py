"""What heads are trained on: the model's own answers to questions about documents.

A head learns to guess what this model will say, so the model says it first (self-distillation,
Medusa section 2.3.2). Answers are written to a file batch by batch; a run that was stopped goes on
behind the last one.
"""

import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from snapkv.app.answering import end_token_ids, generate_options
from snapkv.app.answering_together import until_end
from snapkv.app.models import LoadedModel
from snapkv.app.prompts import question_prompt
from snapkv.app.settings import GenerationSettings, MedusaTraining
from snapkv.cache.saving.writing import append_line, open_for_lines, replace_file
from snapkv.errors import InvalidArgumentError

QUESTIONS = (
    "What is this text about? Answer in a few sentences.",
    "Summarize the text above.",
    "Explain the most important part of the text step by step.",
    "Which facts does the text state? List them.",
    "Write a short introduction to the text for a beginner.",
    "Repeat the first paragraph of the text word for word.",
)
"""Asked in turn, one per passage."""

Progress = Callable[[str, int, int], None]
"""Takes what is done now, and how much of how much of it is done."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A prompt and what the model answered, as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AnswerWriter:
    """Has a model answer questions about passages of documents.

    The plan says how many, how long, and in which order.
    """

    loaded: LoadedModel
    texts: Sequence[str]
    plan: MedusaTraining

    def into(self, path: Path, progress: Progress) -> list[Exchange]:
        """All answers; those the file holds already are not generated again.

        Raises:
            OutputError: the file cannot be written.
            InvalidArgumentError: the documents have fewer passages than answers are wanted, or the
                file is of another run.
        """
        prompts = self._prompts()
        done = list(_read(path, prompts))
        with open_for_lines(path) as file:
            while len(done) < self.plan.answers:
                progress("answering", len(done), self.plan.answers)
                asked = prompts[len(done) : len(done) + self.plan.batch]
                answered = self._answered(asked)
                for exchange in answered:
                    line = {"prompt": exchange.prompt, "answer": exchange.answer}
                    append_line(file, json.dumps(line), path)
                done += answered
        return done

    def _prompts(self) -> list[tuple[int, ...]]:
        passages, plan = list(self._passages()), self.plan
        if len(passages) < plan.answers:
            raise InvalidArgumentError(
                f"data: expected text for {plan.answers} passages of {plan.passage_tokens} tokens, "
                f"got {len(passages)}; pass more documents, or ask for fewer answers"
            )
        random.Random(plan.seed).shuffle(passages)
        tokenizer = self.loaded.tokenizer
        return [
            tuple(
                question_prompt(tokenizer, passage, QUESTIONS[number % len(QUESTIONS)])
                .token_ids(tokenizer)[0]
                .tolist()
            )
            for number, passage in enumerate(passages[: plan.answers])
        ]

    def _passages(self) -> Iterator[str]:
        tokenizer, length = self.loaded.tokenizer, self.plan.passage_tokens
        for text in self.texts:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            for start in range(0, len(ids) - length + 1, length):
                yield tokenizer.decode(ids[start : start + length])

    def _answered(self, prompts: Sequence[tuple[int, ...]]) -> list[Exchange]:
        """The model's greedy answers to left-padded prompts, end tokens included."""
        model, longest = self.loaded.model, max(map(len, prompts))
        settings = GenerationSettings(max_new_tokens=self.plan.max_new_tokens)
        ends = end_token_ids(model, settings)
        padded = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        rows = [torch.tensor(prompt) for prompt in prompts]
        ids = padded(rows, padding_value=next(iter(ends), 0))
        mask = padded([torch.ones_like(row) for row in rows])
        output = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            past_key_values=DynamicCache(config=model.config.get_text_config(decoder=True)),
            **generate_options(model, settings),
        )
        return [
            Exchange(prompt=prompt, answer=until_end(row, ends))
            for prompt, row in zip(prompts, output[:, longest:].tolist(), strict=True)
        ]


def _read(path: Path, prompts: Sequence[tuple[int, ...]]) -> Iterator[Exchange]:
    """What a file holds; a line that was cut off when the run was stopped is taken out of it."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        replace_file(path, whole)
    for number, line in enumerate(whole.splitlines()[: len(prompts)]):
        found = json.loads(line)
        if tuple(found["prompt"]) != prompts[number]:
            raise InvalidArgumentError(
                f"to: expected answers to the prompts of this run in {path}, got others; pass "
                "another folder, or the documents and settings it was begun with"
            )
        yield Exchange(prompt=prompts[number], answer=tuple(found["answer"]))
