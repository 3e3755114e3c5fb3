"""Sealed safetensors files: whole or not there, and refused if a single byte has changed."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from safetensors import SafetensorError, safe_open

from snapkv.cache.saving.writing import is_stream, replacing
from snapkv.errors import CacheFileError, OutputError

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = "snapkv cache "
_VERSION = 3
_OWN = re.compile(rb'"format":"snapkv cache ')
_UNSEALED = "0" * 64
_SEAL = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_MOST_HEADER_BYTES = 100_000_000  # what safetensors itself allows
_BLOCK_BYTES = 1 << 22


class SealedFile(NamedTuple):
    """What a sealed file holds, on the host.

    The seal in its header is the SHA-256 of all its bytes, with zeros in the digest's own place.
    """

    tensors: "dict[str, Tensor]"
    notes: dict[str, Any]


def write_sealed(
    path: Path, tensors: "Mapping[str, Tensor]", notes: dict[str, Any], *, sweep: bool = True
) -> None:
    """Write tensors and JSON to a file, which appears under its name when it is complete.

    A saved cache that is there is replaced at the end, any other file is not. What earlier saves of
    this file have left because they were killed is removed, unless `sweep` is off.

    Raises:
        CacheFileError: the file cannot be written, or is there and no saved cache; what stood under
            its name still does.
    """
    if path.is_dir() or is_stream(path) or not _is_free_or_saved(path):
        raise CacheFileError(
            f"path: expected a new file or a cache that was saved before, got {str(path)!r}, which "
            "is neither and stays as it is; choose another name"
        )
    from safetensors.torch import save_file  # imports torch, which whoever lists files does without

    metadata = {"format": f"{_FORMAT}{_VERSION}", "notes": json.dumps(notes), "sha256": _UNSEALED}
    whole = {name: _alone(tensor) for name, tensor in tensors.items()}
    try:
        with replacing(path, sweep=sweep) as partial:
            save_file(whole, partial, metadata)
            _seal(partial)
    except (OutputError, SafetensorError) as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise CacheFileError(
            f"path: expected to write a cache to {str(path)!r}, got: {reason}; choose another place"
        ) from error


def _is_free_or_saved(path: Path) -> bool:
    """Whether no bytes stand there, or those of a saved cache, by its header."""
    try:
        with path.open("rb") as file:
            header = _header(file)
            return not os.fstat(file.fileno()).st_size or bool(header and _OWN.search(header))
    except OSError:
        return not os.path.lexists(path)


def _header(file: BinaryIO) -> bytes | None:
    """The JSON in front of a safetensors file; None where its length is none."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    fits = size <= min(_MOST_HEADER_BYTES, os.fstat(file.fileno()).st_size)
    return file.read(size) if fits else None


def read_sealed(path: Path) -> SealedFile:
    """What `write_sealed` has written.

    Raises:
        CacheFileError: no such file, not such a file, one of another version, or one that has
            changed since.
    """
    if is_stream(path):  # opening a pipe would wait for its other end
        raise _damaged(path, "it is no regular file")
    try:
        with path.open("rb") as file:
            _require_seal(file, path)
            checked = _identity(os.fstat(file.fileno()))
            with safe_open(path, framework="pt") as content:
                metadata = content.metadata()
                notes: dict[str, Any] = json.loads(metadata["notes"])
                tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - no mapping
            if _identity(path.stat()) != checked:
                raise _damaged(path, "it was replaced while it was read")
    except FileNotFoundError as error:
        raise _missing(path) from error
    except (OSError, SafetensorError, RecursionError, TypeError, ValueError, KeyError) as error:
        if isinstance(error, CacheFileError):
            raise
        raise _damaged(path, str(error)) from error
    if metadata.get("format") != f"{_FORMAT}{_VERSION}":
        raise CacheFileError(
            f"path: expected a file of the format {f'{_FORMAT}{_VERSION}'!r}, got "
            f"{metadata.get('format')!r} of another version at {str(path)!r}; read its text again"
        )
    return SealedFile(tensors, notes)


def seal_of(path: Path, *, checked: bool = True) -> str:
    """The digest in the header of a file that `write_sealed` has written.

    Raises:
        CacheFileError: no such file, not such a file or, where all of it is to be `checked`, one of
            which a byte has changed since.
    """
    try:
        with path.open("rb") as file:
            return _require_seal(file, path) if checked else _find_seal(file, path)[0]
    except FileNotFoundError as error:
        raise _missing(path) from error
    except OSError as error:
        raise _damaged(path, str(error)) from error


def _missing(path: Path) -> CacheFileError:
    return CacheFileError(
        f"path: expected a cache that was saved before, got no file at {str(path)!r}; save one "
        "with cache.save(path)"
    )


def _alone(tensor: "Tensor") -> "Tensor":
    """On the host, in memory of its own: safetensors writes no views."""
    here = tensor.detach().cpu().contiguous()
    shared = here.data_ptr() == tensor.data_ptr() or here.untyped_storage().nbytes() != here.nbytes
    return here.clone() if shared else here


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _seal(path: Path) -> None:
    """Put the digest of the file into its place, and the file onto the disk."""
    with path.open("r+b") as file:
        _, start = _find_seal(file, path)
        digest = _digest(file, start)
        file.seek(start)
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())


def _require_seal(file: BinaryIO, path: Path) -> str:
    """The seal of a file; one whose bytes are not those that were sealed is refused."""
    sealed, start = _find_seal(file, path)
    if _digest(file, start) != sealed:
        raise _damaged(path, "its bytes are not those that were saved")
    return sealed


def _find_seal(file: BinaryIO, path: Path) -> tuple[str, int]:
    """The digest in the file's header, and where it begins."""
    found = list(_SEAL.finditer(_header(file) or b""))
    if len(found) != 1:
        raise _damaged(path, "its header is not one of a saved cache")
    return found[0].group(1).decode(), 8 + found[0].start(1)


def _digest(file: BinaryIO, start: int) -> str:
    """SHA-256 of the file, read with zeros from `start` in the place of the digest."""
    digest = hashlib.sha256()
    file.seek(0)
    digest.update(file.read(start))
    file.seek(len(_UNSEALED), os.SEEK_CUR)
    digest.update(_UNSEALED.encode())
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> CacheFileError:
    return CacheFileError(
        f"path: expected a cache that cache.save has written, whole and unchanged, got "
        f"{str(path)!r}: {why}; save it again"
    )
