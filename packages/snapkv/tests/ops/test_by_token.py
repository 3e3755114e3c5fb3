"""Keys and values gathered token by token equal those gathered number by number."""

import itertools

import pytest
import torch

from snapkv.ops import gather_tokens
from snapkv.ops.votes import blocked, reference
from tests.ops.vote_cases import require_gather

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)


def test_by_hand():
    """Two heads of three tokens of two numbers; -1 stands for any, here the first."""
    states = torch.tensor([[[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]]])
    kept = torch.tensor([[[0, 2], [-1, 1]]])
    expected = [[[[1, 2], [5, 6]], [[7, 8], [9, 10]]]]
    assert blocked.gather_tokens(states, kept).tolist() == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_it_equals_the_reference(dtype, heads):
    source = torch.Generator().manual_seed(heads)
    for batch, tokens, dim, fillers in itertools.product((1, 3), (0, 1, 77), (1, 20, 64), (0, 3)):
        states = torch.randn(batch, 2, tokens, dim, generator=source).mul_(50).to(dtype)
        order = torch.rand(batch, heads, tokens, generator=source).argsort(dim=-1)
        kept = order[..., : (tokens + 1) // 2].sort(dim=-1).values
        kept[-1, :, :fillers] = -1
        expected = reference.gather_tokens(states, kept)
        got = blocked.gather_tokens(states, kept)
        assert got.is_contiguous()
        assert torch.equal(got, expected), f"{batch} rows, {tokens} tokens, dim {dim}"


def test_states_that_are_no_one_block():
    require_gather("by_token")


def test_what_is_gathered_is_a_copy_that_gradients_pass():
    states = torch.randn(1, 2, 4, 3, requires_grad=True)
    kept = torch.tensor([[[0, 3]]])
    gathered = gather_tokens(states, kept)
    gathered.sum().backward()
    assert states.grad.sum(dim=-1).tolist() == [[[3, 0, 0, 3], [3, 0, 0, 3]]]
    states.detach().zero_()
    assert gathered.abs().min() > 0
