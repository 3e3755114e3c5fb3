"""One cache of several documents that were read separately, as if they had been read together.

Every document is read once, by itself. Joining moves their keys to their new positions. A fraction
of the tokens, those that the documents before them change most, is recomputed (CacheBlend, arXiv
2405.16444), fewer in every layer. The result is an ordinary cache: a question is read, the end of
the prompt votes, and the policy chooses.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.restoring import restore, restore_chosen
from snapkv.cache.slots import SlotMap
from snapkv.errors import InvalidArgumentError
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import passed
from snapkv.hf.placement import device_of
from snapkv.kvzip import require_one_reading
from snapkv.policies import EvictingPolicy, FullCache, Policy
from snapkv.policies.base import ALL_QUERIES
from snapkv.policies.default import by_layer
from snapkv.storage.dense import DenseStore
from snapkv.validation import DEFAULT_RECOMPUTE, require_share
from snapkv_app.library.joining import JoinedLayer, Part, join, joined_ids, require_joinable
from snapkv_app.library.recomputing import falling, require_recomputable
from snapkv_app.library.recomputing import recompute as read_again

_WHOLE = "keep the documents whole (FullCache)"

Evenness = Literal["whole", "even", "uneven"]
"""What joined documents hold: all tokens, equally many in all heads and layers, or not."""


@torch.no_grad()
def blend(
    model: PreTrainedModel,
    parts: Sequence[Part],
    policy: Policy | None = None,
    *,
    recompute: float = DEFAULT_RECOMPUTE,
    **options: Any,
) -> CompressedCache:
    """A cache that has seen all documents, one after the other.

        cache = blend(model, parts, SnapKV(1024))
        ids = torch.cat([joined_ids(parts), question], dim=1)
        model.generate(ids, past_key_values=cache, ...)

    The question is still a part of the prompt: it is read, votes on the documents, and the policy
    compresses. If the parts' heads or layers hold different numbers of tokens (`AdaKV`,
    `PyramidKV`), nothing more is compressed: the whole question is appended.

    Tokens that a part has evicted are gone, unless `recompute=1`. If the question is shorter than
    the observation window, only its own queries vote.

    Args:
        model: the model that has read the parts; all of its layers must be of full attention.
        parts: the documents, in the order of the prompt.
        policy: what is kept of them for the question; `snapkv.default_policy()` by default.
        recompute: the fraction of all N tokens that the second layer recomputes. It falls by a
            constant factor from layer to layer, to a tenth in the last; from 0.5 on it falls less.
            0: no forward pass at all. 1: read all tokens in all layers, which is exact.
        options: as for `CompressedCache`.

    Raises:
        CacheMismatchError: a part of another model, or with another prefix.
        InvalidArgumentError: no part, a fraction out of range, or a policy or an option that does
            not go with what the parts hold.
        InvalidTypeError: a value of the wrong type.
        PromptTooLongError: more tokens than the model has positions.
        UnsupportedModelError: layers that are not compressed, keys that cannot be turned, or
            attention that takes no masks.
    """
    recompute = require_share("recompute", recompute, str(DEFAULT_RECOMPUTE))
    require_joinable(model, parts)
    cache = CompressedCache(model, policy, **options)
    ids = joined_ids(parts).to(device_of(model))
    if recompute == 1:
        _read(model, ids, cache)
        return cache
    counts = falling(recompute, ids.shape[1], len(cache.layers)) if len(parts) > 1 else []
    if any(counts):
        require_recomputable(model)
    joined = join(model, parts)
    held = _held(joined)
    if policy is None and held == "even":  # layers that hold a part of a text choose by themselves
        cache = CompressedCache(model, by_layer(cache.policy), **options)
    _require_going_on(cache, held)
    if any(counts):
        joined = read_again(model, ids, joined, counts)
    _fill(cache, joined, held)
    if cache.prompt_state.looks_at_tokens:
        for layer in cache.prompt_state.layers:
            layer.remember_ids(ids)
    return cache


def _read(model: PreTrainedModel, ids: Tensor, cache: CompressedCache) -> None:
    """Read the tokens into an empty cache; nothing is evicted before the question."""
    _require_choice_behind(cache.policy)
    cache.expect_prompt(ids.shape[1] + 1)
    cache.expect_tokens(ids)
    model(ids, **passed(cache), logits_to_keep=1)
    cache.prompt_state.prompt_end = None


def _held(joined: Sequence[JoinedLayer]) -> Evenness:
    """What kind it is; by all layers, since they share the masks of a prompt that goes on."""
    if all(layer.is_whole for layer in joined):
        return "whole"
    alike = all(layer.is_even for layer in joined) and len({layer.slots for layer in joined}) == 1
    return "even" if alike else "uneven"


def _fill(cache: CompressedCache, joined: Sequence[JoinedLayer], held: Evenness) -> None:
    """Put the documents into a new cache.

    If all heads hold equally many tokens, the cache is in the middle of a prompt, otherwise after
    one.
    """
    for layer, one in zip(cache.prompt_state.layers, joined, strict=True):
        keys, values = one.key_states, one.value_states
        state: dict[str, Any] = dict(keys=keys, values=values, num_kv_heads=keys.shape[1])
        if held == "whole":
            restore(layer, DenseStore.kind, state, SlotMap())
        elif held == "even":
            slots = SlotMap().chosen(one.places, one.tokens)
            restore(layer, DenseStore.kind, state, slots)
        else:
            restore_chosen(layer, keys, values, one.places, one.tokens)
    if held == "uneven":
        cache.prompt_state.prompt_end = joined[0].tokens


def _require_going_on(cache: CompressedCache, held: Evenness) -> None:
    """Raise unless the policy and the options of a new cache fit what it will hold."""
    policy = cache.policy
    if held == "uneven":
        _refuse_options(cache, "protect", "recall", "quantize", "turns")
        if isinstance(policy, EvictingPolicy):
            raise InvalidArgumentError(
                f"policy: expected one that only compresses prompts where heads hold different "
                f"numbers of tokens, got {policy.name}, which evicts after every token; use "
                f"SnapKV, or {_WHOLE}"
            )
        return
    _require_choice_behind(policy)
    if policy.query_tokens == ALL_QUERIES:
        raise InvalidArgumentError(
            f"policy: expected one whose last queries vote, since the documents' queries are not "
            f"held, got {policy.name}, which asks all of a prompt's; use SnapKV, or recompute=1"
        )
    if held == "even":
        _refuse_options(cache, "protect", "recall")
        if not (policy.can_select_after_drops or isinstance(policy, FullCache)):
            raise InvalidArgumentError(
                f"policy: expected a method with a budget that can rate a part of what was read, "
                f"such as SnapKV(budget=1024), where documents were compressed, got {policy!r}; "
                f"use one of them, or {_WHOLE}"
            )


def _require_choice_behind(policy: Policy) -> None:
    require_one_reading(policy, "Compress the documents by it, and pass SnapKV for the question")


def _refuse_options(cache: CompressedCache, *names: str) -> None:
    usual = {"turns": "append"}
    for name in names:
        given = cache.options[name]
        if given is not None and given != usual.get(name):
            raise InvalidArgumentError(
                f"{name}: expected {usual.get(name, 'none')!r} where documents were compressed to "
                f"numbers of tokens that cannot be chosen from again, got {given!r}; leave it out, "
                f"or {_WHOLE}"
            )
