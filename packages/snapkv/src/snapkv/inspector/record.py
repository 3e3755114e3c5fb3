"""Recording what methods keep of one prompt: a reading shown to all of them, and their answers."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from snapkv.app.answering import Answer, costs, end_token_ids, prompt_ids
from snapkv.app.comparison import Comparison
from snapkv.app.models import LoadedModel
from snapkv.app.observing import observed
from snapkv.app.prefills import Exact
from snapkv.app.prompt_end import PromptEnd
from snapkv.app.prompt_reader import PromptReader
from snapkv.app.prompts import Prompt
from snapkv.app.protection import Protection
from snapkv.app.settings import GenerationSettings
from snapkv.app.text_files import TextFile
from snapkv.inspector.changes import word_changes
from snapkv.inspector.curve import BudgetPoint, likelihood
from snapkv.inspector.finding import needed_spans, sentence
from snapkv.inspector.heat import Heat, heat
from snapkv.inspector.leave_out import LeaveOut, Span, leave_out
from snapkv.inspector.packing import is_logarithmic, levels, packed_bits, packed_scores
from snapkv.inspector.pieces import token_texts
from snapkv.inspector.places import Places
from snapkv.inspector.seen import KeptOf, SeenLayer, telling_head
from snapkv.policies import FullCache, Policy

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
        kept: how much of what the answer needs was kept; None where that is not known.
        heat: the vote of the head that tells most of what the answer needs; None where none does.
    """

    label: str
    answer: Answer
    layers: list[LayerRecord]
    bin_tokens: int
    kept: KeptOf | None
    heat: Heat | None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything the page shows.

    Attributes:
        pieces: the text of every token of the prompt.
        full: the answer of the full cache.
        methods: one record for every policy.
        leave_out: which parts of the prompt the answer needs.
        places: where each of them stands, in words.
        needed: where the parts stand that the answer needs, the most missed first.
        answer_start: the greedy answer that those were found with, as text.
        other_layers: layers that no method compresses.
        curve: the first method at several budgets, the smallest first.
        full_likelihood: of the full cache's answer to itself; see `curve.likelihood`.
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
        """As the page reads it."""
        return {
            "pieces": self.pieces,
            "full": self._answered(self.full),
            "methods": [
                {
                    "label": method.label,
                    "policy": method.answer.policy,
                    "sentence": self.sentence(method),
                    "answer": self._answered(method.answer),
                    "layers": [asdict(layer) for layer in method.layers],
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
    documents: Sequence[TextFile] = (),
    on_step: Callable[[str, int, int], None] | None = None,
) -> Inspection:
    """Read a prompt once for all methods, then answer from the full cache and from each of theirs.

    Args:
        loaded: model and tokenizer.
        prompt: what the model continues.
        policies: a label and a policy each.
        settings: of the answers.
        checks: spans that are hidden from the answer; 0 to leave that out.
        budgets: a number of tokens, and the method that is to answer with that budget, each.
        documents: what the prompt holds, in its order, to say where in them something stands.
        on_step: told what comes next.

    Raises:
        PromptTooLongError: prompt and answer need more positions than the model has.
        UnsupportedModelError: the model cannot be compressed correctly.
        OutOfMemoryError: the device is full.
    """
    answers = [label for label, _ in policies] + [f"budget {budget:,}" for budget, _ in budgets]
    steps = _Steps(["reading", "hiding parts", "full", *answers], on_step)
    known = [loaded.completed(policy) for _, policy in policies]
    shown, left_out, other_layers = _looked_at(loaded, prompt, known, settings, checks, steps)
    reader = PromptReader(loaded, prompt, settings, [Exact()] * (1 + len(policies) + len(budgets)))

    def ask(policy: Policy, ends: list[PromptEnd] | None = None) -> Answer:
        steps.next()
        return reader.answer(policy, Exact(), Protection(), ends)

    full_end: list[PromptEnd] | None = [] if budgets else None
    full = ask(FullCache(), full_end)
    full_likelihood = None if full_end is None else likelihood(loaded, full, full_end)
    pieces = token_texts(loaded.tokenizer, prompt)
    places = Places(pieces, documents)
    return Inspection(
        pieces=pieces,
        full=full,
        methods=[
            with_answer(label=label, answer=ask(policy))
            for (label, policy), with_answer in zip(policies, shown, strict=True)
        ],
        leave_out=left_out,
        places=[places.of(span.start, span.stop) for span in left_out.spans],
        needed=[places.of(span.start, span.stop) for span in needed_spans(left_out.spans)],
        answer_start=loaded.tokenizer.decode(left_out.answer_ids, skip_special_tokens=True),
        other_layers=other_layers,
        curve=[_point(loaded, budget, policy, ask, full) for budget, policy in budgets],
        full_likelihood=full_likelihood,
    )


class _Steps:
    """Tells what comes next, and how much of all has been done."""

    def __init__(
        self, names: Sequence[str], on_step: Callable[[str, int, int], None] | None
    ) -> None:
        self._names, self._on_step, self._done = names, on_step, 0

    def next(self) -> None:
        if self._on_step:
            self._on_step(self._names[self._done], self._done, len(self._names))
        self._done += 1


def _point(
    loaded: LoadedModel,
    budget: int,
    policy: Policy,
    ask: Callable[[Policy, list[PromptEnd]], Answer],
    full: Answer,
) -> BudgetPoint:
    ends: list[PromptEnd] = []
    given = ask(policy, ends)
    return BudgetPoint(budget=budget, answer=given, likelihood=likelihood(loaded, full, ends))


def _looked_at(
    loaded: LoadedModel,
    prompt: Prompt,
    policies: Sequence[Policy],
    settings: GenerationSettings,
    checks: int,
    steps: _Steps,
) -> tuple[list[Callable[..., MethodRecord]], LeaveOut, int]:
    """What every method kept of a prompt, what its answer needs, and layers that none compresses.

    The full cache of the reading is gone when others are filled.
    """
    ids = prompt_ids(loaded, prompt, settings)
    steps.next()
    reading = observed(
        loaded,
        ids,
        max(policy.query_tokens for policy in policies),
        lambda layer: [SeenLayer.of(policy, layer) for policy in policies],
        frozenset().union(*(policy.needs for policy in policies)),
    )
    steps.next()
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
    by_method = zip(*reading.seen.values(), strict=True)
    shown = [_shown(layers, needed, ids.shape[1]) for layers in by_method]
    return shown, left_out, len(reading.cache.layers) - len(reading.seen)


def _shown(
    seen: Sequence[SeenLayer], needed: Sequence[Span], tokens: int
) -> Callable[..., MethodRecord]:
    """A method's record, which its label and its answer make whole; no tensor is held.

    Where its scores would be too many, neighbours share a byte.
    """
    bin_tokens = -(-sum(layer.kept.numel() for layer in seen) // MOST_SCORE_BYTES)
    layers = [_packed(layer, bin_tokens) for layer in seen]
    kept = KeptOf.parts(seen, needed)
    picture = heat(seen, telling_head(seen, _positions(needed, tokens)))
    return partial(MethodRecord, layers=layers, bin_tokens=bin_tokens, kept=kept, heat=picture)


def _positions(spans: Sequence[Span], tokens: int) -> Tensor:
    """(T,) bool, which positions lie in the spans."""
    found = torch.zeros(tokens, dtype=torch.bool)
    for span in spans:
        found[span.start : span.stop] = True
    return found


def _packed(seen: SeenLayer, bin_tokens: int) -> LayerRecord:
    record = LayerRecord(
        layer=seen.states.layer_idx,
        kept_tokens=seen.kept.sum(dim=-1).tolist(),
        bits=packed_bits(seen.kept),
    )
    if seen.scores is None or seen.cuts is None:
        return record
    at = levels(seen.cuts[:, None], seen.scores)[:, 0].tolist()
    return replace(
        record,
        votes=None if seen.votes is None else packed_scores(seen.votes, bin_tokens),
        scores=packed_scores(seen.scores, bin_tokens),
        cuts=[None if level != level else round(level, 2) for level in at],
        logarithmic=is_logarithmic(seen.scores),
    )
