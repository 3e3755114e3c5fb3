"""What recall must show: as many right answers as the full cache, where plain SnapKV loses many."""

import pytest

from snapkv_lab.experiments.quotes import quoted_document
from snapkv_lab.experiments.recall import (
    AGAIN,
    EXPERIMENT,
    FULL,
    PLAIN,
    RECALL,
    cap_bytes,
    measure_questions,
    share,
)


@pytest.fixture(scope="module")
def rows():
    return EXPERIMENT.known()


def test_recall_answers_as_the_full_cache_does_where_plain_snapkv_loses_a_third(rows):
    questions = [row for row in rows if row["task"] == "questions"]
    full = share(questions, FULL, None)
    budgets = {row["budget"] for row in questions} - {None}
    shown = [
        budget
        for budget in budgets
        if share(questions, RECALL, budget) >= 0.98 * full
        and share(questions, PLAIN, budget) <= full * 2 / 3
    ]
    assert full >= 0.6
    assert shown


def test_recall_answers_what_reading_again_answers(rows):
    answers = {}
    for row in rows:
        if row["task"] == "questions" and row["contender"] in (RECALL, AGAIN):
            key = (row["document"], row["budget"], row["depth"])
            answers.setdefault(key, set()).add(row["right"])
    assert answers
    assert all(len(right) == 1 for right in answers.values())


def test_fifty_turns_stay_below_the_cap_and_the_host_holds_what_was_seen(rows):
    turns = [row for row in rows if row["task"] == "turns"]
    assert len(turns) >= 50
    for row in turns:
        assert row["held_bytes"] <= row["most_bytes"] <= cap_bytes(row)
        assert row["host_bytes"] == row["prompt_tokens"] * row["bytes_per_token"]


def test_questions_quote_the_document_at_ten_depths(demo, haystack):
    document = quoted_document(demo.tokenizer, haystack.text, tokens=1024)
    text = demo.tokenizer.decode(document.ids)
    assert len(document.ids) == 1024
    for place, quote in enumerate(document.quotes):
        start = demo.tokenizer.decode(quote.question_ids).partition('"')[2]
        answer = demo.tokenizer.decode(quote.answer_ids)
        assert text.count(start + answer) == 1
        assert abs(quote.depth - (place + 0.5) / 10) < 0.1
        assert abs(text.index(start) / len(text) - quote.depth) < 0.01


@pytest.mark.slow
def test_the_measurement_runs(demo, haystack):
    document = quoted_document(demo.tokenizer, haystack.text, tokens=512, questions=3)
    rows = list(measure_questions(demo.model, document, [96]))
    assert len(rows) == 6 * 3
    assert share(rows, RECALL, 96) == share(rows, AGAIN, 96)
