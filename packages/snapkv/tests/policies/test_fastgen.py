"""FastGen: worked examples of its profile and decode steps, token ids and punctuation.

What it shares with the other methods that evict is in `test_evicting.py`.
"""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from snapkv import (
    CacheMismatchError,
    CompressedCache,
    FastGen,
    InvalidArgumentError,
    InvalidTypeError,
)
from snapkv.policies.fastgen import (
    FREQUENT,
    LOCAL,
    PUNCTUATION,
    SPECIAL,
    found,
    punctuation_tokens,
    special_tokens,
)
from tests.families import random_ids, tiny_model
from tests.ops.states import worked_prompt, worked_step
from tests.policies.test_evicting import KINDS, PROMPT

ROWS = [[1.0], [0.9, 0.1], [0.8, 0.1, 0.1], [0.7, 0.05, 0.2, 0.05], [0.6, 0.05, 0.25, 0.05, 0.05]]
IDS = [1, 10, 5, 11, 12]  # <s> A . B C
PROMPT_BY_HAND = worked_prompt(ROWS, 5, token_ids=torch.tensor([IDS]))
BY_HAND = {"special_ids": (1,), "punctuation_ids": (5, 6)}
FIFTHS = {"local_ratio": 0.2, "frequent_ratio": 0.2}  # one token each


@pytest.mark.parametrize(
    ("recovery", "choice", "kept"),
    [
        (0.75, SPECIAL, [0]),
        (0.90, PUNCTUATION, [0, 2]),
        (0.95, FREQUENT, [0, 1, 2]),
        (0.985, LOCAL, [0, 1, 2, 4]),
    ],
)
def test_profile_of_a_head_equals_a_worked_example(recovery, choice, kept):
    """Special tokens recover .80; with punctuation .91, with token 1 .97, with token 4 .99."""
    selection = FastGen(recovery, **BY_HAND, **FIFTHS).select(PROMPT_BY_HAND)
    assert selection.head_notes.tolist() == [[[choice, 1]]]
    assert selection.keep_indices.tolist() == [[kept]]


@pytest.mark.parametrize("recovery", [0.995, 1.0])
def test_head_keeps_everything_if_no_smaller_choice_recovers_enough(recovery):
    selection = FastGen(recovery, **BY_HAND, **FIFTHS).select(PROMPT_BY_HAND)
    assert selection.keep_indices.tolist() == [[[0, 1, 2, 3, 4]]]
    assert selection.head_notes is None


# A step over the positions 0, 1, 2, 4 and the new 5, whose row is .5 .2 .1 .15 .05.
STEP_ROW = [0.5, 0.2, 0.1, 0.15, 0.05]
HELD = [0, 1, 2, 4, 5]
INF = float("inf")


def step_of(choice, token, *, held=HELD, noted=(INF, 0.3, INF, 0.05)):
    """Return the decode step: token 0 is special, 2 is punctuation, 1 and 4 are words."""
    return worked_step(
        [STEP_ROW],
        5,
        held,
        scores=torch.tensor([[[*noted, 0.0]]]),
        head_notes=torch.tensor([[[choice, 1]]]),
        token_ids=torch.tensor([[token]]),
    )


@pytest.mark.parametrize(
    ("choice", "token", "kept"),
    [
        (SPECIAL, 13, [0, 2]),  # what was noted as this head's kinds stays
        (SPECIAL, 5, [0, 2]),  # punctuation is not among them
        (SPECIAL, 1, [0, 2, 4]),
        (PUNCTUATION, 13, [0, 2]),
        (PUNCTUATION, 5, [0, 2, 4]),
        (FREQUENT, 13, [0, 1, 2]),  # .3 + .2 for token 1, .05 + .15 for token 4, .05 for the new
        (FREQUENT, 6, [0, 1, 2, 4]),
        (LOCAL, 13, [0, 1, 2, 4]),  # the new one is the last one
    ],
)
def test_decode_step_of_each_kind_of_head_equals_a_worked_example(choice, token, kept):
    eviction = FastGen(**BY_HAND, **FIFTHS).evict(step_of(choice, token))
    assert eviction.keep_indices.tolist() == [[kept]]


def test_number_of_frequent_tokens_grows_with_the_text():
    """A fifth of ten tokens is two, so a second frequent token is kept."""
    step = step_of(FREQUENT, 13, held=[0, 1, 2, 8, 9], noted=(INF, 0.3, INF, 0.0))
    policy = FastGen(**BY_HAND, **FIFTHS)
    assert policy.evict(step).keep_indices.tolist() == [[[0, 1, 2, 3]]]
    assert policy.evict(replace(step, seen_tokens=9)).keep_indices.tolist() == [[[0, 1, 2]]]


# The profile, from two sums per token, against the whole matrix in float64.


# Who says which tokens come.


@torch.no_grad()
def call(model, cache, ids):
    cache.expect_tokens(ids)
    return model(ids, past_key_values=cache).logits


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])  # the first layer slides in the second
def test_tokens_without_announced_ids_are_refused_before_any_is_stored(family):
    model, ids = tiny_model(family), random_ids(2, PROMPT)
    cache = CompressedCache(model, FastGen(0.8, **KINDS))
    with pytest.raises(
        CacheMismatchError, match=r"ids of the next 60 tokens .* got none\. .*expect_tok"
    ):
        model(ids, past_key_values=cache)
    cache.expect_tokens(ids[:1])
    with pytest.raises(CacheMismatchError, match=r"got a tensor of shape \(1, 60\)"):
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0
    fresh = CompressedCache(model, FastGen(0.8, **KINDS))
    assert torch.equal(call(model, cache, ids), call(model, fresh, ids))
    for token in ids[:, :2].split(1, dim=1):
        with pytest.raises(CacheMismatchError, match="got none"):  # what was read is not to come
            model(token, past_key_values=cache)
        assert torch.equal(call(model, cache, token), call(model, fresh, token))


def test_invalid_token_ids_are_refused():
    cache = CompressedCache(tiny_model("llama"), FastGen(0.8, **KINDS))
    for wrong in ([1, 2], torch.zeros(3, dtype=torch.long), torch.zeros(1, 3)):
        with pytest.raises(InvalidTypeError, match=r"token_ids: expected a tensor of integers"):
            cache.expect_tokens(wrong)


def test_input_embeddings_without_token_ids_are_refused():
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    cache = CompressedCache(model, FastGen(0.8, **KINDS))
    embeds = model.get_input_embeddings()(ids)
    with pytest.raises(InvalidArgumentError, match=r"inputs_embeds: .*needs the ids of the tokens"):
        model.generate(inputs_embeds=embeds, past_key_values=cache, max_new_tokens=2)
    assert cache.get_seq_length() == 0


# Special tokens and punctuation.


def test_punctuation_includes_variants_with_a_space_and_single_bytes():
    vocabulary = ["<unk>", "<s>", "▁.", ".", "<0x2E>", "<0xE2>", "▁word", "word", "▁", "!?", "$"]
    own = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    own.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, bos_token="<s>", unk_token="<unk>")
    assert special_tokens(tokenizer) == (0, 1)
    assert punctuation_tokens(tokenizer) == (2, 3, 4, 9)
    policy = FastGen(0.9).with_tokenizer(tokenizer)
    assert (policy.special_ids, policy.punctuation_ids) == ((0, 1), (2, 3, 4, 9))
    given = FastGen(0.9, special_ids=(7,)).with_tokenizer(tokenizer)
    assert (given.recovery, given.special_ids) == (0.9, (7,))
    assert json.loads(json.dumps(policy.describe()))["punctuation_ids"] == 4
    assert FastGen().describe()["special_ids"] is None


def test_marker_of_several_tokens_is_found_only_as_a_sequence():
    ids = torch.tensor([[7, 8, 9, 1, 7, 8], [7, 9, 7, 8, 9, 9]])
    marks = [[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]]
    assert found(ids, (1, (7, 8, 9))).int().tolist() == marks
    assert found(ids[:, :2], (1, (7, 8, 9))).int().tolist() == [[0, 0], [0, 0]]
    assert not found(ids, ()).any()
    overlapping = found(torch.tensor([[5, 5, 5]]), ((5, 5),))
    assert overlapping.all()
