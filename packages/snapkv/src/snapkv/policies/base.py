"""What a policy is: tensors of one layer in, positions to keep out. It holds no request state."""

import sys
from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NoReturn, Self

from torch import Tensor

from snapkv.errors import InvalidArgumentError, InvalidTypeError
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
"""Parts of the model's layers, the ids of all tokens, what `Policy.with_tokenizer` gives, that
`snapkv.kvzip` has the model repeat the prompt, the scores of all layers before one knows what it
keeps, or the queries of all that is chosen from."""

ALL_QUERIES = sys.maxsize
"""`Policy.query_tokens` of a method that scores with every query of the prompt."""


@dataclass(frozen=True)
class Policy(metaclass=WithParameters):
    """Decides what a layer keeps when the prompt has been read.

    Attributes:
        per_head_budget: whether heads of a row may keep different numbers of tokens.
    """

    name: ClassVar[str]
    per_head_budget: ClassVar[bool] = False

    def __call__(self, model: Any) -> NoReturn:
        """Refuse kvpress's idiom, in which a press is entered around a model."""
        raise InvalidTypeError(
            f"policy: expected to be given to a cache, CompressedCache(model, {self!r}), got a "
            f"call with a {type(model).__name__}, as of a press; see docs/migrating.md"
        )

    @property
    @abstractmethod
    def query_tokens(self) -> int:
        """How many of the prompt's last queries `select` wants to see."""

    @property
    def needs(self) -> frozenset[Need]:
        """What the method cannot work without."""
        return frozenset()

    @property
    def needs_reconstruction_pass(self) -> bool:
        """Whether `snapkv.kvzip.read_context` has to read the prompt, before any question."""
        return "reconstruction_pass" in self.needs

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
    def per_query_head(self) -> bool:
        """Whether query heads of one KV head may keep sets of their own."""
        return False

    @abstractmethod
    def select(self, layer: PromptLayer) -> Selection | None:
        """Choose the positions to keep; None keeps everything, untouched."""

    @property
    def promised_window(self) -> int:
        """How many of a prompt's last tokens `select` keeps in every head; 0 if it may drop any."""
        return 0

    @property
    def chooses_of_stacks(self) -> bool:
        """Whether it does of several layers at once, stacked as rows: see `PromptLayer.stack`."""
        return False

    @property
    def chooses_from_a_part(self) -> bool:
        """Whether it can where tokens between those of the prompt have been dropped before."""
        return False

    def require_protection(self, spans: Spans) -> None:
        """Raise unless the method keeps what `LayerStates.protected` says, and can have room."""
        del spans
        raise InvalidArgumentError(
            f"protect: expected a method that keeps protected tokens whatever their scores, such "
            f"as SnapKV(budget=1024), got {self!r}; use one of them, or leave protect out"
        )

    def require_room(self, layer: PromptLayer) -> None:
        """Raise in the first layer if one has no room for what is protected; by sizes alone."""
        del layer

    def votes_at_stake(self, layer: PromptLayer) -> VotesAtStake | None:
        """What the window voted for, which `select` may drop; None for methods without votes."""
        del layer
        return None

    def describe(self) -> dict[str, Any]:
        """The method's name and parameters, ready for JSON; a wrapped method's inside its own."""
        return self._told("describe")

    def as_saved(self) -> dict[str, Any]:
        """As `describe`, with all that a file needs to make the method again."""
        return self._told("as_saved")

    def _told(self, how: str) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        told = {
            name: getattr(value, how, None) or getattr(value, "describe", None)
            for name, value in values.items()
        }
        return {"name": self.name} | {
            name: values[name] if tell is None else tell() for name, tell in told.items()
        }


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
