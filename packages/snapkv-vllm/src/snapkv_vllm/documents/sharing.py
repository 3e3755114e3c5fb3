"""How a server shares documents; no vLLM is needed here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.validation import format_bytes, require_at_least, require_int
from snapkv_vllm.limits import Limits, entry_of, require_fields


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How much of a server's cache shared documents may take, and who sees them.

    Args:
        most_bytes: of all documents together; 0 for a quarter of the engine's cache.
        chunk_tokens: of a document, read again at a time.
        across_keys: whether every API key sees the documents of all others.
        folder: where documents are kept as files, and found again at the next start; "" for none.

    Raises:
        InvalidArgumentError: a value out of range.
        InvalidTypeError: a value of the wrong type.
    """

    most_bytes: int = 0
    chunk_tokens: int = 2048
    across_keys: bool = False
    folder: str = ""

    def __post_init__(self) -> None:
        """Check every value by itself."""
        require_int("most_bytes", self.most_bytes, minimum=0)
        require_at_least("chunk_tokens", self.chunk_tokens, 1)
        if not isinstance(self.across_keys, bool):
            raise InvalidTypeError(
                f"across_keys: expected true or false, got {self.across_keys!r} of type "
                f"{type(self.across_keys).__name__}; pass one of them"
            )
        if not isinstance(self.folder, str):
            raise InvalidTypeError(
                f"folder: expected a path, got {self.folder!r} of type "
                f"{type(self.folder).__name__}; pass a string"
            )

    @property
    def summary(self) -> str:
        """How much, for whom and where, in words."""
        most = format_bytes(self.most_bytes) if self.most_bytes else "a quarter of the cache"
        across = " across keys" if self.across_keys else ""
        return f"{most}{across}{f' in {self.folder}' if self.folder else ''}"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """What `to_config` was called on.

        Raises:
            InvalidArgumentError: an unknown name.
        """
        require_fields("sharing", cls, config)
        return cls(**config)

    def to_config(self) -> dict[str, Any]:
        """What differs from the defaults, ready for JSON."""
        return entry_of(self)

    def require_possible(self, limits: Limits) -> None:
        """Raise where a server's other settings leave no room for documents.

        Raises:
            InvalidArgumentError: names the setting in the way.
        """
        for name in ("cap", "decode_budget"):
            if tokens := getattr(limits, name):
                raise InvalidArgumentError(
                    f"{name}: expected none where documents are shared, since requests that name "
                    f"one stay whole, got {tokens}; leave --{name.replace('_', '-')} or --share out"
                )
