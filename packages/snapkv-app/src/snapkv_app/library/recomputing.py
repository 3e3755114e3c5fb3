"""Reading again the tokens that another text before them changes most (CacheBlend).

Of documents that were read apart, no token has seen those of the documents before its own. The
first layer does not care: its keys and values depend on a token and its place alone. The second
layer's keys and values, once the first has read all tokens together, show how much each token
would change (arXiv 2405.16444, Sec. 4.3). Those that change most go on, at their places and over
what is held of all others, and what they become takes the place of what was held. Every layer shows
again which of them it changes most: only those reach the next one, and of the others that one and
all after it keep what was held.

The first two layers come out exact: their keys and values are those of all tokens read together.
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

from snapkv.errors import UnsupportedModelError
from snapkv.hf.attention import plain_name
from snapkv.hf.cache_argument import passed
from snapkv.prefill.decoder import (
    ReadEnough,
    at_places,
    decoder_layers,
    require_by_token,
    standing_in,
)
from snapkv_app.library.joining import JoinedLayer

IMPLEMENTATIONS = ("sdpa", "eager")

_PIECE_TOKENS = 256
"""Of more tokens the chosen ones are read in pieces, none of which looks at what is after it."""

_LAST = 0.1
"""Of the tokens that the second layer reads again, so many are left in the last one."""

States = tuple[Tensor, Tensor]
"""Keys and values, (1, H, N, D) and (1, H, N, Dv)."""


def require_recomputable(model: PreTrainedModel) -> str:
    """The name of the model's attention, which takes masks of any kind."""
    name = plain_name(model.config.get_text_config(decoder=True)._attn_implementation)
    if name not in IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"attn_implementation: expected {' or '.join(IMPLEMENTATIONS)} where tokens are "
            f"recomputed over documents that were read apart, got {name!r}; load the model so, or "
            "pass recompute=0"
        )
    return name


@torch.no_grad()
def recompute(
    model: PreTrainedModel, input_ids: Tensor, layers: Sequence[JoinedLayer], counts: Sequence[int]
) -> list[JoinedLayer]:
    """Read again the keys and values of the tokens that change most, and hold them in place.

    Of how many, `counts` says for every layer from the second on; it may fall, and never rises.
    """
    again = _SecondReading(layers, counts, model)
    forwards: dict[Any, Callable[..., Any]] = {
        layer: functools.partial(again.read_layer, index, layer.forward)
        for index, layer in enumerate(decoder_layers(model))
        if index
    }
    with standing_in(forwards), suppress(ReadEnough):
        model.get_decoder()(input_ids=input_ids, **passed(again), use_cache=True)
    return again.joined


class _SecondReading(Cache):
    """What the layers hold, as the cache of a pass over all tokens of which few go on."""

    def __init__(
        self, layers: Sequence[JoinedLayer], counts: Sequence[int], model: PreTrainedModel
    ) -> None:
        super().__init__(layers=[])
        self.joined = list(layers)
        self.chosen: Tensor | None = None
        self._counts, self._implementation = counts, require_recomputable(model)
        self._query_heads = model.config.get_text_config(decoder=True).num_attention_heads
        self._second: States | None = None
        self._start = self._stop = 0  # of the chosen tokens, those that a layer reads now
        self._unheld: list[States] = []
        self._changes: list[Tensor] = []  # of the tokens that the last layer has read

    # What a layer attends to.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> States:
        """Hold the new keys and values of a layer; returns those that it attends to."""
        states = key_states, value_states
        if layer_idx == 0:
            self._hold(layer_idx, self._every_token(0), states)
            return states
        if layer_idx == 1:
            return self._read_second(states)
        self._changes.append(self._hold(layer_idx, self._reading, states))
        return self._seen(layer_idx, states)

    def _hold(self, layer_idx: int, tokens: Tensor, states: States) -> Tensor:
        """(n,) float32: how much that changes what is held of the tokens."""
        change = self.joined[layer_idx].put(tokens, *states)
        if layer_idx == len(self.joined) - 1:
            raise ReadEnough
        return change

    def _read_second(self, states: States) -> States:
        """Choose when the layer is read by all tokens; the chosen ones then see all that were."""
        if self._second is None:
            self._second, self.chosen = states, self._every_token(1)
            self._changes = [self._hold(1, self.chosen, states)]
            raise ReadEnough
        keys, values = self._second
        return keys[:, :, : self._end(1)], values[:, :, : self._end(1)]

    def _seen(self, layer_idx: int, states: States) -> States:
        """What is held, and after it of the chosen tokens what some head does not hold."""
        held, end = self.joined[layer_idx], self._end(layer_idx)
        keys, values = held.key_states[:, :, :end], held.value_states[:, :, :end]
        if self._missing(held) is None:
            return keys, values
        self._unheld.append(states)
        new_keys, new_values = zip(*self._unheld, strict=True)
        return torch.cat([keys, *new_keys], dim=2), torch.cat([values, *new_values], dim=2)

    def _missing(self, held: JoinedLayer) -> Tensor | None:
        """(H, m) bool: which chosen tokens so far each head does not hold; None where it does."""
        assert self.chosen is not None
        if held.is_whole:
            return None
        missing = held.slots_of(self.chosen) < 0
        return missing[:, : self._stop] if bool(missing.any()) else None

    def _end(self, layer_idx: int) -> int:
        """After which slot of a layer nothing is visible to the tokens that are read now."""
        last = int(self._reading[-1])
        held = self.joined[layer_idx]
        if layer_idx == 1 or held.is_whole:
            return last + 1
        return int((held.places <= last).sum(dim=-1).max())

    @property
    def _reading(self) -> Tensor:
        """(m,) the chosen tokens that a layer reads now."""
        assert self.chosen is not None
        return self.chosen[self._start : self._stop]

    def _every_token(self, layer_idx: int) -> Tensor:
        places = self.joined[layer_idx].places
        return torch.arange(self.joined[0].tokens, device=places.device)

    # Which tokens reach a layer.

    def read_layer(
        self,
        layer_idx: int,
        forward: Callable[..., Any],
        hidden_states: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """A layer's forward, from the second layer on, of the tokens that reach it."""
        tokens = self.joined[0].tokens
        require_by_token(args, kwargs, tokens)
        if self.chosen is None:
            with suppress(ReadEnough):
                forward(hidden_states, **kwargs)
        if self.chosen is None or len(self.joined) == 2:
            raise ReadEnough
        self.chosen = self.chosen.to(self.joined[layer_idx].places.device)
        hidden_states = self._narrowed(hidden_states, self._counts[layer_idx - 1])
        kwargs.pop("attention_mask", None)
        return self._read_pieces(layer_idx, forward, hidden_states, kwargs)

    def _narrowed(self, hidden_states: Tensor, count: int) -> Tensor:
        """Of the tokens that have reached a layer, the `count` that the last one changed most."""
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
        """The chosen tokens in pieces, none of which looks at what comes after its last one."""
        outputs, count = [], hidden_states.shape[1]
        size = math.ceil(count / math.ceil(count / _PIECE_TOKENS))
        self._unheld = []
        if layer_idx > 1:
            self._changes = []
        for self._start in range(0, count, size):
            self._stop = min(self._start + size, count)
            part = hidden_states[:, self._start : self._stop]
            reached = {name: at_places(each, self._reading[None]) for name, each in others.items()}
            mask = self._as_taken(self._visible(layer_idx), part.dtype)
            with suppress(ReadEnough):
                outputs.append(forward(part, attention_mask=mask, **reached))
        if not outputs:
            raise ReadEnough
        if isinstance(outputs[0], tuple):
            return (torch.cat([output[0] for output in outputs], dim=1),)
        return torch.cat(outputs, dim=1)

    def _visible(self, layer_idx: int) -> Tensor:
        """(1, 1 or Hq, m, S) bool: what stands at a token's own place or before it."""
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

    def _as_taken(self, visible: Tensor, dtype: torch.dtype) -> Tensor:
        if self._implementation != "eager":
            return visible
        lowest = torch.finfo(dtype).min
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, lowest)


def falling(share: float, tokens: int, layers: int) -> list[int]:
    """How many of N tokens every layer from the second on reads again: a share, falling to a tenth.

    By the same factor from layer to layer. From half of the tokens on it falls less, so that of all
    tokens none is left out: what is read grows with the share without a jump, in every layer.
    """
    steps = max(layers - 2, 1)
    last = _LAST ** min(1.0, 2 * (1 - share))
    return [math.floor(share * last ** (step / steps) * tokens) for step in range(layers - 1)]


def most_changed(deviation: Tensor, count: int) -> Tensor:
    """(n,) int64, ascending: which of (N,) deviations are largest; of equal ones the first."""
    order = deviation.sort(descending=True, stable=True).indices
    return order[:count].sort().values
