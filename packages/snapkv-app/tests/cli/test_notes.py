"""Notes after an answer: differences, suggested commands and lost votes."""

from dataclasses import replace

import pytest
import torch

from snapkv import CompressedCache, SnapKV
from snapkv_app.cli.changes import FULL, MORE_BITS, changed_command, larger_budget, next_change
from snapkv_app.cli.notes import (
    LITTLE_SUM,
    LITTLE_VOTE,
    checked_note,
    compared_note,
    format_lost_votes,
    is_little_lost,
    votes_note,
)
from snapkv_app.cli.options import RunOptions
from snapkv_app.cli.policy import build_policy
from tests.cli.conftest import made_answer
from tests.families import random_ids, tiny_model

SNAPKV = RunOptions(policy="snapkv", budget=64)
TYPED = ("ask", "my notes.txt", "-q", "Who's there?", "--budget", "64", "--compare")


def answered(text="a b", options=SNAPKV, **votes):
    policy = build_policy(options)
    budget = getattr(policy, "budget", None)
    kept = budget if isinstance(budget, int) else 150
    cache = {"seen_tokens": 609, "kept_tokens": kept + 9, "held_bytes": 10, "full_bytes": 100}
    return made_answer(
        text,
        cache | votes,
        policy=policy.describe(),
        prompt_tokens=600,
        kept_tokens=kept,
        token_ids=tuple(map(ord, text)),
    )


def plain(note):
    return [line.plain for line in note.lines]


@pytest.mark.parametrize(
    ("typed", "change", "command"),
    [
        (
            TYPED,
            {"budget": 128, "keep_ratio": None},
            "snapkv ask 'my notes.txt' -q 'Who'\"'\"'s there?' --compare --budget 128",
        ),
        (("ask", "a", "--budget=64"), {"budget": 128}, "snapkv ask a --budget 128"),
        (
            ("ask", "a", "--set", "budget=64", "--set", "sink_tokens=4", "--set=kernel-size=5"),
            {"budget": 128, "kernel_size": None},
            "snapkv ask a --set sink_tokens=4 --budget 128",
        ),
        (
            ("ask", "--policy", "adakv", "--set", "policy.budget=64", "--", "--budget"),
            {"budget": 128},
            "snapkv ask --policy adakv --budget 128 -- --budget",
        ),
        (
            ("ask", "a", "--keep-ratio", "0.1", "--pooling", "avg", "--set", "x=1", "--json"),
            FULL,
            "snapkv ask a --json --policy full",
        ),
        (("ask", "a", "--json"), MORE_BITS, "snapkv ask a --json --exact-bits"),
    ],
)
def test_suggested_command_is_the_typed_one_with_the_change(typed, change, command):
    assert changed_command(typed, change) == command


def larger(tokens):
    return {"budget": tokens, "keep_ratio": None}


@pytest.mark.parametrize(
    ("exactly", "given", "bits", "change"),
    [
        ({}, {"budget": 64}, {}, larger(128)),
        ({}, {"budget": 64}, {"8/4": 30}, MORE_BITS),
        ({"prefill": None}, {"budget": 64}, {"8/4": 30}, {"prefill": None}),
        ({}, {"keep_ratio": 0.25}, {}, larger(300)),  # 150 of 600 were kept
        ({}, {"policy": "default"}, {}, larger(300)),
        ({}, {"budget": 300}, {}, None),  # only the full cache, which is shown already, has more
        ({}, {"policy": "fastgen"}, {}, None),
    ],
)
def test_next_change_is_the_most_likely_remedy(exactly, given, bits, change):
    options = RunOptions(**{"policy": "snapkv"} | given)
    assert next_change(exactly, options, answered(options=options, bits=bits)) == change


def test_equal_answer_has_one_line_and_different_one_a_command():
    same = compared_note(answered("a b"), answered("a b"), SNAPKV, TYPED, {})
    assert plain(same) == ["the compressed cache gives the full cache's answer"]
    assert same.record == {"same": True, "first_difference": None, "command": None}
    other = compared_note(answered("a b"), answered("a c"), SNAPKV, TYPED, {})
    command = "snapkv ask 'my notes.txt' -q 'Who'\"'\"'s there?' --compare --budget 128"
    different = "the compressed cache gives another answer than the full cache"
    assert plain(other) == [different, f"next to try: {command}"]
    assert other.record == {"same": False, "first_difference": 2, "command": command}
    drawn = replace(SNAPKV, temperature=0.7)
    chance = compared_note(answered("a b"), answered("a c"), drawn, TYPED, {})
    assert plain(chance) == [different]


def test_check_prints_a_line_and_sets_the_exit_status():
    same = checked_note(answered("abc"), answered("abd"), 2)
    assert (same.status, plain(same)) == (0, ["check: the first 2 tokens are the full cache's"])
    other = checked_note(answered("abc"), answered("abd"), 3)
    assert other.status == 3
    assert plain(other) == ["check: token 3 of the first 3 is not the full cache's"]
    assert other.record == {"tokens": 3, "same": False, "first_difference": 2}


@pytest.mark.parametrize(
    ("lost", "peak", "ending"),
    [(None, None, None), (0.1, 0.0012, None), (0.12, 0.0013, "--budget 128")],
)
def test_many_lost_votes_suggest_a_larger_budget_or_a_comparison(lost, peak, ending):
    ours = answered(lost_votes=lost, lost_vote_peak=peak)
    note = votes_note([ours], SNAPKV, TYPED[:-1])
    assert note.record["share"] == lost
    assert (note.record["command"] or "").endswith(ending or "")
    assert len(plain(note)) == (ending is not None)
    beside = votes_note([ours, answered()], SNAPKV, TYPED)  # the full cache's answer
    assert (plain(beside), beside.record["command"]) == ([], None)
    by_votes = answered(options=RunOptions(), lost_votes=lost, lost_vote_peak=peak)
    chosen = votes_note([by_votes], RunOptions(), TYPED[:-1])
    assert (chosen.record["command"] or "").endswith("--compare" if ending else "")
    assert len(plain(chosen)) == (ending is not None)
    assert plain(votes_note([by_votes, answered()], RunOptions(), TYPED)) == []


def test_larger_budget_that_holds_the_prompt_is_the_full_cache():
    half, fastgen = RunOptions(policy="snapkv", budget=300), RunOptions(policy="fastgen")
    assert larger_budget(half, answered(options=half)) is FULL
    assert larger_budget(fastgen, answered(options=fastgen)) is None


NAN = float("nan")


@pytest.mark.parametrize(
    ("peak", "share", "tokens", "little"),
    [
        (0.0, 0.0, 1024, True),
        (LITTLE_VOTE - 0.0001, LITTLE_SUM - 0.01, 1024, True),
        (LITTLE_VOTE, 0.0, 1024, False),
        (0.0, LITTLE_SUM, 1024, False),
        (NAN, 0.0, 1024, False),
        (0.0, NAN, 1024, False),
        (LITTLE_VOTE / 8, LITTLE_SUM / 8, 7 * 1024, True),  # a longer prompt dilutes them
        (LITTLE_VOTE / 2, 0.0, 2 * 1024, False),
        (0.0, LITTLE_SUM / 8, 8 * 1024, False),
    ],
)
def test_votes_at_the_limit_are_not_a_little_loss(peak, share, tokens, little):
    report = {"kept_tokens": 256, "seen_tokens": tokens + 9, "chosen_at": tokens}
    report |= {"lost_votes": share, "lost_vote_peak": peak}
    assert is_little_lost(report) == little


def test_table_cell_has_the_share_of_lost_votes_or_a_dash():
    def said(**values):
        return format_lost_votes({"kept_tokens": 256, "seen_tokens": 1024, **values})

    assert said(lost_votes=0.072, lost_vote_peak=0.0007) == "7 %"
    assert said() == said(lost_votes=None) == "-"
    assert said(kept_tokens=1024, lost_votes=0.5) == "nothing was dropped"


@torch.no_grad()
def test_generated_tokens_do_not_change_the_lost_votes():
    model = tiny_model("llama")
    cache = CompressedCache(model, SnapKV(24, window_size=8))
    model(random_ids(1, 60), past_key_values=cache)
    names = ("lost_votes", "lost_vote_peak", "chosen_at")
    behind_the_prompt = [cache.report()[name] for name in names]
    assert behind_the_prompt[-1] == 60
    for tokens in (1, 140):
        model(random_ids(1, tokens), past_key_values=cache)
        assert [cache.report()[name] for name in names] == behind_the_prompt
