"""What a policy is: tensors of one layer in, positions to keep out. It holds no request state."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import InvalidArgumentError, InvalidTypeError

DEFAULT_BUDGET = 1024

Need = Literal["rotation", "output_weight"]

ALL_QUERIES = sys.maxsize
"""`Policy.query_tokens` of a method that scores with every query of the prompt."""


@dataclass(frozen=True, kw_only=True)
class LayerStates:
    """What a policy sees of one layer, at the end of the prompt or behind it.

    Attributes:
        queries: (B, Hq, N, D), after rotary embedding and query norm.
        keys: (B, Hkv, S, D), all stored keys as attention sees them.
        values: (B, Hkv, S, Dv).
        scaling: the factor attention puts on its scores.
        softcap: the cap attention puts on its scores, or None.
        sinks: (Hq,) learned sink logits, or None.
        pad_tokens: (B,) int64, leading pads of each row of the prompt, or None where none has any.
        stored_heads: heads of the cache where they differ from those of `keys`: models with latent
            attention (DeepSeek) store one latent that all heads share, so they share one set.
        layer_idx: index of the layer in the model.
        depth: how many compressed layers come before this one.
        num_layers: how many compressed layers the model has.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    scaling: float
    layer_idx: int
    depth: int = 0
    num_layers: int = 1
    softcap: float | None = None
    sinks: Tensor | None = None
    pad_tokens: Tensor | None = None
    stored_heads: int | None = None

    @property
    def num_kv_heads(self) -> int:
        """How many heads the cache stores, each with a set of its own."""
        return self.keys.shape[1] if self.stored_heads is None else self.stored_heads

    @property
    def score_options(self) -> dict[str, Any]:
        """How attention turns products into weights, as the ops take it."""
        return {"scaling": self.scaling, "softcap": self.softcap, "sinks": self.sinks}


@dataclass(frozen=True, kw_only=True)
class PromptLayer(LayerStates):
    """One layer's attention states at the end of the prompt.

    Attributes:
        queries: the last ``policy.query_tokens`` queries of the prompt, fewer where it is shorter.
        rotation: turns (B, H, N, D) states on by (B, N) positions, float32; for `Policy.needs`.
        output_weight: (hidden, Hq * Dv), what maps the heads' outputs to the model's width; for
            `Policy.needs`.
    """

    rotation: Callable[[Tensor, Tensor], Tensor] | None = None
    output_weight: Tensor | None = None

    @property
    def row_tokens(self) -> Tensor:
        """(B,) int64: real tokens of each row, pads left out."""
        total = torch.full((self.keys.shape[0],), self.keys.shape[2], device=self.keys.device)
        return total if self.pad_tokens is None else total - self.pad_tokens


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which positions of the prompt a layer keeps.

    Attributes:
        keep_indices: (B, H, K) int64, ascending and unique, slots of the prompt, after a leading
            run of -1 where a row or head keeps fewer than K. H is Hkv, or Hq where every query head
            keeps its own set, or 1 where all heads share one.
        prompt_tokens: T, the length of the prompt the indices point into.
        filler_tokens: (B,) int64, how many leading entries of a row are -1; None where no row has
            any.
        head_tokens: (B, H) int64 where heads keep different numbers of tokens: how many of the last
            entries along K are indices. None where all heads of a row keep the same number.
        scores: (B, H, T) float32, what an `EvictingPolicy` has noted of every token of the prompt;
            it comes back with each `DecodeStep`. None where nothing needs to be remembered.
        sink_tokens: how many of the first kept tokens move on to the positions right before the
            token that follows them. Only where those tokens are neighbours, as a prompt's first
            tokens are.
    """

    keep_indices: Tensor
    prompt_tokens: int
    filler_tokens: Tensor | None = None
    head_tokens: Tensor | None = None
    scores: Tensor | None = None
    sink_tokens: int = 0

    @classmethod
    def of(cls, layer: PromptLayer, keep_indices: Tensor, **options: Any) -> "Selection":
        """A selection whose rows drop their pads before their tokens."""
        T, K = layer.keys.shape[2], keep_indices.shape[-1]
        fillers = fillers_left(T, K, layer.pad_tokens)
        return cls(keep_indices=keep_indices, prompt_tokens=T, filler_tokens=fillers, **options)

    @classmethod
    def whole(cls, layer: PromptLayer) -> "Selection":
        """Every position of the prompt."""
        every = torch.arange(layer.keys.shape[2], device=layer.keys.device)
        return cls.of(layer, every.expand(layer.keys.shape[0], layer.num_kv_heads, -1))


@dataclass(frozen=True, kw_only=True)
class DecodeStep(LayerStates):
    """One layer's states right after the attention of tokens behind the prompt.

    Attributes:
        queries: (B, Hq, Q, D), of the tokens of this step, the last Q slots; for a policy with
            `history_tokens` as many of the last queries, whether or not their tokens are stored.
        scores: (B, H, S) float32, what the policy has noted of every slot; zero for new tokens.
            None where it notes nothing.
        filler_tokens: (B,) leading slots that hold pads, or None.
        seen_tokens: tokens seen since the start of the cache, dropped ones included.
        columns: (B, H, S) int64, column of every slot in the whole sequence, pads counted, -1 or a
            pad's where a slot holds no token; None for a policy without `history_tokens`.
    """

    seen_tokens: int
    scores: Tensor | None = None
    filler_tokens: Tensor | None = None
    columns: Tensor | None = None

    @property
    def row_tokens(self) -> Tensor:
        """(B,) int64: slots of each row that hold a token."""
        total = torch.full((self.keys.shape[0],), self.keys.shape[2], device=self.keys.device)
        return total if self.filler_tokens is None else total - self.filler_tokens


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """What a step of decoding leaves in a layer.

    Attributes:
        keep_indices: (B, H, K) int64, ascending slots to keep, -1 and H as in `Selection`; None
            keeps all.
        scores: (B, H, S) float32 for the slots before eviction, to be noted; or None.
        sink_tokens: as in `Selection`.
        filler_tokens: (B,) int64, leading entries of `keep_indices` that hold no token; None where
            every row drops its fillers before its tokens.
    """

    keep_indices: Tensor | None = None
    scores: Tensor | None = None
    sink_tokens: int = 0
    filler_tokens: Tensor | None = None


@dataclass(frozen=True)
class Policy(ABC):
    """Decides what a layer keeps when the prompt has been read."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def query_tokens(self) -> int:
        """How many of the prompt's last queries `select` wants to see."""

    @property
    def needs(self) -> frozenset[Need]:
        """Parts of the model's layers without which the method cannot work."""
        return frozenset()

    @property
    def most_tokens(self) -> int | None:
        """Tokens of a prompt that no layer and head keeps more of; None where there is no limit.

        Also None where heads of a row keep different numbers of tokens.
        """
        return None

    @abstractmethod
    def select(self, layer: PromptLayer) -> Selection | None:
        """Choose the positions to keep; None keeps everything, untouched."""

    def describe(self) -> dict[str, Any]:
        """The method's name and parameters, ready for JSON; a wrapped method's inside its own."""
        parameters = {
            name: value.describe() if isinstance(value := getattr(self, name), Policy) else value
            for name in (parameter.name for parameter in fields(self) if parameter.init)
        }
        return {"name": self.name, **parameters}


class EvictingPolicy(Policy):
    """Also evicts while generating, so that the cache never outgrows its budget.

    What it notes of each slot travels with the slot: `Selection.scores` at the end of the prompt,
    `DecodeStep.scores` and `Eviction.scores` from step to step.
    """

    @property
    @abstractmethod
    def room_tokens(self) -> int:
        """Tokens that every layer may hold while generating."""

    @property
    def history_tokens(self) -> int:
        """How many of the last queries `evict` wants to see; 0 for those of its step only.

        The layer holds on to them: (B, Hq, history, D) beside its keys and values.
        """
        return 0

    def note(self, layer: PromptLayer) -> Tensor | None:
        """What to remember of every token of the prompt: (B, H, T) float32, or None."""
        return None

    @abstractmethod
    def select(self, layer: PromptLayer) -> Selection:
        """Choose the positions to keep; here also where all of them fit."""

    @abstractmethod
    def evict(self, step: DecodeStep) -> Eviction:
        """Choose the slots to keep after tokens behind the prompt were attended to and stored."""


def keep_best_and_recent(
    scores: Tensor, best_tokens: int | Tensor, recent_tokens: int, filler_tokens: Tensor | None
) -> Tensor:
    """The best of the older slots and all of the most recent ones; fillers go first.

    Args:
        scores: (B, H, S) float32 over all slots; those of the recent ones are not looked at.
        best_tokens: how many of the older slots to keep, of all rows or (B,) of each.
        recent_tokens: how many of the last slots to keep.
        filler_tokens: (B,) leading slots that hold pads, or None.

    Returns:
        (B, H, best + recent) int64, ascending; (B, H, S) where there are no more slots than that;
        rows that keep fewer than others begin with -1.
    """
    B, H, S = scores.shape
    older = max(S - recent_tokens, 0)
    wanted = torch.as_tensor(best_tokens, device=scores.device).expand(B).clamp(max=older)
    if filler_tokens is not None:
        wanted = wanted.minimum((older - filler_tokens).clamp(min=0))
    best = ops.keep_best(scores[..., :older], wanted, filler_tokens)
    recent = torch.arange(older, S, device=scores.device)
    return torch.cat([best, recent.expand(B, H, -1)], dim=-1)


def fillers_left(slots: int, kept_slots: int, filler_tokens: Tensor | None) -> Tensor | None:
    """(B,) fillers that remain where rows drop their fillers before their tokens."""
    if filler_tokens is None:
        return None
    return (filler_tokens - (slots - kept_slots)).clamp(min=0)


@dataclass(frozen=True)
class PrefixPolicy(Policy):
    """Keeps the window and the best-scored positions before it; subclasses give the scores.

    Args:
        budget: tokens kept per KV head and layer, window included; 1024 if neither is given.
        keep_ratio: instead of `budget`, the fraction of the prefix to keep beside the window:
            k = floor(keep_ratio * prefix), in (0, 1] (Sec. 4, "voting").
        window_size: the last tokens of the prompt, always kept.

    Raises:
        InvalidArgumentError: a value out of range, or both `budget` and `keep_ratio`.
        InvalidTypeError: a value of the wrong type.
    """

    budget: int | None = None
    _: KW_ONLY
    keep_ratio: float | None = None
    window_size: int = field(default=32)

    def __post_init__(self) -> None:
        """Check every parameter once, here."""
        require_int("window_size", self.window_size, minimum=1)
        if self.keep_ratio is None:
            if self.budget is None:
                object.__setattr__(self, "budget", DEFAULT_BUDGET)
            self._check_budget()
        elif self.budget is not None:
            raise InvalidArgumentError(
                f"budget and keep_ratio: expected one of them, got budget={self.budget} and "
                f"keep_ratio={self.keep_ratio}; leave one out"
            )
        else:
            require_ratio("keep_ratio", self.keep_ratio)

    def _check_budget(self) -> None:
        require_int("budget", self.budget, minimum=1)
        if self.budget is not None and self.budget <= self.window_size:
            raise InvalidArgumentError(
                f"budget: expected more than window_size={self.window_size}, since the window is "
                f"part of the budget, got {self.budget}; raise budget or lower window_size"
            )

    @property
    def most_tokens(self) -> int | None:
        """The budget."""
        return self.budget

    @abstractmethod
    def score(self, layer: PromptLayer) -> Tensor:
        """Rate the prefix: (B, num_kv_heads or Hq, T - window_size) float32, higher first."""

    def select(self, layer: PromptLayer) -> Selection | None:
        """Keep the best of the prefix and the window, or everything where it fits the budget."""
        prompt_tokens = layer.keys.shape[2]
        prefix_tokens = prompt_tokens - self.window_size
        rows = layer.row_tokens
        keep_tokens = self.kept_prefix_tokens(layer)
        if prefix_tokens <= 0 or prefix_tokens <= int(keep_tokens.max()):
            return None
        best = ops.keep_best(self.score(layer), keep_tokens, layer.pad_tokens)
        window = torch.arange(prefix_tokens, prompt_tokens, device=best.device)
        keep_indices = torch.cat([best, window.expand(*best.shape[:2], -1)], dim=-1)
        if layer.pad_tokens is None:
            return Selection(keep_indices=keep_indices, prompt_tokens=prompt_tokens)
        kept_tokens = keep_tokens + rows.clamp(max=self.window_size)
        return Selection(
            keep_indices=keep_indices,
            prompt_tokens=prompt_tokens,
            filler_tokens=keep_indices.shape[-1] - kept_tokens,
        )

    def kept_prefix_tokens(self, layer: PromptLayer) -> Tensor:
        """(B,) int64: positions each row keeps of its own prefix."""
        prefix = (layer.row_tokens - self.window_size).clamp(min=0)
        if self.keep_ratio is None:
            assert self.budget is not None
            return prefix.clamp(max=self.budget - self.window_size)
        kept = [math.floor(self.keep_ratio * tokens) for tokens in prefix.tolist()]
        return torch.tensor(kept, dtype=torch.int64, device=prefix.device)


def require_int(argument: str, value: object, *, minimum: int) -> None:
    """Raise unless `value` is an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidTypeError(
            f"{argument}: expected an integer, got {value!r} of type {type(value).__name__}; "
            f"pass a whole number of at least {minimum}"
        )
    if value < minimum:
        raise InvalidArgumentError(
            f"{argument}: expected at least {minimum}, got {value}; pass a larger number"
        )


def require_ratio(argument: str, value: object) -> None:
    """Raise unless `value` is a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidTypeError(
            f"{argument}: expected a number in (0, 1], got {value!r} of type "
            f"{type(value).__name__}; pass a fraction such as 0.25"
        )
    if not 0 < value <= 1:
        raise InvalidArgumentError(
            f"{argument}: expected a number in (0, 1], got {value}; pass a fraction such as 0.25"
        )


def require_choice(argument: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise InvalidArgumentError(
            f"{argument}: expected one of {', '.join(choices)}, got {value!r}; pass one of them"
        )
