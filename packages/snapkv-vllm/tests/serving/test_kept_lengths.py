"""Lengths that attention reads for requests with dropped tokens, in worked examples."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv_vllm.kept_lengths import KeptLengths

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Metadata:
    """The part of vLLM's `CommonAttentionMetadata` that speaks of lengths."""

    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None
    max_seq_len: int
    _num_computed_tokens_cache: torch.Tensor | None = None

    def replace(self, **changes: Any) -> "Metadata":
        return replace(self, **changes)


def metadata(*lengths):
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    return Metadata(seq_lens, seq_lens.clone(), max(lengths), seq_lens - 1)


def held_by(requests, dropped, most=4):
    held = KeptLengths(most, CPU)
    held.begin_step(requests, dropped)
    return held


def test_lengths_are_reduced_only_for_the_request_that_dropped_tokens():
    """a generates its 71st token, b its 41st (30 are dropped, 11 held), and c reads 3 more."""
    held = held_by(["a", "b", "c"], {"b": 30, "gone": 7})
    positions = torch.tensor([70, 40, 5, 6, 7])
    starts = torch.tensor([0, 1, 2, 5], dtype=torch.int32)
    assert held.stored_positions(positions, starts).tolist() == [70, 10, 5, 6, 7]
    assert positions.tolist() == [70, 40, 5, 6, 7]  # rotations stay those of true positions
    told = held.convert(metadata(71, 41, 8))
    assert told.seq_lens.tolist() == [71, 11, 8]
    assert told.seq_lens_cpu_upper_bound.tolist() == [71, 11, 8]
    assert told.max_seq_len == 71
    told = held.convert(replace(metadata(71, 41, 8), seq_lens_cpu_upper_bound=None))
    assert (told.seq_lens_cpu_upper_bound, told.max_seq_len) == (None, 71)


def test_padded_rows_and_tokens_do_not_change_other_requests():
    """A graph has four rows, two of them requests; its tokens are padded, too."""
    held = held_by(["a", "b"], {"b": 30})
    assert held.convert(metadata(71, 41, 0, 0)).seq_lens.tolist() == [71, 11, 0, 0]
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    found = held.stored_positions(torch.tensor([70, 40, 0, 0]), starts)
    assert found[:2].tolist() == [70, 10]


def test_lengths_of_all_steps_are_in_the_same_buffer():
    """The replay of a CUDA graph reads the buffer that its capture read."""
    held = KeptLengths(4, CPU)
    captured = held.convert(metadata(1, 1, 1, 1)).seq_lens
    held.begin_step(["a", "b"], {"a": 60})
    told = held.convert(metadata(71, 41)).seq_lens
    assert told.data_ptr() == captured.data_ptr()
    assert captured.tolist() == [11, 41, 1, 1]


@settings(deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("most", [1, 5])
def test_every_new_token_gets_the_slot_after_the_stored_tokens(most, data):
    """In random batches, the slot of a request's last token is its stored length minus one."""
    names = [f"r{number}" for number in range(data.draw(st.integers(1, most)))]
    lengths = [data.draw(st.integers(1, 300)) for _ in names]
    steps = [data.draw(st.integers(1, length)) for length in lengths]
    dropped = {
        name: data.draw(st.integers(0, length - step))
        for name, length, step in zip(names, lengths, steps, strict=True)
        if data.draw(st.booleans())
    }
    held = held_by(names, dropped, most)
    ends = torch.tensor(lengths)
    pieces = [torch.arange(n - step, n) for n, step in zip(lengths, steps, strict=True)]
    positions = torch.cat(pieces)
    starts = torch.tensor([0, *torch.tensor(steps).cumsum(0)], dtype=torch.int32)
    found = held.stored_positions(positions, starts)
    if found is None:
        assert not dropped
        return
    told = held.convert(metadata(*lengths)).seq_lens
    assert (found[starts[1:] - 1] == told - 1).all()
    assert told.tolist() == (ends - torch.tensor([dropped.get(n, 0) for n in names])).tolist()
    for piece, at, name in zip(pieces, found.split(steps), names, strict=True):
        assert (at == piece - dropped.get(name, 0)).all()
