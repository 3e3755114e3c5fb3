"""The retrieval task over many methods: a document is read once and answered from every cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.magic_number import Document
from benchmarks.reading import read_prompt
from benchmarks.scoring import Score, score_answer
from snapkv.policies import Policy


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One method on all documents.

    Attributes:
        policy: the method.
        documents: how many were answered.
        accuracy: fraction of documents whose answer was right in every token.
        nll: mean over documents of `Score.nll`; it moves smoothly where accuracy jumps.
        held_bytes: keys and values stored after the prompt.
        full_bytes: keys and values of the full cache.
    """

    policy: Policy
    documents: int
    accuracy: float
    nll: float
    held_bytes: int
    full_bytes: int


def measure_retrieval(
    model: Any, documents: Iterable[Document], policies: Sequence[Policy]
) -> list[Outcome]:
    """Answer every document from the cache of every policy; outcomes in the order of `policies`."""
    scores: list[list[Score]] = [[] for _ in policies]
    sizes: list[tuple[int, int]] = [(0, 0) for _ in policies]
    for document in documents:
        prompt = read_prompt(model, document.prompt_ids)
        for index, policy in enumerate(policies):
            cache = prompt.compressed(policy)
            report = cache.report()
            sizes[index] = (report.held_bytes, report.full_bytes)
            scores[index].append(score_answer(prompt, cache, document.answer_ids))
    return [
        Outcome(
            policy=policy,
            documents=len(of_policy),
            accuracy=fmean(score.right for score in of_policy),
            nll=fmean(score.nll for score in of_policy),
            held_bytes=held,
            full_bytes=full,
        )
        for policy, of_policy, (held, full) in zip(policies, scores, sizes, strict=True)
    ]
