"""Layers that have read a prompt's end and choose together, as rows of one batch.

The dozens of small operations of a choice take longer than the work that they are, on a GPU above
all. So neighbours that are alike wait for each other, as many as are little to hold.
"""

import functools
import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from snapkv import ops
from snapkv.cache.layer import CompressedLayer
from snapkv.policies import PromptLayer, Selection
from snapkv.policies.states import LostVotes
from snapkv.storage.bits import KVCodes
from snapkv.storage.ragged_store import CodedStore

MOST_BYTES = {"cpu": 4 << 20}
"""Of keys and values that wait, by the type of device; those of one layer may be more."""

_MOST_BYTES = 128 << 20
"""On any other device; as much again for their copies, side by side."""


class LayerGroup:
    """Neighbouring layers that wait, in order; none before a prompt ends and behind its last layer.

    Attributes:
        layers: those that wait.
        prompts: what each of them has read.
        is_full: whether none that comes may wait with them.
        reaches_last: whether the last layer of the model is among them.
    """

    def __init__(self) -> None:
        self.layers: list[CompressedLayer] = []
        self.prompts: list[PromptLayer] = []
        self._outputs: list[Tensor] = []
        self._kind: Any = None
        self._bytes = 0
        self.is_full = self.reaches_last = False

    def __len__(self) -> int:
        return len(self.layers)

    def goes_with(self, prompt: PromptLayer) -> bool:
        """Whether one more layer can choose together with those that wait, if any do."""
        if not self.prompts:
            return True
        return self.prompts[-1].depth + 1 == prompt.depth and self._kind == prompt.stack_key

    def add(
        self, layer: CompressedLayer, prompt: PromptLayer, output: Tensor | None = None
    ) -> None:
        """One more layer waits; `output` is (B, Hq, Dv), what attention gave the last token."""
        self._bytes += prompt.keys.nbytes + prompt.values.nbytes
        self._kind = prompt.stack_key
        self.reaches_last = prompt.depth == prompt.num_layers - 1
        is_much = self._bytes >= most_bytes(prompt.keys.device)
        stays_alone = prompt.stack_key is None or not layer.policy.can_select_stacked
        self.is_full = is_much or stays_alone or self.reaches_last
        if not self.is_full:  # a view would hold those of all tokens
            prompt = replace(prompt, queries=prompt.queries.clone())
            output = None if output is None else output.clone()
        self.layers.append(layer)
        self.prompts.append(prompt)
        if output is not None:
            self._outputs.append(output)

    @functools.cached_property
    @torch.no_grad()
    def stack(self) -> PromptLayer:
        """What they have read, as rows of one layer."""
        return PromptLayer.stack(self.prompts)

    @property
    def outputs(self) -> Tensor:
        """What attention gave the last token, as rows."""
        outputs = self._outputs
        return outputs[0].detach() if len(outputs) == 1 else torch.cat(outputs).detach()

    def keep(self, selection: Selection | None) -> None:
        """Each keeps what was chosen of the stack, None for all, and notes what its votes lost."""
        nothing: list[Selection | None] = [None] * len(self)
        parts = nothing if selection is None else selection.of_layers(self.prompts)
        with ops.scoring(self.stack.keys):
            lost = self._lost_by(selection)
        for layer, part, prompt, own in zip(self.layers, parts, self.prompts, lost, strict=True):
            layer.end_prompt(part, prompt, **own)
        prompt_tokens = self.prompts[0].keys.shape[2]
        kept = ((layer, layer.kept_slots(prompt_tokens)) for layer in self.layers)
        encode(kept, self.layers[0].codes)

    def _lost_by(self, selection: Selection | None) -> list[dict[str, Tensor]]:
        """What each loses of its votes; nothing where all is kept, or some had gone before."""
        nothing: list[dict[str, Tensor]] = [{}] * len(self)
        if selection is None or not self.layers[0].slots.is_whole:
            return nothing
        if (votes := self.layers[0].policy.votes_at_stake(self.stack)) is None:
            return nothing
        kept, tokens = selection.keep_indices, selection.prompt_tokens
        lost = LostVotes.of(votes.votes, votes.faded_shares(), kept, tokens)
        shares = zip(lost.mass.chunk(len(self)), lost.peak.chunk(len(self)), strict=True)
        return [{"lost_mass": mass, "lost_peak": peak} for mass, peak in shares]


def most_bytes(device: torch.device) -> int:
    """What may be held by layers that do something together."""
    return MOST_BYTES.get(device.type, _MOST_BYTES)


def encode(kept: Iterable[tuple[CompressedLayer, int]], codes: KVCodes | None) -> None:
    """Have layers hold so many first slots each as codes, if any are asked for.

    Of neighbours that are alike as many at once as are little to hold: a GPU is waited for once.
    """
    if codes is None:
        return
    filled = [(layer, tokens) for layer, tokens in kept if tokens]
    for _, alike in itertools.groupby(filled, lambda each: _kind_of_states(each[0])):
        layers = list(alike)
        largest = max(layer.held_bytes for layer, _ in layers)
        at_once = max(1, most_bytes(layers[0][0].keys.device) // largest)
        for start in range(0, len(layers), at_once):
            some = layers[start : start + at_once]
            stores = [layer.in_heads(tokens) for layer, tokens in some]
            coded = CodedStore.of_each(stores, codes)
            for (layer, tokens), store in zip(some, coded, strict=True):
                layer.hold_codes(store, tokens)


def _kind_of_states(layer: CompressedLayer) -> tuple[Any, ...]:
    keys, values = layer.keys, layer.values
    return keys.device, keys.dtype, keys.shape[-1], values.shape[-1]
