"""A compressed layer of indexed attention: an indexer chooses which latents a query attends to.

DeepSeek Sparse Attention (DeepSeek-V3.2): a small indexer scores all stored tokens by keys of its
own, and attention sees the best of them. The indexer's keys, rotated at true positions, are stored
behind each token's values, so whatever becomes of a token becomes of its indexer key.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer, LayerIdentity
from snapkv.errors import UnsupportedModelError
from snapkv.policies import Policy
from snapkv.storage.base import Storage

_UNSEEN = -3e4
"""A score below it is that of a token which the query must not see: an additive mask made it so."""


class IndexedLayer(CompressedLayer):
    """A latent for each token, and its indexer key.

    Args:
        index_dim: numbers of an indexer key; 0 for a layer that goes by the indexer of `leader`.
        leader: index of the layer whose indexer it goes by, its own or an earlier one's.
        most_attended: how many tokens a query attends to at most.
        note: told of the scores of the last queries, (B, N, S) float32, as the indexer makes them;
            of None when it begins.
    """

    def __init__(
        self,
        policy: Policy,
        identity: LayerIdentity,
        storage: Storage,
        *,
        index_dim: int,
        leader: int,
        most_attended: int,
        note: Callable[[int, Tensor | None], None],
    ) -> None:
        super().__init__(policy, identity, storage)
        self.index_dim, self.leader, self.most_attended = index_dim, leader, most_attended
        self._note_scores = note

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As of a compressed layer; `update_indexer` fills in the new tokens' indexer keys."""
        width = value_states.shape[-1]
        room = value_states.new_zeros(*value_states.shape[:-1], self.index_dim)
        beside = torch.cat([value_states, room], dim=-1)
        keys, values = super().update(key_states, beside, *args, **kwargs)
        return keys, values[..., :width]

    def shown(self, real: Tensor) -> Tensor:
        """Without what the first slots hold in place of tokens: the indexer goes by this mask."""
        if self.slots.kept is None or self.slots.fillers is None or self.recall_due:
            return real
        first = self.slots.gone + self.slots.dropped + self.slots.fillers[:, None]
        return real & (torch.arange(real.shape[1], device=real.device) >= first)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the (B, N, D) keys of the tokens that came last; returns all, (B, S, D)."""
        if indexer_key_states.shape[-1] != self.index_dim:
            raise UnsupportedModelError(
                f"model: expected indexer keys of {self.index_dim} numbers in layer "
                f"{self.identity.layer_idx}, as its config says, got "
                f"{indexer_key_states.shape[-1]}; use transformers' own cache for it"
            )
        keys: Tensor = self.store.values[:, 0, :, -self.index_dim :]
        with torch.no_grad():
            keys[:, -indexer_key_states.shape[1] :] = indexer_key_states
        if "index_scores" not in self.policy.needs:
            return keys
        leader, note = self.leader, self._note_scores
        note(leader, None)
        return _IndexerKeys.of(keys, lambda found: note(leader, found), self.policy.query_tokens)


class _IndexerKeys(Tensor):
    """Indexer keys that tell which scores are made of them: those a top-k is taken of."""

    tell: Callable[[Tensor], None]
    rows: int

    @classmethod
    def of(cls, states: Tensor, tell: Callable[[Tensor], None], rows: int) -> "_IndexerKeys":
        made: _IndexerKeys = states.as_subclass(cls)
        made.tell, made.rows = tell, rows
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        told = next(each for each in given if isinstance(each, _IndexerKeys))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in (Tensor.topk, torch.topk):
            scores = args[0].as_subclass(Tensor)[:, -told.rows :].detach()
            told.tell(scores.masked_fill(scores < _UNSEEN, -math.inf))
        elif isinstance(result, Tensor):
            return _IndexerKeys.of(result, told.tell, told.rows)
        return result
