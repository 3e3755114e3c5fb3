"""A table of the options, methods and models that do not work together in one cache.

Each rule contains a condition and the error that a user gets. Rules for the options of a cache are
checked when it is made; rules for a later call are checked before the call changes anything.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Literal, get_args

from snapkv.errors import InvalidArgumentError, SnapKVError, UnsupportedModelError, wrong
from snapkv.hf.model_parts import States
from snapkv.policies import EvictingPolicy, Policy
from snapkv.policies.default import method_name
from snapkv.policies.spans import Spans
from snapkv.storage.bits import KVCodes, Quantize
from snapkv.storage.offload import OffloadPool, Recall, pool_for
from snapkv.validation import DEFAULT, require_choice

Turns = Literal["append", "compress", "recall"]
"""How a later prompt is handled. "append": store all of it. "compress": let its last queries vote
on the stored tokens, and compress them again. "recall": restore every evicted token first, and
compress everything again."""

Use = Literal["made", "drop", "drafts"]
"""When a rule is checked: when a cache is made, drops spans, or verifies drafts."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The options of a cache and the facts about its policy and model that the rules check.

    Attributes:
        policy: the policy of the cache.
        model: the name of the model's class.
        other_layers: the names of those of its layer classes that are not full attention.
        shares_latent: whether its attention stores one latent for all heads.
        states: how the model handles its recurrent states.
        quantize: the option of `CompressedCache`.
        turns: the option of `CompressedCache`, None if it was left out.
        recall: the option of `CompressedCache`, None if it was left out.
        recall_bytes: the option of `CompressedCache`.
        protect: the spans of positions that must be kept; None for none.
    """

    policy: Policy
    model: str
    other_layers: tuple[str, ...]
    shares_latent: bool
    states: States
    quantize: Quantize | None
    turns: Turns | None
    recall: Recall | None
    recall_bytes: int | None
    protect: Spans | None

    def require_known_options(self) -> None:
        """Raise if an option has an unknown value, before rules compare it with other options.

        Raises:
            InvalidArgumentError: `turns` or `quantize` has an unknown value.
            InvalidTypeError: `quantize` has the wrong type.
        """
        if self.turns is not None:
            require_choice("turns", self.turns, get_args(Turns))
        _ = self.codes

    def require(self, use: Use) -> None:
        """Raise the error of the first rule for `use` whose condition holds.

        Raises:
            InvalidArgumentError: the options and the policy do not work together.
            UnsupportedModelError: the model does not allow an option.
        """
        for rule in RULES:
            if rule.use == use and rule.meets(self):
                raise wrong(rule.argument, rule.problem.format(s=self), rule.remedy, rule.error)

    # Options with their defaults.

    @property
    def options(self) -> dict[str, Any]:
        """The options of `CompressedCache` as a dict that JSON can represent."""
        bits = asdict(self.quantize) if is_dataclass(self.quantize) else self.quantize
        spans = None if self.protect is None else [list(span) for span in self.protect.parts]
        return {
            "quantize": bits,
            "turns": self.turn_mode,
            "recall": self.recalled_from,
            "recall_bytes": self.recall_bytes,
            "protect": spans,
        }

    @property
    def codes(self) -> KVCodes | None:
        """The quantized form of the kept tokens, or None if they are not quantized.

        Raises:
            InvalidArgumentError: `quantize` has an unknown value.
            InvalidTypeError: `quantize` has an unknown parameter.
        """
        return None if self.quantize is None else KVCodes.of(self.quantize)

    @property
    def turn_mode(self) -> Turns:
        """How a later prompt is handled, by default "recall" with the option `recall`."""
        return self.turns or ("append" if self.recall is None else "recall")

    @property
    def recalls(self) -> bool:
        """Whether every evicted token is restored when a later prompt is read."""
        return self.turn_mode == "recall"

    @property
    def chooses_again(self) -> bool:
        """Whether the cache is compressed to its budget again after every later prompt."""
        return self.turn_mode != "append"

    @property
    def pool(self) -> OffloadPool | None:
        """A new pool of memory for evicted keys and values, or None if these are deleted.

        Raises:
            InvalidArgumentError: the folder cannot be used, or the limit is below 1.
            InvalidTypeError: `recall` or `recall_bytes` has the wrong type.
        """
        where = self.recalled_from
        return None if where is None else pool_for(where, self.recall_bytes)

    @property
    def recalled_from(self) -> Recall | None:
        """Where evicted keys and values are offloaded to; None if they are deleted."""
        return "host" if self.recalls and self.recall is None else self.recall

    # Facts about the policy.

    @property
    def evicts(self) -> bool:
        """Whether the policy evicts tokens while the model generates."""
        return isinstance(self.policy, EvictingPolicy)

    @property
    def has_uniform_budget(self) -> bool:
        """Whether all heads and layers keep the same number of tokens."""
        most = self.policy.most_tokens
        return most is not None and most == getattr(self.policy, "budget", None)

    @property
    def method(self) -> str:
        """The name and the parameters of the policy for an error message."""
        is_default = method_name(self.policy.describe()) == DEFAULT
        return f"the default, {self.policy!r}" if is_default else repr(self.policy)

    @property
    def turns_option(self) -> str:
        """The option that makes later prompts compress the cache again, for an error message."""
        return "recall" if self.recalls else "turns='compress'"

    @property
    def other_names(self) -> str:
        """The names of `other_layers` in one line of text."""
        return ", ".join(self.other_layers)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A condition under which a cache cannot work, and the error for it.

    Attributes:
        meets: returns whether the condition holds for a setup.
        argument: the argument that the message names.
        problem: what is wrong; a format string in which `s` is the setup.
        remedy: what the user can do.
        use: when the rule is checked.
        error: the class of the error.
    """

    meets: Callable[[Setup], bool]
    argument: str
    problem: str
    remedy: str
    use: Use = "made"
    error: type[SnapKVError] = InvalidArgumentError


RULES = (
    Rule(
        meets=lambda s: s.recall is not None and not s.recalls,
        argument="turns",
        problem="this argument must be 'recall' if the argument recall is used, but got "
        "{s.turns!r}",
        remedy="Remove one of the two arguments, turns or recall",
    ),
    Rule(
        meets=lambda s: s.recall_bytes is not None and not s.recalls,
        argument="recall_bytes",
        problem="this argument can only be used together with recall='host' or a folder, but got "
        "only {s.recall_bytes}",
        remedy="Set recall as well, or remove recall_bytes",
    ),
    Rule(
        meets=lambda s: "tokenizer" in s.policy.needs,
        argument="policy",
        problem="the policy {s.policy!r} needs to know which tokens are special tokens and "
        "punctuation",
        remedy="Use policy.with_tokenizer(tokenizer) as the policy",
    ),
    Rule(
        meets=lambda s: s.quantize is not None and s.evicts,
        argument="quantize",
        problem="this option can only be used with a policy that only compresses prompts, but got "
        "{s.policy.name}",
        remedy="Remove quantize, or use SnapKV as the policy",
    ),
    Rule(
        meets=lambda s: s.quantize is not None and s.shares_latent,
        argument="quantize",
        problem="the heads of {s.model} share one latent (latent attention), which cannot be "
        "quantized",
        remedy="Remove the argument quantize for this model",
        error=UnsupportedModelError,
    ),
    Rule(
        meets=lambda s: s.policy.per_query_head and s.shares_latent,
        argument="group_reduce",
        problem="expected 'mean' for latent attention, because all heads of {s.model} share the "
        "stored tokens, but got {s.policy!r}",
        remedy="Remove group_reduce for this model",
        error=UnsupportedModelError,
    ),
    Rule(
        meets=lambda s: s.chooses_again and s.evicts,
        argument="policy",
        problem="{s.turns_option} can only be used with a policy that only compresses prompts, "
        "but got {s.policy.name}, which evicts after every token",
        remedy="Use SnapKV as the policy, or remove this option",
    ),
    Rule(
        meets=lambda s: s.chooses_again and s.policy.needs_reconstruction_pass,
        argument="policy",
        problem="with {s.turns_option}, later turns are read once, but {s.policy.name} has to read "
        "each prompt a second time",
        remedy="Use SnapKV as the policy, or remove this option",
    ),
    Rule(
        meets=lambda s: s.chooses_again and "queries" in s.policy.needs,
        argument="policy",
        problem="with {s.turns_option}, the queries of earlier turns are not stored, but "
        "{s.policy.name} needs these queries",
        remedy="Use SnapKV, KeyDiff or LagKV, which do not need the queries of earlier turns",
    ),
    Rule(
        meets=lambda s: (
            s.turn_mode == "compress" and (not s.has_uniform_budget or "rotation" in s.policy.needs)
        ),
        argument="policy",
        problem="turns='compress' without recall needs a policy with the same budget for all "
        "heads and layers that does not need positions, but got {s.method}",
        remedy="Use policy=SnapKV(budget=...), or set recall='host' instead of turns, which also "
        "works with budgets that heads and layers share",
    ),
    Rule(
        use="drop",
        meets=lambda s: s.evicts,
        argument="policy",
        problem="spans can only be dropped with a policy that only compresses prompts, but got "
        "{s.policy.name}, which counts how many tokens it has evicted",
        remedy="Use SnapKV as the policy, or do not drop spans",
    ),
    Rule(
        use="drop",
        meets=lambda s: bool(s.policy.needs & {"rotation", "queries"}),
        argument="policy",
        problem="spans can only be dropped with a policy that does not need positions, but got "
        "{s.policy.name}, which needs them",
        remedy="Use SnapKV, KeyDiff or LagKV instead",
    ),
    Rule(
        use="drafts",
        meets=lambda s: s.states is not States.NONE,
        argument="model",
        problem="rejected drafts cannot be removed from the recurrent states of {s.model}",
        remedy="Generate without drafts",
        error=UnsupportedModelError,
    ),
    Rule(
        use="drafts",
        meets=lambda s: s.evicts,  # drafts would see tokens that are evicted by then
        argument="policy",
        problem="drafts (of Medusa, an assistant model or prompt lookup) only work with a policy "
        "that only compresses the prompt, but got {s.policy.name}, which evicts after every token",
        remedy="Use SnapKV as the policy, or generate without drafts",
    ),
)
