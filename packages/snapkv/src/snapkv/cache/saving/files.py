"""Sealed safetensors files, which are written completely or not at all.

Reading a file raises an error if a single byte of it has changed.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from safetensors import SafetensorError, safe_open

from snapkv.cache.saving.writing import is_stream, replacing
from snapkv.errors import CacheFileError, OutputError, SnapKVError, wrong

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = "snapkv cache "
_VERSION = 3
_FORMATS = re.compile(rb'"format":"snapkv cache ')
_UNSEALED = "0" * 64
_SEAL = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_MOST_HEADER_BYTES = 100_000_000  # what safetensors itself allows
_BLOCK_BYTES = 1 << 22


class SealedFile(NamedTuple):
    """The content of a sealed file, with its tensors on the CPU.

    The seal in the header of the file is the SHA-256 digest of all its bytes. To compute it, the
    bytes of the digest itself are set to zeros.

    Attributes:
        tensors: the tensors by name.
        notes: everything else, as JSON.
    """

    tensors: "dict[str, Tensor]"
    notes: dict[str, Any]


def write_sealed(
    path: Path, tensors: "Mapping[str, Tensor]", notes: dict[str, Any], *, sweep: bool = True
) -> None:
    """Write tensors and JSON to a sealed file, which appears under its name once it is complete.

    An existing file is replaced only if it is a saved cache or empty.

    Args:
        path: the name of the file.
        tensors: the tensors by name.
        notes: the JSON.
        sweep: whether to remove temporary files of this name that killed processes have left.

    Raises:
        CacheFileError: the file cannot be written, or another file has this name. An existing file
            is unchanged then.
    """
    if path.is_dir() or is_stream(path) or not _is_free_or_saved(path):
        raise wrong(
            "path",
            f"the file {str(path)!r} already exists and is not a saved cache, so it was not "
            "changed",
            "Choose a different file name",
            CacheFileError,
        )
    from safetensors.torch import save_file  # imports torch, which listing files does not need

    metadata = {"format": f"{_FORMAT}{_VERSION}", "notes": json.dumps(notes), "sha256": _UNSEALED}
    copies = {name: _without_views(tensor) for name, tensor in tensors.items()}
    try:
        with replacing(path, sweep=sweep) as partial:
            save_file(copies, partial, metadata)
            _seal(partial)
    except (OutputError, SafetensorError) as error:
        reason = getattr(error.__cause__, "strerror", None) or error
        raise wrong(
            "path",
            f"the cache could not be written to {str(path)!r}: {reason}",
            "Choose a different folder",
            CacheFileError,
        ) from error


def _is_free_or_saved(path: Path) -> bool:
    """Return whether `path` does not exist, is an empty file, or has the header of a saved cache.

    These are the files that may be replaced.
    """
    try:
        with path.open("rb") as file:
            header = _header(file)
            return not os.fstat(file.fileno()).st_size or bool(header and _FORMATS.search(header))
    except OSError:
        return not os.path.lexists(path)


def _header(file: BinaryIO) -> bytes | None:
    """Return the JSON at the beginning of a safetensors file, or None if it cannot be one."""
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    fits = size <= min(_MOST_HEADER_BYTES, os.fstat(file.fileno()).st_size)
    return file.read(size) if fits else None


def read_sealed(path: Path) -> SealedFile:
    """Read the tensors and the JSON of a sealed file, after comparing its bytes with its digest.

    Raises:
        CacheFileError: there is no such file, it is not a saved cache, it has another version, or
            it has changed since it was written.
    """
    if is_stream(path):  # opening a pipe would wait for its other end
        raise _damaged(path, "this is not a regular file")
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
        raise wrong(
            "path",
            f"expected a file with the format {f'{_FORMAT}{_VERSION}'!r}, but got "
            f"{metadata.get('format')!r}, which is a different version, in {str(path)!r}",
            "Read the text with the model again, and save the new cache",
            CacheFileError,
        )
    return SealedFile(tensors, notes)


def seal_of(path: Path, *, checked: bool = True) -> str:
    """Return the digest in the header of a file that `write_sealed` has written.

    Args:
        path: the file.
        checked: whether to read the whole file and compare its bytes with the digest.

    Raises:
        CacheFileError: there is no such file, it is not a saved cache, or it has changed since it
            was written. The last is only noticed if `checked` is true.
    """
    try:
        with path.open("rb") as file:
            return _require_seal(file, path) if checked else _find_seal(file, path)[0]
    except FileNotFoundError as error:
        raise _missing(path) from error
    except OSError as error:
        raise _damaged(path, str(error)) from error


def _missing(path: Path) -> SnapKVError:
    problem = f"expected a saved cache, but there is no file with the name {str(path)!r}"
    return wrong("path", problem, "Use cache.save(path) to save a cache", CacheFileError)


def _without_views(tensor: "Tensor") -> "Tensor":
    """Copy a tensor to memory of its own on the CPU, because safetensors writes no views."""
    here = tensor.detach().cpu().contiguous()
    shared = here.data_ptr() == tensor.data_ptr() or here.untyped_storage().nbytes() != here.nbytes
    return here.clone() if shared else here


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _seal(path: Path) -> None:
    """Write the digest of a file into its header, and flush the file to the disk."""
    with path.open("r+b") as file:
        _, start = _find_seal(file, path)
        digest = _digest(file, start)
        file.seek(start)
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())


def _require_seal(file: BinaryIO, path: Path) -> str:
    """Return the seal of a file after checking it against the bytes of the file.

    Raises:
        CacheFileError: the file has no seal, or its bytes have changed.
    """
    sealed, start = _find_seal(file, path)
    if _digest(file, start) != sealed:
        raise _damaged(path, "its bytes are not those that were saved")
    return sealed


def _find_seal(file: BinaryIO, path: Path) -> tuple[str, int]:
    """Return the digest in the header of a file, and the offset at which it begins.

    Raises:
        CacheFileError: the header has no digest.
    """
    seals = list(_SEAL.finditer(_header(file) or b""))
    if len(seals) != 1:
        raise _damaged(path, "its header is not one of a saved cache")
    return seals[0].group(1).decode(), 8 + seals[0].start(1)


def _digest(file: BinaryIO, start: int) -> str:
    """Compute the SHA-256 of a file, with zeros in place of the digest that begins at `start`."""
    digest = hashlib.sha256()
    file.seek(0)
    digest.update(file.read(start))
    file.seek(len(_UNSEALED), os.SEEK_CUR)
    digest.update(_UNSEALED.encode())
    while block := file.read(_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def _damaged(path: Path, reason: str) -> SnapKVError:
    return wrong(
        "path",
        "expected a file that was written by cache.save and not changed since then, but got "
        f"{str(path)!r}: {reason}",
        "Save the cache again, or use a different file",
        CacheFileError,
    )
