"""One cache of several documents that were read apart, as if they had been read together.

Every document is read once, by itself. Joined, their keys stand where their tokens do, and a
fraction of the tokens, those that the documents before them change most, is read anew (CacheBlend,
arXiv 2405.16444). What comes out goes on like any cache: a question is read over it, its end votes,
and the policy chooses.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.hf.cache import CompressedCache
from snapkv.library.held import held_of, require_choice_behind
from snapkv.library.joining import join
from snapkv.library.parts import Part, joined_ids, require_joinable
from snapkv.library.recomputing import recompute as read_again
from snapkv.library.recomputing import require_recomputable
from snapkv.policies import Policy
from snapkv.validation import require_share

DEFAULT_RECOMPUTE = 0.15


@torch.no_grad()
def blend(
    model: PreTrainedModel,
    parts: Sequence[Part],
    policy: Policy | None = None,
    *,
    recompute: float = DEFAULT_RECOMPUTE,
    **options: Any,
) -> CompressedCache:
    """A cache that has seen all documents, one behind the other.

        cache = blend(model, parts, SnapKV(1024))
        ids = torch.cat([joined_ids(parts), question], dim=1)
        model.generate(ids, past_key_values=cache, ...)

    The prompt has not ended: the question is read over what is held, votes on it, and the policy
    compresses. Where the parts' heads or layers hold different numbers of tokens (`AdaKV`,
    `PyramidKV`), it has: the question is stored behind them whole.

    Tokens that a part has dropped stay dropped, unless everything is read in full. A question that
    is shorter than the policy's window votes by its own queries only.

    Args:
        model: the model that has read the parts; all of its layers must be of full attention.
        parts: the documents, in the order in which they stand.
        policy: what is kept of them for the question; `snapkv.default_policy()` by default.
        recompute: the fraction of all N tokens that is read anew. 0 for none: no forward pass at
            all. 1 reads the tokens in full, as if nothing had been read before: exact.
        options: as for `CompressedCache`.

    Raises:
        CacheMismatchError: a part of another model, or behind another prefix than the others.
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
    ids = joined_ids(parts).to(model.device)
    if recompute == 1:
        _read(model, ids, cache)
        return cache
    count = math.floor(recompute * ids.shape[1]) if len(parts) > 1 else 0
    if count:
        require_recomputable(model)
    joined = join(model, parts)
    held = held_of(joined)
    held.require(cache)
    if count:
        joined = read_again(model, ids, joined, count)
    held.fill(cache, joined)
    if cache.reading.looks_at_tokens:
        for layer in cache.reading.layers:
            layer.remember_ids(ids)
    return cache


def _read(model: PreTrainedModel, ids: Tensor, cache: CompressedCache) -> None:
    """Read the tokens into an empty cache; a question is to come, so nothing is dropped."""
    require_choice_behind(cache.policy)
    cache.expect_prompt(ids.shape[1] + 1)
    cache.expect_tokens(ids)
    model(ids, past_key_values=cache, logits_to_keep=1)
    cache.reading.prompt_end = None
