"""What a policy is: tensors of one layer in, positions to keep out. It holds no request state."""

import math
import sys
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import InvalidArgumentError
from snapkv.policies.auto_budget import AutoBudget
from snapkv.policies.fair import Segments, keep_fair
from snapkv.policies.spans import Spans, require_room
from snapkv.policies.states import DecodeStep, Eviction, LostVotes, PromptLayer, Selection
from snapkv.validation import DEFAULT_BUDGET, DEFAULT_WINDOW, require_budget, require_one_limit

Need = Literal["rotation", "output_weight", "token_ids", "tokenizer", "second_reading", "queries"]
"""Parts of the model's layers, the ids of all tokens, what `Policy.with_tokenizer` gives, that
`snapkv.kvzip` reads the prompt, or the queries of all that is chosen from."""

ALL_QUERIES = sys.maxsize
"""`Policy.query_tokens` of a method that scores with every query of the prompt."""


@dataclass(frozen=True)
class Policy(ABC):
    """Decides what a layer keeps when the prompt has been read.

    Attributes:
        parts_heads: whether heads of a row may keep different numbers of tokens.
    """

    name: ClassVar[str]
    parts_heads: ClassVar[bool] = False

    @property
    @abstractmethod
    def query_tokens(self) -> int:
        """How many of the prompt's last queries `select` wants to see."""

    @property
    def needs(self) -> frozenset[Need]:
        """What the method cannot work without."""
        return frozenset()

    @property
    def reads_twice(self) -> bool:
        """Whether `snapkv.kvzip` has to read the prompt."""
        return "second_reading" in self.needs

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """The same method, for the tokens of this tokenizer; itself where it looks at none."""
        del tokenizer
        return self

    @property
    def most_tokens(self) -> int | None:
        """Tokens of a prompt that no layer and head keeps more of; None where there is no limit.

        Also None where heads of a row keep different numbers of tokens.
        """
        return None

    @property
    def parts_groups(self) -> bool:
        """Whether query heads of one KV head may keep sets of their own."""
        return False

    @abstractmethod
    def select(self, layer: PromptLayer) -> Selection | None:
        """Choose the positions to keep; None keeps everything, untouched."""

    def require_cap(self, cap_tokens: int) -> None:
        """Raise unless `select_under_cap` can keep to that many tokens.

        Raises:
            InvalidArgumentError: fewer than the method keeps in the end, or a method that has to
                see the whole prompt at once.
        """
        del cap_tokens
        raise InvalidArgumentError(
            f"policy: expected a method with a budget that can rate a part of what was read, such "
            f"as SnapKV(budget=1024), where a prompt is held to a cap while it is read, got "
            f"{self!r}; use one of them, or snapkv.prefill.layer_by_layer"
        )

    def select_under_cap(self, layer: PromptLayer, cap_tokens: int) -> Selection:
        """Choose what stays, for now, of a prompt that is still coming in.

        Args:
            layer: the states of all that is held and what has just been read, as if the prompt
                ended here; tokens between them have been dropped before.
            cap_tokens: how many to keep, fewer than there are.
        """
        raise NotImplementedError(f"{self.name} passes no require_cap")

    def require_protection(self, spans: Spans) -> None:
        """Raise unless the method keeps what `LayerStates.protected` says, and can have room.

        Raises:
            InvalidArgumentError: it does not, or no prompt that is compressed leaves them room.
        """
        del spans
        raise InvalidArgumentError(
            f"protect: expected a method that keeps protected tokens whatever their scores, such "
            f"as SnapKV(budget=1024), got {self!r}; use one of them, or leave protect out"
        )

    def require_room(self, layer: PromptLayer) -> None:
        """Raise in the first layer if one has no room for what is protected; by sizes alone."""
        del layer

    def require_fairness(self, segments: Segments) -> None:
        """Raise unless the method shares its budget as `PromptLayer.fair` says.

        Raises:
            InvalidArgumentError: it does not.
        """
        del segments
        raise InvalidArgumentError(
            f"fair: expected a method that keeps the best of a prefix by itself, such as "
            f"SnapKV(budget=1024), got {self!r}; use one of them, or leave fair out"
        )

    def lost_votes(self, layer: PromptLayer, selection: Selection) -> LostVotes | None:
        """What the window voted for and `select` has dropped; None for methods without votes."""
        del layer, selection
        return None

    def describe(self) -> dict[str, Any]:
        """The method's name and parameters, ready for JSON; a wrapped method's inside its own."""
        return self.as_saved()

    def as_saved(self) -> dict[str, Any]:
        """As `describe`, with all that a file needs to make the method again."""
        parameters = {
            name: value.describe() if hasattr(value := getattr(self, name), "describe") else value
            for name in (parameter.name for parameter in fields(self) if parameter.init)
        }
        return {"name": self.name, **parameters}


class EvictingPolicy(Policy):
    """Also evicts while generating, so that the cache never outgrows its budget.

    What it notes of each slot travels with the slot: `Selection.scores` at the end of the prompt,
    `DecodeStep.scores` and `Eviction.scores` from step to step. What it notes of each head stays:
    `Selection.head_notes`, `DecodeStep.head_notes`.
    """

    @property
    @abstractmethod
    def max_decode_tokens(self) -> int | None:
        """Tokens that every layer may hold while generating; None where heads hold their own."""

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
        """Choose the KV cache slots to keep after a step of decoding was attended to and stored."""

    def _require_whole_spans(self, spans: Spans, room: int, beside: str) -> None:
        """Raise unless whole spans fit: tokens to come may stand in them too."""
        require_room(self.name, spans.tokens, room, f"{beside}, as long as it generates")


@dataclass(frozen=True)
class PrefixPolicy(Policy):
    """Keeps the window and the best-scored positions before it; subclasses give the scores.

    Args:
        budget: tokens kept per KV head and layer, window included; 1024 if neither is given.
            "auto", or an `AutoBudget`, lets the votes choose, for methods that have some.
        keep_ratio: instead of `budget`, the fraction of the prefix to keep beside the window:
            k = floor(keep_ratio * prefix), in (0, 1] (Sec. 4, "voting").
        window_size: the last tokens of the prompt, always kept.

    Raises:
        InvalidArgumentError: a value out of range, or both `budget` and `keep_ratio`.
        InvalidTypeError: a value of the wrong type.
    """

    rates_what_is_held: ClassVar[bool] = False
    """Whether `score` is right where tokens between those of the prefix have been dropped."""

    scores_are_votes: ClassVar[bool] = False
    """Whether a budget may be chosen by the scores, as shares of the window's attention."""

    budget: int | Literal["auto"] | AutoBudget | None = None
    _: KW_ONLY
    keep_ratio: float | None = None
    window_size: int = field(default=DEFAULT_WINDOW)

    def __post_init__(self) -> None:
        """Check every parameter once, here."""
        if self.budget is None and self.keep_ratio is None:
            object.__setattr__(self, "budget", DEFAULT_BUDGET)
        require_one_limit(self.budget, self.keep_ratio)
        object.__setattr__(self, "budget", AutoBudget.read(self.budget))
        tokens = self.budget
        if isinstance(tokens, AutoBudget):
            self._require_votes()
            tokens = tokens.most or self.window_size + self.sink_tokens + tokens.least
        require_budget(tokens, self.keep_ratio, self.window_size, self.sink_tokens)
        if isinstance(self.budget, AutoBudget):
            self.budget.require_window(self.window_size)

    def _require_votes(self) -> None:
        if not self.scores_are_votes:
            raise InvalidArgumentError(
                f"budget: expected a number of tokens with {self.name}, since 'auto' goes by the "
                "votes of SnapKV, got 'auto'; pass a number, or use SnapKV(budget='auto')"
            )

    @property
    def sink_tokens(self) -> int:
        """Attention sinks: first tokens of every row that each head keeps, whatever their scores.

        They count towards the budget; where it has less room beside the window, the first of them
        are kept. None here: methods that have some declare a parameter of this name.
        """
        return 0

    @property
    def most_tokens(self) -> int | None:
        """The budget."""
        return self.budget.most if isinstance(self.budget, AutoBudget) else self._budget_tokens

    @property
    def _budget_tokens(self) -> int | None:
        """The budget as a number; None where it is none."""
        return self.budget if isinstance(self.budget, int) else None

    @abstractmethod
    def score(self, layer: PromptLayer) -> Tensor:
        """Rate the prefix: (B, num_kv_heads or Hq, T - window_size) float32, higher first."""

    def summed_weights(self, layer: PromptLayer) -> int:
        """How many attention weights a score is the sum of; 1 where it is none, or their mean."""
        del layer
        return 1

    def select(self, layer: PromptLayer) -> Selection | None:
        """Keep the sinks, the best of the prefix and the window, or everything where it fits."""
        self.require_room(layer)
        if self.fits(layer):
            return None
        return self._best_and_window(layer, self.kept_prefix_tokens(layer))

    def fits(self, layer: PromptLayer) -> bool:
        """Whether nothing of the prompt has to be dropped, pads that all rows share included."""
        if (prefix_tokens := layer.keys.shape[2] - self.window_size) <= 0:
            return True
        kept = self.kept_prefix_tokens(layer)
        return prefix_tokens <= max(kept) and kept == self.prefix_lengths(layer)

    def require_cap(self, cap_tokens: int) -> None:
        """Raise unless the cap has room for the budget."""
        if not self.rates_what_is_held or self.most_tokens is None:
            super().require_cap(cap_tokens)
            return
        if cap_tokens < self.most_tokens:
            raise InvalidArgumentError(
                f"cap_tokens: expected at least {self.most_tokens}, what a layer may keep in the "
                f"end with {self!r}, got {cap_tokens}; raise cap_tokens or lower the budget"
            )

    def select_under_cap(self, layer: PromptLayer, cap_tokens: int) -> Selection:
        """Keep the last tokens, the sinks and the best, the same number in every layer."""
        prefix = [cap_tokens - self.window_size] * layer.keys.shape[0]
        self._require_room(layer, prefix)
        return self._best_and_window(layer, prefix)

    def require_protection(self, spans: Spans) -> None:
        """Raise where no prompt that is compressed leaves them room, or a subclass chooses."""
        if type(self).select is not PrefixPolicy.select:
            super().require_protection(spans)
        tokens = self.budget.most if isinstance(self.budget, AutoBudget) else self._budget_tokens
        if tokens is not None:
            room = tokens - self.window_size
            if spans.among_first(room + 1) > room:
                self._refuse(spans.tokens, room)

    def require_fairness(self, segments: Segments) -> None:
        """Raise where a subclass chooses by itself."""
        if type(self).select is not PrefixPolicy.select:
            super().require_fairness(segments)

    def require_room(self, layer: PromptLayer) -> None:
        """Raise unless what must stay of the prefix fits, the sinks among it."""
        self._require_room(layer, self.least_prefix_tokens(layer))

    def _require_room(self, layer: PromptLayer, prefix_tokens: list[int]) -> None:
        must_stay = None if layer.depth else self.must_stay(layer)
        if must_stay is None:
            return
        counts = must_stay.sum(dim=-1).amax(dim=-1).tolist()
        for tokens, room in zip(counts, prefix_tokens, strict=True):
            if tokens > room:
                self._refuse(tokens, room)

    def _refuse(self, tokens: int, room: int) -> None:
        sinks = f", its {self.sink_tokens} sinks included" if self.sink_tokens else ""
        require_room(self.name, tokens, room, f"before its window of {self.window_size}{sinks}")

    def must_stay(self, layer: PromptLayer) -> Tensor | None:
        """Positions of the prefix that every head keeps whatever their scores.

        Returns:
            (B, 1 or H, P) bool; None where there are none but sinks at most, and no segments.
        """
        if layer.protected is None and not (layer.fair is not None and self.sink_tokens):
            return None
        slots = max(0, layer.keys.shape[2] - self.window_size)
        first = layer.is_among_first(self.sink_tokens, slots) & ~layer.is_among_first(0, slots)
        if layer.protected is None:
            return first.expand(layer.keys.shape[0], -1, -1)
        return first | layer.protected[..., :slots]

    def _best_and_window(self, layer: PromptLayer, keep_tokens: list[int]) -> Selection:
        """The sinks and the best of the prefix, so many in every row, and the window."""
        prompt_tokens = layer.keys.shape[2]
        prefix_tokens = prompt_tokens - self.window_size
        best = self._best(layer, keep_tokens)
        window = torch.arange(prefix_tokens, prompt_tokens, device=best.device)
        keep_indices = torch.cat([best, window.expand(*best.shape[:2], -1)], dim=-1)
        if layer.pad_tokens is None and min(keep_tokens) == max(keep_tokens):
            return Selection(keep_indices=keep_indices, prompt_tokens=prompt_tokens)
        prefix = torch.tensor(keep_tokens, device=best.device)
        kept_tokens = prefix + layer.row_tokens.clamp(max=self.window_size)
        return Selection(
            keep_indices=keep_indices,
            prompt_tokens=prompt_tokens,
            filler_tokens=keep_indices.shape[-1] - kept_tokens,
        )

    def _best(self, layer: PromptLayer, keep_tokens: list[int]) -> Tensor:
        """The sinks and the best of the prefix, or of every segment that shares the budget."""
        scores, must_stay = self.score(layer), self.must_stay(layer)
        if layer.fair is not None:
            lengths = self.prefix_lengths(layer)
            return keep_fair(scores, keep_tokens, lengths, layer.fair, must_stay)
        return ops.keep_best(
            scores,
            keep_tokens,
            layer.pad_tokens,
            first_tokens=self.sink_tokens,
            protected=must_stay,
        )

    def least_prefix_tokens(self, layer: PromptLayer) -> list[int]:
        """B numbers: what a row can keep of its prefix in the layer that keeps least."""
        if isinstance(self.budget, AutoBudget):  # which counts what must stay
            prefixes = self.prefix_lengths(layer)
            return self._within(self.budget, prefixes, prefixes)
        return self.kept_prefix_tokens(layer)

    def kept_prefix_tokens(self, layer: PromptLayer) -> list[int]:
        """B numbers: positions each row keeps of its own prefix."""
        prefixes = self.prefix_lengths(layer)
        if self.keep_ratio is not None:
            return [math.floor(self.keep_ratio * tokens) for tokens in prefixes]
        if isinstance(self.budget, AutoBudget):
            voted = self.budget.voted(self.rated(layer)).amax(dim=-1).tolist()
            return self._within(self.budget, voted, prefixes)
        assert isinstance(self.budget, int)
        return [min(tokens, self.budget - self.window_size) for tokens in prefixes]

    def mean_prefix_tokens(self, layer: PromptLayer) -> list[int]:
        """B numbers: as `kept_prefix_tokens`, on average over heads that need not keep the same."""
        if not isinstance(self.budget, AutoBudget):
            return self.kept_prefix_tokens(layer)
        voted = self.budget.voted(self.rated(layer)).float().mean(dim=-1).ceil().int().tolist()
        return self._within(self.budget, voted, self.prefix_lengths(layer))

    def _within(self, auto: AutoBudget, voted: list[int], prefixes: list[int]) -> list[int]:
        return [
            auto.within(positions, tokens, self.window_size)
            for positions, tokens in zip(voted, prefixes, strict=True)
        ]

    def rated(self, layer: PromptLayer) -> Tensor:
        """(B, H, P) float32: scores per attention weight that they are the sum of.

        Votes are shares of the window's attention then. What must stay is inf, pads are -inf.
        """
        rated, must_stay = self.score(layer) / self.summed_weights(layer), self.must_stay(layer)
        slots = rated.shape[-1]
        if must_stay is not None:
            heads = rated.shape[1] // must_stay.shape[1]
            rated = rated.masked_fill(must_stay.repeat_interleave(heads, dim=1), math.inf)
        rated = rated.masked_fill(layer.is_among_first(self.sink_tokens, slots), math.inf)
        return rated.masked_fill(layer.is_among_first(0, slots), -math.inf)

    def prefix_lengths(self, layer: PromptLayer) -> list[int]:
        """B numbers: tokens of each row before the window, pads left out."""
        return [max(0, tokens - self.window_size) for tokens in layer.row_lengths]
