"""How many tokens a request may hold while it is read and while its answer grows."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, cast

from snapkv.errors import InvalidArgumentError
from snapkv.policies import POLICIES, RKV, EvictingPolicy, Policy, StreamingLLM
from snapkv.validation import (
    DEFAULT_CHUNK,
    DEFAULT_EVERY,
    MOST,
    nearest,
    require_choice,
    require_int,
)
from snapkv_vllm.methods import kept_tokens, parts_heads, require_first_protected
from snapkv_vllm.plans import Cap, Growth, queries_of


def entry_of(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from the defaults, ready for JSON."""
    defaults = asdict(type(record)())
    return {name: value for name, value in asdict(record).items() if value != defaults[name]}


def require_fields(what: str, kind: type[Any], entry: Mapping[str, Any]) -> None:
    """Raise where an entry has a name that is no field of a dataclass.

    Raises:
        InvalidArgumentError: names it.
    """
    known = [one.name for one in fields(kind)]
    for name in entry:
        if name not in known:
            raise InvalidArgumentError(
                f"{what}: expected {', '.join(known)}, got {name!r}; leave it out"
                f"{nearest(name, known)}"
            )


SERVED_WHILE_GENERATING = ("r-kv", "tova", "streaming-llm")
"""Methods that evict by the last queries and what is held alone."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server promises of every request; a request may ask for less, never for more.

    Args:
        cap: tokens of a prompt that every head holds between two chunks of it; 0 for all of them.
        chunk_tokens: read between two compressions of a prompt that is held to a cap.
        decode_budget: tokens of a prompt and its answer that every head holds while generating; 0
            lets answers grow.
        decode_policy: one of `SERVED_WHILE_GENERATING`, which evicts.
        evict_every: generated tokens between two evictions, dropped at once.

    Raises:
        InvalidArgumentError: a method that cannot be served, or a value out of range.
        InvalidTypeError: a value of the wrong type.
    """

    cap: int = 0
    chunk_tokens: int = DEFAULT_CHUNK
    decode_budget: int = 0
    decode_policy: str = SERVED_WHILE_GENERATING[0]
    evict_every: int = DEFAULT_EVERY

    def __post_init__(self) -> None:
        """Check every value by itself."""
        require_int("cap", self.cap, minimum=0)
        require_int("chunk_tokens", self.chunk_tokens, minimum=1)
        require_int("decode_budget", self.decode_budget, minimum=0)
        require_int("evict_every", self.evict_every, minimum=1)
        require_choice("decode_policy", self.decode_policy, SERVED_WHILE_GENERATING)
        if 0 < self.decode_budget <= self.evict_every:
            raise InvalidArgumentError(
                f"decode_budget: expected more than the {self.evict_every} tokens between two "
                f"evictions, got {self.decode_budget}; raise it, or lower evict_every"
            )
        wanted = self.queries_of_answers
        if self.evict_every < wanted:
            raise InvalidArgumentError(
                f"evict_every: expected at least {wanted}, as many queries as {self.decode_policy} "
                f"looks at, got {self.evict_every}; raise it, or choose another decode_policy"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The limits out of what `to_config` gave.

        Raises:
            InvalidArgumentError: an unknown name.
        """
        require_fields("limits", cls, config)
        return cls(**config)

    def to_config(self) -> dict[str, Any]:
        """Those that differ from the defaults, ready for JSON."""
        return entry_of(self)

    def cap_of(self, asked: int | None, policy: Policy | None, *, looks_ahead: bool) -> Cap | None:
        """What a request's prompt is held to while it is read.

        Args:
            asked: by the request; None where it asks for nothing.
            policy: that compresses the prompt; None where it is to stay whole.
            looks_ahead: see `Cap`.

        Raises:
            InvalidArgumentError: more than the server's cap, or a method that cannot hold to one.
            InvalidTypeError: not an integer.
        """
        tokens = self.cap if asked is None else asked
        require_int("cap", tokens, minimum=1 if self.cap else 0, maximum=self.cap or MOST)
        if not tokens:
            return None
        if policy is None:
            raise InvalidArgumentError(
                "budget: expected at least 1 where prompts are held to a cap, got 0; pass a budget"
            )
        budget = kept_tokens(policy, MOST)
        if tokens < budget:
            raise InvalidArgumentError(
                f"cap: expected at least the budget of {budget}, got {tokens}; raise it, or lower "
                "the budget"
            )
        try:
            policy.require_cap(tokens)
        except InvalidArgumentError:
            raise InvalidArgumentError(
                f"cap: expected none with {policy.name}, which cannot rate a part of a prompt, got "
                f"{tokens}; leave it out, or serve with --policy snapkv"
            ) from None
        if policy.query_tokens > self.chunk_tokens:
            raise InvalidArgumentError(
                f"window_size: expected at most the {self.chunk_tokens} tokens of a chunk where "
                f"prompts are held to a cap, got {policy.query_tokens}; pass a smaller one"
            )
        return Cap(most_tokens=tokens, chunk_tokens=self.chunk_tokens, looks_ahead=looks_ahead)

    def growth_of(
        self, asked: int | None, prompt_policy: Policy | None, *, protect_first: int
    ) -> Growth | None:
        """What a request's prompt and answer are held to while the answer grows.

        Args:
            asked: by the request; None where it asks for nothing.
            prompt_policy: that compresses the prompt; None where it is to stay whole.
            protect_first: first tokens that stay.

        Raises:
            InvalidArgumentError: more than the server's budget, or too little for what is kept of
                the prompt.
            InvalidTypeError: not an integer.
        """
        tokens = self.decode_budget if asked is None else asked
        require_int("decode_budget", tokens, minimum=0)
        if tokens and not self.decode_budget:
            raise InvalidArgumentError(
                f"decode_budget: expected none on this server, which lets answers grow, got "
                f"{tokens}; leave it out, or start the server with --decode-budget"
            )
        if not self.decode_budget:
            return None
        require_int("decode_budget", tokens, minimum=1, maximum=self.decode_budget)
        if prompt_policy is not None and parts_heads(prompt_policy):
            raise InvalidArgumentError(
                f"decode_budget: expected none with adakv, whose heads hold different numbers of "
                f"tokens, got {tokens}; leave it out, or serve with --policy snapkv"
            )
        if prompt_policy is None:
            raise InvalidArgumentError(
                f"budget: expected at least 1 where answers are held to a budget, got 0; pass "
                f"{tokens - self.evict_every}, or less"
            )
        least = kept_tokens(prompt_policy, MOST) + self.evict_every
        if tokens < least:
            raise InvalidArgumentError(
                f"decode_budget: expected at least {least}, what is kept of a prompt and the "
                f"{self.evict_every} tokens between two evictions, got {tokens}; raise it, or "
                "lower the budget or evict_every"
            )
        policy = self._evicting(tokens - self.evict_every)
        require_first_protected(policy, protect_first)
        return Growth(
            policy=policy,
            most_tokens=tokens,
            evict_every=self.evict_every,
            protect_first=protect_first,
        )

    def _evicting(self, kept_tokens: int) -> EvictingPolicy:
        """The method that keeps so many."""
        kind: Callable[..., Policy] = POLICIES[self.decode_policy]
        options: dict[str, dict[str, Any]] = {
            RKV.name: {"evict_every": self.evict_every},
            StreamingLLM.name: {"positions": "original"},
        }
        own = options.get(self.decode_policy, {})
        try:
            return cast(EvictingPolicy, kind(budget=kept_tokens, **own))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f"decode_budget: expected room for {self.decode_policy} beside the "
                f"{self.evict_every} tokens between two evictions, got "
                f"{kept_tokens + self.evict_every}; raise it ({error})"
            ) from None

    @property
    def queries_of_answers(self) -> int:
        """How many queries of every answer may wait for an eviction."""
        if not self.decode_budget:
            return 0
        return queries_of(self._evicting(self.decode_budget - self.evict_every))

    def most_read(self, tokens: int, window_tokens: int) -> int:
        """The most that any request holds while a prompt of so many tokens is read.

        Args:
            tokens: of the longest prompt.
            window_tokens: of the longest window that votes.
        """
        return min(tokens, self.cap + self.chunk_tokens + window_tokens) if self.cap else tokens

    def most_held(self, tokens: int, window_tokens: int) -> int:
        """The most that any request holds that sees so many tokens, its answer among them."""
        if not self.decode_budget:
            return tokens
        return min(tokens, max(self.decode_budget, self.most_read(tokens, window_tokens)))
