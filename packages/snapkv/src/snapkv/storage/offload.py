"""Offloaded tokens: all that a layer has seen, off the device, to come back when a turn votes."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from snapkv.storage.base import RowChange
from snapkv.storage.offload_pool import OffloadPool, Room
from snapkv.storage.ragged import RaggedStates


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Keys and values of neighbouring tokens.

    Attributes:
        keys: (R, Hkv, N, D), as attention sees them.
        values: (R, Hkv, N, Dv).
        start: column of the first token.
        end: column behind the last one that counts.
        rows: (B,) int64, which of the R rows each row of the batch has; several may share one.
        shift: (B,) int64, by how many columns each row's tokens stand further to the right.
        room: what keeps the memory.
    """

    keys: Tensor
    values: Tensor
    start: int
    end: int
    rows: Tensor
    shift: Tensor
    room: Room

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values."""
        return int(self.keys.nbytes + self.values.nbytes)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """For each row of the batch its own row, the column it begins at, and how many tokens."""
        for row, shift in zip(self.rows.tolist(), self.shift.tolist(), strict=True):
            begin = self.start + shift
            yield row, begin, max(0, min(self.keys.shape[2], self.end - begin))


class OffloadedTokens:
    """The first tokens that a layer has seen, in pieces, as they were put off the device.

    On a GPU copies run in a stream of their own, beside the next layer's work.

    Args:
        pool: where there is room for them.

    Attributes:
        is_due: whether they are to come back with the next tokens, which vote on all that was seen.
    """

    def __init__(self, pool: OffloadPool) -> None:
        self.pool = pool
        self.pieces: list[Piece] = []
        self.is_due = False

    @property
    def tokens(self) -> int:
        """How many of the first tokens are here."""
        return self.pieces[-1].end if self.pieces else 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(piece.held_bytes for piece in self.pieces)

    def append(self, keys: Tensor, values: Tensor, *, on: torch.device | None = None) -> None:
        """Copy the tokens that come next: (B, Hkv, N, D) and (B, Hkv, N, Dv).

        Args:
            keys: of the tokens.
            values: of the tokens.
            on: where they will be recalled to; None for the device of the keys.

        Raises:
            OutOfMemoryError: there is no room.
        """
        if not keys.shape[2]:
            return
        states = (keys.detach(), values.detach())
        room = self.pool.room_for(*states, device=on or keys.device)
        with _copying(keys.device):
            for target, source in zip(room.tensors, states, strict=True):
                if source.is_cuda:
                    source.record_stream(torch.cuda.current_stream(source.device))
                target.copy_(source, non_blocking=True)
        self.add(room)

    def add(self, room: Room) -> None:
        """Take keys and values that are in their place already, a row of them for each row."""
        keys, values = room.tensors
        batch = keys.shape[0]
        piece = Piece(
            keys=keys,
            values=values,
            start=self.tokens,
            end=self.tokens + keys.shape[2],
            rows=torch.arange(batch),
            shift=torch.zeros(batch, dtype=torch.int64),
            room=room,
        )
        self.pieces.append(piece)

    def with_tail(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All offloaded tokens and behind them (B, Hkv, N, D) ones, on the device of those."""
        if not self.pieces:
            return keys.clone(), values.clone()
        with _copying(keys.device) as stream:
            whole = [self._whole(keys, "keys"), self._whole(values, "values")]
        if stream is not None:
            torch.cuda.current_stream(keys.device).wait_stream(stream)
            for states in whole:
                states.record_stream(torch.cuda.current_stream(keys.device))
        return whole[0], whole[1]

    def on_host(self) -> tuple[Tensor, Tensor]:
        """All offloaded tokens, (B, Hkv, N, D) and (B, Hkv, N, Dv), a copy in the host's memory."""
        wait_for_copies()
        rows = len(self.pieces[0].rows)
        tails = (
            states.new_empty(rows, states.shape[1], 0, states.shape[3], device="cpu")
            for states in (self.pieces[0].keys, self.pieces[0].values)
        )
        return self.with_tail(*tails)

    def _whole(self, tail: Tensor, name: str) -> Tensor:
        B, H, N, D = tail.shape
        whole = torch.empty(B, H, self.tokens + N, D, dtype=tail.dtype, device=tail.device)
        for piece in self.pieces:
            states = getattr(piece, name)
            for row, (own, begin, count) in enumerate(piece.spans()):
                for head in range(H):  # both sides contiguous: no second copy on the device
                    part = whole[row, head, begin : begin + count]
                    part.copy_(states[own, head, :count], non_blocking=True)
        for row, pads in enumerate(self.pieces[0].shift.tolist()):
            whole[row, :, :pads] = 0.0
        whole[:, :, self.tokens :] = tail
        return whole

    def fetch(self, columns: Tensor) -> RaggedStates:
        """Copies of some offloaded tokens, on the device of the columns, which is waited for.

        Args:
            columns: (B, H, K) int64, those of each head; -1 is none. H is Hkv or a multiple of it.
        """
        wait_for_copies()
        wanted = columns.cpu()
        there = wanted >= 0
        counts = tuple(tuple(row) for row in there.sum(dim=-1).tolist())
        rows, heads, _ = there.nonzero().unbind(dim=1)
        wanted, first = wanted[there], self.pieces[0]
        heads = heads // (columns.shape[1] // first.keys.shape[1])
        keys = first.keys.new_empty(len(wanted), first.keys.shape[-1])
        values = first.values.new_empty(len(wanted), first.values.shape[-1])
        for piece in self.pieces:
            begin = piece.start + piece.shift[rows]
            here = (wanted >= begin) & (wanted < (begin + piece.keys.shape[2]).clamp(max=piece.end))
            where = piece.rows[rows[here]], heads[here], (wanted - begin)[here]
            keys[here], values[here] = piece.keys[where], piece.values[where]
        device = columns.device
        return RaggedStates(keys=keys.to(device), values=values.to(device), head_tokens=counts)

    def crop(self, tokens: int) -> None:
        """Keep no more than that many of the first tokens."""
        self.pieces = [
            replace(piece, end=min(piece.end, tokens))
            for piece in self.pieces
            if piece.start < tokens
        ]

    def clear(self) -> None:
        """Forget everything."""
        self.pieces, self.is_due = [], False

    def map_rows(self, change: RowChange) -> None:
        """Put rows in another order; nothing is copied."""
        self.pieces = [
            replace(piece, rows=change(piece.rows), shift=change(piece.shift))
            for piece in self.pieces
        ]

    def shift(self, columns: Tensor, tokens: int) -> None:
        """Move each row's tokens to the right, behind pads, and end all rows at the same column.

        Args:
            columns: (B,) int64, by how much.
            tokens: how many columns are here from now on, the pads counted.
        """
        self.pieces = [replace(piece, shift=columns, end=tokens) for piece in self.pieces]

    def __copy__(self) -> "OffloadedTokens":
        """Another list of the same pieces, which never change."""
        copied = OffloadedTokens(self.pool)
        copied.pieces, copied.is_due = list(self.pieces), self.is_due
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadedTokens":
        return copy.copy(self)


@contextlib.contextmanager
def _copying(device: torch.device) -> Iterator[Any]:
    """Within this block copies run in the device's own stream for them, if it has streams."""
    if device.type != "cuda":
        yield None
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    """The stream for copies of a device, made once."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's own
    return _streams[device]


def wait_for_copies() -> None:
    """Wait until what was put off any device can be read on the host."""
    for stream in _streams.values():
        stream.synchronize()
