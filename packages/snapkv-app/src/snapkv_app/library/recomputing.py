"""Recompute the tokens that the documents before them change most (CacheBlend).

If documents were read separately, no token has seen the documents before its own. The first layer
is not affected: its keys and values depend only on a token and its position. Once the first layer
has read all tokens together, the keys and values of the second layer show how much each token would
change (arXiv 2405.16444, section 4.3). The tokens that change most are read by the following
layers, at their own positions and over the stored keys and values of all other tokens, and their
new keys and values replace the stored ones. Every layer measures again which of its tokens change
most: only those reach the next layer. All other tokens keep their stored keys and values in that
layer and in all later ones.

The first two layers are exact: their keys and values equal those of all tokens read together.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from snapkv.errors import UnsupportedModelError, wrong
from snapkv.hf.attention import plain_name
from snapkv.hf.cache_argument import passed
from snapkv.prefill.decoder import (
    ReadEnough,
    at_places,
    decoder_layers,
    replacing_forward,
    require_by_token,
)
from snapkv_app.library.joining import JoinedLayer

IMPLEMENTATIONS = ("sdpa", "eager")

_PIECE_TOKENS = 256
"""The most tokens that a layer reads at once; more are read in pieces of equal size."""

_LAST = 0.1
"""The fraction of the second layer's recomputed tokens that the last layer recomputes, too."""

States = tuple[Tensor, Tensor]
"""Keys and values of N tokens in H KV heads, (1, H, N, D) and (1, H, N, Dv)."""


def require_recomputable(model: PreTrainedModel) -> str:
    """Check that the model's attention implementation accepts any mask, and return its name.

    Raises:
        UnsupportedModelError: the implementation is neither sdpa nor eager.
    """
    name = plain_name(model.config.get_text_config(decoder=True)._attn_implementation)
    if name not in IMPLEMENTATIONS:
        raise wrong(
            "attn_implementation",
            f"the value must be {' or '.join(IMPLEMENTATIONS)} to recompute tokens of joined "
            f"documents, but got {name!r}",
            f"Load the model with attn_implementation={IMPLEMENTATIONS[0]!r}, or set recompute=0",
            UnsupportedModelError,
        )
    return name


@torch.no_grad()
def recompute(
    model: PreTrainedModel, input_ids: Tensor, layers: Sequence[JoinedLayer], counts: Sequence[int]
) -> list[JoinedLayer]:
    """Recompute the keys and values of the tokens that change most, and replace the stored ones.

    Changes `layers` in place.

    Args:
        model: the model that has read the documents.
        input_ids: (1, N) int64, the tokens of all documents, on the device of the model.
        layers: the joined keys and values of every layer.
        counts: the number of tokens that each layer from the second on reads. They may fall from
            layer to layer, but must not rise. At the first 0 the forward pass ends.

    Returns:
        A list with the layers of `layers` themselves.

    Raises:
        UnsupportedModelError: the model's attention or its decoder layers are not supported.
    """
    again = _SecondReading(layers, counts, model)
    forwards: dict[Any, Callable[..., Any]] = {
        layer: functools.partial(again.read_layer, index, layer.forward)
        for index, layer in enumerate(decoder_layers(model))
        if index
    }
    with replacing_forward(forwards), suppress(ReadEnough):
        model.get_decoder()(input_ids=input_ids, **passed(again), use_cache=True)
    return again.joined


class _SecondReading(Cache):
    """The cache of a forward pass that reads joined documents again, with fewer tokens per layer.

    Args:
        layers: the joined keys and values of every layer, which are changed in place.
        counts: the number of tokens that each layer from the second on reads.
        model: the model.

    Attributes:
        joined: the layers.
        chosen: (n,) int64, the positions of the tokens that reach the current layer, ascending;
            None before the second layer.

    Raises:
        UnsupportedModelError: the model's attention implementation does not accept the masks.
    """

    def __init__(
        self, layers: Sequence[JoinedLayer], counts: Sequence[int], model: PreTrainedModel
    ) -> None:
        super().__init__(layers=[])
        self.joined = list(layers)
        self.chosen: Tensor | None = None
        self._counts, self._implementation = counts, require_recomputable(model)
        self._query_heads = model.config.get_text_config(decoder=True).num_attention_heads
        self._second: States | None = None
        self._start = self._stop = 0  # the range of chosen tokens that the layer is reading now
        self._unheld: list[States] = []
        self._changes: list[Tensor] = []  # of the tokens that the previous layer has read

    # The keys and values that a layer attends to.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> States:
        """Store new keys and values of a layer, and return those to which its queries attend.

        Args:
            key_states: (1, H, m, D), those of the m tokens that the layer is reading now.
            value_states: (1, H, m, Dv), likewise.
            layer_idx: the index of the layer.
            args: ignored.
            kwargs: ignored.

        Returns:
            Keys (1, H, S, D) and values (1, H, S, Dv) of S visible tokens. In the first layer they
            are the new ones; in later layers they are the stored ones up to the last token that is
            being read, and new ones of tokens that some head does not store.

        Raises:
            ReadEnough: the layer needs no attention, because the rest of the pass would change
                nothing.
        """
        states = key_states, value_states
        if layer_idx == 0:
            self._replace_stored(layer_idx, self._every_token(0), states)
            return states
        if layer_idx == 1:
            return self._read_second(states)
        self._changes.append(self._replace_stored(layer_idx, self._reading, states))
        return self._seen(layer_idx, states)

    def _replace_stored(self, layer_idx: int, tokens: Tensor, states: States) -> Tensor:
        """Replace the stored keys and values of `tokens` in a layer, in the heads that store them.

        Args:
            layer_idx: the index of the layer.
            tokens: (n,) int64, positions of tokens in the joined text.
            states: the new keys and values of these tokens.

        Returns:
            (n,) float32, how much each token has changed: the squared distance between its old and
            its new states.

        Raises:
            ReadEnough: it was the last layer.
        """
        change = self.joined[layer_idx].put(tokens, *states)
        if layer_idx == len(self.joined) - 1:
            raise ReadEnough
        return change

    def _read_second(self, states: States) -> States:
        """Store the keys and values of the second layer, or return those of the visible tokens.

        The first call stores them for all tokens, measures how much each token has changed, and
        then ends the layer. Every later call ignores `states` and returns the stored keys and
        values up to the last token that is being read.

        Raises:
            ReadEnough: it was the first call.
        """
        if self._second is None:
            self._second, self.chosen = states, self._every_token(1)
            self._changes = [self._replace_stored(1, self.chosen, states)]
            raise ReadEnough
        keys, values = self._second
        return keys[:, :, : self._end(1)], values[:, :, : self._end(1)]

    def _seen(self, layer_idx: int, states: States) -> States:
        """Return the stored keys and values of a layer, and after them new ones of missing tokens.

        If some head does not store some chosen token, the new states of all tokens that the layer
        has read so far are appended; the mask hides them from the heads that store the token. The
        new states are remembered until the next layer.
        """
        held, end = self.joined[layer_idx], self._end(layer_idx)
        keys, values = held.key_states[:, :, :end], held.value_states[:, :, :end]
        if self._missing(held) is None:
            return keys, values
        self._unheld.append(states)
        new_keys, new_values = zip(*self._unheld, strict=True)
        return torch.cat([keys, *new_keys], dim=2), torch.cat([values, *new_values], dim=2)

    def _missing(self, held: JoinedLayer) -> Tensor | None:
        """Return which of the chosen tokens each head does not store.

        Returns:
            (H, m) bool, for the chosen tokens up to the end of the current piece; None if all heads
            store all chosen tokens.
        """
        assert self.chosen is not None
        if held.is_whole:
            return None
        missing = held.slots_of(self.chosen) < 0
        return missing[:, : self._stop] if bool(missing.any()) else None

    def _end(self, layer_idx: int) -> int:
        """Return how many leading slots contain all tokens up to the last one of this piece.

        It is the largest number over the heads of the layer.
        """
        last = int(self._reading[-1])
        held = self.joined[layer_idx]
        if layer_idx == 1 or held.is_whole:
            return last + 1
        return int((held.places <= last).sum(dim=-1).max())

    @property
    def _reading(self) -> Tensor:
        """The positions of the m chosen tokens that the layer is reading now, (m,) int64."""
        assert self.chosen is not None
        return self.chosen[self._start : self._stop]

    def _every_token(self, layer_idx: int) -> Tensor:
        """Return all tokens, (N,) int64, on the device of a layer."""
        places = self.joined[layer_idx].places
        return torch.arange(self.joined[0].tokens, device=places.device)

    # The tokens that reach a layer.

    def read_layer(
        self,
        layer_idx: int,
        forward: Callable[..., Any],
        hidden_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a layer, from the second one on, for the tokens that reach it.

        The second layer is run twice: first to measure how much every token changes, then for the
        tokens that have changed most.

        Args:
            layer_idx: the index of the layer.
            forward: the `forward` of the layer.
            hidden_states: the hidden states of the tokens that have reached the previous layer.
            args: further arguments of `forward`, which must be empty.
            kwargs: further arguments of `forward`.

        Returns:
            The output of `forward`, for the tokens that it has read.

        Raises:
            ReadEnough: no later layer has any token to read.
            UnsupportedModelError: the layer gets an argument that cannot be reduced to some tokens.
        """
        tokens = self.joined[0].tokens
        require_by_token(args, kwargs, tokens)
        if self.chosen is None:
            with suppress(ReadEnough):
                forward(hidden_states, **kwargs)
        if self.chosen is None or len(self.joined) == 2:
            raise ReadEnough
        self.chosen = self.chosen.to(self.joined[layer_idx].places.device)
        hidden_states = self._reduce_chosen(hidden_states, self._counts[layer_idx - 1])
        kwargs.pop("attention_mask", None)
        return self._read_pieces(layer_idx, forward, hidden_states, kwargs)

    def _reduce_chosen(self, hidden_states: Tensor, count: int) -> Tensor:
        """Reduce `chosen` to the `count` tokens that have changed most in the previous layer.

        Args:
            hidden_states: (1, n, hidden size), those of the chosen tokens.
            count: the number of tokens to keep; `chosen` stays as it is if it has no more.

        Returns:
            The hidden states of the tokens that are left, (1, min(n, count), hidden size).

        Raises:
            ReadEnough: `count` is 0.
        """
        assert self.chosen is not None
        if not count:
            raise ReadEnough
        if count < len(self.chosen):
            changes = torch.cat(self._changes).to(self.chosen.device)
            most = most_changed(changes, count)
            self.chosen, self._changes = self.chosen[most], [changes[most]]
            hidden_states = at_places(hidden_states, most[None])
        return hidden_states

    def _read_pieces(
        self,
        layer_idx: int,
        forward: Callable[..., Any],
        hidden_states: Tensor,
        others: dict[str, Any],
    ) -> Any:
        """Run a layer on the chosen tokens in pieces of equal size, so that its masks stay small.

        Args:
            layer_idx: the index of the layer.
            forward: the `forward` of the layer.
            hidden_states: (1, n, hidden size), those of the chosen tokens.
            others: further arguments, which have a value for each of all N tokens.

        Returns:
            The output of `forward` for the chosen tokens: hidden states, or a tuple that contains
            nothing else, as `forward` returns them.

        Raises:
            ReadEnough: it was the last layer, which only stores keys and values.
        """
        outputs, count = [], hidden_states.shape[1]
        size = math.ceil(count / math.ceil(count / _PIECE_TOKENS))
        self._unheld = []
        if layer_idx > 1:
            self._changes = []
        for self._start in range(0, count, size):
            self._stop = min(self._start + size, count)
            part = hidden_states[:, self._start : self._stop]
            reached = {name: at_places(each, self._reading[None]) for name, each in others.items()}
            mask = self._accepted_mask(self._visible(layer_idx), part.dtype)
            with suppress(ReadEnough):
                outputs.append(forward(part, attention_mask=mask, **reached))
        if not outputs:
            raise ReadEnough
        if isinstance(outputs[0], tuple):
            return (torch.cat([output[0] for output in outputs], dim=1),)
        return torch.cat(outputs, dim=1)

    def _visible(self, layer_idx: int) -> Tensor:
        """Return the mask of the current tokens, which see the tokens up to their own position.

        Returns:
            (1, 1 or Hq, m, S) bool, for the m current tokens and the S keys that `update` returns,
            in their order; True for visible keys. With a second size of 1, it is the same for all
            Hq query heads.
        """
        held, end = self.joined[layer_idx], self._end(layer_idx)
        if layer_idx == 1 or held.is_whole:
            return (self._every_token(layer_idx)[:end] <= self._reading[:, None])[None, None]
        places, missing = held.places[:, :, None, :end], self._missing(held)
        visible = (places >= 0) & (places <= self._reading[:, None])
        if missing is not None:
            assert self.chosen is not None
            before = self.chosen[: self._stop] <= self._reading[:, None]
            visible = torch.cat([visible, (missing[:, None] & before)[None]], dim=-1)
        return visible.repeat_interleave(self._query_heads // visible.shape[1], dim=1)

    def _accepted_mask(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a mask in the form that the attention implementation accepts.

        For eager attention, it has the dtype of the hidden states, with 0 for visible keys and the
        lowest number for the others. For sdpa, it is `visible` itself.
        """
        if self._implementation != "eager":
            return visible
        lowest = torch.finfo(dtype).min
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, lowest)


def falling(share: float, tokens: int, layers: int) -> list[int]:
    """Return how many tokens each layer from the second on recomputes.

    From layer to layer the number falls by a constant factor, down to a tenth in the last layer.
    For shares above one half it falls less, and for a share of 1 it does not fall, so that the work
    grows steadily with the share.

    Args:
        share: the fraction of the tokens that the second layer recomputes.
        tokens: the number of tokens.
        layers: the number of layers of the model.

    Returns:
        `layers` - 1 numbers, which are rounded down.
    """
    steps = max(layers - 2, 1)
    last = _LAST ** min(1.0, 2 * (1 - share))
    return [math.floor(share * last ** (step / steps) * tokens) for step in range(layers - 1)]


def most_changed(deviation: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest deviations; among equal ones the first win.

    Args:
        deviation: (N,) numbers.
        count: how many to return.

    Returns:
        (count,) int64, in ascending order.
    """
    order = deviation.sort(descending=True, stable=True).indices
    return order[:count].sort().values
