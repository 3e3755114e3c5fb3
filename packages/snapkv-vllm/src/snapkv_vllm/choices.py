"""What chooses the tokens that stay, each time a request is compressed; no vLLM is needed here."""

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from snapkv.policies import DecodeStep, EvictingPolicy, Policy, PromptLayer
from snapkv_vllm.methods import parts_heads
from snapkv_vllm.protecting import protected_first


def queries_of(policy: EvictingPolicy) -> int:
    """How many of the last queries a method wants to see when it evicts."""
    return policy.history_tokens or policy.query_tokens


class Choice(Protocol):
    """Chooses by what the workers have put aside and by the keys that a request holds.

    Attributes:
        stage: when it does, in a word for the metrics.
        fills_pages: whether every head then keeps a multiple of a page's tokens.
        parts_heads: whether the heads of a layer keep different numbers of tokens.
    """

    stage: ClassVar[str]
    fills_pages: ClassVar[bool]

    @property
    def parts_heads(self) -> bool:
        """See above."""

    @property
    def query_tokens(self) -> int:
        """How many of the last queries it wants to see."""

    def keep(self, layer: PromptLayer, kept_tokens: int) -> Tensor | None:
        """Which of the held tokens stay.

        Args:
            layer: of all that is held; the layers of a run are rows of the batch.
            kept_tokens: how many are to stay, K.

        Returns:
            (layers, H or 1, K) int64, ascending, behind a leading run of -1 where heads keep
            different numbers; None where the method keeps everything.
        """


@dataclass(frozen=True)
class EndOfPrompt:
    """What the method keeps of a prompt that has been read."""

    stage: ClassVar[str] = "prompt"
    fills_pages: ClassVar[bool] = False

    policy: Policy

    @property
    def parts_heads(self) -> bool:
        """See `Choice`."""
        return parts_heads(self.policy)

    @property
    def query_tokens(self) -> int:
        """See `Choice`."""
        return self.policy.query_tokens

    def keep(self, layer: PromptLayer, kept_tokens: int) -> Tensor | None:
        """See `Choice`."""
        del kept_tokens  # the policy knows
        selection = self.policy.select(layer)
        return None if selection is None else selection.keep_indices


@dataclass(frozen=True)
class UnderCap:
    """What stays for now of a prompt that is still coming in.

    Args:
        policy: the method.
        ahead_tokens: how many of the last tokens were read ahead and do not stay.
    """

    stage: ClassVar[str] = "reading"
    fills_pages: ClassVar[bool] = False
    parts_heads: ClassVar[bool] = False

    policy: Policy
    ahead_tokens: int

    @property
    def query_tokens(self) -> int:
        """See `Choice`."""
        return self.policy.query_tokens

    def keep(self, layer: PromptLayer, kept_tokens: int) -> Tensor:
        """See `Choice`."""
        selection = self.policy.select_under_cap(layer, kept_tokens + self.ahead_tokens)
        return selection.keep_indices[..., :kept_tokens]


@dataclass(frozen=True)
class WhileGenerating:
    """What stays while an answer grows.

    Args:
        policy: the method; it is shown no columns, as those served need none.
        query_tokens: how many of the last queries it sees, fewer than it wants where the answer has
            just begun.
        protect_first: first tokens that stay.
    """

    stage: ClassVar[str] = "generating"
    fills_pages: ClassVar[bool] = False
    parts_heads: ClassVar[bool] = False

    policy: EvictingPolicy
    query_tokens: int
    protect_first: int

    def keep(self, layer: PromptLayer, kept_tokens: int) -> Tensor | None:
        """See `Choice`."""
        del kept_tokens  # the policy knows
        first = self.protect_first
        step = DecodeStep(
            queries=layer.queries,
            keys=layer.keys,
            score_options=layer.score_options,
            layer_idx=layer.layer_idx,
            depth=layer.depth,
            num_layers=layer.num_layers,
            protected=protected_first(layer, first) if first else None,
            columns=torch.empty(*layer.keys.shape[:3], dtype=torch.int64, device="meta"),
            seen_tokens=layer.keys.shape[2],
        )
        return self.policy.evict(step).keep_indices


@dataclass(frozen=True)
class SecondReading:
    """What stays of a document that has been read twice.

    Args:
        policy: `KVzip`, or `AdaKV` around it, whose heads keep whole pages.
        document_tokens: how many of the tokens held are the document's, the first ones.
    """

    stage: ClassVar[str] = "document"
    fills_pages: ClassVar[bool] = True
    query_tokens: ClassVar[int] = 0

    policy: Policy
    document_tokens: int

    @property
    def parts_heads(self) -> bool:
        """See `Choice`."""
        return parts_heads(self.policy)

    def keep(self, layer: PromptLayer, kept_tokens: int) -> Tensor | None:
        """See `Choice`; the layer has what the second reading noted."""
        del kept_tokens  # the policy knows
        first = slice(self.document_tokens)
        document = replace(layer, keys=layer.keys[:, :, first], values=layer.values[:, :, first])
        selection = self.policy.select(document)
        return None if selection is None else selection.keep_indices
