"""One text, many questions, many poolings: read once, compressed and scored in batches.

The text is read with the full cache, each question behind a branch of it. The poolings of one
budget are then rows of one batch: each row keeps what its policy keeps of that reading, and the
right answer is fed to all of them in one forward pass.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.pooling_cases import Case
from benchmarks.reading import MOST_WINDOW_TOKENS, ReadPrompt, Recorder
from snapkv import CompressedCache, FullCache, SnapKV, ops
from snapkv.policies import PromptLayer, Selection

SINKS = 4
"""First tokens that the lost mass is also given without."""


@dataclass(frozen=True)
class FadingBothWays(SnapKV):
    """Fading that also lifts what stands before a vote, by another factor a token."""

    name: ClassVar[str] = "snapkv"

    before: float = field(default=0.5, kw_only=True)

    def pool(self, votes: Tensor) -> Tensor:
        """The larger of what fades forward and what fades backward."""
        backward = ops.fade_votes(votes.flip(-1), self.before).flip(-1)
        return torch.maximum(super().pool(votes), backward)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """An answer behind one cache.

    Attributes:
        right: for every part of the answer, whether each of its tokens was the most likely one.
        nll: negative log-likelihood (nats) per answer token after the first; None where there is
            one token only.
    """

    right: list[bool]
    nll: float | None


class ReadText:
    """A text that a model has read with the full cache; questions are read behind branches of it.

    The model must have full attention in every layer, as the demo model has.
    """

    def __init__(self, model: Any, context_ids: Sequence[int]) -> None:
        self._model, self._recorder = model, Recorder(recorded_queries=MOST_WINDOW_TOKENS)
        self._cache = CompressedCache(model, self._recorder)
        self.prompt = self._read(self._cache, context_ids, [])

    def asked(self, question_ids: Sequence[int]) -> ReadPrompt:
        """The text and a question behind it as one prompt."""
        if not question_ids:
            return self.prompt
        return self._read(copy.copy(self._cache), question_ids, self.prompt.layers)

    @torch.inference_mode()
    def _read(self, cache: CompressedCache, ids: Sequence[int], before: list[Any]) -> ReadPrompt:
        tokens = torch.tensor([list(ids)], device=self._model.device)
        self._recorder.layers.clear()
        cache.expect_prompt(cache.get_seq_length() + len(ids))
        cache.expect_tokens(tokens)
        logits = self._model(tokens, past_key_values=cache, logits_to_keep=1).logits
        layers = list(self._recorder.layers)
        if before:
            layers = [
                replace(new, queries=_last([old.queries, new.queries]))
                for old, new in zip(before, layers, strict=True)
            ]
        return ReadPrompt(model=self._model, layers=layers, last_logits=logits)


def _last(queries: list[Tensor]) -> Tensor:
    return torch.cat(queries, dim=2)[:, :, -MOST_WINDOW_TOKENS:]


@dataclass(frozen=True)
class Kept:
    """What policies of one budget keep of a prompt, a row each.

    Attributes:
        cache: a batch with a row per policy.
        lost: (policies, layers, KV heads), the mass of raw votes that is not kept.
        lost_beyond_sinks: the same without the first `SINKS` tokens.
    """

    cache: CompressedCache
    lost: Tensor
    lost_beyond_sinks: Tensor

    def lost_of(self, row: int) -> list[float]:
        """Six numbers of one policy: of all layers and heads the mean, the highest mean of a
        layer, the highest of a head; then the same without the first tokens.
        """
        return [
            round(float(number), 4)
            for lost in (self.lost[row], self.lost_beyond_sinks[row])
            for number in (lost.mean(), lost.mean(dim=-1).max(), lost.max())
        ]


@torch.inference_mode()
def compressed_rows(prompt: ReadPrompt, policies: Sequence[SnapKV]) -> Kept:
    """A cache of one row per policy, each as it would be after a prefill; all of one budget."""
    cache = CompressedCache(prompt.model, policies[0])
    cache.expect_prompt(prompt.prompt_tokens)
    lost: list[Tensor] = []
    for layer, states in zip(cache.layers, prompt.layers, strict=True):
        votes = {policy.window_size: _votes(policy, states) for policy in policies}
        of_rows = [votes[policy.window_size] for policy in policies]
        kept = torch.cat([kept_of(*pair) for pair in zip(policies, of_rows, strict=True)])
        lost.append(_lost(of_rows, kept))
        shape = (len(policies), -1, -1, -1)
        layer.update(states.keys.expand(shape), states.values.expand(shape))
        layer.end_prompt(Selection(keep_indices=kept, prompt_tokens=prompt.prompt_tokens), states)
    return Kept(cache, *torch.stack(lost, dim=2))


def _votes(policy: SnapKV, states: PromptLayer) -> Tensor:
    return policy.votes(replace(states, queries=states.queries[:, :, -policy.window_size :]))


def kept_of(policy: SnapKV, votes: Tensor) -> Tensor:
    """What `policy.select` keeps by these votes, (1, H, budget), without voting again."""
    assert policy.budget is not None
    prefix, window = votes.shape[-1], policy.window_size
    best = ops.keep_best(policy.pool(votes), [policy.budget - window], None)
    return torch.cat([best, torch.arange(prefix, prefix + window).expand(*best.shape[:2], -1)], 2)


def _lost(votes: Sequence[Tensor], kept: Tensor) -> Tensor:
    """(2, policies, H): the lost mass of each policy's choice, with the first tokens and without."""
    return torch.stack(
        [
            torch.cat(
                [lost_mass(own, row[None], first) for own, row in zip(votes, kept, strict=True)]
            )
            for first in (0, SINKS)
        ]
    )


def lost_mass(votes: Tensor, keep_indices: Tensor, first: int = 0) -> Tensor:
    """The share of a window's votes on the prefix that is not kept: (1, H) float32.

    Args:
        votes: (1, H, P) float32, before pooling.
        keep_indices: (1, H, K), distinct; those at P and behind are the window's.
        first: so many first tokens are left out of what is kept and of the whole.
    """
    counted = votes.clone()
    counted[..., :first] = 0
    behind = int(keep_indices.max()) + 1 - votes.shape[-1]
    with_window = torch.nn.functional.pad(counted, (0, max(behind, 0)))
    return 1 - with_window.gather(-1, keep_indices).sum(dim=-1) / counted.sum(dim=-1)


@torch.inference_mode()
def scored_rows(prompt: ReadPrompt, cache: CompressedCache, rows: int, case: Case) -> list[Scored]:
    """The right answer of a case fed to a cache of that many rows, behind the prompt.

    What stands between prompt and answer, the case's `between_ids`, is read in the same pass.
    """
    answer, between = list(case.answer_ids), list(case.between_ids)
    fed = torch.tensor([between + answer[:-1]], device=prompt.last_logits.device)
    if fed.shape[1]:
        fed = fed.expand(rows, -1)
        logits = prompt.model(fed, past_key_values=cache).logits
    else:
        logits = prompt.last_logits[:, :0].expand(rows, -1, -1)
    if between:
        logits = logits[:, len(between) - 1 :]
    else:
        logits = torch.cat([prompt.last_logits.expand(rows, -1, -1), logits], dim=1)
    wanted = torch.tensor(answer, device=logits.device)
    is_right = logits.argmax(dim=-1) == wanted
    nll = torch.nn.functional.cross_entropy(
        logits.float().transpose(1, 2), wanted.expand(rows, -1), reduction="none"
    )
    return [
        Scored(
            right=[bool(row[list(part)].all()) for part in case.parts],
            nll=round(float(losses[1:].mean()), 4) if len(answer) > 1 else None,
        )
        for row, losses in zip(is_right, nll, strict=True)
    ]


def scored_full(prompt: ReadPrompt, case: Case) -> Scored:
    """The right answer of a case behind the full cache."""
    return scored_rows(prompt, prompt.compressed(FullCache()), 1, case)[0]
