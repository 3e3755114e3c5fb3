"""Compressed layers that have a recurrent state besides their keys and values."""

import copy
from typing import Any, Self

from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from snapkv.cache.layer import CompressedLayer, LayerIdentity
from snapkv.policies import Policy
from snapkv.storage import uncompressed
from snapkv.storage.bits import KVCodes


class HybridLayer(CompressedLayer, LinearAttentionAndFullAttentionLayer):
    """The cache of a layer with both attention and linear attention, such as a layer of Falcon H1.

    Only the keys and values are compressed. The state of linear attention stays as transformers
    keeps it.

    Args:
        policy: selects what is kept.
        identity: which layer of the model it is.
        codes: the quantized form of what is kept of a prompt; None to store it unchanged.
        made: the cache layer that transformers has made for this layer. Its state is taken over.
    """

    def __init__(
        self, policy: Policy, identity: LayerIdentity, codes: KVCodes | None, made: Any
    ) -> None:
        super().__init__(policy, identity, codes)
        states = {name: value for name, value in vars(made).items() if name not in _TOKEN_FIELDS}
        self.__dict__.update(states)
        self._state_names = tuple(states)

    @property
    def other_states(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._state_names}

    def take_other_states(self, other: "HybridLayer") -> None:
        """Replace the recurrent states of this layer by copies of those of another layer."""
        self.__dict__.update(copy.deepcopy(other.other_states))  # both layers change them in place

    @property
    def is_croppable(self) -> bool:
        return super().is_croppable and LinearAttentionLayer.is_croppable.fget(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        super().reset()
        uncompressed.forget_states(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.record_past:
            LinearAttentionLayer.crop(self, tokens_to_remove)

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied.take_other_states(self)
        return copied


_TOKEN_FIELDS = ("keys", "values", "is_initialized")
"""The attributes of a transformers layer that a compressed layer replaces by properties."""
