"""Layers that have read a prompt and choose what they keep together, as rows of one batch.

A choice takes dozens of small operations. On a GPU, launching them takes longer than running them.
So consecutive layers with tensors of the same shapes wait for each other, as long as they hold few
bytes.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from snapkv import ops
from snapkv.cache.layer import CompressedLayer
from snapkv.policies import Policy, PromptLayer, Selection, checks
from snapkv.policies.states import LostVotes
from snapkv.storage.bits import KVCodes
from snapkv.storage.ragged_store import CodedStore

MOST_BYTES = {"cpu": 4 << 20}
"""How many bytes of keys and values may wait, by type of device. A single layer may hold more."""

_MOST_BYTES = 128 << 20
"""How many bytes may wait on any other device. Stacking the layers takes as much memory again."""


class LayerGroup:
    """Consecutive layers that have read the prompt and will choose together.

    Attributes:
        layers: the layers, in order.
        prompts: what each of them has read.
        check_votes: checks the votes of the group before it chooses; None for no check.
        is_full: whether no further layer may join.
        reaches_last: whether the model's last layer is in the group.
    """

    def __init__(self) -> None:
        self.layers: list[CompressedLayer] = []
        self.prompts: list[PromptLayer] = []
        self.check_votes: Callable[[LayerGroup], None] | None = None
        self._outputs: list[Tensor] = []
        self._next: Any = None  # the depth and `stack_key` of a prompt that may join
        self._bytes_left = 0
        self.is_full = self.reaches_last = False

    def __len__(self) -> int:
        return len(self.layers)

    def add(
        self,
        layer: CompressedLayer,
        prompt: PromptLayer,
        output: Tensor | None = None,
        check_votes: "Callable[[LayerGroup], None] | None" = None,
    ) -> bool:
        """Add a layer, unless it does not follow the others or has tensors of other shapes.

        Args:
            layer: the layer, which holds the whole prompt.
            prompt: the prompt's states in this layer.
            output: (B, Hq, Dv), the model's attention output of the prompt's last token.
            check_votes: checks the votes of the group before it chooses.

        Returns:
            Whether the layer was added. An empty group takes any layer.
        """
        if not self.layers:
            self._bytes_left = most_bytes(prompt.keys.device)
        elif self._next != (prompt.depth, prompt.stack_key):
            return False
        self._bytes_left -= prompt.keys.nbytes + prompt.values.nbytes
        self._next, self.check_votes = (prompt.depth + 1, prompt.stack_key), check_votes
        self.reaches_last = prompt.depth == prompt.num_layers - 1
        stays_alone = prompt.stack_key is None or not layer.policy.can_select_stacked
        self.is_full = self._bytes_left <= 0 or stays_alone or self.reaches_last
        if not self.is_full:  # copied, since views would keep the states of all tokens in memory
            prompt = replace(prompt, queries=prompt.queries.clone())
            output = None if output is None else output.clone()
        self.layers.append(layer)
        self.prompts.append(prompt)
        if output is not None:
            self._outputs.append(output)
        return True

    @functools.cached_property
    @torch.no_grad()
    def stack(self) -> PromptLayer:
        """The prompts of all layers of the group, stacked as batch rows of one layer."""
        return PromptLayer.stack(self.prompts)

    @property
    def outputs(self) -> Tensor:
        """The attention outputs of the last token of the prompt, as (layers * B, Hq, Dv)."""
        outputs = self._outputs
        return outputs[0].detach() if len(outputs) == 1 else torch.cat(outputs).detach()

    def choose(self, policy: Policy, *, is_final: bool) -> None:
        """Let the policy select what each layer keeps, and evict the rest.

        Args:
            policy: the policy of all layers.
            is_final: as for `Chooser.offer`.
        """
        with ops.scoring(self.stack.keys):
            selection = checks.select(policy, self.stack, [one.layer_idx for one in self.prompts])
            if selection is None and is_final:
                selection = Selection.keep_all(self.stack)
            lost = self._lost_votes(policy, selection)
        parts: list[Selection | None] = [None] * len(self.layers)
        if selection is not None:
            parts = selection.of_layers(self.prompts)
        for layer, part, prompt, own in zip(self.layers, parts, self.prompts, lost, strict=True):
            layer.end_prompt(prompt, part, **own)
        prompt_tokens = self.prompts[0].keys.shape[2]
        kept = ((layer, layer.slots.kept_slots(prompt_tokens)) for layer in self.layers)
        quantize_slots(kept, self.layers[0].codes)

    def _lost_votes(self, policy: Policy, selection: Selection | None) -> list[dict[str, Tensor]]:
        """Return the votes that each layer loses, as arguments for `CompressedLayer.end_prompt`.

        They are empty if nothing is evicted, or if tokens were evicted before.
        """
        nothing: list[dict[str, Tensor]] = [{}] * len(self.layers)
        if selection is None or self.layers[0].slots.kept is not None:
            return nothing
        if (votes := policy.votes_at_stake(self.stack)) is None:
            return nothing
        kept, tokens = selection.keep_indices, selection.prompt_tokens
        lost = LostVotes.of(votes.votes, votes.faded_shares(), kept, tokens)
        shares = zip(lost.mass.chunk(len(self)), lost.peak.chunk(len(self)), strict=True)
        return [{"lost_mass": mass, "lost_peak": peak} for mass, peak in shares]


def most_bytes(device: torch.device) -> int:
    """Return how many bytes a group of layers may hold on `device`."""
    return MOST_BYTES.get(device.type, _MOST_BYTES)


def quantize_slots(kept: Iterable[tuple[CompressedLayer, int]], codes: KVCodes | None) -> None:
    """Quantize the first slots of layers, in place.

    With recall, the exact keys and values are offloaded first. Consecutive layers of the same kind
    are quantized together, up to `most_bytes`, because each call has to wait for the GPU once.

    Args:
        kept: each layer with the number of its first slots that are quantized.
        codes: the quantized form; None to quantize nothing.

    Raises:
        InvalidArgumentError: a number is not finite, or beyond half of float32's range.
    """
    if codes is None:
        return
    filled = [(layer, tokens) for layer, tokens in kept if tokens]
    for _, alike in itertools.groupby(filled, lambda each: _stack_key(each[0])):
        layers = list(alike)
        largest = max(layer.held_bytes for layer, _ in layers)
        count = max(1, most_bytes(layers[0][0].keys.device) // largest)
        for start in range(0, len(layers), count):
            part = layers[start : start + count]
            stores = [
                layer.store.as_ragged(layer.slots.leading_padding, tokens) for layer, tokens in part
            ]
            coded = CodedStore.of_each(stores, codes)
            for (layer, tokens), store in zip(part, coded, strict=True):
                if layer.slots.kept is None:  # otherwise all tokens are offloaded already
                    layer.offloaded.append_up_to(tokens, layer.store)
                layer.store, layer.slots = store, layer.slots.without_padding()


def _stack_key(layer: CompressedLayer) -> tuple[Any, ...]:
    """Return what layers must have in common to be quantized together."""
    keys, values = layer.keys, layer.values
    return keys.device, keys.dtype, keys.shape[-1], values.shape[-1]
