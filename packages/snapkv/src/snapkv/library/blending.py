"""One cache of several documents that were read apart, as if they had been read together.

Every document is read once, by itself. Joined, their keys stand where their tokens do, and a
fraction of the tokens, those that the documents before them change most, is read again (CacheBlend,
arXiv 2405.16444), in every layer fewer of them. What comes out goes on like any cache: a question
is read over it, its end votes, and the policy chooses.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.slots import SlotMap
from snapkv.errors import InvalidArgumentError
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import passed
from snapkv.hf.placement import device_of
from snapkv.kvzip import require_one_reading
from snapkv.library.joining import JoinedLayer, Part, join, joined_ids, require_joinable
from snapkv.library.recomputing import falling, require_recomputable
from snapkv.library.recomputing import recompute as read_again
from snapkv.policies import EvictingPolicy, FullCache, Policy
from snapkv.policies.base import ALL_QUERIES
from snapkv.storage.dense import DenseStore
from snapkv.validation import DEFAULT_RECOMPUTE, require_share

_WHOLE = "keep the documents whole (FullCache)"

Held = Literal["whole", "even", "uneven"]
"""Of joined documents all tokens, as many in every head of every layer, or numbers of their own."""


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

    The prompt has not ended: the question is read over what is held, votes on it, and the policy
    compresses. Where the parts' heads or layers hold different numbers of tokens (`AdaKV`,
    `PyramidKV`), it has: the question is stored after them whole.

    Tokens that a part has dropped stay dropped, unless everything is read in full. A question that
    is shorter than the policy's window votes by its own queries only.

    Args:
        model: the model that has read the parts; all of its layers must be of full attention.
        parts: the documents, in the order in which they stand.
        policy: what is kept of them for the question; `snapkv.default_policy()` by default.
        recompute: the fraction of all N tokens that the second layer reads again; it falls by
            the same factor from layer to layer, to a tenth of it in the last, and the less the
            nearer it is to 1, from 0.5 on. 0 for none: no forward pass at all. 1 reads the tokens
            in full, as if nothing had been read before: exact.
        options: as for `CompressedCache`.

    Raises:
        CacheMismatchError: a part of another model, or after another prefix than the others.
        InvalidArgumentError: no part, a fraction out of range, or a policy or an option that does
            not go with what the parts hold.
        InvalidTypeError: a value of the wrong type.
        PromptTooLongError: more tokens than the model has positions.
        UnsupportedModelError: layers that are not compressed, keys that cannot be turned, or
            attention that takes no masks.
    """
    require_share("recompute", recompute, str(DEFAULT_RECOMPUTE))
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
    _require_going_on(cache, held)
    if any(counts):
        joined = read_again(model, ids, joined, counts)
    _fill(cache, joined, held)
    if cache.reading.looks_at_tokens:
        for layer in cache.reading.layers:
            layer.remember_ids(ids)
    return cache


def _read(model: PreTrainedModel, ids: Tensor, cache: CompressedCache) -> None:
    """Read the tokens into an empty cache; a question is to come, so nothing is dropped."""
    _require_choice_behind(cache.policy)
    cache.expect_prompt(ids.shape[1] + 1)
    cache.expect_tokens(ids)
    model(ids, **passed(cache), logits_to_keep=1)
    cache.reading.prompt_end = None


def _held(joined: Sequence[JoinedLayer]) -> Held:
    """What kind it is; by all layers, since they share the masks of a prompt that goes on."""
    if all(layer.is_whole for layer in joined):
        return "whole"
    alike = all(layer.is_even for layer in joined) and len({layer.slots for layer in joined}) == 1
    return "even" if alike else "uneven"


def _fill(cache: CompressedCache, joined: Sequence[JoinedLayer], held: Held) -> None:
    """Let a new cache have seen the documents.

    Whole or even, it is in the middle of a prompt, even of one that is held in part; uneven,
    after one.
    """
    for layer, one in zip(cache.reading.layers, joined, strict=True):
        keys, values = one.key_states, one.value_states
        state: dict[str, Any] = dict(keys=keys, values=values, num_kv_heads=keys.shape[1])
        if held == "whole":
            layer.restore(DenseStore.kind, state, SlotMap())
        elif held == "even":
            slots = SlotMap().chosen(one.places, one.tokens, is_partial=True)
            layer.restore(DenseStore.kind, state, slots)
        else:
            layer.restore_chosen(keys, values, one.places, one.tokens, parts_heads=True)
    if held == "uneven":
        cache.reading.prompt_end = joined[0].tokens


def _require_going_on(cache: CompressedCache, held: Held) -> None:
    """Raise unless the policy and the options of a new cache go with what it is to hold."""
    policy = cache.policy
    if held == "uneven":
        _refuse_options(cache, "protect", "recall", "quantize", "turns", "storage")
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
        if not (policy.chooses_from_a_part or isinstance(policy, FullCache)):
            raise InvalidArgumentError(
                f"policy: expected a method with a budget that can rate a part of what was read, "
                f"such as SnapKV(budget=1024), where documents were compressed, got {policy!r}; "
                f"use one of them, or {_WHOLE}"
            )


def _require_choice_behind(policy: Policy) -> None:
    require_one_reading(policy, "compress the documents by it, and pass SnapKV for the question")


def _refuse_options(cache: CompressedCache, *names: str) -> None:
    usual = {"storage": "dynamic", "turns": "append"}
    for name in names:
        given = cache.options[name]
        if given is not None and given != usual.get(name):
            raise InvalidArgumentError(
                f"{name}: expected {usual.get(name, 'none')!r} where documents were compressed to "
                f"numbers of tokens that cannot be chosen from again, got {given!r}; leave it out, "
                f"or {_WHOLE}"
            )
