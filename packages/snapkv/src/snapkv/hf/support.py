"""What goes with what: every option, method and model that do not meet in one cache are a row here.

A row says which facts meet, and the line a user gets: argument, expected, got, remedy. What a cache
is made with is judged when it is made; what it is asked for later, before anything changes.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Literal, get_args

from snapkv.cache.layer import Turns
from snapkv.errors import InvalidArgumentError, SnapKVError, UnsupportedModelError
from snapkv.hf.model_parts import States
from snapkv.policies import EvictingPolicy, Policy
from snapkv.policies.default import method_name
from snapkv.policies.spans import Spans
from snapkv.storage.bits import KVCodes, Quantize
from snapkv.storage.offload import OffloadPool, Recall, pool_for
from snapkv.validation import DEFAULT, require_choice

Use = Literal["made", "drop", "drafts"]
"""What a cache is asked for: to be made so, to drop spans, or to verify drafts."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The options of a cache, its method and its model: all that rows of the table ask.

    Attributes:
        model: name of the model's class.
        other_layers: names of the kinds of its layers that are not of full attention.
        shares_latent: whether its attention stores one latent for all heads.
        states: what becomes of the recurrent states of its layers.
        protect: what must stay; None for nothing.
        others: as `CompressedCache` has them.
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

    def require_words(self) -> None:
        """Refuse an option that is none, whatever it would go with."""
        if self.turns is not None:
            require_choice("turns", self.turns, get_args(Turns))
        _ = self.codes

    def require(self, use: Use) -> None:
        """Raise the line of the first row whose facts meet here."""
        for rule in RULES:
            if rule.use == use and rule.meets(self):
                raise rule.error(rule.line.format(s=self))

    # What the options come to.

    @property
    def options(self) -> dict[str, Any]:
        """As `CompressedCache` has them, ready for JSON."""
        bits = asdict(self.quantize) if is_dataclass(self.quantize) else self.quantize
        spans = None if self.protect is None else [list(span) for span in self.protect.parts]
        return {
            "quantize": bits,
            "turns": self.going_on,
            "recall": self.recalled_from,
            "recall_bytes": self.recall_bytes,
            "protect": spans,
        }

    @property
    def codes(self) -> KVCodes | None:
        return None if self.quantize is None else KVCodes.of(self.quantize)

    @property
    def going_on(self) -> Turns:
        """What becomes of a later prompt, where the user has only said where to recall from."""
        return self.turns or ("append" if self.recall is None else "recall")

    @property
    def recalls(self) -> bool:
        return self.going_on == "recall"

    @property
    def chooses_again(self) -> bool:
        """Whether every later prompt brings the cache back to its budget."""
        return self.going_on != "append"

    @property
    def pool(self) -> OffloadPool | None:
        """Made anew: where evicted keys and values go."""
        where = self.recalled_from
        return None if where is None else pool_for(where, self.recall_bytes)

    @property
    def recalled_from(self) -> Recall | None:
        """Where evicted keys and values go; None where they are dropped."""
        return "host" if self.recalls and self.recall is None else self.recall

    # Facts on the method.

    @property
    def evicts(self) -> bool:
        return isinstance(self.policy, EvictingPolicy)

    @property
    def keeps_alike(self) -> bool:
        """Whether all heads and layers keep the same number of tokens."""
        most = self.policy.most_tokens
        return most is not None and most == getattr(self.policy, "budget", None)

    @property
    def method(self) -> str:
        """The method as made, and whether it is what somebody gets who chooses none."""
        is_default = method_name(self.policy.describe()) == DEFAULT
        return f"the default, {self.policy!r}" if is_default else repr(self.policy)

    @property
    def turns_asked(self) -> str:
        """The option by which later prompts choose, as a user wrote it."""
        return "recall" if self.recalls else "turns='compress'"

    @property
    def other_names(self) -> str:
        return ", ".join(self.other_layers)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Facts that do not go together: whether they meet in a setup `s`, and the line about it."""

    meets: Callable[[Setup], bool]
    line: str
    use: Use = "made"
    error: type[SnapKVError] = InvalidArgumentError


RULES = (
    Rule(
        meets=lambda s: s.recall is not None and not s.recalls,
        line="turns: expected 'recall' with a place to recall from, got {s.turns!r}; leave turns "
        "out, or recall",
    ),
    Rule(
        meets=lambda s: s.recall_bytes is not None and not s.recalls,
        line="recall_bytes: expected recall='host' or a folder with it, got {s.recall_bytes} "
        "without; pass recall, or leave recall_bytes out",
    ),
    Rule(
        meets=lambda s: "tokenizer" in s.policy.needs,
        line="policy: expected a method that knows the tokenizer's special tokens and punctuation,"
        " got {s.policy!r} without; pass policy.with_tokenizer(tokenizer)",
    ),
    Rule(
        meets=lambda s: s.quantize is not None and s.evicts,
        line="quantize: expected a policy that only compresses prompts, got {s.policy.name}; leave"
        " quantize out",
    ),
    Rule(
        meets=lambda s: s.quantize is not None and s.shares_latent,
        line="quantize: expected none for latent attention, whose heads share what is stored, got "
        "it for {s.model}; leave it out",
        error=UnsupportedModelError,
    ),
    Rule(
        meets=lambda s: s.policy.per_query_head and s.shares_latent,
        line="group_reduce: expected 'mean' for latent attention, whose heads share what is "
        "stored, got {s.policy!r} for {s.model}; leave it out",
        error=UnsupportedModelError,
    ),
    Rule(
        meets=lambda s: s.chooses_again and s.evicts,
        line="policy: expected one that only compresses prompts for {s.turns_asked}, got "
        "{s.policy.name}, which evicts after every token; use SnapKV, or leave the option out",
    ),
    Rule(
        meets=lambda s: s.chooses_again and s.policy.needs_reconstruction_pass,
        line="policy: expected one that chooses when a prompt has been read once for "
        "{s.turns_asked}, since later turns are read once, got {s.policy.name}; use SnapKV, "
        "or leave the option out",
    ),
    Rule(
        meets=lambda s: s.chooses_again and "queries" in s.policy.needs,
        line="policy: expected one that chooses by the last queries or none for {s.turns_asked}, "
        "since earlier turns' queries are not held, got {s.policy.name}; use SnapKV, KeyDiff "
        "or LagKV",
    ),
    Rule(
        meets=lambda s: (
            s.going_on == "compress" and (not s.keeps_alike or "rotation" in s.policy.needs)
        ),
        line="policy: expected one with a budget that is the same for all heads and layers, and "
        "that does not ask for positions, for turns='compress' without recall, got "
        "{s.method}; pass policy=SnapKV(budget=...), or recall='host' instead of turns, "
        "which also goes with budgets that heads and layers share",
    ),
    Rule(
        use="drop",
        meets=lambda s: s.evicts,
        line="policy: expected one that only compresses prompts for drop, got {s.policy.name}, "
        "which counts what it has evicted by; use SnapKV, or do not drop",
    ),
    Rule(
        use="drop",
        meets=lambda s: bool(s.policy.needs & {"rotation", "queries"}),
        line="policy: expected one that does not ask for positions, for drop, got "
        "{s.policy.name}; use SnapKV, KeyDiff or LagKV",
    ),
    Rule(
        use="drafts",
        meets=lambda s: s.states is not States.NONE,
        line="model: expected layers that can forget rejected drafts, got recurrent states in "
        "{s.model}; generate without drafts",
        error=UnsupportedModelError,
    ),
    Rule(
        use="drafts",
        meets=lambda s: s.evicts,  # together they would see tokens that are dropped by then
        line="policy: expected one that only compresses the prompt where drafts are verified "
        "(Medusa, assistant model, prompt lookup), got {s.policy.name}, which evicts after "
        "every token; use SnapKV, or generate without drafts",
    ),
)
