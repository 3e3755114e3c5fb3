"""Recording what methods keep of one prompt: a reading shown to all of them, and their answers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from snapkv.app.answering import Answer, answer, end_token_ids, prompt_ids
from snapkv.app.models import LoadedModel
from snapkv.app.prompts import Prompt
from snapkv.app.settings import GenerationSettings
from snapkv.cache.last_queries import last_tokens
from snapkv.lab.evaluate.asking import costs
from snapkv.lab.evaluate.store import Progress
from snapkv.lab.inspect.leave_out import LeaveOut, leave_out
from snapkv.lab.inspect.packing import is_logarithmic, levels, packed_bits, packed_scores
from snapkv.lab.inspect.pieces import token_texts
from snapkv.lab.inspect.scores import kept_mask, rating
from snapkv.lab.study.reading import Observed, observed
from snapkv.policies import FullCache, Policy, PromptLayer

MOST_SCORE_BYTES = 4 * 2**20
"""Of all votes of a method on the page, and of all scores; beyond it neighbours share a byte."""

_CHECKED_ANSWER_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """What one method kept of one layer, packed for the page.

    Attributes:
        layer: its index in the model.
        kept_tokens: of each head.
        bits: which positions each head keeps; see `packing.packed_bits`.
        votes: before pooling; None where the method does not pool.
        scores: what the best are chosen by; None where the method does not show them.
        cuts: the level, 0 to 255, of each head's lowest kept score; None where none was kept.
        logarithmic: whether levels are powers of ten; see `packing.levels`.
    """

    layer: int
    kept_tokens: list[int]
    bits: str
    votes: str | None = None
    scores: str | None = None
    cuts: list[float | None] | None = None
    logarithmic: bool = False


@dataclass(frozen=True, kw_only=True)
class MethodRecord:
    """A method, what it kept, and what it answered.

    Attributes:
        label: its name on the page.
        answer: from the compressed cache.
        layers: of the layers that are compressed.
        bin_tokens: neighbours that share a byte of votes and scores.
    """

    label: str
    answer: Answer
    layers: list[LayerRecord]
    bin_tokens: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything the page shows.

    Attributes:
        pieces: the text of every token of the prompt.
        full: the answer of the full cache.
        methods: one record for every policy.
        leave_out: which parts of the prompt the answer needs.
        answer_start: the greedy answer that those were found with, as text.
        other_layers: layers that no method compresses.
    """

    pieces: list[str]
    full: Answer
    methods: list[MethodRecord]
    leave_out: LeaveOut
    answer_start: str
    other_layers: int

    def data(self) -> dict[str, Any]:
        """As the page reads it."""
        return {
            "pieces": self.pieces,
            "full": _answered(self.full),
            "methods": [
                {
                    "label": method.label,
                    "policy": method.answer.policy,
                    "answer": _answered(method.answer),
                    "layers": [asdict(layer) for layer in method.layers],
                    "bin_tokens": method.bin_tokens,
                }
                for method in self.methods
            ],
            "spans": [asdict(span) for span in self.leave_out.spans],
            "checked_answer": self.answer_start,
            "other_layers": self.other_layers,
        }


def inspect_prompt(
    loaded: LoadedModel,
    prompt: Prompt,
    policies: Sequence[tuple[str, Policy]],
    settings: GenerationSettings,
    *,
    checks: int = 64,
    on_step: Progress | None = None,
) -> Inspection:
    """Read a prompt once for all methods, then answer from the full cache and from each of theirs.

    Args:
        loaded: model and tokenizer.
        prompt: what the model continues.
        policies: a label and a policy each.
        settings: of the answers.
        checks: spans that are hidden from the answer; 0 to leave that out.
        on_step: told what comes next.

    Raises:
        PromptTooLongError: prompt and answer need more positions than the model has.
        UnsupportedModelError: the model cannot be compressed correctly.
        OutOfMemoryError: the device is full.
    """
    steps = ["reading", "hiding parts", "full", *[label for label, _ in policies]]

    def step(number: int) -> None:
        if on_step:
            on_step(steps[number], number, len(steps))

    ids = prompt_ids(loaded, prompt, settings)
    known = [(label, loaded.completed(policy)) for label, policy in policies]
    step(0)
    reading = observed(
        loaded,
        ids,
        max(policy.query_tokens for _, policy in known),
        lambda layer: [_record(policy, layer) for _, policy in known],
        frozenset().union(*(policy.needs for _, policy in known)),
    )
    step(1)
    left_out = _left_out(loaded, reading, [policy for _, policy in known], settings, checks)
    other_layers = len(reading.cache.layers) - len(reading.seen)
    seen = [list(of_method) for of_method in zip(*reading.seen.values(), strict=True)]
    del reading  # its full cache, before others are filled
    answers = []
    for number, policy in enumerate([FullCache(), *[policy for _, policy in known]], 2):
        step(number)
        answers.append(answer(loaded, prompt, policy, settings))
    return Inspection(
        pieces=token_texts(loaded.tokenizer, prompt),
        full=answers[0],
        methods=[
            _method(label, given, layers)
            for (label, _), given, layers in zip(known, answers[1:], seen, strict=True)
        ],
        leave_out=left_out,
        answer_start=loaded.tokenizer.decode(left_out.answer_ids, skip_special_tokens=True),
        other_layers=other_layers,
    )


def _left_out(
    loaded: LoadedModel,
    reading: Observed[Any],
    policies: Sequence[Policy],
    settings: GenerationSettings,
    checks: int,
) -> LeaveOut:
    return leave_out(
        loaded.model,
        reading.cache,
        reading.last_logits,
        checks=checks,
        answer_tokens=min(settings.max_new_tokens, _CHECKED_ANSWER_TOKENS),
        keep_last_tokens=max(getattr(policy, "window_size", 1) for policy in policies),
        end_ids=end_token_ids(loaded.model, settings),
    )


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What a method did to a layer, as tensors in main memory."""

    layer: int
    kept: Tensor
    votes: Tensor | None
    scores: Tensor | None
    cuts: Tensor | None

    def packed(self, bin_tokens: int) -> LayerRecord:
        kept_tokens = self.kept.sum(dim=-1).tolist()
        record = LayerRecord(layer=self.layer, kept_tokens=kept_tokens, bits=packed_bits(self.kept))
        if self.scores is None or self.cuts is None:
            return record
        at = levels(self.cuts[:, None], self.scores)[:, 0].tolist()
        return replace(
            record,
            votes=None if self.votes is None else packed_scores(self.votes, bin_tokens),
            scores=packed_scores(self.scores, bin_tokens),
            cuts=[None if level != level else round(level, 2) for level in at],
            logarithmic=is_logarithmic(self.scores),
        )


def _record(policy: Policy, states: PromptLayer) -> _Seen:
    """Ask a policy about a layer, as `snapkv.hf.attention` would."""
    layer = replace(states, queries=last_tokens(states.queries, policy.query_tokens))
    selection = policy.select(layer)
    kept = kept_mask(selection, layer)
    rated = rating(policy, layer, selection, kept)
    return _Seen(
        layer=layer.layer_idx,
        kept=kept.cpu(),
        votes=None if rated is None or rated.votes is None else rated.votes.cpu(),
        scores=None if rated is None else rated.scores.cpu(),
        cuts=None if rated is None else rated.cuts.cpu(),
    )


def _method(label: str, given: Answer, seen: Sequence[_Seen]) -> MethodRecord:
    """A method's record; where its scores would be too many, neighbours share a byte."""
    bin_tokens = -(-sum(layer.kept.numel() for layer in seen) // MOST_SCORE_BYTES)
    layers = [layer.packed(bin_tokens) for layer in seen]
    return MethodRecord(label=label, answer=given, layers=layers, bin_tokens=bin_tokens)


def _answered(given: Answer) -> dict[str, Any]:
    return {"text": given.text, "finish_reason": given.finish_reason, **costs(given)}
