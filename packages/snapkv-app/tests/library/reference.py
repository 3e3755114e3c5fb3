"""A slow reference for blending: every token goes through every layer.

Keys at another place are not turned but read there: the model reads a document at the positions
where it stands when joined. Choosing is a loop over tokens.
"""

import torch
from transformers import DynamicCache

from snapkv import CompressedCache, FullCache
from snapkv_app.library.joining import Part
from tests.families import call


def read_part(model, ids, prefix_tokens, policy=None, **options):
    """A document that was read by itself."""
    cache = CompressedCache(model, policy or FullCache(), **options)
    call(model, cache, ids)
    return Part(input_ids=ids, cache=cache, prefix_tokens=prefix_tokens)


def shifted(parts):
    """For every part the place of its first token, the prefix included, when all are joined."""
    steps, end = [], parts[0].prefix_tokens
    for part in parts:
        steps.append(end - part.prefix_tokens)
        end += part.input_ids.shape[1] - part.prefix_tokens
    return steps, end


def states_read_in_place(model, parts):
    """Per layer (keys, values), each (H, N, D), of documents read apart where they will stand."""
    layers = []
    for number, (part, step) in enumerate(zip(parts, shifted(parts)[0], strict=True)):
        cache = DynamicCache(config=model.config)
        places = torch.arange(part.input_ids.shape[1])[None] + step
        call(model, cache, part.input_ids, position_ids=places)
        begin = part.prefix_tokens if number else 0
        layers.append([(at.keys[0, :, begin:], at.values[0, :, begin:]) for at in cache.layers])
    return [
        tuple(torch.cat(states, dim=1) for states in zip(*held, strict=True))
        for held in zip(*layers, strict=True)
    ]


def held_by_heads(parts, layer_idx):
    """(H, N) bool: which tokens every head still holds."""
    steps, tokens = shifted(parts)
    heads = parts[0].cache.kept_positions(layer_idx).shape[1]
    held = torch.zeros(heads, tokens, dtype=torch.bool)
    for number, (part, step) in enumerate(zip(parts, steps, strict=True)):
        for head, positions in enumerate(part.cache.kept_positions(layer_idx)[0]):
            for position in positions.tolist():
                if position >= (part.prefix_tokens if number else 0):
                    held[head, position + step] = True
    return held


def narrowed(chosen, changes, count):
    """The `count` of these tokens that change most; of equal ones the first."""
    return sorted(sorted(chosen, key=lambda token: (-changes[token], token))[:count])


def changes_of(reused, fresh, held):
    """Per token, how far its keys and values lie apart in the heads that hold it."""
    changes = []
    for token in range(held.shape[1]):
        change = 0.0
        for head in range(held.shape[0]):
            if held[head, token]:
                for old, new in zip(reused, fresh, strict=True):
                    change += float((old[head, token] - new[head, token]).double().square().sum())
        changes.append(change)
    return changes


class Mixed(DynamicCache):
    """A cache of a pass over all tokens that hands out what was reused, but for chosen tokens.

    Those that a layer changes most are chosen for the next one, `counts` of them.
    """

    def __init__(self, reused, held, counts):
        super().__init__()
        self.reused, self.held, self.counts, self.mixed = reused, held, counts, []
        self.chosen = {}  # by layer, from the second on

    def update(self, keys, values, layer_idx, *args, **kwargs):
        fresh, own = (keys, values), list(self.reused[layer_idx])
        if layer_idx < 2:
            mixed = fresh
        else:
            mixed = tuple(old[None].clone() for old in own)
            for state, new in zip(mixed, fresh, strict=True):
                state[:, :, self.chosen[layer_idx]] = new[:, :, self.chosen[layer_idx]]
        if layer_idx:
            changes = changes_of(own, [new[0] for new in fresh], self.held[layer_idx])
            if layer_idx == 1:
                self.chosen[1] = narrowed(range(len(changes)), changes, self.counts[0])
            for count in self.counts[layer_idx : layer_idx + 1]:
                self.chosen[layer_idx + 1] = narrowed(self.chosen[layer_idx], changes, count)
        self.mixed.append(tuple(state[0] for state in mixed))
        return mixed


def mask_of(model, cache, layer_idx):
    """(1, Hq, N, N) bool: a token sees what stands before it and is held or chosen."""
    seen = cache.held[layer_idx].clone()
    tokens = seen.shape[1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if layer_idx < 2:
        seen[:] = True
    else:
        seen[:, cache.chosen[layer_idx]] = True
    visible = causal & (seen[:, None] | torch.eye(tokens, dtype=torch.bool))
    groups = model.config.num_attention_heads // len(visible)
    return visible.repeat_interleave(groups, dim=0)[None]


def blended(model, parts, ids, counts):
    """Per layer (keys, values): what a blend has to hold in heads that hold a token."""
    layers = range(model.config.num_hidden_layers)
    held = [held_by_heads(parts, layer_idx) for layer_idx in layers]
    mixed, handles = Mixed(states_read_in_place(model, parts), held, counts), []
    eager = model.config._attn_implementation.endswith("eager")
    for layer_idx, layer in enumerate(model.get_decoder().layers):

        def give(_, args, kwargs, layer_idx=layer_idx):
            mask = mask_of(model, mixed, layer_idx)
            if eager:
                lowest = torch.finfo(torch.float32).min
                mask = torch.zeros(mask.shape).masked_fill(~mask, lowest)
            return args, {**kwargs, "attention_mask": mask}

        handles.append(layer.register_forward_pre_hook(give, with_kwargs=True))
    call(model, mixed, ids)
    for handle in handles:
        handle.remove()
    return mixed.mixed


def states_held(cache, layer_idx, tokens):
    """(keys, values, held) of one layer of a cache, by token: (H, N, D) and (H, N) bool."""
    layer = cache.layers[layer_idx]
    positions = layer.stored_positions()[0]
    found = []
    for states in layer.store.padded():
        by_token = torch.full((states.shape[1], tokens, states.shape[-1]), float("nan"))
        for head, row in enumerate(positions.tolist()):
            for slot, position in enumerate(row):
                if position >= 0:
                    by_token[head, position] = states[0, head, slot]
        found.append(by_token)
    return found[0], found[1], ~found[0][..., 0].isnan()
