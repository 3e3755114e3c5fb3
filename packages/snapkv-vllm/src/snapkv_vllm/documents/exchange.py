"""Documents from files into a worker's cache and back; called by name in every worker.

What is refused comes back as a line, so that the front end can tell it from a worker that is lost.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from snapkv.document_files import StoredDocument, read_document, write_document
from snapkv.errors import CacheFileError, InvalidArgumentError, SnapKVError
from snapkv_vllm.documents.states import DocumentStates

REFUSED = "refused"
"""Under which the answer of a worker says what is wrong; it has nothing else."""


def answered(act: Callable[[], None]) -> dict[str, str]:
    """What a worker answers when it has done something; with why not, where it has not."""
    try:
        with torch.inference_mode():
            act()
    except SnapKVError as error:
        return {REFUSED: str(error)}
    return {}


def fill_document(
    states: DocumentStates,
    path: str,
    blocks: Sequence[Sequence[int]],
    model: Mapping[str, Any],
    *,
    seal: str,
    most_bytes: int,
    vocabulary: int,
) -> None:
    """Write the document in a file into blocks that nobody reads yet.

    Args:
        states: of the worker.
        path: the file.
        blocks: of every KV cache group.
        model: its `model_identity`.
        seal: of the file that was looked at before.
        most_bytes: see `read_document`.
        vocabulary: tokens that the model knows.

    Raises:
        CacheFileError: the file is another one by now, or damaged.
        CacheMismatchError: it belongs to another model.
        InvalidArgumentError: it does not fit the cache.
    """
    document = read_document(path, model=model, most_bytes=most_bytes)
    if document.seal != seal:
        raise CacheFileError(
            f"path: expected the file that was looked at, got another one at {path!r} by now; "
            "register it again"
        )
    highest = int(document.token_ids.max())
    if highest >= vocabulary:
        raise InvalidArgumentError(
            f"document: expected token ids below {vocabulary:,}, the model's vocabulary, got "
            f"{highest:,}; save it with the model that is served"
        )
    states.write(blocks, document.keys, document.values)


def save_document(
    states: DocumentStates,
    path: str,
    blocks: Sequence[Sequence[int]],
    model: Mapping[str, Any],
    *,
    token_ids: Sequence[int],
) -> None:
    """Write the document in blocks to a file.

    Args:
        states: of the worker.
        path: the file.
        blocks: of every KV cache group.
        model: its `model_identity`.
        token_ids: what the document stands for.

    Raises:
        CacheFileError: the file cannot be written.
        InvalidArgumentError: blocks of which it is not known what they hold.
    """
    held = states.read(blocks, len(token_ids))
    document = StoredDocument(
        token_ids=torch.tensor(token_ids),
        kept=held.kept,
        keys=held.keys,
        values=held.values,
        policy=held.policy,
    )
    write_document(path, model, document)
