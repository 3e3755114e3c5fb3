"""The retrieval task over many methods: a document is read once and answered from every cache."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from snapkv import CacheReport
from snapkv.policies import Policy
from snapkv_lab.experiments.magic_number import Document
from snapkv_lab.experiments.reading import (
    MOST_WINDOW_TOKENS,
    ReadPrompt,
    Score,
    read_prompt,
    score_answer,
)

Question = Literal["visible", "hidden"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One method on all documents.

    Attributes:
        policy: the method.
        documents: how many were answered.
        accuracy: fraction of documents whose answer was right in every token.
        nll: mean over documents of `Score.nll`; it moves smoothly where accuracy jumps.
        read_tokens: tokens of what was compressed, the mean over documents.
        held_bytes: keys and values stored after the prompt, the mean over documents.
        full_bytes: keys and values of the full cache then, the mean.
        end_bytes: keys and values stored at the end, after the answer, the mean.
    """

    policy: Policy
    documents: int
    accuracy: float
    nll: float
    read_tokens: float
    held_bytes: int
    full_bytes: int
    end_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """One method on one document: what the cache held after the prompt, and at the end."""

    score: Score
    prompt_report: CacheReport
    end_report: CacheReport


def measure_retrieval(
    model: Any,
    documents: Iterable[Document],
    policies: Sequence[Policy],
    *,
    question: Question = "visible",
    read: Callable[[list[int]], ReadPrompt] | None = None,
) -> list[Outcome]:
    """Answer every document from the cache of every policy; outcomes in the order of `policies`.

    Args:
        model: the model.
        documents: what to read, all of one length.
        policies: the methods.
        question: "visible" compresses the whole prompt, which ends in the question; "hidden"
            compresses the text before the question, which is then read from the compressed cache.
        read: how; by default once, with the full cache.
    """
    recorded = max(MOST_WINDOW_TOKENS, *(policy.query_tokens for policy in policies))
    read = read or functools.partial(read_prompt, model, recorded_queries=recorded)
    answers: list[list[_Answer]] = [[] for _ in policies]
    for document in documents:
        hidden_ids = document.question_ids if question == "hidden" else []
        read_ids = document.prompt_ids[: len(document.prompt_ids) - len(hidden_ids)]
        prompt = read(read_ids)
        for policy, of_policy in zip(policies, answers, strict=True):
            of_policy.append(_answer(prompt, policy, hidden_ids, document.answer_ids))
    return [
        _outcome(policy, of_policy) for policy, of_policy in zip(policies, answers, strict=True)
    ]


def _answer(
    prompt: ReadPrompt, policy: Policy, hidden_ids: list[int], answer_ids: list[int]
) -> _Answer:
    cache = prompt.compressed(policy)
    prompt_report = cache.report()
    score = score_answer(prompt, cache, answer_ids, question_ids=hidden_ids)
    return _Answer(score=score, prompt_report=prompt_report, end_report=cache.report())


def _outcome(policy: Policy, answers: Sequence[_Answer]) -> Outcome:
    return Outcome(
        policy=policy,
        documents=len(answers),
        accuracy=fmean(answer.score.right for answer in answers),
        nll=fmean(answer.score.nll for answer in answers),
        read_tokens=fmean(answer.prompt_report.seen_tokens for answer in answers),
        held_bytes=round(fmean(answer.prompt_report.held_bytes for answer in answers)),
        full_bytes=round(fmean(answer.prompt_report.full_bytes for answer in answers)),
        end_bytes=round(fmean(answer.end_report.held_bytes for answer in answers)),
    )
