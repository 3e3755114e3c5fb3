"""What a user says of a cache: how later prompts choose, and what of a text must stay."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from snapkv.cache.layer import CompressedLayer
from snapkv.errors import InvalidArgumentError
from snapkv.policies import EvictingPolicy, Policy
from snapkv.policies.spans import Span, Spans
from snapkv.storage.offload import OffloadedTokens, Recall, pool_for
from snapkv.validation import require_choice

Turns = Literal["append", "compress"]

Protect = Iterable[Span]
"""Half-open spans of positions; see `CompressedCache`."""


@dataclass(frozen=True, kw_only=True)
class TurnOptions:
    """How a cache goes on behind its first prompt; see `CompressedCache`."""

    turns: Turns | None = None
    recall: Recall | None = None
    recall_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a policy."""
        if self.turns is not None:
            require_choice("turns", self.turns, ("append", "compress"))
        if self.recall is not None and self.turns == "append":
            raise InvalidArgumentError(
                "turns: expected 'compress' with recall, since every turn votes on what is "
                "recalled, got 'append'; leave turns out"
            )
        if self.recall_bytes is not None and self.recall is None:
            raise InvalidArgumentError(
                f"recall_bytes: expected recall='host' or a folder beside it, got "
                f"{self.recall_bytes} without; pass recall, or leave recall_bytes out"
            )

    def apply(self, layers: Sequence[CompressedLayer], policy: Policy) -> None:
        """Prepare the compressed layers of a cache; refuse what they or the policy do not allow."""
        if self.recall is None and self.turns != "compress":
            return
        self._require_suitable(policy)
        self._require_storage(layers)
        pool = None if self.recall is None else pool_for(self.recall, self.recall_bytes)
        for layer in layers:
            layer.chooses_again = True
            layer.offloaded = None if pool is None else OffloadedTokens(pool)

    def _require_storage(self, layers: Sequence[CompressedLayer]) -> None:
        """Refuse static storage where what a step attends to does not stay where it is."""
        if self.recall is None and any(layer.is_compileable for layer in layers):
            raise InvalidArgumentError(
                "storage: expected 'dynamic' where a cache chooses again out of what it stores "
                "(turns='compress' without recall), got 'static', whose buffer stays as it is; "
                "leave one out"
            )

    def _require_suitable(self, policy: Policy) -> None:
        """Refuse policies whose turns would not be what was asked for."""
        asked = "turns='compress'" if self.recall is None else "recall"
        if isinstance(policy, EvictingPolicy):
            raise InvalidArgumentError(
                f"policy: expected one that only compresses prompts for {asked}, got "
                f"{policy.name}, which evicts after every token; use SnapKV, or leave the option "
                "out"
            )
        if policy.reads_context:
            raise InvalidArgumentError(
                f"policy: expected one that chooses when a prompt has been read once for {asked}, "
                f"since later turns are read once, got {policy.name}; use SnapKV, or leave the "
                "option out"
            )
        if "queries" in policy.needs:
            raise InvalidArgumentError(
                f"policy: expected one that chooses by the last queries or none for {asked}, since "
                f"earlier turns' queries are not held, got {policy.name}; use SnapKV, KeyDiff or "
                "LagKV"
            )
        alike = policy.most_tokens is not None and policy.most_tokens == getattr(
            policy, "budget", None
        )
        if self.recall is None and (not alike or "rotation" in policy.needs):
            raise InvalidArgumentError(
                f"policy: expected one with a budget that is the same for all heads and layers, "
                f"and that does not ask where tokens stand, for turns='compress' without recall, "
                f"got {policy!r}; use SnapKV(budget=...), or recall='host'"
            )


def protected_spans(protect: Protect | None) -> Spans | None:
    """What a user protects; None for nothing."""
    spans = None if protect is None else Spans.of("protect", protect)
    return spans if spans is not None and spans.parts else None


def apply_spans(spans: Spans | None, layers: Sequence[CompressedLayer], policy: Policy) -> None:
    """Prepare the compressed layers of a cache."""
    if spans is not None:
        policy.require_protection(spans)
    for layer in layers:
        layer.protect = spans
