"""A compressed layer that has a state besides its keys and values."""

import copy
from typing import Any, Self

from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from snapkv.cache.layer import CompressedLayer, LayerIdentity
from snapkv.policies import Policy
from snapkv.storage import uncompressed
from snapkv.storage.bits import KVCodes


class HybridLayer(CompressedLayer, LinearAttentionAndFullAttentionLayer):
    """Attention and linear attention in one layer, such as Falcon H1's: only the tokens shrink.

    The state is transformers', taken over from the layer that it has made.
    """

    def __init__(
        self, policy: Policy, identity: LayerIdentity, codes: KVCodes | None, made: Any
    ) -> None:
        super().__init__(policy, identity, codes)
        own = {name: value for name, value in vars(made).items() if name not in _OF_TOKENS}
        self.__dict__.update(own)
        self._names = tuple(own)

    @property
    def other_states(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def take_other_states(self, other: "HybridLayer") -> None:
        """Go on from the states of another layer, which keeps them."""
        self.__dict__.update(copy.deepcopy(other.other_states))  # they are written over in place

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


_OF_TOKENS = ("keys", "values", "is_initialized")
"""What a layer of transformers has that a compressed one holds in its own way."""
