"""Record what methods keep of one prompt, which is read once for all of them, and their answers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from snapkv.app.answering import Answer, costs, end_token_ids, prompt_ids
from snapkv.app.comparison import Comparison
from snapkv.app.likelihood import References
from snapkv.app.models import LoadedModel
from snapkv.app.observing import observed
from snapkv.app.prefills import Exact
from snapkv.app.prompt_end import PromptEnd
from snapkv.app.prompt_reader import PromptReader
from snapkv.app.prompts import Prompt
from snapkv.app.protection import Protection
from snapkv.app.settings import GenerationSettings
from snapkv.inspector.leave_out import LeaveOut, Span, leave_out, needed_spans
from snapkv.inspector.packing import Heat, heat, is_logarithmic, levels, packed_bits, packed_scores
from snapkv.inspector.scores import KeptOf, SeenLayer, telling_head
from snapkv.inspector.words import Places, sentence, word_changes
from snapkv.library.records import Text
from snapkv.policies import FullCache, Policy
from snapkv.policies.default import asked_by

MOST_SCORE_BYTES = 4 * 2**20
"""Limit for a method's votes, and for its scores; beyond it, neighbours share a byte."""

_CHECKED_ANSWER_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class MethodRecord:
    """A method, what it kept, and what it answered.

    Attributes:
        label: its name on the page.
        answer: from the compressed cache.
        layers: the compressed layers, packed for the page, see `_packed`.
        bin_tokens: neighbours that share a byte of votes and scores.
        kept: how much of what the answer needs was kept; None if unknown.
        heat: the vote of the head that votes most for what the answer needs; None if none does.
    """

    label: str
    answer: Answer
    layers: list[dict[str, Any]]
    bin_tokens: int
    kept: KeptOf | None
    heat: Heat | None


@dataclass(frozen=True, kw_only=True)
class BudgetPoint:
    """The answer of a method at a budget.

    Attributes:
        budget: tokens per head and layer.
        answer: from that cache.
        likelihood: probability of a token of the full cache's answer under that cache, the
            geometric mean over its tokens, in [0, 1]; None if the model has too few positions.
    """

    budget: int
    answer: Answer
    likelihood: float | None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything the page shows.

    Attributes:
        pieces: the text of every token of the prompt.
        full: the answer of the full cache.
        methods: one record for every policy.
        leave_out: which parts of the prompt the answer needs.
        places: where each of them is, in words.
        needed: where the parts are that the answer needs, the largest loss first.
        answer_start: the greedy answer that they were found with, as text.
        other_layers: number of layers that are never compressed.
        curve: the first method at several budgets, the smallest first.
        full_likelihood: the same for the full cache; see `BudgetPoint.likelihood`.
    """

    pieces: list[str]
    full: Answer
    methods: list[MethodRecord]
    leave_out: LeaveOut
    places: list[str]
    needed: list[str]
    answer_start: str
    other_layers: int
    curve: list[BudgetPoint]
    full_likelihood: float | None

    def sentence(self, method: MethodRecord) -> str:
        """What the answer needs, and how much of it a method kept, in plain words."""
        cache = method.answer.cache
        share = cache.held_bytes / cache.full_bytes
        return sentence(self.leave_out.spans, self.needed, method.kept, share)

    def data(self) -> dict[str, Any]:
        """The record in the page's format."""
        return {
            "pieces": self.pieces,
            "full": self._answered(self.full),
            "methods": [
                {
                    "label": method.label,
                    "policy": method.answer.policy,
                    "sentence": self.sentence(method),
                    "answer": self._answered(method.answer),
                    "layers": method.layers,
                    "bin_tokens": method.bin_tokens,
                    "kept": None if method.kept is None else asdict(method.kept),
                    "heat": None if method.heat is None else asdict(method.heat),
                }
                for method in self.methods
            ],
            "spans": [
                asdict(span) | {"place": place}
                for span, place in zip(self.leave_out.spans, self.places, strict=True)
            ],
            "checked_answer": self.answer_start,
            "other_layers": self.other_layers,
            "growing_share": self.methods[0].answer.cache["growing_share"],
            "curve": [
                self._answered(point.answer)
                | {"budget": point.budget, "likelihood": point.likelihood}
                for point in self.curve
            ],
            "full_likelihood": self.full_likelihood,
        }

    def _answered(self, given: Answer) -> dict[str, Any]:
        return {
            "text": given.text,
            "finish_reason": given.finish_reason,
            "same": Comparison.of(given, self.full).same,
            "changes": word_changes(self.full.text, given.text),
            **costs(given),
        }


def inspect_prompt(
    loaded: LoadedModel,
    prompt: Prompt,
    policies: Sequence[tuple[str, Policy]],
    settings: GenerationSettings,
    *,
    checks: int = 64,
    budgets: Sequence[tuple[int, Policy]] = (),
    documents: Sequence[Text] = (),
    on_step: Callable[[str, int, int], None] | None = None,
) -> Inspection:
    """Read a prompt once for all methods, then answer from the full cache and from each of theirs.

    Args:
        loaded: model and tokenizer.
        prompt: what the model continues.
        policies: a label and a policy each.
        settings: how answers are generated.
        checks: how many spans to mask for the answer; 0 for none.
        budgets: pairs of a number of tokens and the method with that budget.
        documents: the documents in the prompt, in order, to name places in them.
        on_step: called with a description of every next step.

    Raises:
        PromptTooLongError: prompt and answer need more positions than the model has.
        UnsupportedModelError: the model cannot be compressed correctly.
        OutOfMemoryError: the device is full.
    """
    names = ["reading", "hiding parts", "full", *(label for label, _ in policies)]
    names += [f"budget {budget:,}" for budget, _ in budgets]
    steps = iter(enumerate(names))

    def begin_next() -> None:
        done, name = next(steps)
        if on_step:
            on_step(name, done, len(names))

    asked = prompt.question_tokens(loaded.tokenizer)
    known = [asked_by(loaded.completed(policy), asked) for _, policy in policies]
    shown, left_out, other_layers = _looked_at(loaded, prompt, known, settings, checks, begin_next)
    reader = PromptReader(loaded, prompt, settings, [Exact()] * (1 + len(policies) + len(budgets)))

    def ask(policy: Policy, ends: list[PromptEnd] | None = None) -> Answer:
        begin_next()
        return reader.answer(policy, Exact(), Protection(), ends)

    def likelihood(ends: list[PromptEnd]) -> float | None:
        loss = References(token_ids=[full.token_ids]).loss(loaded, ends.pop())
        return None if loss is None else math.exp(-loss)

    def point(budget: int, policy: Policy) -> BudgetPoint:
        ends: list[PromptEnd] = []
        given = ask(policy, ends)
        return BudgetPoint(budget=budget, answer=given, likelihood=likelihood(ends))

    full_end: list[PromptEnd] = []
    full = ask(FullCache(), full_end if budgets else None)
    full_likelihood = likelihood(full_end) if budgets else None
    pieces = token_texts(loaded.tokenizer, prompt)
    places = Places(pieces, documents)
    return Inspection(
        pieces=pieces,
        full=full,
        methods=[
            MethodRecord(label=label, answer=ask(policy), **seen)
            for (label, policy), seen in zip(policies, shown, strict=True)
        ],
        leave_out=left_out,
        places=[places.place_name(span.start, span.stop) for span in left_out.spans],
        needed=[places.place_name(span.start, span.stop) for span in needed_spans(left_out.spans)],
        answer_start=loaded.tokenizer.decode(left_out.answer_ids, skip_special_tokens=True),
        other_layers=other_layers,
        curve=[point(budget, policy) for budget, policy in budgets],
        full_likelihood=full_likelihood,
    )


def token_texts(tokenizer: Any, prompt: Prompt) -> list[str]:
    """One text per token; joined, they are the prompt's text.

    If several tokens make one character, the first one has it and the others are empty, as are
    tokens that the tokenizer adds. If the tokenizer gives no offsets, each token is decoded on its
    own.
    """
    ids, offsets = prompt.encoded(tokenizer, offsets=tokenizer.is_fast)
    if not tokenizer.is_fast:
        return [tokenizer.decode([index]) for index in ids]
    starts, reached = [], 0
    for start, _ in offsets:
        reached = max(reached, start)
        starts.append(reached)
    stops = [*starts[1:], len(prompt.text)]
    return [prompt.text[start:stop] for start, stop in zip(starts, stops, strict=True)]


def _looked_at(
    loaded: LoadedModel,
    prompt: Prompt,
    policies: Sequence[Policy],
    settings: GenerationSettings,
    checks: int,
    begin_next: Callable[[], None],
) -> tuple[list[dict[str, Any]], LeaveOut, int]:
    """What every method kept of a prompt, what its answer needs, and uncompressed layers.

    The full cache is freed before others are filled.
    """
    ids = prompt_ids(loaded, prompt, settings)
    begin_next()
    reading = observed(
        loaded,
        ids,
        max(policy.query_tokens for policy in policies),
        lambda layer: replace(layer, queries=layer.queries.clone()),  # frees the others
        frozenset().union(*(policy.needs for policy in policies)),
    )
    layers = list(reading.seen.values())
    by_method = [SeenLayer.of_all(policy, layers) for policy in policies]
    begin_next()
    left_out = leave_out(
        loaded.model,
        reading.cache,
        reading.last_logits,
        checks=checks,
        answer_tokens=min(settings.max_new_tokens, _CHECKED_ANSWER_TOKENS),
        keep_last_tokens=max(getattr(policy, "window_size", 1) for policy in policies),
        end_ids=end_token_ids(loaded.model, settings),
    )
    needed = needed_spans(left_out.spans)
    shown = [_shown(seen, needed, ids.shape[1]) for seen in by_method]
    return shown, left_out, len(reading.cache.layers) - len(reading.seen)


def _shown(seen: Sequence[SeenLayer], needed: Sequence[Span], tokens: int) -> dict[str, Any]:
    """The parts of a method's record without tensors; too many scores share bytes."""
    bin_tokens = -(-sum(layer.kept.numel() for layer in seen) // MOST_SCORE_BYTES)
    is_needed = torch.zeros(tokens, dtype=torch.bool)
    for span in needed:
        is_needed[span.start : span.stop] = True
    return {
        "layers": [_packed(layer, bin_tokens) for layer in seen],
        "bin_tokens": bin_tokens,
        "kept": KeptOf.parts(seen, needed),
        "heat": heat(seen, telling_head(seen, is_needed)),
    }


def _packed(seen: SeenLayer, bin_tokens: int) -> dict[str, Any]:
    """What one method kept of one layer.

    `cuts` are the levels, 0 to 255, of each head's lowest kept score, None if none was kept.
    If the method reports no scores, `votes`, `scores` and `cuts` are None.
    """
    record = {
        "layer": seen.states.layer_idx,
        "kept_tokens": seen.kept.sum(dim=-1).tolist(),
        "bits": packed_bits(seen.kept),
        "votes": None if seen.votes is None else packed_scores(seen.votes, bin_tokens),
        "scores": None,
        "cuts": None,
        "logarithmic": False,
    }
    if seen.scores is not None and seen.cuts is not None:
        at = levels(seen.cuts[:, None], seen.scores)[:, 0].tolist()
        record["scores"] = packed_scores(seen.scores, bin_tokens)
        record["cuts"] = [None if level != level else round(level, 2) for level in at]
        record["logarithmic"] = is_logarithmic(seen.scores)
    return record
