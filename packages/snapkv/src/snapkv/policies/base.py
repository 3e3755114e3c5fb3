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
from snapkv.policies.spans import Spans, require_fit
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
    """The base class of all methods that decide which tokens of the prompt a layer keeps.

    Attributes:
        name: the method's name on the command line and in `snapkv.policies.POLICIES`.
        per_head_budget: whether heads of a row may keep different numbers of tokens.
    """

    name: ClassVar[str]
    per_head_budget: ClassVar[bool] = False

    def __call__(self, model: Any) -> NoReturn:
        """Raise an error, because policies are not called with a model, unlike those of kvpress.

        Raises:
            InvalidTypeError: always.
        """
        remedy = f"Use CompressedCache(model, {self!r}) instead, and see docs/migrating.md"
        problem = f"a policy cannot be called with a model, but got a {type(model).__name__}"
        raise wrong("policy", problem, remedy, InvalidTypeError)

    @property
    @abstractmethod
    def query_tokens(self) -> int:
        """The number of queries that `select` needs, counted from the end of the prompt.

        It is `ALL_QUERIES` for a method that needs all of them, and 0 for one that needs none.
        """

    @property
    def needs(self) -> frozenset[Need]:
        """The names of all inputs that `select` needs beside keys, values and the last queries.

        The set is empty by default.
        """
        return frozenset()

    @property
    def needs_reconstruction_pass(self) -> bool:
        """Whether the model must read the prompt a second time before any question.

        If so, `snapkv.kvzip.read_context` must read the prompt; a plain forward pass is refused.
        """
        return "reconstruction_pass" in self.needs

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """Return a copy of the policy that knows the token ids of `tokenizer`.

        By default, for a policy that does not look at token ids, this is the policy itself.
        """
        del tokenizer
        return self

    @property
    def most_tokens(self) -> int | None:
        """The largest number of prompt tokens that a head of a layer can keep, window included.

        It is None if there is no limit, or if heads of a row keep different numbers of tokens. The
        default is None.
        """
        return None

    @property
    def per_query_head(self) -> bool:
        """Whether the query heads that share a KV head can each keep their own positions.

        The cache then stores keys and values once per query head. The default is False.
        """
        return False

    @abstractmethod
    def select(self, layer: PromptLayer) -> Selection | None:
        """Select the positions of the prompt to keep.

        Args:
            layer: the tensors of one layer, or of several layers as rows if `can_select_stacked` is
                True. They must not be changed.

        Returns:
            The selection, or None to keep everything unchanged.
        """

    @property
    def promised_window(self) -> int:
        """The number of tokens at the end of the prompt that every head keeps; 0 by default.

        A selection of a user's own policy that lacks some of these tokens is refused.
        """
        return 0

    @property
    def can_select_stacked(self) -> bool:
        """Whether `select` can handle several layers at once, which are stacked as rows.

        See `PromptLayer.stack`. The default is False.
        """
        return False

    @property
    def can_select_after_drops(self) -> bool:
        """Whether `select` still works after tokens inside the prompt have been dropped.

        The default is False.
        """
        return False

    def require_protection(self, spans: Spans) -> None:
        """Check that the method can protect the tokens in `spans`.

        A method that can do so must keep `LayerStates.protected`, and its budget must be large
        enough. The default always raises.

        Raises:
            InvalidArgumentError: the method cannot protect tokens, or `spans` cannot fit.
        """
        del spans
        problem = f"the policy {self!r} cannot protect tokens from eviction"
        raise wrong("protect", problem, "Use SnapKV(budget=1024), or remove the argument protect")

    def require_fit(self, layer: PromptLayer) -> None:
        """Check that every layer can hold all protected tokens of a prompt.

        It looks at sizes before any score is computed. The default accepts everything.

        Args:
            layer: a layer at the end of the prompt; one call is enough for all layers.

        Raises:
            InvalidArgumentError: the tokens that must be kept do not fit.
        """
        del layer

    def votes_at_stake(self, layer: PromptLayer) -> VotesAtStake | None:
        """Return the votes of the window on the positions before it.

        Returns:
            The votes, or None if the method does not vote, as by default.
        """
        del layer
        return None

    def describe(self) -> dict[str, Any]:
        """Return the name and the parameters of the method as JSON values.

        A wrapped method or a budget is described by a dictionary of its own. Large parameters may
        be shortened, so the result need not be enough to create the method again; see `as_saved`.

        Returns:
            A new dictionary: "name", and each parameter by its name.
        """
        return self._describe_with("describe")

    def as_saved(self) -> dict[str, Any]:
        """Return everything that a file needs to create the method again, as JSON values.

        The dictionary has the form of that of `describe`, but no parameter is shortened.
        """
        return self._describe_with("as_saved")

    def _describe_with(self, how: str) -> dict[str, Any]:
        """Return the name and the parameters of the method.

        Args:
            how: the name of the method to call on parameters that have it, such as "as_saved". Of
                other parameters `describe` is called if they have it; the rest is returned as it
                is.
        """
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
    """A policy that also evicts tokens during decoding, so that the cache never exceeds its budget.

    It can keep numbers between the steps, in the layer and not in itself. The scores of the slots
    are returned as `Selection.scores` at the end of the prompt and as `Eviction.scores` after each
    step; the next step gets those of the kept slots as `DecodeStep.scores`. Numbers of the heads
    are returned once, as `Selection.head_notes`, and every step gets them as
    `DecodeStep.head_notes`.
    """

    @property
    @abstractmethod
    def max_decode_tokens(self) -> int | None:
        """The largest number of tokens that a layer can hold during decoding.

        If layers have different budgets, it is the smallest of these numbers. None if heads may
        hold different numbers.
        """

    @property
    def history_tokens(self) -> int:
        """The number of previous queries that `evict` needs; 0 if it only needs those of its step.

        The layer stores these queries, (B, Hq, history, D), beside its keys and values. 0 by
        default.
        """
        return 0

    def note(self, layer: PromptLayer) -> Tensor | None:
        """Return the scores that the tokens of the prompt have when decoding begins.

        `PromptThenDecode` calls this in place of `select`, because another method selects.

        Args:
            layer: the layer at the end of the prompt, before any token is evicted.

        Returns:
            (B, H, T) float32; None if the method needs no scores, as by default.
        """
        return None

    @abstractmethod
    def select(self, layer: PromptLayer) -> Selection:
        """Select the positions of the prompt to keep; unlike other policies, never return None."""

    @abstractmethod
    def evict(self, step: DecodeStep) -> Eviction:
        """Select the slots to keep after a decode step.

        The new tokens of the step are already stored and can be dropped, too.

        Args:
            step: the layer after the step. Its tensors belong to the cache and must not be changed.

        Returns:
            The slots to keep and their new scores. Its `keep_indices` are None to keep every slot.
        """

    def _require_all_spans(self, spans: Spans, room: int, beside: str) -> None:
        """Check that all tokens in `spans` fit, even those that are yet to be generated.

        Args:
            spans: the positions to protect.
            room: how many protected tokens fit.
            beside: what else needs room, for the message.

        Raises:
            InvalidArgumentError: `spans` has more tokens than `room`.
        """
        require_fit(self.name, spans.tokens, room, f"{beside}, as long as it generates")
