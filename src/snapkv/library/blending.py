"""Stand-in."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.hf.cache import CompressedCache
from snapkv.policies import Policy


@dataclass(frozen=True, kw_only=True)
class Part:
    """One document."""

    input_ids: Tensor
    cache: CompressedCache
    prefix_tokens: int


def joined_ids(parts: Sequence[Part]) -> Tensor:
    """The tokens of all."""
    first, *rest = parts
    return torch.cat([first.input_ids, *(p.input_ids[:, p.prefix_tokens :] for p in rest)], dim=1)


def blend(
    model: PreTrainedModel,
    parts: Sequence[Part],
    policy: Policy | None = None,
    *,
    recompute: float = 0.15,
    **options: Any,
) -> CompressedCache:
    """Read all in full."""
    if len(parts) == 1 and not recompute:
        return copy.deepcopy(parts[0].cache)
    cache = CompressedCache(model, policy, **options)
    ids = joined_ids(parts)
    cache.expect_prompt(ids.shape[1] + 1)
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    return cache
