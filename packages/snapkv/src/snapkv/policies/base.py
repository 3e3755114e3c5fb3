"""The interface of a policy, which gets the tensors of one layer and returns positions to keep.

A policy holds no state of a request.
"""

import sys
from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NoReturn, Self

from torch import Tensor

from snapkv.errors import InvalidTypeError, wrong
from snapkv.parameters import WithParameters
from snapkv.policies.spans import Spans, require_room
from snapkv.policies.states import DecodeStep, Eviction, PromptLayer, Selection, VotesAtStake

Need = Literal[
    "rotation",
    "output_weight",
    "token_ids",
    "tokenizer",
    "reconstruction_pass",
    "all_layers",
    "queries",
]
"""What a method may need beside keys, values and its last queries.

"rotation" and "output_weight" are parts of the model's layers, "token_ids" the ids of all tokens.
"tokenizer" means that `Policy.with_tokenizer` must be called first, "reconstruction_pass" that
`snapkv.kvzip` lets the model repeat the prompt, "all_layers" that no layer is selected before all
are scored, and "queries" that the queries of every token to select from are needed.
"""

ALL_QUERIES = sys.maxsize
"""The `Policy.query_tokens` of a method that scores with every query of the prompt."""


@dataclass(frozen=True)
class Policy(metaclass=WithParameters):
    """Decides what a layer keeps once the prompt has been read.

    Attributes:
        per_head_budget: whether heads of a row may keep different numbers of tokens.
    """

    name: ClassVar[str]
    per_head_budget: ClassVar[bool] = False

    def __call__(self, model: Any) -> NoReturn:
        """Raise, because a policy is given to a cache and not called with a model as in kvpress.

        Raises:
            InvalidTypeError: always.
        """
        remedy = f"Write CompressedCache(model, {self!r}), see docs/migrating.md"
        problem = f"a policy is no press to call with a {type(model).__name__}"
        raise wrong("policy", problem, remedy, InvalidTypeError)

    @property
    @abstractmethod
    def query_tokens(self) -> int:
        """How many of the prompt's last queries `select` needs."""

    @property
    def needs(self) -> frozenset[Need]:
        """What the method needs beside the layer's keys and values."""
        return frozenset()

    @property
    def needs_reconstruction_pass(self) -> bool:
        """Whether the prompt must be read with `snapkv.kvzip.read_context`, before any question."""
        return "reconstruction_pass" in self.needs

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """Return the method with token ids of `tokenizer`; itself if it looks at no tokens."""
        del tokenizer
        return self

    @property
    def most_tokens(self) -> int | None:
        """The largest number of prompt tokens that a layer and head keeps, or None.

        None if there is no limit, or if heads of a row keep different numbers of tokens.
        """
        return None

    @property
    def per_query_head(self) -> bool:
        """Whether the query heads of one KV head may each keep their own positions."""
        return False

    @abstractmethod
    def select(self, layer: PromptLayer) -> Selection | None:
        """Select the positions of the prompt to keep.

        Returns:
            The selection, or None to keep everything unchanged.
        """

    @property
    def promised_window(self) -> int:
        """How many of the prompt's last tokens `select` keeps in every head; 0 if none."""
        return 0

    @property
    def can_select_stacked(self) -> bool:
        """Whether `select` accepts several layers stacked as rows, see `PromptLayer.stack`."""
        return False

    @property
    def can_select_after_drops(self) -> bool:
        """Whether `select` is right if tokens inside the prompt have been dropped before."""
        return False

    def require_protection(self, spans: Spans) -> None:
        """Raise unless the method keeps `LayerStates.protected` and its budget can hold `spans`.

        Raises:
            InvalidArgumentError: the method cannot protect tokens, or `spans` cannot fit.
        """
        del spans
        problem = f"{self!r} cannot keep tokens regardless of their scores"
        raise wrong("protect", problem, "Use SnapKV(budget=1024), or leave protect out")

    def require_room(self, layer: PromptLayer) -> None:
        """Raise in the first layer if some layer cannot hold all protected tokens.

        This looks at sizes only, before any score is computed. The default accepts everything.

        Raises:
            InvalidArgumentError: the tokens that must be kept do not fit.
        """
        del layer

    def votes_at_stake(self, layer: PromptLayer) -> VotesAtStake | None:
        """Return the votes of the window that `select` may drop; None for methods without votes."""
        del layer
        return None

    def describe(self) -> dict[str, Any]:
        """Return the method's name and parameters as JSON, including those of a wrapped method."""
        return self._describe_with("describe")

    def as_saved(self) -> dict[str, Any]:
        """Return `describe` with everything that a file needs to build the method again."""
        return self._describe_with("as_saved")

    def _describe_with(self, how: str) -> dict[str, Any]:
        """Return the name and parameters, calling the method `how` of parameters that have it."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        describers = {
            name: getattr(value, how, None) or getattr(value, "describe", None)
            for name, value in values.items()
        }
        return {"name": self.name} | {
            name: values[name] if describe is None else describe()
            for name, describe in describers.items()
        }


class EvictingPolicy(Policy):
    """A policy that also evicts during decoding, so that the cache never outgrows its budget.

    Its scores of the slots move with them: `Selection.scores` at the end of the prompt,
    `DecodeStep.scores` and `Eviction.scores` from step to step. Its notes on the heads stay the
    same: `Selection.head_notes`, `DecodeStep.head_notes`.
    """

    @property
    @abstractmethod
    def max_decode_tokens(self) -> int | None:
        """How many tokens a layer may hold during decoding; None if heads differ in it."""

    @property
    def history_tokens(self) -> int:
        """How many of the last queries `evict` needs; 0 for those of its step only.

        The layer keeps these queries: (B, Hq, history, D) beside its keys and values.
        """
        return 0

    def note(self, layer: PromptLayer) -> Tensor | None:
        """Return initial scores of every prompt token.

        Returns:
            (B, H, T) float32, or None if not needed.
        """
        return None

    @abstractmethod
    def select(self, layer: PromptLayer) -> Selection:
        """Select the positions of the prompt to keep, even if all of them fit."""

    @abstractmethod
    def evict(self, step: DecodeStep) -> Eviction:
        """Select the slots to keep after a decode step, whose tokens are already stored."""

    def _require_whole_spans(self, spans: Spans, room: int, beside: str) -> None:
        """Raise unless `room` holds `spans` in full, because later tokens may also lie in them.

        Args:
            spans: the positions to protect.
            room: how many protected tokens fit.
            beside: what else needs room, for the message.

        Raises:
            InvalidArgumentError: `spans` has more tokens than `room`.
        """
        require_room(self.name, spans.tokens, room, f"{beside}, as long as it generates")
