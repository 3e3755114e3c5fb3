"""Join documents that were read separately in one cache, as if they had been read together.

Every document was read by itself. Joining rotates its keys to their new positions. A fraction
of the tokens, those that the documents before them change most, is recomputed (CacheBlend, arXiv
2405.16444), fewer in every layer. The result is an ordinary cache: a question is read, the end of
the prompt votes, and the policy selects tokens.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.restoring import restore, restore_chosen
from snapkv.cache.slots import SlotMap
from snapkv.errors import wrong
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

_WHOLE = "add the documents with FullCache"

Evenness = Literal["whole", "even", "uneven"]
"""The tokens that joined layers store: all tokens, equally many in every head, or neither."""


@torch.no_grad()
def blend(
    model: PreTrainedModel,
    parts: Sequence[Part],
    policy: Policy | None = None,
    *,
    recompute: float = DEFAULT_RECOMPUTE,
    **options: Any,
) -> CompressedCache:
    """Build a cache in the state after reading all documents, one after the other.

        cache = blend(model, parts, SnapKV(1024))
        ids = torch.cat([joined_ids(parts), question], dim=1)
        model.generate(ids, past_key_values=cache, ...)

    The question is still a part of the prompt: when it is read, it votes on the documents, and the
    policy selects tokens. If the heads or layers of the parts store different numbers of tokens
    (`AdaKV`, `PyramidKV`), no more tokens are evicted, and the complete question is appended.

    Tokens that a part has evicted are missing unless `recompute` is 1. If the question is shorter
    than the observation window, only its own queries vote. The parts are not changed, so they can
    be joined again.

    Args:
        model: the model that has read the parts; all of its layers must have full attention.
        parts: the documents, in the order of the prompt.
        policy: selects the tokens to keep for the question; `snapkv.default_policy()` by default,
            or its form that selects in every layer separately if the parts were compressed.
        recompute: the fraction of all N tokens that the second layer recomputes. It falls by a
            constant factor from layer to layer, to a tenth in the last layer; above 0.5 it falls
            less. 0 runs no forward pass, and neither does a single part unless `recompute` is 1.
            1 reads all tokens in all layers, which is exact.
        options: further keyword arguments of `CompressedCache`, such as `quantize`.

    Returns:
        A new cache that has read `joined_ids(parts)`.

    Raises:
        CacheMismatchError: a part belongs to another model or has another prefix.
        InvalidArgumentError: there is no part, `recompute` is out of range, or the policy or an
            option is impossible with the tokens that the parts store.
        InvalidTypeError: an argument has the wrong type.
        PromptTooLongError: there are more tokens than the model has positions.
        UnsupportedModelError: some layers are not compressed, the keys cannot be rotated, or the
            attention implementation does not accept the masks.
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
    held = _evenness_of(joined)
    if policy is None and held == "even":  # then every layer selects its tokens by itself
        cache = CompressedCache(model, by_layer(cache.policy), **options)
    _require_compatible(cache, held)
    if any(counts):
        joined = read_again(model, ids, joined, counts)
    _fill(cache, joined, held)
    if cache.prompt_state.looks_at_tokens:
        for layer in cache.prompt_state.layers:
            layer.remember_ids(ids)
    return cache


def _read(model: PreTrainedModel, ids: Tensor, cache: CompressedCache) -> None:
    """Read the tokens into an empty cache, without evicting any before the question.

    Args:
        model: the model.
        ids: (1, N) int64, on the device of the model.
        cache: the cache, which is changed in place.

    Raises:
        InvalidArgumentError: the policy needs a second reading of the prompt.
    """
    _require_single_reading(cache.policy)
    cache.expect_prompt(ids.shape[1] + 1)
    cache.expect_tokens(ids)
    model(ids, **passed(cache), logits_to_keep=1)
    cache.prompt_state.prompt_end = None


def _evenness_of(joined: Sequence[JoinedLayer]) -> Evenness:
    """Return which tokens the layers store: all of them, equally many in all heads, or neither."""
    if all(layer.is_whole for layer in joined):
        return "whole"
    alike = all(layer.is_even for layer in joined) and len({layer.slots for layer in joined}) == 1
    return "even" if alike else "uneven"


def _fill(cache: CompressedCache, joined: Sequence[JoinedLayer], held: Evenness) -> None:
    """Put the joined keys and values into an empty cache, which is changed in place.

    If all heads store equally many tokens, the prompt is not complete afterwards, so the question
    can still vote. Otherwise the prompt is complete, and the question is stored in full.
    """
    for layer, one in zip(cache.prompt_state.layers, joined, strict=True):
        keys, values = one.key_states, one.value_states
        state: dict[str, Any] = dict(keys=keys, values=values, num_kv_heads=keys.shape[1])
        if held == "whole":
            restore(layer, DenseStore.kind, state, SlotMap())
        elif held == "even":
            slots = SlotMap().with_kept(one.places, one.tokens)
            restore(layer, DenseStore.kind, state, slots)
        else:
            restore_chosen(layer, keys, values, one.places, one.tokens)
    if held == "uneven":
        cache.prompt_state.prompt_end = joined[0].tokens


def _require_compatible(cache: CompressedCache, held: Evenness) -> None:
    """Raise unless the policy and the options of a cache work with the tokens that parts store.

    Args:
        cache: the cache for the question.
        held: which tokens the joined layers store.

    Raises:
        InvalidArgumentError: an option of the cache needs tokens that the parts have evicted. If
            the heads store different numbers of tokens: the policy evicts after every token. If
            they store equally many: the policy reads prompts twice, needs the queries of the
            documents, which are not stored, or cannot select from the tokens that are left.
    """
    policy = cache.policy
    if held == "uneven":
        _refuse_options(cache, "protect", "recall", "quantize", "turns")
        if isinstance(policy, EvictingPolicy):
            raise wrong(
                "policy",
                f"the method {policy.name} evicts after every token, which is not possible if the "
                "heads store different numbers of tokens",
                f"Use SnapKV, or {_WHOLE}",
            )
        return
    _require_single_reading(policy)
    if policy.query_tokens == ALL_QUERIES:
        raise wrong(
            "policy",
            f"the method {policy.name} needs the queries of the whole prompt, but the queries of "
            "the documents are not stored",
            "Use SnapKV, which only needs the last queries, or set recompute=1",
        )
    if held == "even":
        _refuse_options(cache, "protect", "recall")
        if not (policy.can_select_after_drops or isinstance(policy, FullCache)):
            raise wrong(
                "policy",
                f"the documents were compressed, and {policy!r} cannot select among the tokens "
                "that were kept",
                f"Use a method with a budget, such as SnapKV(budget=1024), or {_WHOLE}",
            )


def _require_single_reading(policy: Policy) -> None:
    """Raise if the policy reads prompts twice, because a question is read only one time.

    Raises:
        InvalidArgumentError: the policy reads prompts twice.
    """
    require_one_reading(policy, "Compress the documents by it, and pass SnapKV for the question")


def _refuse_options(cache: CompressedCache, *names: str) -> None:
    """Raise if one of the options `names` of a cache has another value than its default.

    Raises:
        InvalidArgumentError: an option has another value; the first one is named.
    """
    usual = {"turns": "append"}
    for name in names:
        value = cache.options[name]
        if value is not None and value != usual.get(name):
            raise wrong(
                name,
                f"expected {usual.get(name, 'none')!r}, because the documents were "
                f"compressed and do not contain all tokens, but got {value!r}",
                f"Remove this argument, or {_WHOLE}",
            )
