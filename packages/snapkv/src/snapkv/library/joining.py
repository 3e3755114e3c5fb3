"""Keys and values of documents that were read apart, moved to where they stand together.

A key knows its token's place by a rotation, and only distances matter to attention. So a document
that begins at another place than it was read at has its keys turned by the difference; its values
stay as they are.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.cache.layer import CompressedLayer
from snapkv.hf.model_parts import rotations_of
from snapkv.library.parts import Part, steps_of

Turn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class JoinedLayer:
    """What one layer holds of all documents.

    Attributes:
        key_states: (1, H, S, D), turned to where their tokens stand now.
        value_states: (1, H, S, Dv).
        places: (1, H, S) int64, which token of all N every slot holds, ascending in every head;
            -1 in the leading slots of a head that holds fewer than S.
        tokens: N.
    """

    key_states: Tensor
    value_states: Tensor
    places: Tensor
    tokens: int

    @property
    def slots(self) -> int:
        """S, the tokens of the head that holds most."""
        return int(self.places.shape[-1])

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether every head holds as many tokens as the others."""
        return bool((self.places >= 0).all())

    @property
    def is_whole(self) -> bool:
        """Whether every head holds all tokens."""
        return self.slots == self.tokens and self.is_even

    def slots_of(self, chosen: Tensor) -> Tensor:
        """(H, n) int64: in which slot every head holds (n,) tokens; -1 where it holds none."""
        H, S = self.places.shape[1:]
        found = self.places.new_full((H, self.tokens + 1), -1)  # the last column is for no token
        slots = torch.arange(S, device=found.device).expand(H, -1)
        found.scatter_(1, self.places[0] % (self.tokens + 1), slots)
        found[:, -1] = -1
        return found[:, chosen]

    def put(self, chosen: Tensor, keys: Tensor, values: Tensor) -> None:
        """Hold other keys and values of (n,) tokens, (1, H, n, D), in heads that hold the tokens.

        In place: these tensors are nobody else's.
        """
        slots = self.slots_of(chosen)
        heads, tokens = (slots >= 0).nonzero(as_tuple=True)
        where = (torch.zeros_like(heads), heads, slots[heads, tokens])
        self.key_states.index_put_(where, keys[0, heads, tokens])
        self.value_states.index_put_(where, values[0, heads, tokens])

    def deviation(self, keys: Tensor, values: Tensor) -> Tensor:
        """How far what is held lies from the keys and values of all N tokens, (1, H, N, D).

        Returns:
            (N,) float32: squared distances, summed over keys, values and the heads that hold the
            token; 0 for a token that none holds.
        """
        index = self.places.clamp(min=0)[..., None]
        apart = torch.zeros(self.places.shape, dtype=torch.float32, device=keys.device)
        for held, new in ((self.key_states, keys), (self.value_states, values)):
            own = new.gather(2, index.expand(-1, -1, -1, new.shape[-1]))
            apart += (held.float() - own.float()).square().sum(dim=-1)
        summed = apart.new_zeros(self.tokens + 1)
        summed.index_add_(0, (self.places % (self.tokens + 1)).flatten(), apart.flatten())
        return summed[:-1]


def join(model: PreTrainedModel, parts: Sequence[Part]) -> list[JoinedLayer]:
    """What every layer holds of the parts, the prefix once.

    Raises:
        UnsupportedModelError: the model's keys cannot be turned to other places.
    """
    layers = range(len(parts[0].cache.layers))
    rotations, steps = rotations_of(model, layers), steps_of(parts)
    tokens = steps[-1] + parts[-1].tokens
    joined = []
    for index in layers:
        held = [
            _moved(
                part.cache.reading.layers[index],
                rotations[index],
                prefix_tokens=part.prefix_tokens if number else 0,
                step=step,
            )
            for number, (part, step) in enumerate(zip(parts, steps, strict=True))
        ]
        keys, values, places = (torch.cat(states, dim=2) for states in zip(*held, strict=True))
        joined.append(_packed(keys, values, places, tokens))
    return joined


def _moved(
    layer: CompressedLayer, rotation: Turn, *, prefix_tokens: int, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A part's keys, values and places in one layer, without its first tokens.

    Args:
        layer: of the part's cache.
        rotation: of the layer.
        prefix_tokens: how many first tokens to leave out.
        step: by how many positions the others move on.
    """
    keys, values = layer.store.padded()
    places = layer.slots.positions(layer.store)
    left_out = int((places < prefix_tokens).sum(dim=-1).min())
    keys, values, places = (
        states[:, :, left_out:].to(keys.device) for states in (keys, values, places)
    )
    if step:
        steps = torch.full((1, 1), step, dtype=torch.int64, device=keys.device)
        keys = rotation(keys, steps).to(keys.dtype)
    return keys, values, (places + step).masked_fill(places < prefix_tokens, -1)


def _packed(keys: Tensor, values: Tensor, places: Tensor, tokens: int) -> JoinedLayer:
    """Slots that hold no token stand in front of every head, as few as there must be."""
    held = places >= 0
    if not bool(held.all()):
        longest = int(held.sum(dim=-1).max())
        order = held.byte().argsort(dim=-1, stable=True)[..., places.shape[-1] - longest :]
        keys, values = (
            states.gather(2, order[..., None].expand(-1, -1, -1, states.shape[-1]))
            for states in (keys, values)
        )
        places = places.gather(2, order)
    return JoinedLayer(key_states=keys, value_states=values, places=places, tokens=tokens)
