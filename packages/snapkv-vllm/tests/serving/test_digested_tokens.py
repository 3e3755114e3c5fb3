"""Common tokens of a request and a history, found by digests and by plain comparison."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from snapkv.policies.spans import Spans
from snapkv_vllm.admission.spans import RequestSpans
from snapkv_vllm.histories import BLOCK, CompressedPrefix, DigestedTokens, History


def common_by_a_loop(one, other):
    for number, (mine, its) in enumerate(zip(one, other, strict=False)):
        if mine != its:
            return number
    return min(len(one), len(other))


LENGTHS = st.one_of(st.integers(0, 5), st.integers(BLOCK - 2, 3 * BLOCK + 2))


@given(length=LENGTHS, other_length=LENGTHS, differs_at=st.none() | LENGTHS, cut=LENGTHS)
def test_common_tokens_match_a_plain_comparison(length, other_length, differs_at, cut):
    """Texts of any length are equal, differ at one place, or differ from there to the end."""
    one, other = list(range(length)), list(range(other_length))
    if differs_at is not None and differs_at < other_length:
        other[differs_at] = -1
    digested, others = DigestedTokens.from_ids(one), DigestedTokens.from_ids(other)
    expected = common_by_a_loop(one, other)
    assert digested.count_common_tokens(others) == others.count_common_tokens(digested) == expected
    assert digested.has_same_prefix(others, expected)
    assert not others.has_same_prefix(digested, expected + 1) or one == other
    shortened = digested.truncate(cut)
    assert len(shortened) == min(cut, length)
    assert shortened.count_common_tokens(others) == common_by_a_loop(one[:cut], other)


def test_comparison_reads_few_digests_and_one_block():
    """Earlier tokens are compared by their digest, however long the texts are."""
    looked_at = []

    class Noting(list):
        def __getitem__(self, number):
            looked_at.append(number)
            return super().__getitem__(number)

    ids = np.arange(1000 * BLOCK)
    one, other = DigestedTokens.from_ids(ids), DigestedTokens.from_ids(ids)
    noting = DigestedTokens(one.ids, Noting(one.digests))
    assert noting.count_common_tokens(other) == len(ids)
    assert len(looked_at) <= 10


def test_equal_digests_of_different_tokens_are_detected():
    one, other = DigestedTokens.from_ids(range(BLOCK)), DigestedTokens.from_ids(range(1, BLOCK + 1))
    forged = DigestedTokens(other.ids, one.digests)
    assert one.count_common_tokens(forged) == BLOCK
    assert not one.has_same_prefix(forged, BLOCK)


def test_request_takes_full_blocks_or_continues_alone_in_the_last_one():
    """30 of the first 100 tokens are stored in blocks of 16; 16 stored and 70 dropped are 86."""
    compressed = CompressedPrefix(tokens=100, kept_tokens=30)
    tokens = DigestedTokens.from_ids(range(120))
    idle = History(owner=("s", "", ""), prompt=b"", tokens=tokens, compressed=compressed)
    assert [idle.usable_tokens(same, 16) for same in (99, 100, 105, 120)] == [0, 100, 102, 118]
    used = replace(idle, requests={"other"})
    assert [used.usable_tokens(same, 16) for same in (99, 100, 105, 120)] == [0, 0, 102, 118]


def test_history_serves_no_request_that_needs_its_dropped_tokens():
    start, tail, nothing = Spans(((0, 4),)), Spans(((60, 80),)), Spans(())
    plain = CompressedPrefix(tokens=100, kept_tokens=30)
    protecting = replace(plain, protected=start)
    dropping = replace(plain, drop=tail)
    assert plain.remaining_edits(RequestSpans(), start) is None
    assert protecting.remaining_edits(RequestSpans(), start) == RequestSpans()
    assert dropping.remaining_edits(RequestSpans(), nothing) is None
    assert dropping.remaining_edits(RequestSpans(drop=tail), nothing) == RequestSpans()
