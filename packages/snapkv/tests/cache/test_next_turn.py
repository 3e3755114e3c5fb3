"""A copied or saved cache selects in the next turn as the original does."""

import copy

import pytest
import torch

from snapkv import CompressedCache, default_policy
from snapkv.cache.saving.files import read_sealed, write_sealed
from tests.cache.rows import Rows
from tests.families import random_ids
from tests.methods import METHODS

DEFAULT, SNAPKV, HOST = default_policy(40), METHODS["snapkv"], {"recall": "host"}
PROMPT, TURN, QUESTION, PADS = 70, 30, 25, (0, 7)


def told_of(question_tokens):
    return lambda rows: rows.cache.expect_question(question_tokens)


def crop_into_the_prompt(rows):
    """Crop into the prompt, so that the next tokens restore the offloaded ones."""
    rows.read(ids(3, 2))
    rows.cache.crop(-5)


def generate_a_little(rows):
    for token in ids(3, 4).split(1, dim=1):
        rows.read(token)


# method, options, what brings the cache into the state behind a prompt
STATES = {
    "a question is expected": (DEFAULT, HOST, told_of(QUESTION)),
    "a short question is expected": (DEFAULT, HOST, told_of(20)),
    "a text before its question is expected": (DEFAULT, HOST, told_of(0)),
    "a question was expected, and is not": (
        DEFAULT,
        HOST,
        lambda rows: [told_of(QUESTION)(rows), told_of(None)(rows)],
    ),
    "nothing is expected": (DEFAULT, HOST, generate_a_little),
    "tokens are protected": (
        SNAPKV,
        {**HOST, "protect": [(2, 9), (PROMPT, PROMPT + 9)]},
        generate_a_little,
    ),
    "recall is due for a question": (
        DEFAULT,
        HOST,
        lambda rows: [told_of(QUESTION)(rows), crop_into_the_prompt(rows)],
    ),
    "heads have notes": (METHODS["fastgen"], {}, generate_a_little),
}


def ids(tokens, seed=0):
    return random_ids(2, tokens, seed=seed)


def saved(cache, tmp_path):
    cache.save(tmp_path / "one")
    return CompressedCache.load(tmp_path / "one", cache.model)


def same_rows(cache, _):
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2]))
    return cache


WAYS = {
    "saved": saved,
    "copied": lambda cache, _: copy.copy(cache),
    "deeply copied": lambda cache, _: copy.deepcopy(cache),
    "rows chosen": same_rows,
}


def in_state(name):
    policy, options, change = STATES[name]
    rows = Rows(policy, options, PADS)
    rows.turn(ids(PROMPT), PROMPT, ids(1, 9))
    change(rows)
    return rows


def next_turn(rows):
    """Read the next turn and return the kept positions of every layer and all logits."""
    cache, rows.passes = rows.cache, []
    end = cache.prompt_state.prompt_end
    tokens = end - cache.get_seq_length() if cache.prompt_state.is_announced else TURN
    rows.turn(ids(tokens, 5), 17, ids(2, 6))
    kept = [cache.kept_positions(layer) for layer in cache.compressed_layers]
    return kept, torch.cat(rows.passes, dim=1)


@pytest.mark.parametrize("name", STATES)
def test_next_turn_of_a_saved_or_copied_cache_equals_that_of_the_original(name, tmp_path):
    kept, logits = next_turn(in_state(name))
    rows = in_state(name)
    branches = {way: change(rows.cache, tmp_path) for way, change in WAYS.items()}
    for way, rows.cache in branches.items():
        other_kept, other_logits = next_turn(rows)
        assert all(map(torch.equal, kept, other_kept)), way
        assert torch.equal(logits, other_logits), way


def test_expected_question_changes_the_kept_positions():
    """If not, the comparison above could not notice a lost question."""
    kept = [next_turn(in_state(name))[0] for name in list(STATES)[:3]]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert any(
            not torch.equal(layer, another)
            for layer, another in zip(kept[one], kept[other], strict=True)
        )


def test_file_without_question_tokens_is_loaded(tmp_path):
    """Files of version 0.3 have no question tokens, so the method is not adapted to a question."""
    in_state("nothing is expected").cache.save(tmp_path / "one")
    tensors, notes = read_sealed(tmp_path / "one")
    assert notes.pop("question_tokens", "none") is None
    write_sealed(tmp_path / "old", tensors, notes)
    rows = in_state("nothing is expected")
    kept, _ = next_turn(in_state("nothing is expected"))
    rows.cache = CompressedCache.load(tmp_path / "old", rows.model)
    for layer, other in zip(kept, next_turn(rows)[0], strict=True):
        assert torch.equal(layer, other)
