"""Operations on cache layers of transformers, which a cache uses where nothing is compressed."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from snapkv.errors import UnsupportedModelError, wrong


class CrossAttentionLayer(DynamicLayer):
    """A layer that holds the keys and values of an image, which do not depend on the text."""

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing, because the keys and values of this layer do not come from the text."""


class AbsentLayer(DynamicLayer):
    """A placeholder for a missing layer, so that the other layers keep their indices."""

    is_compileable = True  # the layers that are there decide

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise an error, because no module of the model was found for this layer.

        Raises:
            UnsupportedModelError: always.
        """
        problem = f"no attention module has the `layer_idx` {self.layer_idx}, which received keys"
        remedy = "Set the `layer_idx` of the attention modules before you make the cache"
        raise wrong("model", problem, remedy, UnsupportedModelError)

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing, because there are no tokens in this layer."""


def free_dropped_tokens(layer: CacheLayerMixin, new_tokens: int) -> None:
    """Free the memory of old tokens in a sliding-window layer after a long prompt was read.

    transformers keeps the last tokens as a view of all tokens, so the whole prompt stays in memory
    until the next forward pass. Here the view is replaced by a copy. Other layers do not change.

    Args:
        layer: the layer, which changes in place.
        new_tokens: how many tokens the forward pass has read.
    """
    if not isinstance(layer, DynamicSlidingWindowLayer):
        return
    if layer.keys is not None and new_tokens > layer.keys.shape[-2]:
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()


def require_croppable(layer: Any, count: int, layer_idx: int) -> None:
    """Raise if the last `count` tokens cannot be removed from a layer.

    Only recurrent layers and sliding-window layers have a limit.

    Args:
        layer: the layer, which does not change.
        count: how many tokens are to be removed.
        layer_idx: the index of the layer, for the error.

    Raises:
        InvalidArgumentError: the layer no longer holds the state or the window before these tokens.
    """
    if hasattr(layer, "conv_states"):
        most, why = _recorded(layer), "has a recurrent state"
    elif isinstance(layer, DynamicSlidingWindowLayer):
        most, why = (
            _before_window(layer),
            "has a sliding window and has dropped older tokens",
        )
    else:
        return
    if count > most:
        raise wrong(
            "tokens_to_remove",
            f"expected at most {most} tokens, because layer {layer_idx} {why}, but got {count}",
            "Call cache.reset() and read the shorter text again",
        )


def crop(layer: Any, count: int) -> None:
    """Remove the last `count` tokens from a layer of any kind, in place.

    If `count` is 0, a layer that records past states or a longer window frees these.
    """
    if count or getattr(layer, "record_past", False):
        layer.crop(-count)


def reset(layer: Any) -> None:
    """Remove all tokens from a layer, so that it can be used with any number of rows.

    transformers would fill states with zeros for the same number of rows.
    """
    layer.reset()
    if isinstance(layer, DynamicSlidingWindowLayer | CrossAttentionLayer):
        # Older releases of transformers keep zeros.
        layer.keys = layer.values = None
        layer.is_initialized = False
    forget_states(layer)


def forget_states(layer: Any) -> None:
    """Remove the states of a recurrent layer, so that it can be used with any number of rows."""
    for name in ("conv_states", "recurrent_states"):
        if hasattr(layer, name):
            setattr(layer, name, dict.fromkeys(getattr(layer, name)))
            setattr(layer, f"is_{name}_initialized", dict.fromkeys(getattr(layer, name), False))
    if hasattr(layer, "has_previous_state"):
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, False)


def _recorded(layer: Any) -> int:
    """Return how many tokens can be removed from a recurrent layer.

    It is 0 unless the layer has recorded its past states.
    """
    if not (getattr(layer, "record_past", False) and getattr(layer, "is_croppable", False)):
        return 0
    sizes = layer.conv_kernel_size
    past = (states.shape[-1] - sizes[place] for place, states in layer.conv_states.items())
    return max(0, int(min(past)))


def _before_window(layer: DynamicSlidingWindowLayer) -> int:
    """Return how many tokens can be removed from a sliding-window layer."""
    seen = int(layer.cumulative_length)
    held = 0 if layer.keys is None else int(layer.keys.shape[-2])
    return seen if held == seen else max(0, held - int(layer.sliding_window) + 1)
