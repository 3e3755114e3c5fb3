"""The choice at a prompt's end: which tokens a layer keeps, and how many bits hold them."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError
from snapkv.ops import window_output
from snapkv.policies import Policy, PromptLayer, Selection
from snapkv.policies.budget import AutoBudget, ByteBudget, budget_of
from snapkv.storage.auto import AutoStorage
from snapkv.storage.base import Storage, TokenStore
from snapkv.storage.dense import DenseStore
from snapkv.storage.dynamic import Dynamic
from snapkv.storage.ragged import RaggedStore
from snapkv.validation import SMALL_WINDOW


class Choice(NamedTuple):
    """What is kept of a prompt, None for all, and by which storage."""

    selection: Selection | None
    storage: Storage


class _Tried(NamedTuple):
    choice: Choice
    error: float


@torch.no_grad()
def choose(policy: Policy, prompt: PromptLayer, storage: Storage, store: TokenStore) -> Choice:
    """What a policy keeps, stored as `storage` says; see `AutoCodes` where that is to be chosen.

    Args:
        policy: the method.
        prompt: the layer at the end of its prompt.
        storage: how the layer stores.
        store: what it holds of the prompt by now.

    Raises:
        InvalidArgumentError: the budget has too few bytes for any candidate.
    """
    if not isinstance(storage, AutoStorage):
        return Choice(policy.select(costed(policy, prompt, storage, store)), storage)
    if isinstance(budget_of(policy), ByteBudget):
        return _of_least_error(policy, prompt, storage, store)
    return _of_fewest_bits(policy, prompt, storage)


def costed(policy: Policy, prompt: PromptLayer, storage: Storage, store: TokenStore) -> PromptLayer:
    """The layer where its tokens cost what they do in such a storage."""
    heads = prompt.queries.shape[1] if policy.parts_groups else prompt.num_kv_heads
    return prompt.costing(functools.partial(storage.token_cost, store, heads))


def _of_least_error(
    policy: Policy, prompt: PromptLayer, storage: AutoStorage, store: TokenStore
) -> Choice:
    """As many tokens as the bytes hold in so many bits; the bits that lose least."""
    trial, tried = _Trial(prompt), list[_Tried]()

    def attempt(candidate: Dynamic) -> _Tried:
        selection = policy.select(costed(policy, prompt, candidate, store))
        return trial.of(Choice(selection, candidate), trial.whole)

    for each in _possible(storage.candidates, attempt):
        tried.append(each)
        if not each.error:
            break
    return min(tried, key=lambda each: each.error).choice


def _of_fewest_bits(policy: Policy, prompt: PromptLayer, storage: AutoStorage) -> Choice:
    """The same tokens in any case, in the fewest bits that lose little more."""
    selection = policy.select(prompt)
    if selection is None and not isinstance(budget_of(policy), AutoBudget):
        return Choice(None, storage.candidates[0])
    trial, tried = _Trial(prompt), list[_Tried]()
    as_it_came = trial.output(Choice(selection, Dynamic()))

    def attempt(candidate: Dynamic) -> _Tried:
        return trial.of(Choice(selection, candidate), as_it_came)

    for each in _possible(sorted(storage.candidates, key=_bits), attempt):
        tried.append(each)
        if each.error <= storage.codes.most_error:
            return each.choice
    return min(tried, key=lambda each: each.error).choice


def _bits(candidate: Dynamic) -> float:
    """Of a key's number and a value's together."""
    if candidate.codes is None:
        return math.inf
    pair = candidate.codes.keys, candidate.codes.values
    return sum(8 if each == "fp8" else each for each in pair)


def _possible(
    candidates: Sequence[Dynamic], attempt: Callable[[Dynamic], _Tried]
) -> Iterator[_Tried]:
    """One after the other, but for those that have too few bytes, or cannot hold such numbers."""
    refused, any_possible = None, False
    for candidate in candidates:
        try:
            tried = attempt(candidate)
        except InvalidArgumentError as error:
            refused = refused or error
            continue
        any_possible = True
        yield tried
    if refused is not None and not any_possible:
        raise refused


class _Trial:
    """A layer at the end of its prompt, whose last queries attend to what may be held of it."""

    def __init__(self, prompt: PromptLayer) -> None:
        self._prompt = prompt
        self._queries = prompt.queries[:, :, -SMALL_WINDOW:]
        B, _, T, _ = prompt.keys.shape
        pads = prompt.pads
        slots = torch.arange(T, device=prompt.keys.device).expand(B, prompt.num_kv_heads, -1)
        self._slots = slots if pads is None else slots.masked_fill(pads, -1)

    @functools.cached_property
    def whole(self) -> Tensor:
        """(B, Hq, W, Dv): what attention to the whole prompt gives."""
        return self._attended(self._prompt.keys, self._prompt.values, self._slots)

    def of(self, choice: Choice, wanted: Tensor) -> _Tried:
        """A choice and its error against an output that is wanted, see `AutoCodes`."""
        missed = (self.output(choice) - wanted).square().sum(dim=(-1, -2))
        size = wanted.square().sum(dim=(-1, -2)).clamp(min=torch.finfo(torch.float32).tiny)
        return _Tried(choice, float((missed / size).mean()))

    def output(self, choice: Choice) -> Tensor:
        """(B, Hq, W, Dv): what attention to what would be held gives."""
        prompt, (selection, storage) = self._prompt, choice
        slots = self._slots if selection is None else selection.keep_indices
        slots = slots.expand(-1, max(slots.shape[1], prompt.num_kv_heads), -1)
        whole = DenseStore().fill(prompt.keys, prompt.values, prompt.keys.shape[1])
        kept = RaggedStore.gather(whole, slots, prompt.keys.shape[2])
        kept.ragged = replace(kept.ragged, least_slots=slots.shape[-1])
        held = storage.finalize(kept, slots.shape[-1], "", None)
        return self._attended(*held.padded(), slots)

    def _attended(self, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
        prompt = self._prompt
        return window_output(
            self._queries, keys, values, slots, prompt.keys.shape[2], prompt.score_options
        )
