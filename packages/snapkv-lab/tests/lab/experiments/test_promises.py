"""The margins that are promised for a machine with two cores, checked on the committed rows."""

from dataclasses import fields

import pytest

from snapkv.policies import POLICIES, Policy
from snapkv_lab.experiments import methods, recall
from snapkv_lab.experiments.speed import BY_DEFAULT, SPEED
from snapkv_lab.experiments.texts import list_answers
from snapkv_lab.rows import select_rows


def test_token_takes_as_long_after_6k_as_after_1k_prompt_tokens():
    ratios = {row["cache"]: row for row in SPEED.results() if "ratio" in row}
    ours = ratios["snapkv"]
    assert (ours["against_tokens"], ours["prompt_tokens"]) == (1024, 6144)
    assert ours["ratio"]["p50"] <= 1.05 < 1.5 < ratios["full"]["ratio"]["p50"]


def test_default_answer_takes_no_longer_than_on_the_full_cache():
    rows = BY_DEFAULT.results()
    assert tuple(row["prompt_tokens"] for row in rows) == (1024, 2048, 6144)
    assert all(row["token_cpu_ratio"]["p50"] <= 1 for row in rows)
    assert all(row["held_bytes"] < row["full_bytes"] for row in rows)


def test_memory_peaks_no_higher_and_falls_by_prompt_over_budget():
    rows = {row["cache"]: row for row in select_rows(SPEED.results(), benchmark="peak memory")}
    ours, plain = rows["snapkv"], rows["transformers"]
    assert ours["peak_growth_bytes"] <= plain["peak_growth_bytes"]
    assert plain["kept_bytes"] == ours["prompt_tokens"] / ours["budget"] * ours["kept_bytes"]
    assert ours["held_bytes"] <= 1.01 * ours["kept_bytes"]  # beside them, the kept positions


def test_recall_answers_as_the_full_cache_while_plain_snapkv_loses_a_third():
    rows = select_rows(recall.MANY_QUESTIONS.results(), task="questions")
    full = recall.right_share(rows, recall.FULL, None)
    assert full >= 0.6
    assert any(
        recall.right_share(rows, recall.RECALL, budget) >= 0.98 * full
        and recall.right_share(rows, recall.PLAIN, budget) <= full * 2 / 3
        for budget in {row["budget"] for row in rows} - {None}
    )
    answers = [
        [(row["document"], row["budget"], row["depth"], row["right"]) for row in own]
        for own in (select_rows(rows, contender=name) for name in (recall.RECALL, recall.AGAIN))
    ]
    assert answers[0] == answers[1]


def test_fifty_turns_stay_below_the_cap_and_the_host_holds_all_seen_tokens():
    turns = select_rows(recall.MANY_QUESTIONS.results(), task="turns")
    assert len(turns) >= 50
    for row in turns:
        assert row["held_bytes"] <= row["most_bytes"] <= recall.cap_bytes(row)
        assert row["host_bytes"] == row["prompt_tokens"] * row["bytes_per_token"]


def names_inside(policy):
    inner = [getattr(policy, parameter.name) for parameter in fields(policy)]
    return {policy.name}.union(*(names_inside(part) for part in inner if isinstance(part, Policy)))


def test_every_method_whose_size_a_budget_sets_takes_part():
    contenders = [way.policy(64) for own in methods.SETTINGS.values() for way in own.ways]
    without_size = {"full", "fastgen"}
    elsewhere = {"prompt-then-decode"}  # the prompt's method
    assert set().union(*map(names_inside, contenders)) == set(POLICIES) - without_size - elsewhere
    found = list_answers(methods.METHODS.results())
    for setting, own in methods.SETTINGS.items():
        measured = {row["method"] for row in found if row["of"]["setting"] == setting}
        assert measured == {way.name for way in own.ways}


def test_methods_of_a_column_hold_about_the_same_bytes():
    """StreamingLLM has a second copy of the keys of its sinks."""
    for row in list_answers(methods.METHODS.results()):
        share = methods.SETTINGS[row["of"]["setting"]].shares[row["share"]]
        assert row["held"] == pytest.approx(
            share, rel=0.03 if row["method"] == "StreamingLLM" else 0.01
        )
