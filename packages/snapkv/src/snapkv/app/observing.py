"""A reading in which every layer is looked at, as attention saw it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from snapkv.app.models import LoadedModel
from snapkv.hf.cache import CompressedCache
from snapkv.policies import Policy, PromptLayer, Selection
from snapkv.policies.base import Need

Seen = TypeVar("Seen")


@dataclass(frozen=True)
class _Observer(Policy):
    """Looks at every layer and keeps everything."""

    name: ClassVar[str] = "observer"

    look: Callable[[PromptLayer], None]
    query_count: int
    parts: frozenset[Need] = frozenset()

    @property
    def query_tokens(self) -> int:
        return self.query_count

    @property
    def needs(self) -> frozenset[Need]:
        return self.parts

    def select(self, layer: PromptLayer) -> Selection | None:
        self.look(layer)
        return None


@dataclass(frozen=True, kw_only=True)
class Observed(Generic[Seen]):
    """Tokens that were read in one pass while every layer was looked at."""

    seen: dict[int, Seen]
    cache: CompressedCache
    last_logits: Tensor


def observed(
    loaded: LoadedModel,
    ids: Tensor,
    query_tokens: int,
    look: Callable[[PromptLayer], Seen],
    needs: frozenset[Need] = frozenset(),
) -> Observed[Seen]:
    """Read tokens in one pass and look at every layer, whose states are as attention saw them."""
    seen: dict[int, Seen] = {}

    def note(layer: PromptLayer) -> None:
        seen[layer.layer_idx] = look(layer)

    ids = ids.to(loaded.model.device)
    cache = CompressedCache(loaded.model, _Observer(note, query_tokens, needs))
    cache.expect_tokens(ids)
    with torch.inference_mode():
        logits = loaded.model(ids, past_key_values=cache, logits_to_keep=1).logits
    return Observed(seen=seen, cache=cache, last_logits=logits[0, -1])
