"""What a request says of documents to the scheduler, and how much room the engine says it has."""

import pytest

from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv_vllm.documents.room import Room
from snapkv_vllm.documents.words import (
    ADOPT,
    BUDGET,
    DOCUMENT,
    DROP,
    INSTRUCTION,
    KEPT,
    REGISTER,
    ROOM,
    TOKENS,
    Errand,
    errand,
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({}, None),
        ({"snapkv_budget": 3, "other": 1}, None),
        ({DOCUMENT: "a", "other": 1}, Errand(verb=DOCUMENT, document_id="a")),
        ({DROP: "a"}, Errand(verb=DROP, document_id="a")),
        ({ROOM: "all"}, Errand(verb=ROOM, document_id="all")),
        (
            {REGISTER: "a", BUDGET: 64, INSTRUCTION: [1, 2]},
            Errand(verb=REGISTER, document_id="a", budget=64, instruction_ids=(1, 2)),
        ),
        (
            {ADOPT: "a", TOKENS: [7, 8, 9], KEPT: 2},
            Errand(verb=ADOPT, document_id="a", token_ids=(7, 8, 9), kept_tokens=2),
        ),
    ],
)
def test_what_a_request_does_with_a_document(given, expected):
    assert errand(given) == expected


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({DOCUMENT: ""}, InvalidArgumentError, "snapkv_document: expected an identifier"),
        ({DOCUMENT: 7}, InvalidArgumentError, "snapkv_document: expected an identifier, got 7"),
        ({DOCUMENT: "a", DROP: "a"}, InvalidArgumentError, "snapkv_drop: expected none beside"),
        ({DOCUMENT: "a", BUDGET: 3}, InvalidArgumentError, "snapkv_budget: expected none beside"),
        ({DROP: "a", INSTRUCTION: [1]}, InvalidArgumentError, "snapkv_instruction: expected none"),
        ({REGISTER: "a", BUDGET: 0}, InvalidArgumentError, "snapkv_budget: expected at least 1"),
        ({ADOPT: "a", TOKENS: [1]}, InvalidTypeError, "snapkv_kept: expected an integer"),
        ({ADOPT: "a", TOKENS: [-1], KEPT: 1}, InvalidArgumentError, "snapkv_tokens: expected at"),
        ({REGISTER: "a", KEPT: 1}, InvalidArgumentError, "snapkv_kept: expected none beside"),
        ({REGISTER: "a", INSTRUCTION: ["x"]}, InvalidTypeError, "snapkv_instruction: expected"),
    ],
)
def test_what_makes_no_sense_is_refused(given, kind, said):
    with pytest.raises(kind, match=said):
        errand(given)


def test_a_budget_is_rounded_up_to_blocks_and_a_short_document_down():
    room = Room(block_tokens=16, bytes_per_token=10, most_tokens=100, budget=40)
    assert room.most_bytes == 1000
    assert [room.kept_tokens(1000, budget) for budget in (None, 1, 16, 17)] == [48, 16, 16, 32]
    assert [room.kept_tokens(tokens, None) for tokens in (16, 31, 47, 48)] == [16, 16, 32, 48]
    assert room.bytes_of(1000, 17) == 320
    with pytest.raises(InvalidArgumentError, match="at least the 16 tokens of a block, got 15"):
        room.kept_tokens(15, None)
