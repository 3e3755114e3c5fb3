"""How a server holds the histories of sessions; no vLLM is needed here."""

from dataclasses import dataclass

from snapkv.validation import format_bytes, require_int
from snapkv_vllm.limits import ConfigEntry


@dataclass(frozen=True, kw_only=True)
class Sessions(ConfigEntry):
    """How much of a server's cache the histories of sessions may take.

    Args:
        most_bytes: of all together; 0 for a quarter of the engine's cache.

    Raises:
        InvalidArgumentError: a value out of range.
        InvalidTypeError: a value of the wrong type.
    """

    most_bytes: int = 0

    def __post_init__(self) -> None:
        require_int("most_bytes", self.most_bytes, minimum=0)

    @property
    def summary(self) -> str:
        return format_bytes(self.most_bytes) if self.most_bytes else "a quarter of the cache"
