"""An attention call of the model, and how it runs over the tokens that a layer stores."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from snapkv import ops
from snapkv.cache.layer import CompressedLayer
from snapkv.hf.forward_context import Branches
from snapkv.hf.masks import stored_mask
from snapkv.ops.causal import attend_in_parts, is_faster_in_parts
from snapkv.storage.base import TokenStore

FEW_QUERIES = 64
"""The most queries for which keys and values are read without repeating them per query head."""

Attended = tuple[Tensor, Tensor | None]
"""(B, Q, Hq, D) outputs, and attention weights if the implementation returns them."""


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The arguments of one attention call of the model."""

    function: Callable[..., Any]  # the wrapped attention
    implementation: str  # its name, such as "sdpa"
    module: Any
    query: Tensor  # (B, Hq, Q, D)
    key: Tensor  # (B, Hkv, S + Q, D)
    value: Tensor
    mask: Any  # see `snapkv.hf.masks`
    options: dict[str, Any]  # the remaining keyword arguments (scaling, dropout, softcap, ...)
    branches: Branches | None  # which queries see each other if they are alternatives

    @property
    def score_options(self) -> ops.ScoreOptions:
        """The options of the model's attention scores: their scaling, soft-cap and sink logits."""
        scaling = self.options.get("scaling")
        return ops.ScoreOptions(
            scaling=self.query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=self.options.get("softcap"),
            sink_logits=self.options.get("s_aux"),
        )

    def attend(self) -> Attended:
        """Run the model's own attention function, in a faster way if there is one.

        Returns:
            (B, Q, Hq, D) outputs, and attention weights if the implementation returns them.
        """
        mask, Q, S = self.mask, self.query.shape[2], self.key.shape[2]
        few = self._has_few_queries()
        if self.branches is not None:
            mask = self.branches.mask(self)
        elif mask is None and few and Q > 1:
            mask = stored_mask(self.implementation, None, S, self.query)
        elif mask is None and self.implementation == "sdpa" and 1 < Q < S:
            states = self.query, self.key, self.value
            if not self.options.get("dropout") and is_faster_in_parts(*states):
                attended = attend_in_parts(*states, self.options.get("scaling"))
                return attended.transpose(1, 2), None
            mask = causal_lower_right(Q, S)  # sdpa's own causal mask would start at the first key
        if few and (mask is None or mask.shape[1] == 1):
            return self._attend_in_groups(mask), None
        states = self.query, self.key, self.value
        output, weights = self.function(self.module, *states, mask, **self.options)
        return output, weights

    def _has_few_queries(self) -> bool:
        """Return whether repeating keys and values for each query head would dominate the cost."""
        groups, Q = self.query.shape[1] // self.key.shape[1], self.query.shape[2]
        narrow = self.query.device.type == "cpu" and self.query.dtype.itemsize < 4
        return (
            self.implementation == "sdpa"
            and (1 if narrow else 2) <= Q <= min(FEW_QUERIES, self.key.shape[2] - 1)
            and 1 < groups == getattr(self.module, "num_key_value_groups", 1)
            and self.options.get("position_bias") is None
        )

    def _attend_in_groups(self, mask: Tensor | None) -> Tensor:
        """Attend without repeating keys and values, by treating a head group as one head's queries.

        Args:
            mask: (B, 1, Q, S) mask, or None.

        Returns:
            (B, Q, Hq, D) outputs.
        """
        B, Hq, Q, D = self.query.shape
        Hkv = self.key.shape[1]
        query = self.query.reshape(B, Hkv, -1, D)
        grouped = None if mask is None else mask.repeat(1, 1, Hq // Hkv, 1)
        options = {**self.options, "is_causal": False}
        module = _Ungrouped(self.module)
        output, _ = self.function(module, query, self.key, self.value, grouped, **options)
        heads: Tensor = output.transpose(1, 2).reshape(B, Hq, Q, -1)
        return heads.transpose(1, 2).contiguous()


def attend_stored(call: AttentionCall, layer: CompressedLayer) -> Attended:
    """Attend to all tokens that a layer stores, which end with the tokens of the queries.

    The mask of the call must fit the stored slots; see `with_fitting_mask`.

    Returns:
        (B, Q, Hq, D) outputs, and attention weights if the implementation returns them.
    """
    if layer.store.ragged is not None:
        return _attend_ragged(call, layer.store), None
    if layer.slots.kept is not None and call.key.shape[1] == call.query.shape[1]:
        call = replace(call, module=_Ungrouped(call.module))
    return call.attend()


def with_fitting_mask(call: AttentionCall, layer: CompressedLayer) -> AttentionCall:
    """Return the call with a mask over the slots that `layer` stores.

    The model makes one mask for all layers, as wide as the first compressed one. A layer that
    has evicted tokens and has padding, or that stores another number of tokens, gets its own.
    """
    slots, mask, width = layer.slots, call.mask, call.key.shape[2]
    if layer.store.ragged is not None or not slots.chosen_at:
        return call  # ragged attention takes no mask; in a first prompt, the model's always fits
    fits = mask is not None and mask.shape[-1] == width
    if fits and slots.kept is None:
        return call  # the model's mask may hide more than padding, for instance around an image
    if slots.hidden_slots is None and (fits or mask is None):
        return call
    mask = stored_mask(call.implementation, slots.hidden_slots, width, call.query)
    return replace(call, mask=mask)


def _attend_ragged(call: AttentionCall, store: TokenStore) -> Tensor:
    """Compute attention over the append buffer and over heads with different numbers of tokens.

    Returns:
        (B, Q, Hq, D) outputs.
    """
    assert store.ragged is not None
    visible = None if call.branches is None else call.branches.own_visible
    tail, written = (call.key, call.value), store.tail.count
    output = store.ragged.attend(call.query, tail, call.score_options, visible, written)
    return output.transpose(1, 2).contiguous()


class _Ungrouped:
    """A stand-in for an attention module that makes its attention repeat no keys or values."""

    num_key_value_groups = 1

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
