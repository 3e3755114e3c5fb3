"""What the comparison of all methods says, held against its committed rows."""

from dataclasses import fields, replace

import pytest

from snapkv.policies import POLICIES, Policy, StreamingLLM
from snapkv_lab.experiments import methods
from snapkv_lab.experiments.contenders import (
    FULL,
    contenders_at,
    full_cache,
    questionless_at,
    read_twice_at,
    rkv_at,
    without_budget,
)
from snapkv_lab.experiments.magic_number import make_documents
from snapkv_lab.experiments.retrieval import measure_retrieval

ROWS = methods.EXPERIMENT.known()
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
            assert methods.held_tokens(row) == pytest.approx(row["budget"] + extra_tokens)


def test_a_method_that_holds_more_than_its_budget_stops_the_run(demo, haystack):
    documents = make_documents(demo.tokenizer, haystack, prompt_tokens=128, count=1)
    (outcome,) = measure_retrieval(demo.model, documents, [StreamingLLM(64)])
    methods.require_budget_bytes("of its budget", outcome, 64)
    greedy = replace(outcome, held_bytes=outcome.held_bytes * 1.1)
    with pytest.raises(ValueError, match="greedy: expected"):
        methods.require_budget_bytes("greedy", greedy, 64)
