"""Several prompts without recall: read over what is kept, brought back to the budget."""

import pytest
import torch

from snapkv import (
    CompressedCache,
    ExpectedAttention,
    InvalidArgumentError,
    SnapKV,
)
from tests.families import CLOSE, ONCE, call, random_ids, tiny_model
from tests.oracle import hidden_columns, masked_decode_logits, stepwise_logits

DOCUMENT, QUESTION, BUDGET, WINDOW = 90, 20, 40, 8
POLICY = SnapKV(BUDGET, window_size=WINDOW, kernel_size=5)


def turn(model, cache, ids):
    cache.expect_prompt(cache.get_seq_length() + ids.shape[1])
    return call(model, cache, ids)


@pytest.mark.parametrize(("family", "implementation"), ONCE)
def test_a_turn_reads_what_was_kept_and_keeps_what_its_end_votes_for(family, implementation):
    model = tiny_model(family, implementation)
    ids, asked, later = random_ids(2, DOCUMENT), random_ids(2, QUESTION, 1), random_ids(2, 3, 2)
    cache = CompressedCache(model, POLICY, turns="compress")
    call(model, cache, ids)
    expected = masked_decode_logits(model, cache, ids, asked)
    before = {layer: cache.kept_positions(layer) for layer in cache.compressed_layers}
    torch.testing.assert_close(turn(model, cache, asked), expected, **CLOSE)
    new = torch.arange(DOCUMENT, DOCUMENT + QUESTION)
    for layer, earlier in before.items():
        kept = cache.kept_positions(layer)
        assert kept.shape[-1] == BUDGET
        assert torch.equal(kept, kept.sort(-1).values)
        assert torch.equal(kept[..., -WINDOW:], new[-WINDOW:].expand_as(kept[..., -WINDOW:]))
        for row, head in zip(kept.flatten(0, 1), earlier.flatten(0, 1), strict=True):
            assert set(row.tolist()) <= set(head.tolist()) | set(new.tolist())
        assert not torch.equal(kept[..., :32], earlier[..., :32])
    pieces = [call(model, cache, token) for token in later.split(1, 1)]
    whole = masked_after_two_turns(model, ids, asked, later, before, cache)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **CLOSE)


def masked_after_two_turns(model, ids, asked, later, before, cache):
    """A full cache that hides what was dropped by then from every token behind the document."""
    at_first = {}
    for layer, kept in before.items():
        mask = torch.ones(*kept.shape[:2], DOCUMENT, dtype=torch.bool)
        at_first[layer] = mask.scatter(2, kept, False)
    by_now = hidden_columns(cache, DOCUMENT + QUESTION)
    tokens = torch.cat([asked, later], dim=1)
    hidden = [at_first] * QUESTION + [by_now] * later.shape[1]
    return stepwise_logits(model, ids, tokens, hidden)[:, 1 + QUESTION :]


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


def test_tokens_behind_an_announced_turn_neither_vote_nor_see_what_was_dropped():
    model = tiny_model("llama")
    asked, behind = random_ids(1, QUESTION, 1), random_ids(1, 4, 2)
    caches = []
    for parts in ((torch.cat([asked, behind], 1),), (asked, behind)):
        cache = CompressedCache(model, POLICY, turns="compress")
        call(model, cache, random_ids(1, DOCUMENT))
        cache.expect_prompt(DOCUMENT + QUESTION)
        caches.append((cache, torch.cat([call(model, cache, part) for part in parts], dim=1)))
    torch.testing.assert_close(caches[0][1], caches[1][1], **CLOSE)
    for layer in range(4):
        assert torch.equal(*[cache.kept_positions(layer) for cache, _ in caches])


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
