"""A request that begins with a document; no vLLM is needed here."""

from dataclasses import dataclass

from snapkv_vllm.plans import RequestPlan


@dataclass(frozen=True, kw_only=True)
class FromDocument(RequestPlan):
    """The plan of a request whose prompt begins with a document, and which stays whole behind it.

    Args:
        document_tokens: tokens of the prompt that the document stands for.
        kept_tokens: how many of those are held.
        is_adopted: whether another program has read it, whose numbers are not to the last bit those
            that other requests would compute.
    """

    document_tokens: int
    kept_tokens: int
    is_adopted: bool = False

    @property
    def dropped_tokens(self) -> int:
        """Tokens of the document that are not held."""
        return self.document_tokens - self.kept_tokens

    @property
    def shared_tokens(self) -> int | None:
        """See `RequestPlan`."""
        return 0 if self.dropped_tokens or self.is_adopted else None

    @property
    def reusable_tokens(self) -> int:
        """See `RequestPlan`; what is reused is the document."""
        return 0

    def most_held(self, tokens: int) -> int:
        """See `RequestPlan`."""
        return tokens - self.dropped_tokens
