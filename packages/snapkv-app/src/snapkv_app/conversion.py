"""Convert GGUF files once to folders that transformers can load quickly.

transformers can read a GGUF file, but unpacks every tensor each time (10-25 s for a 98 MB file).
The unpacked model is saved to a cache folder, named after the file's name, size and content, so
that a changed file is never mistaken for the one converted before.
"""

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_gguf_pytorch_utils as gguf_reading
from transformers import AutoTokenizer

from snapkv.cache_folder import cache_folder
from snapkv.errors import SnapKVError, missing_package, wrong
from snapkv.hf.checkpoint import load_complete
from snapkv.validation import first_line
from snapkv_app.packages import absent_for_gguf

_log = logging.getLogger(__name__)
_draw_progress = gguf_reading.tqdm

_MAGIC = b"GGUF"

_COMPLETE = "complete-2"
"""Ends the names of folders. In others weights that a file lacks are random numbers, or the tokens
that end a text are those that transformers guessed."""

_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""transformers' names of special tokens, and those in a GGUF header."""


def convert_once(path: Path, dtype: torch.dtype) -> tuple[Path, str]:
    """Convert a GGUF file into a folder, unless an earlier call has done so.

    The rounding of bfloat16 is smaller than the error of a quantized file, and it takes half the
    space of float32.

    Several processes may convert the same file at the same time: each works in a folder of its own
    and the first to finish moves it into place. An interrupted conversion leaves no folder behind
    under the final name.

    Args:
        path: an existing file.
        dtype: the dtype of the weights in the folder; there is a folder for each.

    Returns:
        The folder for `from_pretrained`, in the cache folder of this package, and the hexadecimal
        SHA-256 of the file.

    Raises:
        InvalidArgumentError: the file is not a complete GGUF file of a known architecture, or the
            cache folder has no room.
        MissingDependencyError: a package that reads GGUF files is not installed.
    """
    _require_gguf(path)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    name = f"{path.stem}-{path.stat().st_size}-{sha256[:16]}-{_COMPLETE}"
    if dtype != torch.float32:
        name += f"-{str(dtype).removeprefix('torch.')}"
    folder = cache_folder() / name
    if not folder.is_dir():
        _convert(path, folder, dtype)
    return folder, sha256


def _convert(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Unpack a GGUF file into `folder`, unless another process does so first.

    Raises:
        InvalidArgumentError: the file is damaged or of an unknown architecture, or the folder
            cannot be written.
        MissingDependencyError: a package that reads GGUF files is not installed.
    """
    if absent := absent_for_gguf():
        raise missing_package("model: reading GGUF files", *absent)
    model, tokenizer = _unpack(path, dtype)
    try:
        _save(model, tokenizer, folder)
    except OSError as error:
        raise wrong(
            "SNAPKV_CACHE_DIR",
            f"the converted file {path.name} ({model.num_parameters() * dtype.itemsize:,} bytes) "
            f"cannot be written to the folder {folder.parent}: "
            f"{error.strerror or error}",
            "Set SNAPKV_CACHE_DIR to a different folder",
        ) from error


def _require_gguf(path: Path) -> None:
    """Raise unless a file begins with the four bytes that mark a GGUF file.

    Raises:
        InvalidArgumentError: the file begins with other bytes.
    """
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
    if magic != _MAGIC:
        raise wrong(
            "model",
            f"expected a file that begins with {_MAGIC!r}, but got {magic!r} in {path}",
            "This is not a GGUF file, so download the file again",
        )


def _unpack(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Read a model with tensors of `dtype`, and its tokenizer, from a GGUF file.

    The model can be saved as one that was never quantized.

    Raises:
        InvalidArgumentError: the file is damaged or lacks weights, or transformers cannot read it.
    """
    _log.info("converting %s to a folder that opens in a moment; this is done once", path.name)
    try:
        with _bar_on_terminals():
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            _name_special_tokens(tokenizer, path)
            model = load_complete(
                path,
                path.parent,
                gguf_file=path.name,
                listing="header",
                remedy="Download the file again, or use the original model instead",
                dtype=dtype,
            )
    except SnapKVError:
        raise
    except Exception as error:  # a damaged file makes the reader raise whatever it trips over
        raise wrong(
            "model",
            "expected a complete GGUF file of a decoder-only architecture that transformers can "
            f"read, but got {path}: {first_line(error)}",
            "Download the file again, or use the original model instead",
        ) from error
    # The loader notes that the weights came out of a quantised file, and `save_pretrained` then
    # refuses; they are ordinary tensors by now.
    model.hf_quantizer = None
    del model.config.quantization_config
    return model, tokenizer


def _name_special_tokens(tokenizer: Any, path: Path) -> None:
    """Set the special tokens of `tokenizer`, in place, to those that the file's header names.

    transformers 5.17 mixes them up. Tokens that the header does not name stay as they are.
    """
    from gguf import GGUFReader

    header = GGUFReader(path).fields
    for name, key in _SPECIAL_TOKENS.items():
        field = header.get(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            token = tokenizer.convert_ids_to_tokens(int(field.contents()))
            setattr(tokenizer, f"{name}_token", token)


@contextlib.contextmanager
def _bar_on_terminals() -> Iterator[None]:
    """Hide transformers' progress bar for GGUF files within this block, except on a terminal."""
    gguf_reading.tqdm = functools.partial(_draw_progress, disable=None, leave=False)
    try:
        yield
    finally:
        gguf_reading.tqdm = _draw_progress  # two threads may convert at once


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write model and tokenizer into `folder`, which appears complete or not at all.

    A folder that another process has written meanwhile is left as it is.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / folder.name
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        try:
            os.replace(fresh, folder)
        except OSError:
            if not folder.is_dir():
                raise
            # Another process was first, and its folder is as good as ours.
