"""The kinds of stores by their names in files."""

from typing import Any

from snapkv.storage.base import TokenStore
from snapkv.storage.dense import DenseStore
from snapkv.storage.ragged_store import CodedStore, RaggedStore


def restored(kind: str, state: dict[str, Any]) -> TokenStore:
    """Return the store that was saved with this state.

    Args:
        kind: the `kind` of the store's class.
        state: what `TokenStore.state` returned.

    Raises:
        ValueError: there is no store of this kind.
    """
    if kind == RaggedStore.kind:
        return RaggedStore(**state)
    if kind == CodedStore.kind:
        return CodedStore(**state)
    if kind != DenseStore.kind:
        raise ValueError(f"there is no store of the kind {kind}")
    return DenseStore().fill(**state)
