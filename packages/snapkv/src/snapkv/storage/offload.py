"""Offloading: all tokens of a layer in host memory or mapped files, to be restored for a vote."""

import contextlib
import copy
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import InvalidTypeError, OutOfMemoryError, wrong
from snapkv.storage.base import TokenStore
from snapkv.validation import format_bytes, require_int

Recall = str | Path
"""Where evicted tokens are offloaded to: "host", or a folder."""

_NO_FOLDERS = "host", "cpu", "ram", "gpu", "cuda", "disk", "none"
"""Words that must not name a folder, because other libraries use them for a kind of memory."""


class OffloadPool:
    """Memory for offloaded tokens, with a limit that all layers of a cache share.

    Args:
        limit_bytes: how many bytes may be taken at most; None for no limit.
        folder: where memory is mapped from files, which have no name and leave no trace; None for
            host memory.

    Raises:
        InvalidArgumentError: the folder cannot be made or written to.
    """

    def __init__(self, limit_bytes: int | None = None, folder: Path | None = None) -> None:
        self.limit_bytes, self.folder, self.taken_bytes = limit_bytes, folder, 0
        self._lock = threading.Lock()
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
            reason = getattr(error, "strerror", error)
            problem = f"files cannot be written to the folder {str(folder)!r} ({reason})"
            raise wrong("recall", problem, "Use 'host' or a different folder") from error

    @property
    def where(self) -> str:
        """The name of the place, as a user would write it: "host" or the path of the folder."""
        return "host" if self.folder is None else str(self.folder)

    def allocate(
        self, *states: Tensor, device: torch.device, is_limited: bool = True
    ) -> "PooledTensors":
        """Allocate memory for a copy of each tensor.

        Nothing is copied. The bytes count towards the limit until the result is collected.

        Args:
            states: (B, H, N, D) tensors to copy.
            device: where they will be restored to; pinned memory is used for CUDA.
            is_limited: False if the copy replaces a larger one, which is then not checked against
                the limit.

        Returns:
            Tensors in the shapes and dtypes of `states`, with arbitrary content.

        Raises:
            OutOfMemoryError: the limit would be exceeded, or the system has no memory left.
        """
        wanted = sum(part.nbytes for part in states)
        with self._lock:
            if is_limited:
                self.require_within_limit(wanted)
            self.taken_bytes += wanted
        pinned = device.type == "cuda"  # so that copies need not wait
        try:
            if self.folder is not None:
                made = [_mapped(self.folder, part) for part in states]
            else:
                made = [
                    torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned) for part in states
                ]
            return PooledTensors(self, made, wanted)
        except BaseException:
            self.give_back(wanted)
            raise

    def require_within_limit(self, wanted: int) -> None:
        """Raise if `wanted` more bytes would exceed the limit.

        Raises:
            OutOfMemoryError: the limit would be exceeded.
        """
        if self.limit_bytes is not None and self.taken_bytes + wanted > self.limit_bytes:
            taken, limit = format_bytes(self.taken_bytes), format_bytes(self.limit_bytes)
            problem = f"{taken} are offloaded, and {format_bytes(wanted)} more would exceed {limit}"
            remedy = "Increase recall_bytes, or use a shorter text"
            raise wrong("recall_bytes", problem, remedy, OutOfMemoryError)

    def give_back(self, freed_bytes: int) -> None:
        """Count `freed_bytes` bytes as free again."""
        with self._lock:
            self.taken_bytes -= freed_bytes

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadPool":
        """Return the pool itself, because copies of a cache share the limit."""
        return self


def _mapped(folder: Path, states: Tensor) -> Tensor:
    """Allocate memory for a tensor in a temporary file.

    The whole size is reserved first, because writing to a mapped file on a full disk kills the
    process. The file has no name, so it disappears with the tensor.

    Returns:
        A tensor in the shape and dtype of `states`, with arbitrary content.

    Raises:
        OutOfMemoryError: the disk is full, or the file cannot be made.
    """
    if not states.nbytes:
        return torch.empty(states.shape, dtype=states.dtype)
    try:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="snapkv-")
        try:
            if hasattr(os, "posix_fallocate"):  # where the system can promise it
                os.posix_fallocate(descriptor, 0, states.nbytes)
            else:
                os.ftruncate(descriptor, states.nbytes)
            memory = torch.from_file(name, shared=True, size=states.nbytes, dtype=torch.uint8)
        finally:
            os.close(descriptor)
            os.unlink(name)
    except OSError as error:
        more, reason = format_bytes(states.nbytes), error.strerror
        problem = f"another {more} cannot be written to the folder {str(folder)!r} ({reason})"
        remedy = "Choose a different folder, or set recall_bytes to limit the size"
        raise wrong("recall", problem, remedy, OutOfMemoryError) from error
    return memory.view(states.dtype).view(states.shape)


class PooledTensors:
    """Tensors in a pool, which frees their memory when this object is collected."""

    def __init__(self, pool: OffloadPool, tensors: list[Tensor], taken_bytes: int) -> None:
        self.tensors = tensors
        weakref.finalize(self, pool.give_back, taken_bytes)


def pool_for(recall: Any, limit_bytes: int | None) -> OffloadPool:
    """Create the pool that the user has asked for.

    A folder that does not exist is made.

    Args:
        recall: "host", or a folder.
        limit_bytes: the most bytes to offload, or None.

    Raises:
        InvalidTypeError: `recall` is neither text nor a path, or is empty; or the limit is no
            integer.
        InvalidArgumentError: `recall` is another word for a place, the folder cannot be written to,
            or the limit is below 1.
    """
    if limit_bytes is not None:
        limit_bytes = require_int("recall_bytes", limit_bytes, minimum=1)
    if recall == "host":
        return OffloadPool(limit_bytes)
    if not isinstance(recall, str | Path) or not str(recall):
        problem = f"expected 'host' or the path of a folder, but got {recall!r}"
        raise wrong("recall", problem, "Remove it to drop evicted tokens", InvalidTypeError)
    if isinstance(recall, str) and recall.lower() in _NO_FOLDERS:
        problem = f"expected 'host' or the path of a folder, but got {recall!r}"
        raise wrong("recall", problem, f"Use 'host', or use './{recall}' for a folder")
    return OffloadPool(limit_bytes, Path(recall))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The keys and values of consecutive tokens that have been offloaded together.

    A piece never changes.

    Attributes:
        stored: keys and values, (R, Hkv, N, D) and (R, Hkv, N, Dv), as attention sees them.
        start: column of the first token.
        end: column after the last token that counts.
        rows: (B,) int64, which of the R rows each row of the batch has; several may share one.
        shift: (B,) int64, by how many columns each row's tokens are further to the right.
    """

    stored: PooledTensors
    start: int
    end: int
    rows: Tensor
    shift: Tensor

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield the location of the tokens of each row of the batch.

        Yields:
            For each row the index of the stored row, the column of its first token, and how many of
            its tokens count.
        """
        for row, shift in zip(self.rows.tolist(), self.shift.tolist(), strict=True):
            begin = self.start + shift
            yield row, begin, max(0, min(self.stored.tensors[0].shape[2], self.end - begin))


class OffloadedTokens:
    """The tokens that a layer has offloaded, stored as a list of pieces.

    These are the first tokens that the layer has seen. On a GPU, copies run in their own stream,
    parallel to the work of the next layer. Without a pool nothing is offloaded, and evicted tokens
    are lost.

    Attributes:
        pool: the pool that holds them; None for a layer without recall.
        is_due: whether they must be restored before the layer reads the next tokens, which vote on
            all tokens that it has seen.
    """

    def __init__(self, pool: OffloadPool | None = None) -> None:
        self.pool = pool
        self.pieces: list[Piece] = []
        self.is_due = False

    @property
    def is_enabled(self) -> bool:
        """Whether the layer offloads tokens before it evicts them."""
        return self.pool is not None

    @property
    def tokens(self) -> int:
        """The number of tokens that are offloaded."""
        return self.pieces[-1].end if self.pieces else 0

    @property
    def held_bytes(self) -> int:
        """The number of bytes of all pieces, including tokens that no longer count."""
        return sum(states.nbytes for piece in self.pieces for states in piece.stored.tensors)

    def append_up_to(self, tokens: int, whole: TokenStore) -> None:
        """Offload those of the first `tokens` tokens that are not offloaded yet.

        Does nothing without a pool.

        Args:
            tokens: how many of the first tokens are offloaded afterwards, at least.
            whole: a dense store of every token that the layer has seen; not read if no token is
                missing.

        Raises:
            OutOfMemoryError: the pool or the system has no memory left.
        """
        done = self.tokens if self.pool is not None else tokens
        if done < tokens:
            self.append(whole.keys[:, :, done:tokens], whole.values[:, :, done:tokens])

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        *,
        on: torch.device | None = None,
        is_limited: bool = True,
    ) -> None:
        """Copy the next tokens to the pool, after those that are already there.

        Does nothing without a pool.

        Args:
            keys: (B, Hkv, N, D).
            values: (B, Hkv, N, Dv).
            on: the device they will be restored to; None for the device of `keys`.
            is_limited: as in `OffloadPool.allocate`.

        Raises:
            OutOfMemoryError: the pool or the system has no memory left.
        """
        tokens, batch = keys.shape[2], keys.shape[0]
        if not tokens or self.pool is None:
            return
        states = (keys.detach(), values.detach())
        device = on or keys.device
        stored = self.pool.allocate(*states, device=device, is_limited=is_limited)
        with _copying(keys.device):
            for target, source in zip(stored.tensors, states, strict=True):
                if source.is_cuda:
                    source.record_stream(torch.cuda.current_stream(source.device))
                target.copy_(source, non_blocking=True)
        rows, none = torch.arange(batch), torch.zeros(batch, dtype=torch.int64)
        start, end = self.tokens, self.tokens + tokens
        self.pieces.append(Piece(stored=stored, start=start, end=end, rows=rows, shift=none))

    def select_where(self, stays: Tensor) -> None:
        """Keep only the offloaded tokens that are marked in a mask.

        The memory of the others is freed unless a copy of the cache holds them.

        Args:
            stays: (B, tokens) bool, True for the tokens to keep, on the device to which they will
                be restored. A row that keeps fewer tokens than another one is padded on the left.

        Raises:
            OutOfMemoryError: the system has no memory left for the copy.
        """
        slots = ops.kept_indices(stays.cpu()[:, None])
        keys, values = (ops.gather_tokens(states, slots) for states in self.on_host())
        left = OffloadedTokens(self.pool)
        left.append(keys, values, on=stays.device, is_limited=False)
        self.pieces = left.pieces

    def with_tail(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Restore all offloaded tokens, and append the given tokens to them.

        Args:
            keys: (B, Hkv, N, D).
            values: (B, Hkv, N, Dv).

        Returns:
            New (B, Hkv, `self.tokens` + N, D) keys and (B, Hkv, `self.tokens` + N, Dv) values on
            the device of `keys`, the offloaded tokens first. The offloaded tokens stay in the pool.
        """
        if not self.pieces:
            return keys.clone(), values.clone()
        with _copying(keys.device) as stream:
            whole = self._whole(keys, 0), self._whole(values, 1)
        if stream is not None:
            torch.cuda.current_stream(keys.device).wait_stream(stream)
            for states in whole:
                states.record_stream(torch.cuda.current_stream(keys.device))
        return whole

    def on_host(self) -> tuple[Tensor, Tensor]:
        """Return a copy of all offloaded tokens in host memory.

        Waits until all copies have ended. There must be at least one offloaded token.

        Returns:
            (B, Hkv, N, D) keys and (B, Hkv, N, Dv) values.
        """
        wait_for_copies()
        first = self.pieces[0]
        keys, values = (states[first.rows, :, :0] for states in first.stored.tensors)
        return self.with_tail(keys, values)

    def _whole(self, tail: Tensor, plane: int) -> Tensor:
        """Restore the offloaded keys or values, and append those of the tail.

        Args:
            tail: (B, Hkv, N, D).
            plane: 0 for keys, 1 for values.

        Returns:
            (B, Hkv, `self.tokens` + N, D), with zeros in padding.
        """
        B, H, N, D = tail.shape
        whole = torch.empty(B, H, self.tokens + N, D, dtype=tail.dtype, device=tail.device)
        for piece in self.pieces:
            states = piece.stored.tensors[plane]
            for row, (own, begin, count) in enumerate(piece.spans()):
                for head in range(H):  # both sides contiguous: no second copy on the device
                    part = whole[row, head, begin : begin + count]
                    part.copy_(states[own, head, :count], non_blocking=True)
        for row, pads in enumerate(self.pieces[0].shift.tolist()):
            whole[row, :, :pads] = 0.0
        whole[:, :, self.tokens :] = tail
        return whole

    def truncate(self, tokens: int) -> None:
        """Keep only the first `tokens` tokens."""
        self.pieces = [
            replace(piece, end=min(piece.end, tokens))
            for piece in self.pieces
            if piece.start < tokens
        ]

    def clear(self) -> None:
        """Forget all offloaded tokens."""
        self.pieces, self.is_due = [], False

    def select_rows(self, rows: Tensor) -> None:
        """Select rows of the batch in a new order, without copying any tokens.

        Args:
            rows: (new B,) integers, the old row for every new one.
        """
        rows = rows.cpu()
        self.pieces = [
            replace(piece, rows=piece.rows[rows], shift=piece.shift[rows]) for piece in self.pieces
        ]

    def shift(self, columns: Tensor, tokens: int) -> None:
        """Move the tokens of each row to the right, so that padding fits before them.

        Nothing is copied. The new shift replaces an earlier one.

        Args:
            columns: (B,) int64, by how many columns.
            tokens: the column after the last token of every row.
        """
        self.pieces = [replace(piece, shift=columns, end=tokens) for piece in self.pieces]

    def __copy__(self) -> "OffloadedTokens":
        """Return a new list of the same pieces, which never change."""
        copied = OffloadedTokens(self.pool)
        copied.pieces, copied.is_due = list(self.pieces), self.is_due
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadedTokens":
        return copy.copy(self)


_streams: dict[torch.device, Any] = {}
"""The stream for copies from and to each device."""


@contextlib.contextmanager
def _copying(device: torch.device) -> Iterator[Any]:
    """Run the copies within this block in a stream of their own, if the device has streams."""
    if device.type != "cuda":
        yield None
        return
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's own
    stream = _streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


def wait_for_copies() -> None:
    """Wait until all offloaded tokens have arrived in host memory."""
    for stream in _streams.values():
        stream.synchronize()
