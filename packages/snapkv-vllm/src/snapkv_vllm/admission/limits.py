"""How many tokens a request may store while it generates, and how many bytes sessions may."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self, cast

from snapkv.errors import InvalidArgumentError
from snapkv.policies import POLICIES, RKV, EvictingPolicy, Policy, StreamingLLM
from snapkv.validation import (
    DEFAULT_EVERY,
    MOST,
    format_bytes,
    nearest,
    require_choice,
    require_int,
)
from snapkv_vllm.admission.methods import count_kept_tokens
from snapkv_vllm.admission.names import wrong
from snapkv_vllm.admission.plans import AnswerLimit, count_eviction_queries

DECODE_POLICIES = ("r-kv", "tova", "streaming-llm")
"""Methods that need only the last queries and the stored tokens to evict."""


class ConfigEntry:
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
        defaults = {one.name: one.default for one in fields(cast(Any, self))}
        own = asdict(cast(Any, self))
        return {name: value for name, value in own.items() if value != defaults[name]}


@dataclass(frozen=True, kw_only=True)
class Limits(ConfigEntry):
    """The limits of a server for every request; a request may lower them, never raise them.

    Args:
        decode_budget: tokens of a prompt and its answer that every head stores while generating; 0
            for no limit.
        decode_policy: one of `SERVED_WHILE_GENERATING`, which evicts.
        evict_every: generated tokens between two evictions; as many are evicted at once.

    Raises:
        InvalidArgumentError: a method that cannot be served, or a value out of range.
        InvalidTypeError: a value of the wrong type.
    """

    decode_budget: int = 0
    decode_policy: str = DECODE_POLICIES[0]
    evict_every: int = DEFAULT_EVERY

    def __post_init__(self) -> None:
        require_int("decode_budget", self.decode_budget, minimum=0)
        require_int("evict_every", self.evict_every, minimum=1)
        require_choice("decode_policy", self.decode_policy, DECODE_POLICIES)
        every, own = self.evict_every, self.to_config()
        if not self.decode_budget and own:
            remedy = "pass decode_budget, too, or leave it out"
            raise wrong(next(iter(own)), "it with a decode_budget", "it alone", remedy)
        if 0 < self.decode_budget <= every:
            more = f"more than the {every} tokens between two evictions"
            raise wrong("decode_budget", more, self.decode_budget, "raise it, or lower evict_every")
        if every < (wanted := self.pending_queries_per_answer):
            least = f"at least {wanted}, as many queries as {self.decode_policy} looks at"
            raise wrong("evict_every", least, every, "raise it, or choose another decode_policy")

    def answer_limit_for(
        self, asked: int | None, prompt_policy: Policy | None
    ) -> AnswerLimit | None:
        """What prompt and answer are held to while the answer grows; None where it may grow.

        That is by what the request asks for, no more than the server's. `prompt_policy` is None
        where the prompt is to stay whole.
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
        if tokens < (needed := count_kept_tokens(prompt_policy, MOST) + every):
            beside = f"what is kept of a prompt and the {every} tokens between two evictions"
            remedy = "raise it, or lower the budget or evict_every"
            raise wrong("decode_budget", f"at least {needed}, {beside}", tokens, remedy)
        return AnswerLimit(
            policy=self._make_eviction_policy(tokens - every), max_tokens=tokens, evict_every=every
        )

    def _make_eviction_policy(self, kept_tokens: int) -> EvictingPolicy:
        kind: Callable[..., Policy] = POLICIES[self.decode_policy]
        options: dict[str, dict[str, Any]] = {
            RKV.name: {"evict_every": self.evict_every},
            StreamingLLM.name: {"positions": "original"},
        }
        own = options.get(self.decode_policy, {})
        try:
            return cast(EvictingPolicy, kind(budget=kept_tokens, **own))
        except InvalidArgumentError as error:
            beside = f"next to the {self.evict_every} tokens between two evictions"
            room, tokens = f"room for {self.decode_policy} {beside}", kept_tokens + self.evict_every
            raise wrong("decode_budget", room, tokens, f"raise it ({error})") from None

    @property
    def pending_queries_per_answer(self) -> int:
        """How many queries of every answer may wait for an eviction."""
        if not self.decode_budget:
            return 0
        return count_eviction_queries(
            self._make_eviction_policy(self.decode_budget - self.evict_every)
        )


@dataclass(frozen=True, kw_only=True)
class Sessions(ConfigEntry):
    """How much of a server's cache the histories of sessions may take.

    Args:
        most_bytes: of all together; 0 for a quarter of the engine's cache.

    Raises:
        InvalidArgumentError: a value out of range.
        InvalidTypeError: a value of the wrong type.
    """

    most_bytes: int = 0

    def __post_init__(self) -> None:
        require_int("most_bytes", self.most_bytes, minimum=0)

    @property
    def summary(self) -> str:
        return format_bytes(self.most_bytes) if self.most_bytes else "a quarter of the cache"
