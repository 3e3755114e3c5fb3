"""What becomes of a compressed cache when another prompt follows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from snapkv.cache.layer import CompressedLayer, TurnRule
from snapkv.cache.paging import PageRecall, Recall
from snapkv.errors import InvalidArgumentError
from snapkv.policies import EvictingPolicy, Policy
from snapkv.policies.base import ALL_QUERIES
from snapkv.storage.offload import OffloadedTokens
from snapkv.storage.offload_pool import pool_for
from snapkv.validation import require_choice, require_int

Turns = Literal["append", "compress"]


@dataclass(frozen=True, kw_only=True)
class TurnOptions:
    """How a cache goes on behind its first prompt; see `CompressedCache`.

    Raises:
        InvalidArgumentError: options that contradict each other.
        InvalidTypeError: a value of the wrong type.
    """

    turns: Turns | None = None
    recall: Recall | None = None
    recall_bytes: int | None = None
    refresh_every: int | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a policy."""
        if self.turns is not None:
            require_choice("turns", self.turns, ("append", "compress"))
        if self.refresh_every is not None:
            require_int("refresh_every", self.refresh_every, minimum=1)
        if self.recall is not None and self.turns == "append":
            raise InvalidArgumentError(
                "turns: expected 'compress' with recall, since every turn votes on what is "
                "recalled, got 'append'; leave turns out"
            )
        given = {"recall_bytes": self.recall_bytes, "refresh_every": self.refresh_every}
        for name, value in given.items():
            if value is not None and self.recall is None:
                raise InvalidArgumentError(
                    f"{name}: expected recall='host' or a folder beside it, got {value} without; "
                    f"pass recall, or leave {name} out"
                )

    @property
    def pages(self) -> PageRecall | None:
        """Which pages of evicted tokens each step attends to; None where it attends to none."""
        return self.recall if isinstance(self.recall, PageRecall) else None

    @property
    def where(self) -> str | Path | None:
        """Where evicted tokens lie; None where they are dropped."""
        return self.recall.where if isinstance(self.recall, PageRecall) else self.recall

    def apply(self, layers: Sequence[CompressedLayer], policy: Policy) -> None:
        """Prepare the compressed layers of a cache.

        Raises:
            InvalidArgumentError: the policy, or the layers' storage, does not allow it.
        """
        if self.recall is None and self.turns != "compress":
            return
        self._require_suitable(policy)
        self._require_storage(layers)
        pool = None if self.where is None else pool_for(self.where, self.recall_bytes)
        for layer in layers:
            layer.turns = TurnRule(refresh_every=self.refresh_every, pages=self.pages)
            layer.offloaded = None if pool is None else OffloadedTokens(pool)

    def _require_storage(self, layers: Sequence[CompressedLayer]) -> None:
        """Refuse static storage where what a step attends to does not stay where it is."""
        moving = None
        if self.pages is not None:
            moving = (
                "with recall=PageRecall(...), since a compiled step cannot fetch what its query "
                "chooses, got 'static'"
            )
        elif self.recall is None or self.refresh_every:
            moving = (
                "where a cache chooses again out of what it stores (turns='compress' without "
                "recall, refresh_every), got 'static', whose buffer stays as it is"
            )
        if moving is not None and any(layer.is_compileable for layer in layers):
            raise InvalidArgumentError(f"storage: expected 'dynamic' {moving}; leave one out")

    def _require_suitable(self, policy: Policy) -> None:
        """Refuse policies whose turns would not be what was asked for."""
        asked = "turns='compress'" if self.recall is None else "recall"
        if isinstance(policy, EvictingPolicy):
            raise InvalidArgumentError(
                f"policy: expected one that only compresses prompts for {asked}, got "
                f"{policy.name}, which evicts after every token; use SnapKV, or leave the option "
                "out"
            )
        if policy.reads_twice:
            raise InvalidArgumentError(
                f"policy: expected one that chooses when a prompt has been read once for {asked}, "
                f"since later turns are read once, got {policy.name}; use SnapKV, or leave the "
                "option out"
            )
        if self.refresh_every and policy.query_tokens == ALL_QUERIES:
            raise InvalidArgumentError(
                f"refresh_every: expected a policy whose last queries vote, got {policy.name}, "
                "which asks all of a prompt's; use SnapKV, or leave refresh_every out"
            )
        if self.recall is not None and "queries" in policy.needs:
            raise InvalidArgumentError(
                f"policy: expected one that chooses by the last queries or none for recall, since "
                f"earlier turns' queries are not held, got {policy.name}; use SnapKV, or leave "
                "recall out"
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
