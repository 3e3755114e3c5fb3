"""Several prompts without recall: read over what is kept, brought back to the budget."""

import pytest
import torch

from snapkv import (
    CompressedCache,
    ExpectedAttention,
    InvalidArgumentError,
    SnapKV,
)
from tests.families import call, random_ids, tiny_model

DOCUMENT, QUESTION, BUDGET, WINDOW = 90, 20, 40, 8
POLICY = SnapKV(BUDGET, window_size=WINDOW, kernel_size=5)


def turn(model, cache, ids):
    cache.expect_prompt(cache.get_seq_length() + ids.shape[1])
    return call(model, cache, ids)


def test_the_vote_is_that_of_the_policy_over_the_stored_slots():
    model, shown, select = tiny_model("llama"), [], SnapKV.select
    cache = CompressedCache(model, POLICY, turns="compress")
    call(model, cache, random_ids(1, DOCUMENT))

    class Shown(SnapKV):
        def select(self, layer):
            shown.append((layer, select(POLICY, layer)))
            return shown[-1][1]

    before = cache.kept_positions(1)
    cache.layers[1].policy = Shown(BUDGET, window_size=WINDOW)
    turn(model, cache, random_ids(1, 5, 1))
    (layer, selection), columns = shown[0], torch.arange(DOCUMENT, DOCUMENT + 5).expand(1, 2, -1)
    assert layer.keys.shape[2] == BUDGET + 5
    assert layer.queries.shape[2] == WINDOW  # three of them of the turn before
    stored = torch.cat([before, columns], dim=-1)
    assert torch.equal(cache.kept_positions(1), stored.gather(2, selection.keep_indices))


def test_a_turn_behind_a_prompt_that_fitted_is_refused_where_its_queries_are_asked_for():
    """Its tokens would be chosen from together with the prompt's, whose queries are gone."""
    model = tiny_model("llama")
    cache = CompressedCache(model, ExpectedAttention(40, window_size=8))
    call(model, cache, random_ids(1, 33))
    said = "got expected-attention and a turn up to 45 tok"
    with pytest.raises(InvalidArgumentError, match=said):
        cache.expect_prompt(45)
    cut = CompressedCache(model, ExpectedAttention(40, window_size=8))
    call(model, cut, random_ids(1, 60))
    cut.expect_prompt(72)
    call(model, cut, random_ids(1, 12))
    assert cut.report().kept_tokens == 52
