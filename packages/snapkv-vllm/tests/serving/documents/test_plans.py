"""What a request says of documents, and when one is read again, by numbers of tokens alone."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snapkv import KVzip
from snapkv.errors import InvalidArgumentError, SnapKVError
from snapkv_vllm.documents.plans import STEP_TOKENS, ReadTwice, piece_tokens
from snapkv_vllm.documents.prefix import CachedPrefix
from snapkv_vllm.documents.protocol import (
    BUDGET,
    DOCUMENT,
    INSTRUCTION,
    REGISTER,
    DocumentLimits,
    DocumentRequest,
    document_request,
)
from snapkv_vllm.plans import LookaheadTokens, Order, ReconstructionPass


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ({}, None),
        ({"snapkv_budget": 3, "other": 1}, None),
        ({DOCUMENT: "a", "other": 1}, DocumentRequest(verb=DOCUMENT, document_id="a")),
        (
            {REGISTER: "a", BUDGET: 64, INSTRUCTION: [1, 2]},
            DocumentRequest(verb=REGISTER, document_id="a", budget=64, instruction_ids=(1, 2)),
        ),
    ],
)
def test_what_a_request_does_with_a_document(given, expected):
    assert document_request(given) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({DOCUMENT: ""}, "snapkv_document: expected an identifier"),
        ({DOCUMENT: 7}, "snapkv_document: expected an identifier, got 7"),
        ({DOCUMENT: "a", REGISTER: "a"}, "snapkv_register: expected none with"),
        ({DOCUMENT: "a", BUDGET: 3}, "snapkv_budget: expected none with"),
        ({DOCUMENT: "a", INSTRUCTION: [1]}, "snapkv_instruction: expected none"),
        ({REGISTER: "a", BUDGET: 0}, "snapkv_budget: expected at least 1"),
        ({REGISTER: "a", "snapkv_window_size": 1}, "snapkv_window_size: expected none with"),
        ({REGISTER: "a", INSTRUCTION: ["x"]}, "snapkv_instruction: expected"),
    ],
)
def test_what_makes_no_sense_is_refused(given, said):
    with pytest.raises(SnapKVError, match=said):
        document_request(given)


def test_a_budget_is_rounded_up_to_blocks_and_a_short_document_down():
    room = DocumentLimits(block_tokens=16, bytes_per_token=10, most_tokens=100, budget=40)
    assert room.most_bytes == 1000
    assert [room.kept_tokens(1000, budget) for budget in (None, 1, 16, 17)] == [48, 16, 16, 32]
    assert [room.kept_tokens(tokens, None) for tokens in (16, 31, 47, 48)] == [16, 16, 32, 48]
    with pytest.raises(InvalidArgumentError, match="at least the 16 tokens of a block, got 15"):
        room.kept_tokens(15, None)


CHOICE = ReconstructionPass(KVzip(4, window_size=1, sink_tokens=1), 10)


def plan_of(tokens=10, instruction=(90, 91), chunk=6, kept=4):
    return ReadTwice(
        prefix=CachedPrefix(token_ids=tuple(range(tokens)), kept_tokens=kept, reused_tokens=0),
        instruction_ids=instruction,
        chunk_tokens=chunk,
        choice=CHOICE,
    )


class Reading:
    """Counts as vLLM and this plugin do.

    Args:
        plan: of the request.
    """

    def __init__(self, plan):
        self.plan, self.seen, self.held, self.orders = plan, 0, 0, []

    def step(self, offered):
        tokens = self.plan.step_tokens(self.seen, self.held, offered)
        assert 0 < tokens <= offered
        room = self.plan.room(self.seen, self.held, tokens, 16)
        order = self.plan.order(self.seen, self.held, tokens)
        assert room == (order.kept_tokens if order is not None and order.ends else 0)
        self.seen, self.held = self.seen + tokens, self.held + tokens
        if order is not None:
            assert order.held_tokens == self.held
            assert order.seen_tokens + order.steps_back == self.seen
            self.seen, self.held = order.seen_tokens, order.kept_tokens
            self.orders.append(order)
        return order


def order_of(**changed):
    same = {"choice": CHOICE, "query_tokens": 0, "ends": False, "noted_tokens": 10}
    return Order(**same | changed)


def test_a_document_of_ten_tokens_is_read_again_in_two_pieces():
    reading = Reading(plan_of())
    assert reading.step(7) is None
    assert reading.step(100) == order_of(
        seen_tokens=2, held_tokens=10, kept_tokens=10, steps_back=8, noted_tokens=0
    )
    assert reading.step(5) == order_of(
        query_tokens=5,
        seen_tokens=7,
        held_tokens=15,
        kept_tokens=15,
        ahead=LookaheadTokens(first_position=10, token_ids=(90, 91, 0, 1, 2)),
    )
    assert reading.step(100) == order_of(
        query_tokens=3,
        seen_tokens=4,
        held_tokens=18,
        kept_tokens=10,
        ahead=LookaheadTokens(first_position=15, token_ids=(3, 4, 5)),
        steps_back=6,
    )
    assert reading.step(100) == order_of(
        query_tokens=6,
        seen_tokens=10,
        held_tokens=16,
        kept_tokens=4,
        ahead=LookaheadTokens(first_position=10, token_ids=(90, 91, 6, 7, 8, 9)),
        ends=True,
    )
    assert (reading.seen, reading.held) == (10, 4)
    assert reading.step(100) is None  # the token behind the document


@example(tokens=10, instruction=2, chunk=6, steps=[10], lost=2)  # behind the first piece
@given(
    tokens=st.integers(1, 60),
    instruction=st.integers(0, 5),
    chunk=st.integers(1, 80),
    steps=st.lists(st.integers(1, 30), min_size=1),
    lost=st.integers(0, 40),
)
def test_every_piece_is_read_behind_the_text_however_steps_are_cut(
    tokens, instruction, chunk, steps, lost
):
    """Also where the request has lost its blocks in between and begins again."""
    if tokens < 2 * instruction:
        return
    chunk = piece_tokens(tokens, instruction, chunk, room=1000)
    plan = plan_of(tokens, [99] * instruction, chunk, kept=1)
    reading, number = Reading(plan), 0
    while not (reading.orders and reading.orders[-1].ends):
        if number == lost:
            reading = Reading(plan)
        reading.step(steps[number % len(steps)])
        assert 0 <= reading.seen <= tokens
        assert reading.held <= plan.most_held(tokens + 1)
        number += 1
    read = [order.ahead for order in reading.orders if order.ahead]
    again = [token for ahead in read for token in ahead.token_ids]
    pieces = [list(range(at, min(at + chunk, tokens))) for at in range(0, tokens, chunk)]
    assert again == [token for piece in pieces for token in [99] * instruction + piece]
    assert all(ahead.first_position >= tokens for ahead in read)
    assert (reading.seen, reading.held) == (tokens, 1)


def test_a_step_of_a_piece_is_short():
    plan = plan_of(tokens=5000, chunk=2048)
    assert plan.step_tokens(0, 0, 4096) == 4096
    assert plan.step_tokens(2950, 5000, 4096) == STEP_TOKENS


def test_prefixes_are_shared_up_to_the_documents_end_and_one_token_is_left_to_read():
    plan = plan_of()
    assert (plan.shared_tokens, plan.reusable_tokens, plan.spare_tokens(16)) == (10, 9, 0)


def test_pieces_are_as_long_as_the_text_and_the_positions_allow():
    assert piece_tokens(100, 10, 2048, room=1000) == 90
    assert piece_tokens(100, 10, 30, room=1000) == 30
    assert piece_tokens(100, 10, 2048, room=25) == 15
    with pytest.raises(InvalidArgumentError, match=r"at least 20 tokens, .*got 19"):
        piece_tokens(19, 10, 2048, room=1000)
    with pytest.raises(InvalidArgumentError, match="got 100 tokens with 19 positions after"):
        piece_tokens(100, 10, 2048, room=19)
    with pytest.raises(InvalidArgumentError, match="with 0 positions after them"):
        piece_tokens(100, 0, 2048, room=-7)
