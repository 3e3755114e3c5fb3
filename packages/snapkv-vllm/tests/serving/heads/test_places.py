"""Places of pages equal those of heads that take pages one by one; no vLLM is needed."""

import random

import pytest
import torch

from snapkv_vllm.heads import HeadPlaces
from tests.serving.heads import held_tokens, shared_out, spread


def handed_out(kept, page_tokens, grown):
    """{(head, page): place} by asking: who needs a page takes the next place."""
    found = {}

    def take(head, tokens):
        while sum(owner == head for owner, _ in found) * page_tokens < tokens:
            page = sum(owner == head for owner, _ in found)
            found[head, page] = len(found)

    for head, tokens in enumerate(kept):
        take(head, tokens)
    for more in range(1, grown + 1):
        for head, tokens in enumerate(kept):
            take(head, tokens + more)
    return found


def places(kept, page_tokens, pages):
    laid = HeadPlaces(torch.tensor(kept), page_tokens)
    return laid.page_places(torch.arange(pages)[None]).tolist()


def test_places_of_pages_match_an_example_worked_out_by_hand():
    """Pages have four tokens, so five, one and three tokens take two pages, one and one."""
    assert places([5, 1, 3], 4, 2) == [
        [0, 1],
        [2, 6],  # the last to need its second page: at its fifth token, after four more
        [3, 4],  # the first: after two more
    ]
    # the first head needs its third page after four more too, and comes before the second head
    assert places([5, 1, 3], 4, 3)[0] == [0, 1, 5]
    # in the next round of four tokens, the same turn again
    assert [of_head[-1] for of_head in places([5, 1, 3], 4, 4)] == [8, 12, 10]


@pytest.mark.parametrize("seed", range(20))
def test_places_match_heads_that_take_pages_one_by_one(seed):
    draw = random.Random(seed)
    heads, page_tokens = draw.randint(1, 6), draw.choice([1, 2, 4, 7])
    kept = [draw.randint(0, 30) for _ in range(heads)]
    grown = draw.randint(0, 25)
    expected = handed_out(kept, page_tokens, grown)
    found = places(kept, page_tokens, 60)
    assert {(head, page): found[head][page] for head, page in expected} == expected
    assert sorted(expected.values()) == list(range(len(expected)))


@pytest.mark.parametrize("seed", range(20))
def test_reserved_blocks_suffice_and_exceed_the_need_by_at_most_one(seed):
    draw = random.Random(seed)
    heads, page_tokens = draw.randint(1, 6), draw.choice([1, 4, 16])
    prompt = draw.randint(2, 90)
    budget = draw.randint(1, prompt - 1)
    kept = shared_out(draw, budget, heads, prompt)
    for grown in range(40):
        pages = len(handed_out(kept, page_tokens, grown))
        counted = held_tokens(budget, prompt, page_tokens) + grown
        assert pages <= -(-counted // page_tokens) * heads
        assert -(-counted // page_tokens) <= -(-(budget + grown) // page_tokens) + 1


def test_number_of_reserved_blocks_is_reached_in_the_worst_case():
    """Heads of one and seven tokens take three pages, though eight tokens fit into two."""
    assert len(handed_out([1, 7], 4, 0)) == 3
    assert held_tokens(4, 90, 4) == 7
    assert held_tokens(4, 5, 4) == 5


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_scattered_states_are_found_again_in_every_layer(page_tokens):
    torch.manual_seed(0)
    kept = torch.tensor([[5, 40, 1, 18], [16, 16, 16, 16], [1, 1, 1, 61]])
    longest = int(kept.max())
    states = torch.randn(3, 4, longest, 2)
    slots = -(-held_tokens(16, 90, page_tokens) // page_tokens) * page_tokens
    laid = spread(HeadPlaces(kept, page_tokens), states, slots)
    for layer, counts in enumerate(kept.tolist()):
        found = places(counts, page_tokens, longest)
        for head, count in enumerate(counts):
            for token in range(count):
                block, place = divmod(found[head][token // page_tokens], 4)
                there = laid[layer, place, block * page_tokens + token % page_tokens]
                assert torch.equal(there, states[layer, head, longest - count + token])
    assert int((laid != 0).any(dim=-1).sum()) == int(kept.sum())


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_scattering_a_few_heads_at_a_time_gives_the_same_result(page_tokens):
    """The heads of all layers share pages, and no place is used twice."""
    torch.manual_seed(0)
    kept = torch.tensor([5, 40, 1, 18, 0, 16, 3, 61])
    laid = HeadPlaces(kept, page_tokens)
    slots = -(-held_tokens(18, 90, page_tokens) // page_tokens) * page_tokens
    states = torch.randn(8, 61, 2)
    found = torch.zeros(8 * slots + 1, 2)
    for first in (4, 0, 6, 2):
        longest = int(kept[first : first + 2].max())
        laid.scatter(states[first : first + 2, 61 - longest :], found, slots, first)
    whole = found[:-1].view(8, slots, 2)
    assert torch.equal(whole, spread(laid, states, slots))
    assert int((whole != 0).any(dim=-1).sum()) == int(kept.sum())
