"""One text, many questions, many poolings: read once, compressed and scored in batches.

The text is read with the full cache, each question behind a branch of it. The poolings of one
budget are then rows of one batch: each row keeps what its policy keeps of that reading, and the
right answer is fed to all of them in one forward pass.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from snapkv import CompressedCache, FullCache, SnapKV, ops
from snapkv.policies import PromptLayer, Selection
from snapkv_lab.experiments.pooling_cases import Case
from snapkv_lab.experiments.reading import MOST_WINDOW_TOKENS, ReadPrompt, Recorder

SINKS = 4
"""First tokens that the lost mass is also given without."""


@dataclass(frozen=True)
class FadingBothWays(SnapKV):
    """Fading that also lifts what stands before a vote, by another factor a token."""

    name: ClassVar[str] = "snapkv"

    before: float = field(default=0.5, kw_only=True)

    @property
    def _rating(self) -> tuple[object, ...]:
        return *super()._rating, self.before

    def _pooled(self, votes: Tensor) -> Tensor:
        """The larger of what fades forward and what fades backward."""
        backward = ops.fade_votes(votes.flip(-1), self.before).flip(-1)
        return torch.maximum(super()._pooled(votes), backward)


@dataclass(frozen=True)
class SinksStill(SnapKV):
    """The first tokens' votes lift nothing but themselves, and nothing is kept for being first."""

    name: ClassVar[str] = "snapkv"

    @property
    def _rating(self) -> tuple[object, ...]:
        return *super()._rating, "still"

    def _pooled(self, votes: Tensor) -> Tensor:
        """Pooled without the first tokens' votes, which stand where they are."""
        others = votes.clone()
        others[..., :SINKS] = 0
        pooled = self._spread(others)
        pooled[..., :SINKS] = votes[..., :SINKS]
        return pooled

    def _spread(self, votes: Tensor) -> Tensor:
        return super()._pooled(votes)


@dataclass(frozen=True)
class RunThenFading(SinksStill):
    """Fading that begins only behind a run of tokens, all lifted as high as the vote."""

    run: int = field(default=12, kw_only=True)

    @property
    def _rating(self) -> tuple[object, ...]:
        return *super()._rating, self.run

    def _spread(self, votes: Tensor) -> Tensor:
        """What fades behind the pair (0, run)."""
        return super()._spread(ops.pool_votes(votes, (0, self.run), "max"))


@dataclass(frozen=True)
class FadingSoFar(SnapKV):
    """Fading that ends after a number of tokens."""

    name: ClassVar[str] = "snapkv"

    reach: int = field(default=20, kw_only=True)

    @property
    def _rating(self) -> tuple[object, ...]:
        return *super()._rating, self.reach

    def _pooled(self, votes: Tensor) -> Tensor:
        """The largest of what the last votes, so many, carry on to a position."""
        assert self.decay is not None
        pooled = votes.clone()
        for steps in range(1, self.reach + 1):
            carried = votes[..., :-steps] * self.decay**steps
            pooled[..., steps:] = torch.maximum(pooled[..., steps:], carried)
        return pooled


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


Shown = dict[int, PromptLayer]
"""By window, what a policy is shown of a layer: what one has computed of it, others find there."""


def shown_to(prompt: ReadPrompt, windows: Iterable[int]) -> list[Shown]:
    """What policies of these windows are shown of every layer."""
    wanted = set(windows)
    return [
        {window: replace(layer, queries=layer.queries[:, :, -window:]) for window in wanted}
        for layer in prompt.layers
    ]


@dataclass(frozen=True)
class Kept:
    """What every policy keeps of a prompt at one budget, a row each.

    Attributes:
        cache: a batch with a row per policy.
        lost: (policies, layers, KV heads), the mass of raw votes that is not kept.
        lost_beyond_sinks: the same without the first `SINKS` tokens.
    """

    cache: CompressedCache
    lost: Tensor
    lost_beyond_sinks: Tensor

    def lost_of(self, row: int) -> list[float]:
        """Six numbers of one policy: the mean, the highest of a layer, the highest of a head.

        Then the same three without the first tokens.
        """
        return [
            round(float(number), 4)
            for lost in (self.lost[row], self.lost_beyond_sinks[row])
            for number in (lost.mean(), lost.mean(dim=-1).max(), lost.max())
        ]


@torch.inference_mode()
def compressed_rows(prompt: ReadPrompt, shown: Sequence[Shown], policies: Sequence[SnapKV]) -> Kept:
    """A cache of one row per policy, each as it would be after a prefill.

    Args:
        prompt: what was read.
        shown: see `shown_to`.
        policies: all of one budget.
    """
    cache = CompressedCache(prompt.model, FullCache())  # every row has a policy of its own
    cache.expect_prompt(prompt.prompt_tokens)
    lost: list[list[Tensor]] = [[], []]
    for layer, states, of_windows in zip(cache.layers, prompt.layers, shown, strict=True):
        kept, rows = [], [(policy, of_windows[policy.window_size]) for policy in policies]
        for policy, seen in rows:
            selection = policy.select(seen)
            assert selection is not None
            kept.append(selection.keep_indices)
        for first, noted in zip((0, SINKS), lost, strict=True):
            noted.append(
                torch.cat(
                    [
                        lost_mass(policy.votes(seen), own[..., : -policy.window_size], first)
                        for (policy, seen), own in zip(rows, kept, strict=True)
                    ]
                )
            )
        shape = (len(policies), -1, -1, -1)
        keys, values = states.keys.expand(shape), states.values.expand(shape)  # not copied per row
        layer.store.fill(keys, values, keys.shape[1])
        selection = Selection(keep_indices=torch.cat(kept), prompt_tokens=prompt.prompt_tokens)
        layer.end_prompt(selection, states)
    return Kept(cache, *(torch.stack(of_layers, dim=1) for of_layers in lost))


def lost_mass(votes: Tensor, kept: Tensor, first: int = 0) -> Tensor:
    """The share of a window's votes on the prefix that is not kept: (rows, H) float32.

    Args:
        votes: (1, H, P) float32, before pooling.
        kept: (rows, H, K) int64, distinct positions of the prefix.
        first: so many first tokens are left out of what is kept and of the whole.
    """
    whole = votes[..., first:].sum(dim=-1)
    own = votes.expand(kept.shape[0], -1, -1).gather(-1, kept)
    return 1 - own.masked_fill(kept < first, 0).sum(dim=-1) / whole


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
