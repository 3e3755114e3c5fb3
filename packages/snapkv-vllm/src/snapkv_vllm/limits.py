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
from snapkv_vllm.names import SPANS, wrong
from snapkv_vllm.plans import Cap, Growth, queries_of

SERVED_WHILE_GENERATING = ("r-kv", "tova", "streaming-llm")
"""Methods that evict by the last queries and what is held alone."""


class Entry:
    """A dataclass whose fields go into `additional_config` where they differ from the defaults."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """What `to_config` was called on; an unknown name is refused."""
        known = [one.name for one in fields(cast(Any, cls))]
        for name in config:
            if name not in known:
                remedy = f"leave it out{nearest(name, known)}"
                raise wrong(cls.__name__.lower(), ", ".join(known), repr(name), remedy)
        return cls(**config)

    def to_config(self) -> dict[str, Any]:
        """What differs from the defaults, ready for JSON."""
        own, defaults = asdict(cast(Any, self)), asdict(cast(Any, type(self)()))
        return {name: value for name, value in own.items() if value != defaults[name]}


@dataclass(frozen=True, kw_only=True)
class Limits(Entry):
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
        leasts = {"cap": 0, "chunk_tokens": 1, "decode_budget": 0, "evict_every": 1}
        for name, minimum in leasts.items():
            require_int(name, getattr(self, name), minimum)
        require_choice("decode_policy", self.decode_policy, SERVED_WHILE_GENERATING)
        every = self.evict_every
        if 0 < self.decode_budget <= every:
            more = f"more than the {every} tokens between two evictions"
            raise wrong("decode_budget", more, self.decode_budget, "raise it, or lower evict_every")
        if every < (wanted := self.queries_of_answers):
            least = f"at least {wanted}, as many queries as {self.decode_policy} looks at"
            raise wrong("evict_every", least, every, "raise it, or choose another decode_policy")

    def require_none(self, cap: int | None, decode_budget: int | None) -> None:
        """Refuse spans where a request is held to limits, by which positions are dropped before."""
        asked = {"cap": cap, "decode_budget": decode_budget}
        for name, own in asked.items():
            if tokens := getattr(self, name) if own is None else own:
                none = f"none beside {name} {tokens}, under which tokens of them may be gone before"
                raise wrong(SPANS, none, "some", f"send them to a server without {name}")

    def cap_of(self, asked: int | None, policy: Policy | None, *, looks_ahead: bool) -> Cap | None:
        """What a prompt is held to while it is read, by what its request asks for, or nothing.

        Refuses more than the server's cap, or a method that cannot hold to one.
        """
        tokens = self.cap if asked is None else asked
        require_int("cap", tokens, minimum=1 if self.cap else 0, maximum=self.cap or MOST)
        if not tokens:
            return None
        if policy is None:
            least = "at least 1 where prompts are held to a cap"
            raise wrong("budget", least, 0, "pass a budget")
        if tokens < (budget := kept_tokens(policy, MOST)):
            least = f"at least the budget of {budget}"
            raise wrong("cap", least, tokens, "raise it, or lower the budget")
        try:
            policy.require_cap(tokens)
        except InvalidArgumentError:
            none = f"none with {policy.name}, which cannot rate a part of a prompt"
            remedy = "leave it out, or serve with --policy snapkv"
            raise wrong("cap", none, tokens, remedy) from None
        if policy.query_tokens > self.chunk_tokens:
            most = f"at most the {self.chunk_tokens} tokens of a chunk where prompts are held to"
            raise wrong("window_size", f"{most} a cap", policy.query_tokens, "pass a smaller one")
        return Cap(most_tokens=tokens, chunk_tokens=self.chunk_tokens, looks_ahead=looks_ahead)

    def growth_of(
        self, asked: int | None, prompt_policy: Policy | None, *, protect_first: int
    ) -> Growth | None:
        """What prompt and answer are held to while the answer grows, as `cap_of` says of prompts.

        `prompt_policy` is None where the prompt is to stay whole.
        """
        tokens, every = self.decode_budget if asked is None else asked, self.evict_every
        require_int("decode_budget", tokens, minimum=0)
        if not self.decode_budget:
            if not tokens:
                return None
            none = "none on this server, which lets answers grow"
            remedy = "leave it out, or start the server with --decode-budget"
            raise wrong("decode_budget", none, tokens, remedy)
        require_int("decode_budget", tokens, minimum=1, maximum=self.decode_budget)
        if prompt_policy is None:
            least = "at least 1 where answers are held to a budget"
            raise wrong("budget", least, 0, f"pass {tokens - every}, or less")
        if parts_heads(prompt_policy):
            none = "none with adakv, whose heads hold different numbers of tokens"
            remedy = "leave it out, or serve with --policy snapkv"
            raise wrong("decode_budget", none, tokens, remedy)
        if tokens < (needed := kept_tokens(prompt_policy, MOST) + every):
            beside = f"what is kept of a prompt and the {every} tokens between two evictions"
            remedy = "raise it, or lower the budget or evict_every"
            raise wrong("decode_budget", f"at least {needed}, {beside}", tokens, remedy)
        policy = self._evicting(tokens - every)
        require_first_protected(policy, protect_first)
        return Growth(
            policy=policy, most_tokens=tokens, evict_every=every, protect_first=protect_first
        )

    def _evicting(self, kept_tokens: int) -> EvictingPolicy:
        kind: Callable[..., Policy] = POLICIES[self.decode_policy]
        options: dict[str, dict[str, Any]] = {
            RKV.name: {"evict_every": self.evict_every},
            StreamingLLM.name: {"positions": "original"},
        }
        own = options.get(self.decode_policy, {})
        try:
            return cast(EvictingPolicy, kind(budget=kept_tokens, **own))
        except InvalidArgumentError as error:
            beside = f"beside the {self.evict_every} tokens between two evictions"
            room, tokens = f"room for {self.decode_policy} {beside}", kept_tokens + self.evict_every
            raise wrong("decode_budget", room, tokens, f"raise it ({error})") from None

    @property
    def queries_of_answers(self) -> int:
        """How many queries of every answer may wait for an eviction."""
        if not self.decode_budget:
            return 0
        return queries_of(self._evicting(self.decode_budget - self.evict_every))

    def most_read(self, tokens: int, window_tokens: int) -> int:
        """The most that a request holds while a prompt of so many tokens is read."""
        return min(tokens, self.cap + self.chunk_tokens + window_tokens) if self.cap else tokens

    def most_held(self, tokens: int, window_tokens: int) -> int:
        """The most that any request holds that sees so many tokens, its answer among them."""
        if not self.decode_budget:
            return tokens
        return min(tokens, max(self.decode_budget, self.most_read(tokens, window_tokens)))
