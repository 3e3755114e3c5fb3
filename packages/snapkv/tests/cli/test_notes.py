"""What is told behind an answer, on made-up answers: differences, commands, words."""

import pytest
import torch

from snapkv import CompressedCache, SnapKV
from snapkv.app.answering import Answer
from snapkv.app.remedies import Tried
from snapkv.cache.report import CacheReport
from snapkv.cli.notes import (
    FADING,
    FULL,
    MORE_BITS,
    SAFE_BELOW,
    SAFE_SUM_BELOW,
    WIDE,
    LostVotes,
    are_few,
    changed_command,
    changed_options,
    changes_by_price,
    checked_note,
    compared_note,
    is_safe,
    larger_budget,
    votes_note,
)
from snapkv.cli.options import RunOptions
from snapkv.cli.policy import build_policy
from tests.families import random_ids, tiny_model

SNAPKV = RunOptions(policy="snapkv", budget=64)
TYPED = ("ask", "my notes.txt", "-q", "Who's there?", "--budget", "64", "--compare")


def answered(text="a b", options=SNAPKV, **votes):
    policy = build_policy(options)
    budget = getattr(policy, "budget", None)
    kept = budget if isinstance(budget, int) else 150
    cache = CacheReport(
        policy=policy.name,
        seen_tokens=609,
        kept_tokens=kept + 9,
        held_bytes=10,
        full_bytes=100,
        **votes,
    )
    return Answer(
        text=text,
        finish_reason="stop",
        policy=policy.describe(),
        prompt_tokens=600,
        new_tokens=10,
        kept_tokens=kept,
        first_token_ms=1.0,
        token_ms=1.0,
        cache=cache,
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
def test_a_command_is_the_one_that_was_typed_with_what_changes(typed, change, command):
    assert changed_command(typed, change) == command


def test_changed_options_make_the_policy_that_the_command_will():
    options = RunOptions(
        policy="snapkv", budget=64, kernel_size="5", set_=["budget=32", "group_reduce=max"]
    )
    changed = changed_options(options, {"budget": 128} | dict(FADING))
    policy = build_policy(changed)
    assert (policy.budget, policy.pooling, policy.group_reduce) == (128, "fading", "max")
    assert changed.set_ == ["group_reduce=max"]
    assert build_policy(changed_options(options, FULL)).name == "full"


def test_changes_come_in_the_order_of_their_price():
    larger = [{"budget": budget, "keep_ratio": None} for budget in (128, 256, 512)]
    found = list(changes_by_price(SNAPKV, answered()))
    assert found == [
        FADING, WIDE,
        larger[0], larger[0] | dict(FADING),
        larger[1], larger[1] | dict(FADING),
        larger[2], larger[2] | dict(FADING),
    ]  # fmt: skip
    selective = RunOptions(policy="snapkv", budget=64, prefill="selective")
    exactly = list(changes_by_price(selective, answered(options=selective)))
    assert exactly == [{"prefill": None}, *({"prefill": None, **change} for change in found)]


@pytest.mark.parametrize(
    ("given", "budgets", "poolings"),
    [
        ({"budget": 64, "pooling": "fading"}, [128, 256, 512], 1),
        ({"budget": 64, "kernel_size": "13"}, [128, 128, 256, 256, 512, 512], 1),
        ({"keep_ratio": 0.25}, [300, 300], 2),  # 150 of 600 were kept
        ({"policy": "default"}, [300], 1),  # which fades
        ({"policy": "adakv", "budget": 200}, [400, 400], 2),
        ({"policy": "h2o", "budget": 200}, [400], 0),
        ({"policy": "fastgen"}, [], 0),
        ({"budget": 300}, [], 2),
    ],
)
def test_only_what_a_method_has_is_changed(given, budgets, poolings):
    options = RunOptions(**{"policy": "snapkv"} | given)
    changes = list(changes_by_price(options, answered(options=options)))
    assert [change["budget"] for change in changes if "budget" in change] == budgets
    assert sum("budget" not in change for change in changes) == poolings
    for change in changes:
        build_policy(changed_options(options, change))


def compared(tried, ours="a b", theirs="a c"):
    seen = []

    def tries(answer_ids, changed):
        seen.append((answer_ids, [options.policy for options in changed]))
        return tried

    return compared_note(answered(ours), answered(theirs), SNAPKV, TYPED, tries), seen


def test_the_same_answer_is_one_line_and_nothing_is_tried():
    note, seen = compared(Tried(keeper=0), theirs="a b")
    assert (plain(note), seen) == (["same answer"], [])
    assert note.record == {
        "same": True, "first_difference": None, "remedy": None, "command": None, "note": "",
    }  # fmt: skip


def test_what_keeps_the_answer_is_the_command_to_type():
    note, seen = compared(Tried(keeper=3))
    assert seen == [(tuple(map(ord, "a c")), ["snapkv"] * 8)]
    command = (
        "snapkv ask 'my notes.txt' -q 'Who'\"'\"'s there?' --compare --budget 128 --pooling fading"
    )
    assert plain(note) == [
        "different",
        f"next to try, which keeps the full cache's answer: {command}",
    ]
    assert note.record == {
        "same": False,
        "first_difference": 2,
        "remedy": {"budget": 128, "pooling": "fading"},
        "command": command,
        "note": "",
    }


def test_where_nothing_keeps_it_the_full_cache_is_left_and_what_is_not_known_is_said():
    note, _ = compared(Tried())
    assert plain(note)[1].endswith("for the full cache: " + note.record["command"])
    assert note.record["command"].endswith("--compare --policy full")
    assert note.record["remedy"] is None
    note, _ = compared(Tried(untold="the answers are drawn"))
    assert plain(note)[1] == "what to try next is not computed: the answers are drawn"
    assert note.record["command"] is None


def test_a_check_is_a_line_and_a_status():
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
def test_lost_votes_call_for_a_larger_budget(lost, peak, ending):
    ours = answered(lost_votes=lost, lost_vote_peak=peak)
    note = votes_note([ours], SNAPKV, TYPED[:-1])
    assert note.record["share"] == lost
    assert (note.record["command"] or "").endswith(ending or "")
    assert len(plain(note)) == (ending is not None)
    beside = votes_note([ours, answered()], SNAPKV, TYPED)  # the full cache's answer
    assert (plain(beside), beside.record["command"]) == ([], None)


def test_a_larger_budget_that_holds_everything_is_the_full_cache():
    half, fastgen = RunOptions(policy="snapkv", budget=300), RunOptions(policy="fastgen")
    assert larger_budget(half, answered(options=half)) is FULL
    assert larger_budget(fastgen, answered(options=fastgen)) is None


@pytest.mark.parametrize(
    ("peak", "share", "few"),
    [
        (0.0, 0.0, True),
        (SAFE_BELOW - 0.0001, SAFE_SUM_BELOW - 0.01, True),
        (SAFE_BELOW, 0.0, False),
        (0.0, SAFE_SUM_BELOW, False),
        (float("nan"), 0.0, False),
        (0.0, float("nan"), False),
    ],
)
def test_what_is_lost_is_little_or_not_and_the_borders_are_not(peak, share, few):
    assert are_few(peak, share, 1024) == few


def test_votes_on_a_longer_prompt_weigh_more():
    peak, share = SAFE_BELOW / 8, SAFE_SUM_BELOW / 8
    assert are_few(4 * peak, 4 * share, 1000)
    assert are_few(peak, share, 7 * 1024)
    assert not are_few(4 * peak, 0.0, 2 * 1024)
    assert not are_few(0.0, share, 8 * 1024)


def test_a_report_says_the_share_and_the_word_or_nothing():
    def said(safe=False, **values):
        report = {"kept_tokens": 256, "seen_tokens": 1024, **values}
        return LostVotes.of(report).said(safe=safe)

    assert said(lost_votes=0.072, lost_vote_peak=0.0007) == "7 %"
    assert said(lost_votes=0.072, lost_vote_peak=0.0007, safe=True) == "7 % (safe)"
    assert said() == said(lost_votes=None) == "-"
    assert said(kept_tokens=1024, lost_votes=0.5, safe=True) == "nothing was dropped"


@pytest.mark.parametrize(
    ("votes", "given", "full", "safe"),
    [
        ({}, {}, [], True),
        ({"bits": {"16": 30}}, {}, [], True),
        ({"bits": {"4": 30}}, {}, [], False),
        ({"bits": {"32": 29, "8/4": 1}}, {}, [], False),
        ({}, {"prefill": "selective"}, [], False),
        ({}, {"prefill": "layer-by-layer"}, [], True),
        ({}, {}, ["a b"], True),
        ({}, {}, ["a c"], False),
        ({"lost_vote_peak": 0.01}, {}, [], False),
        ({"lost_votes": None}, {}, [], False),
    ],
)
def test_safe_covers_tokens_bits_and_reading_and_what_was_seen(votes, given, full, safe):
    ours = answered(**{"lost_votes": 0.05, "lost_vote_peak": 0.001, **votes})
    options = RunOptions(policy="snapkv", budget=64, **given)
    answers = [ours, *map(answered, full)]
    assert is_safe(answers, options) == safe
    assert votes_note(answers, options, TYPED).record["safe"] == safe


def test_few_bits_are_tried_with_more():
    few, exact = answered(bits={"8/4": 30}), answered()
    found = list(changes_by_price(SNAPKV, few))
    assert [change for change in found if "exact_bits" in change] == [MORE_BITS]
    found.remove(MORE_BITS)
    assert found == list(changes_by_price(SNAPKV, exact))


@torch.no_grad()
def test_the_word_is_that_of_the_prompt_however_much_follows():
    model = tiny_model("llama")
    cache = CompressedCache(model, SnapKV(24, window_size=8))
    model(random_ids(1, 60), past_key_values=cache)
    behind_the_prompt = LostVotes.of(cache.report())
    lost = behind_the_prompt.peak, behind_the_prompt.share
    assert behind_the_prompt.few == are_few(*lost, 60)
    for tokens in (1, 140):
        model(random_ids(1, tokens), past_key_values=cache)
        assert LostVotes.of(cache.report()) == behind_the_prompt
