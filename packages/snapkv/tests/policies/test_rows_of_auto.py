"""Rows of a batch whose votes choose different numbers of tokens, and what is said of their votes.

Whatever the other row is, each keeps and says what it would alone.
"""

import pytest
import torch

from snapkv import AdaKV, AutoBudget, CompressedCache, KVzip, SnapKV
from snapkv.errors import InvalidArgumentError
from snapkv.kvzip import read_twice
from snapkv.ops.votes import reference
from tests.families import random_ids, tiny_model

AUTO = SnapKV(AutoBudget(lost_vote=0.02, least=4), window_size=4)


@torch.no_grad()
def test_votes_lost_by_a_row_that_chooses_later_are_not_known():
    model = tiny_model("llama")
    cache = CompressedCache(model, SnapKV(24, window_size=4))
    ids = random_ids(2, 90)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    model(ids[:, :60], attention_mask=mask[:, :60], past_key_values=cache)
    assert cache.report()["lost_votes"] > 0
    cache.expect_prompt(90)
    model(ids[:, 60:], attention_mask=mask, past_key_values=cache)
    assert cache.report()["lost_votes"] is None


@torch.no_grad()
@pytest.mark.parametrize("policy", [KVzip(64, window_size=8), AdaKV(KVzip(64, window_size=8))])
def test_a_question_behind_a_context_that_fits_is_stored_whole(policy):
    model, ids = tiny_model("llama"), random_ids(1, 70)
    cache = CompressedCache(model, policy)
    read_twice(model, ids[:, :40], cache)
    model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert cache.report()["kept_tokens"] == 72
    with pytest.raises(InvalidArgumentError, match="later turns are read once"):
        CompressedCache(model, policy, recall="host")


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_a_kernel_wider_than_the_prefix(pooling):
    votes = torch.rand(1, 2, 10)
    wide, pair = 2**40 + 1, (2**39, 2**39)
    expected = reference.pool_votes(votes, pair, pooling)
    assert torch.equal(reference.pool_votes(votes, wide, pooling), expected)
    at_edge = reference.pool_votes(votes, 21, pooling)
    torch.testing.assert_close(at_edge, reference.pool_votes(votes, (10, 10), pooling))
