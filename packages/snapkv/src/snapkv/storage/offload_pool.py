"""Where evicted keys and values are offloaded to: host memory, or files on disk mapped into it."""

import os
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError, InvalidTypeError, OutOfMemoryError
from snapkv.validation import format_bytes, require_int


class OffloadPool:
    """Room off the device, within a limit that all layers of a cache share.

    Args:
        limit_bytes: how many bytes may be taken at most; None for no limit.

    Attributes:
        where: as a user names it.
    """

    where = "host"

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self._lock = threading.Lock()

    def room_for(self, *states: Tensor, device: torch.device) -> "Room":
        """Room for a copy of each of these (B, H, N, D) states, to be recalled to that device.

        Raises:
            OutOfMemoryError: the limit is reached, or the system has no room.
        """
        wanted = sum(part.numel() * part.element_size() for part in states)
        with self._lock:
            if self.limit_bytes is not None and self.taken_bytes + wanted > self.limit_bytes:
                raise OutOfMemoryError(
                    f"recall_bytes: expected room for {format_bytes(wanted)} more beside the "
                    f"{format_bytes(self.taken_bytes)} that are off the device already, got a "
                    f"limit of {format_bytes(self.limit_bytes)}; raise recall_bytes, or shorten "
                    "the text"
                )
            self.taken_bytes += wanted
        try:
            return Room(self, [self._make(part, device) for part in states], wanted)
        except BaseException:
            self.give_back(wanted)
            raise

    def give_back(self, freed_bytes: int) -> None:
        """Note that this much is not needed any more."""
        with self._lock:
            self.taken_bytes -= freed_bytes

    def _make(self, states: Tensor, device: torch.device) -> Tensor:
        """In memory; pinned where they are recalled to a GPU, so that copies need not wait."""
        pinned = device.type == "cuda"
        return torch.empty(states.shape, dtype=states.dtype, pin_memory=pinned)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OffloadPool":
        """Itself: copies of a cache share the limit."""
        return self


class Room:
    """Tensors in a pool, which gets their bytes back when nobody holds this any more.

    Attributes:
        tensors: contiguous, with anything in them.
    """

    def __init__(self, pool: OffloadPool, tensors: list[Tensor], taken_bytes: int) -> None:
        self.tensors = tensors
        weakref.finalize(self, pool.give_back, taken_bytes)


class MappedFolder(OffloadPool):
    """Room in files of a folder, mapped into memory; the files have no name and leave no trace.

    Args:
        folder: where there is room; made if it is not there.
        limit_bytes: as in `OffloadPool`.

    Raises:
        InvalidArgumentError: the folder cannot be made or written to.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        super().__init__(limit_bytes)
        self.folder, self.where = folder, str(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except (OSError, ValueError) as error:  # of a NUL byte in the name
            raise InvalidArgumentError(
                f"recall: expected 'host' or a folder that can be written to, got "
                f"{str(folder)!r}: {getattr(error, 'strerror', error)}; choose another folder"
            ) from error

    def _make(self, states: Tensor, device: torch.device) -> Tensor:
        """In a file of its own; all of it is reserved first, since a full disk kills who writes."""
        size = states.numel() * states.element_size()
        if not size:
            return torch.empty(states.shape, dtype=states.dtype)
        try:
            descriptor, name = tempfile.mkstemp(dir=self.folder, prefix="snapkv-")
            try:
                _reserve(descriptor, size)
                room = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
            finally:
                os.close(descriptor)
                os.unlink(name)
        except OSError as error:
            raise OutOfMemoryError(
                f"recall: expected room for {format_bytes(size)} more in {str(self.folder)!r}, "
                f"got: {error.strerror}; choose another folder, or set recall_bytes"
            ) from error
        return room.view(states.dtype).view(states.shape)


def pool_for(recall: Any, limit_bytes: int | None) -> OffloadPool:
    """The pool that a user names.

    Args:
        recall: "host", or a folder.
        limit_bytes: how many bytes it may take; None for no limit.

    Raises:
        InvalidArgumentError: a folder that cannot be written to, or a limit that is not positive.
        InvalidTypeError: neither "host" nor a path.
    """
    if limit_bytes is not None:
        require_int("recall_bytes", limit_bytes, minimum=1)
    if recall == "host":
        return OffloadPool(limit_bytes)
    if not isinstance(recall, str | Path) or not str(recall):
        raise InvalidTypeError(
            f"recall: expected 'host' or the path of a folder, got {recall!r}; leave it out to "
            "drop for good what is evicted"
        )
    return MappedFolder(Path(recall), limit_bytes)


def _reserve(descriptor: int, size: int) -> None:
    """Make a file that large, on the disk where the system can promise it."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)
