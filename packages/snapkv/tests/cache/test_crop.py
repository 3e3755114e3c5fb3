"""`crop` removes tokens from all layers or from none, and decoding continues as without them."""

import copy
import re

import pytest
import torch

from snapkv import InvalidArgumentError, InvalidTypeError, SnapKV, default_policy
from tests.families import CLOSE, call, kept_of, random_ids, read, small_model, tiny_model

PROMPT = 80
TEXT, LATER = (random_ids(2, tokens, tokens) % 61 + 3 for tokens in (PROMPT, 20))


# Layers that are not compressed.

STATES = ("convolutions", "linear")


def hybrid(kind):
    """Return a model with full-attention and other layers, and a cache that has read a prompt."""
    model = small_model(kind)
    return model, read(model, SnapKV(40, window_size=12), TEXT)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("sliding", "has a sliding window"), *((kind, "has a recurrent state") for kind in STATES)],
)
def test_no_layer_is_cropped_if_one_layer_cannot_be(kind, said):
    model, cache = hybrid(kind)
    other = copy.deepcopy(cache)
    with pytest.raises(InvalidArgumentError, match=rf"tokens_to_rem.*at most 0.*layer 0 {said}"):
        cache.crop(-3)
    cache.crop(0)
    assert cache.get_seq_length() == PROMPT
    assert kept_of(cache) == kept_of(other)
    assert torch.equal(call(model, cache, LATER), call(model, other, LATER))


def test_sliding_layer_can_crop_only_recorded_tokens():
    model, cache = hybrid("sliding")
    expected = copy.deepcopy(cache)
    cache.activate_past_recording()
    call(model, cache, LATER[:, :4])
    with pytest.raises(InvalidArgumentError, match=r"expected at most 4.*layer 0 has a sliding"):
        cache.crop(-5)
    cache.crop(-4)
    found, wanted = (call(model, each, LATER[:, 4:5]) for each in (cache, expected))
    torch.testing.assert_close(found, wanted, **CLOSE)


ROWS = {
    "reordered": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "repeated": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    "masked": (lambda cache: cache.batch_select_indices(torch.tensor([False, True])), [1]),
}
NO_ROWS = {
    "[0, 2]": torch.tensor([0, 2]),
    "[]": torch.tensor([], dtype=torch.int64),
    "[False, False]": torch.tensor([False, False]),
    "[[0, 1], [1, 0]]": torch.tensor([[0, 1], [1, 0]]),
    "[0.0]": torch.tensor([0.0]),
    "(0, 1)": (0, 1),
}


@pytest.mark.parametrize("kind", ["llama", "sliding", *STATES])
def test_rows_of_every_layer_kind_are_reordered_and_missing_rows_are_refused(kind):
    model, cache = hybrid(kind)
    for got, rows in NO_ROWS.items():
        refusal = f"rows: expected the indices of some of the 2 rows of the batch, but got {got}."
        for act in (cache.reorder_cache, cache.batch_select_indices):
            with pytest.raises(InvalidArgumentError, match=re.escape(refusal)):
                act(rows)
    expected = call(model, copy.deepcopy(cache), LATER)
    for act, rows in ROWS.values():
        changed = copy.deepcopy(cache)
        act(changed)
        torch.testing.assert_close(call(model, changed, LATER[rows]), expected[rows], **CLOSE)


def test_invalid_counts_are_refused_by_the_name_of_the_argument():
    cache = read(tiny_model("llama"), SnapKV(keep_ratio=0.2, window_size=12), TEXT, recall="host")
    repeat = cache.batch_repeat_interleave
    for act, given, error, said in (
        (cache.crop, -1.0, InvalidTypeError, r"tokens_to_remove: .*an integer, but got -1\.0"),
        (cache.crop, 1, InvalidArgumentError, r"tokens_to_remove: .*negative number"),
        (repeat, 0, InvalidArgumentError, "repeats: expected a value of at least 1"),
        (
            cache.batch_repeat_interleave,
            2.0,
            InvalidTypeError,
            r"repeats: expected an integer, but got 2\.0",
        ),
    ):
        with pytest.raises(error, match=said):
            act(given)
    assert cache.get_seq_length() == PROMPT
    cache.crop(torch.tensor(-1))  # as some releases of transformers have it
    assert cache.get_seq_length() == PROMPT - 1


@pytest.mark.parametrize("budget", [24, "30%"])
def test_remaining_queries_vote_after_a_prompt_is_cropped_under_recall(budget):
    """After four of six voters are cropped and one token is added, three voters remain."""
    model, cropped = tiny_model("llama"), TEXT[:1, : PROMPT - 4]
    policy = default_policy(budget, window_size=6)
    cache = read(model, policy, TEXT[:1], recall="host")
    cache.crop(-4)
    call(model, cache, LATER[:1, :1])
    whole = torch.cat([cropped, LATER[:1, :1]], dim=1)
    voters = default_policy(budget, window_size=6, voters=3)
    assert kept_of(cache) == kept_of(read(model, voters, whole))
    assert kept_of(cache) != kept_of(read(model, policy, whole))
