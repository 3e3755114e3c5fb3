"""Answers of a document beside those of its whole text."""

import asyncio

import pytest

from snapkv.errors import SnapKVError
from snapkv_vllm.documents.refused import status_of
from tests.serving.documents.test_shared import BODY, MESSAGES, World


def reported(body, document=BODY):
    async def run(world):
        await world.documents.register("a", document)
        found = await world.documents.report("a", document["name"], body)
        assert world.documents.catalogue.of("a")[0].requests == 0
        return found

    return asyncio.run(run(World()))


def test_a_question_of_two_tokens_is_the_same_and_one_of_three_is_not():
    found = reported({"questions": ["xy", "xyz"], "max_tokens": 2})
    assert (found["same"], found["of"]) == (2, 2)
    found = reported({"questions": ["xy", "xyz"], "max_tokens": 3})
    assert (found["same"], found["of"]) == (0, 2)
    assert found["answers"][1] == {
        "question": "xyz",
        "whole": "122 121 120",
        "document": "122 121 0",
        "same_tokens": 2,
        "tokens": 3,
    }


def test_questions_about_messages_are_those_of_a_user():
    chat = {"name": "rules", "messages": MESSAGES}
    found = reported({"questions": ["x"], "max_tokens": 4}, chat)
    assert found["answers"][0]["whole"] == "13 2 120 10"  # the assistant's turn, END, x, its line


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "questions: expected a list of 1 to 32 texts"),
        ({"questions": []}, "questions: expected a list of 1 to 32 texts"),
        ({"questions": ["x"] * 33}, "questions: expected a list of 1 to 32 texts"),
        ({"questions": [""]}, "questions: expected a list of 1 to 32 texts"),
        ({"questions": "why"}, "questions: expected a list of 1 to 32 texts"),
        ({"questions": ["x"], "max_tokens": 257}, "max_tokens: expected at most 256"),
        ({"questions": ["x"], "max_tokens": "9"}, "max_tokens: expected an integer"),
        ({"questions": ["x"], "tokens": 9}, "tokens: expected questions, max_tokens, got 'tokens'"),
    ],
)
def test_what_is_no_report_is_refused(body, said):
    with pytest.raises(SnapKVError, match=said) as refused:
        reported(body)
    assert status_of(refused.value) == 400


def test_reports_are_made_one_at_a_time_and_of_ones_own_documents():
    async def run(world):
        await world.documents.register("a", BODY)
        with pytest.raises(SnapKVError, match="one of this key's documents") as unknown:
            await world.documents.report("b", "contract", {"questions": ["x"]})
        world.engine.reading.clear()
        first = asyncio.create_task(world.documents.report("a", "contract", {"questions": ["xyz"]}))
        await asyncio.sleep(0)
        with pytest.raises(SnapKVError, match="one report at a time") as busy:
            await world.documents.report("a", "contract", {"questions": ["x"]})
        world.engine.reading.set()
        assert (await first)["of"] == 1
        return status_of(unknown.value), status_of(busy.value)

    assert asyncio.run(run(World())) == (404, 503)
