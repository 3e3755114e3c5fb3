"""Answer a question with the full cache and with several methods and budgets, for a page.

The prompt is read one time for all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from snapkv.cache.shown import kept_counts, kept_of, token_texts
from snapkv.page import Page, Shown, Stop
from snapkv.page.packing import Ballot
from snapkv.page.words import answer_sentence, word_changes
from snapkv.policies import FullCache, Policy
from snapkv.policies.default import adapt_to_question
from snapkv_app.answering import Answer, Comparison, prompt_ids
from snapkv_app.inspector.ballots import ballots
from snapkv_app.models import LoadedModel
from snapkv_app.prefills import Exact
from snapkv_app.prompt_end import PromptEnd
from snapkv_app.prompt_reader import PromptReader
from snapkv_app.prompts import Prompt
from snapkv_app.protection import Protection
from snapkv_app.settings import GenerationSettings

CHOSEN = "chosen"
"""The label of the budget that was passed with a method."""

_UNVOTED = "this method counts no votes"


@dataclass(frozen=True, kw_only=True)
class BudgetRecord:
    """The answer of a method with one budget, and the tokens that the method keeps.

    Attributes:
        label: the budget.
        answer: the answer from the compressed cache.
        sentence: a sentence about the tokens that are kept at the end of the prompt.
        counts: (T,) int64, the number of heads in all layers that keep each token of the prompt.
        heads: the number of heads in all layers.
    """

    label: str
    answer: Answer
    sentence: str
    counts: Tensor
    heads: int


@dataclass(frozen=True, kw_only=True)
class MethodRecord:
    """All answers of one method, one for each budget, and the votes that it counts.

    Attributes:
        label: the name of the method on the page.
        budgets: the records, sorted by the memory of their caches.
        chosen: the record of the budget that was passed with the method.
        ballot: the votes for every token; None if the method counts no votes.
    """

    label: str
    budgets: list[BudgetRecord]
    chosen: BudgetRecord
    ballot: Ballot | None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything that the page of the inspector shows.

    Attributes:
        question: the question; empty if it is not known.
        pieces: the text of every token of the prompt.
        full: the answer of the full cache.
        methods: one record for every policy.
    """

    question: str
    pieces: list[str]
    full: Answer
    methods: list[MethodRecord]

    def page(self, request: dict[str, Any]) -> Page:
        """Build the HTML page of the inspector, without writing it to a file.

        Args:
            request: the model, the names of the `documents`, and everything else that a user needs
                to reproduce the page. It must be representable in JSON. The page shows it together
                with the `methods`.
        """
        names = ", ".join(request.get("documents", ())) or "the prompt"
        chosen = {method.label: method.chosen.answer.policy for method in self.methods}
        return Page(
            title=f"What was kept of {names}",
            question=self.question,
            pieces=self.pieces,
            methods=[self._shown(method) for method in self.methods],
            full=self.full.text,
            request=request | {"methods": chosen},
        )

    def _shown(self, method: MethodRecord) -> Shown:
        return Shown(
            label=method.label,
            stops=[self._stop(each) for each in method.budgets],
            chosen=[each is method.chosen for each in method.budgets].index(True),
            ballot=method.ballot,
            unvoted=_UNVOTED,
        )

    def _stop(self, record: BudgetRecord) -> Stop:
        own = record.answer
        same = Comparison.of(own, self.full).same
        cut_after = own.new_tokens if own.finish_reason == "length" else None
        return Stop(
            label=record.label,
            sentences=(record.sentence, answer_sentence(same, cut_after)),
            counts=record.counts,
            heads=record.heads,
            answer={
                "text": own.text,
                "same": same,
                "changes": word_changes(self.full.text, own.text),
            },
        )


def inspect_prompt(
    loaded: LoadedModel,
    prompt: Prompt,
    policies: Sequence[tuple[str, Policy]],
    settings: GenerationSettings,
    *,
    budgets: Sequence[tuple[str, Policy]] = (),
    on_step: Callable[[str, int, int], None] | None = None,
) -> Inspection:
    """Answer a prompt with the full cache and with several policies, and record what each keeps.

    Args:
        loaded: the model and its tokenizer.
        prompt: the text to continue.
        policies: pairs of a label and a policy.
        settings: how answers are generated.
        budgets: pairs of a label and the first policy with another budget. Their answers belong to
            the first method alone.
        on_step: called before every step with its name, the number of finished steps, and the
            number of all steps.

    Returns:
        The answers, with one record for every element of `policies`, in order.

    Raises:
        PromptTooLongError: prompt and answer need more positions than the model has.
        InvalidArgumentError: a policy cannot compress this prompt.
        UnsupportedModelError: the model cannot be compressed correctly.
        OutOfMemoryError: the device is full.
    """
    names = ["reading", "full", *(f"budget {label}" for label, _ in budgets)]
    names += [label for label, _ in policies]
    steps = iter(enumerate(names))

    def begin_next() -> None:
        done, name = next(steps)
        if on_step:
            on_step(name, done, len(names))

    reader = PromptReader(loaded, prompt, settings, [Exact()] * (1 + len(policies) + len(budgets)))

    def ask(label: str, policy: Policy) -> BudgetRecord:
        begin_next()
        ends: list[PromptEnd] = []
        answer = reader.answer(policy, Exact(), Protection(), ends)
        cache = ends.pop().cache
        counts, heads = kept_counts(cache.prompt_state.layers, answer.prompt_tokens)
        kept = kept_of(cache.report(), counts, heads)
        return BudgetRecord(label=label, answer=answer, sentence=kept, counts=counts, heads=heads)

    begin_next()
    ids = prompt_ids(loaded, prompt, settings)[:, : prompt.context_tokens(loaded.tokenizer)]
    tokens = prompt.question_tokens(loaded.tokenizer)
    with reader.reusing_prefill():
        adapted = [adapt_to_question(loaded.completed(policy), tokens) for _, policy in policies]
        voted = ballots(loaded, ids, adapted)
    full = ask(CHOSEN, FullCache()).answer
    others = [ask(label, policy) for label, policy in budgets]
    methods = []
    for (label, policy), ballot in zip(policies, voted, strict=True):
        chosen = ask(CHOSEN, policy)
        made = sorted([*others, chosen], key=lambda each: each.answer.cache.held_bytes)
        methods.append(MethodRecord(label=label, budgets=made, chosen=chosen, ballot=ballot))
        others = []
    return Inspection(
        question=prompt.question,
        pieces=prompt_texts(loaded.tokenizer, prompt),
        full=full,
        methods=methods,
    )


def prompt_texts(tokenizer: Any, prompt: Prompt) -> list[str]:
    """Split the text of a prompt into one piece for each of its tokens.

    If several tokens make one character, the first token gets it, and the pieces of the others are
    empty. So are the pieces of tokens that the tokenizer adds. If the tokenizer reports no offsets,
    the tokens are decoded one by one, see `token_texts`.
    """
    ids, offsets = prompt.encoded(tokenizer, offsets=tokenizer.is_fast)
    if not tokenizer.is_fast:
        return token_texts(tokenizer, ids)
    starts, reached = [], 0
    for start, _ in offsets:
        reached = max(reached, start)
        starts.append(reached)
    stops = [*starts[1:], len(prompt.text)]
    return [prompt.text[start:stop] for start, stop in zip(starts, stops, strict=True)]
