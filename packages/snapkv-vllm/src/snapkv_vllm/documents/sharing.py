"""How a server shares documents; no vLLM is needed here."""

from dataclasses import dataclass

from snapkv.errors import InvalidTypeError
from snapkv.validation import format_bytes, require_at_least, require_int
from snapkv_vllm.limits import ConfigEntry


@dataclass(frozen=True, kw_only=True)
class Sharing(ConfigEntry):
    """How much of a server's cache shared documents may take, and who sees them.

    Args:
        most_bytes: of all documents together; 0 for a quarter of the engine's cache.
        chunk_tokens: of a document, read again at a time.
        across_keys: whether every API key sees the documents of all others, and its requests begin
            with what theirs have cached.
        library: the folder of a library (`snapkv library add`), whose documents everybody may name;
            it is never changed, "" for none.

    Raises:
        InvalidArgumentError: a value out of range.
        InvalidTypeError: a value of the wrong type.
    """

    most_bytes: int = 0
    chunk_tokens: int = 2048
    across_keys: bool = False
    library: str = ""

    def __post_init__(self) -> None:
        require_int("most_bytes", self.most_bytes, minimum=0)
        require_at_least("chunk_tokens", self.chunk_tokens, 1)
        kinds = {"across_keys": (bool, "true or false"), "library": (str, "a path")}
        for name, (kind, expected) in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise InvalidTypeError(
                    f"{name}: expected {expected}, got {value!r} of type {type(value).__name__}; "
                    "pass one"
                )

    @property
    def summary(self) -> str:
        most = format_bytes(self.most_bytes) if self.most_bytes else "a quarter of the cache"
        across = " across keys" if self.across_keys else ""
        return most + across + (f" of {self.library}" if self.library else "")
