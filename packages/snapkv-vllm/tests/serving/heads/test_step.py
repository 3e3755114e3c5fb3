"""Pages and sequences on tensors equal those read token by token; no vLLM is needed."""

import itertools
import random

import pytest
import torch

from snapkv.errors import UnsupportedModelError
from snapkv_vllm.heads import CompressedRows, HeadPages, HeadPlaces, make_sequences
from snapkv_vllm.refusals import require_shared_pages
from tests.serving.heads import held_tokens, shared_out, spread

BLOCKS, HEADS, TOKENS, SIZE, LAYERS = 40, 3, 4, 2, 2

ORDERS = {
    "heads first": (0, 1, 2, 3, 4),
    "tokens first": (0, 1, 3, 2, 4),
    "a head's blocks together": (0, 2, 1, 3, 4),
    "layers inside a block": (1, 0, 2, 3, 4),
    "layers and tokens inside a block": (1, 0, 3, 2, 4),
    "layers inside a head": (1, 2, 0, 3, 4),
}
"""As vLLM may lay out (layers, blocks, heads, tokens, numbers) in memory."""


def caches(order, heads=HEADS):
    """Of each layer, (blocks, heads, tokens, 2 * size), every number another."""
    shape = (LAYERS, BLOCKS, heads, TOKENS, 2 * SIZE)
    memory = torch.zeros([shape[axis] for axis in order])
    whole = memory.permute([order.index(axis) for axis in range(5)])
    whole.copy_(torch.arange(whole.numel()).view(shape))
    return list(whole)


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_pages_of_all_layers_have_different_numbers(order, heads):
    """A block is a page for every head of every layer, layer by layer."""
    layers = caches(order, heads)
    pages = HeadPages.from_caches(*layers)
    require_shared_pages(layers, LAYERS)
    for block, layer, head in itertools.product(range(BLOCKS), range(LAYERS), range(heads)):
        place = torch.tensor(17 * heads * LAYERS + layer * heads + head)
        number = pages.page_numbers(torch.tensor(block), place)
        assert torch.equal(pages.cache[number, 0], layers[layer][block, head])


def test_layers_that_cannot_share_pages_are_refused():
    one, other = (caches(ORDERS["heads first"]) for _ in range(2))
    for wrong in ([one[0], other[1]], one[:1], [one[1], one[0]], [one[0], one[1][:, :2]]):
        with pytest.raises(UnsupportedModelError, match=r"one tensor\. Use --policy adakv"):
            require_shared_pages(wrong, LAYERS)


@pytest.mark.parametrize("across_layers", [False, True])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_every_head_reads_its_own_tokens(order, seed, across_layers):
    """Requests of a batch, with several tokens in a step, are written and read by page.

    The heads of a layer share its pages of a request, or those of all layers the pages of all.
    """
    draw = random.Random(seed)
    layers = caches(order)
    for cache in layers:
        cache.zero_()
    free = draw.sample(range(BLOCKS), BLOCKS)
    budget, prompt = draw.randint(2, 9), 30
    requests = draw.randint(1, 3)
    pools, heads = (1, LAYERS * HEADS) if across_layers else (LAYERS, HEADS)
    kept = torch.tensor(  # of the heads that share pages
        [[shared_out(draw, budget, heads, prompt) for _ in range(requests)] for _ in range(pools)]
    )
    of_layers = torch.stack([kept[:, row].reshape(LAYERS, HEADS) for row in range(requests)], 1)
    shared = [layers] * LAYERS if across_layers else [[cache] for cache in layers]
    blocks = torch.zeros(requests, 8, dtype=torch.int32)
    held = [[[[] for _ in range(HEADS)] for _ in range(requests)] for _ in range(LAYERS)]
    given = [0] * requests
    places, number = HeadPlaces(kept, TOKENS), 0

    def give_blocks(request, grown):
        needed = -(-(held_tokens(budget, prompt, TOKENS) + grown) // TOKENS)
        while given[request] < needed:
            blocks[request, given[request]] = free.pop()
            given[request] += 1

    # the prompt's end: laid out and written as whole blocks
    for request in range(requests):
        give_blocks(request, 0)
        states = torch.zeros(LAYERS, HEADS, int(kept.max()), 2 * SIZE)
        for layer in range(LAYERS):
            for head in range(HEADS):
                count = int(of_layers[layer, request, head])
                for token in range(count):
                    number += 1
                    held[layer][request][head].append(number)
                    states[layer, head, token - count] = number
        apart = states.reshape(pools, heads, *states.shape[2:])
        laid = HeadPlaces(kept[:, request], TOKENS)
        laid = spread(laid, apart, given[request] * TOKENS)
        laid = laid.reshape(LAYERS, HEADS, *laid.shape[2:])
        for cache, of_layer in zip(layers, laid, strict=True):
            mine = blocks[request, : given[request]].long()
            cache[mine] = of_layer.unflatten(1, (-1, TOKENS)).transpose(0, 1)

    grown = [0] * requests
    for _ in range(4):
        others = draw.randint(0, 3)
        counts = [draw.randint(1, 3) for _ in range(requests)]
        starts = [others + sum(counts[:row]) for row in range(requests)]
        for request in range(requests):
            grown[request] += counts[request]
            give_blocks(request, grown[request])
        pages = HeadPages.from_caches(*shared[0])
        batch, most = CompressedRows(starts=starts, counts=counts), int(kept.max()) + max(grown)
        found = make_sequences(batch, places, torch.tensor(grown), blocks, pages, most)
        tokens = others + sum(counts)
        for layer, together in enumerate(shared):
            new = number + 1 + torch.arange(tokens * HEADS)
            number += tokens * HEADS
            for request in range(requests):
                for token in range(starts[request], starts[request] + counts[request]):
                    for head in range(HEADS):
                        held[layer][request][head].append(int(new[token * HEADS + head]))
            view = HeadPages.from_caches(*together).cache
            slots = found.slots[layer]
            view[slots // TOKENS, 0, slots % TOKENS] = new[found.states].float()[:, None]
        for layer, together in enumerate(shared):
            view = HeadPages.from_caches(*together).cache
            for sequence, length in enumerate(found.lengths[layer].tolist()):
                table = found.tables[layer, sequence].long()
                read = view[table, 0].flatten(0, 1)[:length, 0]
                assert read.tolist() == held[layer][sequence // HEADS][sequence % HEADS]
        assert found.starts.diff().tolist() == [c for c in counts for _ in range(HEADS)]
        assert found.max_new_tokens == max(counts)
        assert found.in_order == (found.states.tolist() == list(range(len(found.states))))
