"""What the comparison of all methods says, held against its committed rows."""

from dataclasses import fields, replace

import pytest
from benchmarks import first_tokens, methods
from benchmarks.contenders import (
    FULL,
    contenders_at,
    full_cache,
    questionless_at,
    read_twice_at,
    rkv_at,
    without_budget,
)
from benchmarks.magic_number import make_documents
from benchmarks.methods_page import held_tokens, mean_nll
from benchmarks.records import read_rows
from benchmarks.retrieval import measure_retrieval

from snapkv.policies import POLICIES, Policy, StreamingLLM

ROWS = read_rows(methods.ROWS)
QUALITY = [row for row in ROWS if row["part"] == "quality"]
TIMING = [row for row in ROWS if row["part"] == "timing"]

WITHOUT = ["FastGen"]

WITHOUT_SIZE = {"duo-attention", "score-threshold"}
"""Methods whose size no budget of tokens sets, but a model's heads or a threshold."""


def names_inside(policy):
    inner = [getattr(policy, parameter.name) for parameter in fields(policy)]
    return {policy.name}.union(*(names_inside(part) for part in inner if isinstance(part, Policy)))


def test_every_method_there_is_takes_part(demo):
    contenders = (
        full_cache() | contenders_at(64) | read_twice_at(64) | rkv_at(64) | questionless_at(64)
    )
    contenders |= without_budget(768, 64, demo.tokenizer)
    assert set().union(*map(names_inside, contenders.values())) == set(POLICIES) - WITHOUT_SIZE
    assert not any(hasattr(POLICIES[name](), "budget") for name in WITHOUT_SIZE)


def test_the_rows_are_of_the_methods_lengths_and_budgets_that_are_measured():
    expected = [
        (prompt_tokens, question, name, budget)
        for prompt_tokens, budgets in methods.BUDGETS.items()
        for question in methods.QUESTIONS
        for budget, names in [
            (None, [FULL]),
            *((b, [*contenders_at(b), *WITHOUT]) for b in budgets),
        ]
        for name in names
    ]
    there = [
        (row["prompt_tokens"], row["question"], row["method"], row["budget"]) for row in QUALITY
    ]
    assert there == expected
    assert [row["method"] for row in TIMING] == [FULL, *contenders_at(64), *WITHOUT]


def test_methods_of_a_column_hold_the_same_bytes():
    for row in QUALITY:
        if row["budget"] is None:
            assert row["held_bytes"] == row["full_bytes"]
        elif row["method"] not in WITHOUT:
            extra_tokens = 2 if row["method"] == "StreamingLLM" else 0
            assert held_tokens(row) == pytest.approx(row["budget"] + extra_tokens)


def test_the_last_queries_know_best_where_the_question_is_seen():
    """The order of the literature: window votes, then the last query's, then those without."""
    nll = mean_nll(ROWS, "visible")
    voting = [name for name in nll if "SnapKV" in name or name in ("PyramidKV", "R-KV")]
    assert list(nll)[: len(voting)] == voting
    assert nll["TOVA"] < min(nll["H2O"], nll["StreamingLLM"])
    assert min(nll["H2O"], nll["Scissorhands"]) > nll["Random"]
    assert list(nll)[-1] == "FastGen"


def test_without_the_question_three_methods_that_read_once_are_well_ahead_of_chance():
    nll = mean_nll(ROWS, "hidden")
    ahead = [name for name in nll if nll[name] < 0.75 * nll["Random"] and "KVzip" not in name]
    assert ahead == ["Compactor", "LagKV, lag 32", "KeyDiff"]


def test_reading_twice_finds_what_no_question_asked_for():
    twice = [row for row in ROWS if row["part"] == "second reading"]
    assert [(row["prompt_tokens"], row["budget"], row["method"]) for row in twice] == [
        (prompt_tokens, budget, name)
        for prompt_tokens, budgets in methods.BUDGETS.items()
        for budget in budgets
        for name in read_twice_at(budget)
    ]
    assert {row["question"] for row in twice} == {"hidden"}
    assert next(iter(mean_nll(ROWS, "hidden"))) == "AdaKV(KVzip)"
    full = {row["prompt_tokens"]: row["nll"] for row in QUALITY if row["method"] == FULL}
    for row in twice:
        if row["method"] == "AdaKV(KVzip)":
            share = row["budget"] / row["prompt_tokens"]
            assert row["accuracy"] == (1.0 if share >= 0.25 else 0.0)
            assert share < 0.5 or row["nll"] < full[row["prompt_tokens"]] + 0.05


def test_the_rows_of_r_kv_hold_the_bytes_of_the_others():
    rows = [row for row in ROWS if row["part"] == "r-kv"]
    assert [(row["prompt_tokens"], row["question"], row["budget"]) for row in rows] == [
        (prompt_tokens, question, budget)
        for prompt_tokens, budgets in methods.BUDGETS.items()
        for question in methods.QUESTIONS
        for budget in budgets
    ]
    for row in rows:
        assert row["policy"] == rkv_at(row["budget"])["R-KV"].describe()
        assert row["end_bytes"] == row["held_bytes"]
        assert held_tokens(row) == pytest.approx(row["budget"])
    nll = mean_nll(ROWS, "hidden")
    voting = [name for name in nll if "SnapKV" in name or name in ("PyramidKV", "TOVA")]
    assert nll["KeyDiff"] < nll["R-KV"] < nll["Random"] < min(nll[name] for name in voting)


def test_the_first_tokens_lower_the_loss_of_what_follows():
    rows = [row for row in ROWS if row["part"] == "first tokens"]
    loss = {(row["method"], row["budget"], row["sink_tokens"]): row["loss"] for row in rows}
    full = loss["full cache", None, None]
    for budget in first_tokens.BUDGETS:
        gains = {
            name: loss[name, budget, 0] - loss[name, budget, 4]
            for name in first_tokens.contenders(budget, 4)
        }
        assert gains["KVzip"] > 0.02
        assert gains["AdaKV(KVzip)"] > 0
        assert abs(gains["KeyDiff"]) < 0.005
        assert max(gains, key=gains.get) == "Random"
        assert all(loss[name, budget, 4] > full for name in gains)
    assert {row["policy"].get("sink_tokens", 4) for row in rows if row["sink_tokens"]} == {4}


def test_wide_pooling_finds_every_number_in_every_method_around_snapkv():
    wide = [row for row in ROWS if row["part"] == "pooling"]
    assert {row["budget"] for row in wide} == set(methods.POOLED_BUDGETS)
    assert {row["accuracy"] for row in wide} == {1.0}
    first, *built_on_it = [row["nll"] for row in wide if row["budget"] == 128]
    assert max(built_on_it) < first


def test_a_method_that_holds_more_than_its_budget_stops_the_run(demo, haystack):
    documents = make_documents(demo.tokenizer, haystack, prompt_tokens=128, count=1)
    (outcome,) = measure_retrieval(demo.model, documents, [StreamingLLM(64)])
    methods.require_budget_bytes("of its budget", outcome, 64)
    greedy = replace(outcome, held_bytes=outcome.held_bytes * 1.1)
    with pytest.raises(ValueError, match="greedy: expected"):
        methods.require_budget_bytes("greedy", greedy, 64)
