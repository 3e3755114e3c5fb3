"""Limits on what a request stores while it generates, and on the bytes of all sessions together."""

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
"""The methods that need only the last queries and the stored tokens to evict from an answer."""


class ConfigEntry:
    """The base class of dataclasses that are written into `additional_config`. Fields that have
    their default value are left out.
    """

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build an object of this class from the output of `to_config`. Fields that are left out
        have their defaults.

        Raises:
            RefusedError: `config` has an unknown name, or two values do not go together.
            InvalidArgumentError: a value is out of range.
            InvalidTypeError: a value has the wrong type.
        """
        known = [one.name for one in fields(cast(Any, cls))]
        for name in config:
            if name not in known:
                problem = f"there is no limit with the name {name!r}, only {', '.join(known)}"
                raise wrong(
                    cls.__name__.lower(), problem, nearest(name, known, "Remove this limit")
                )
        return cls(**config)

    def to_config(self) -> dict[str, Any]:
        """Return the fields that differ from their default values, as a new dictionary that can be
        written as JSON; empty if there are none.
        """
        defaults = {one.name: one.default for one in fields(cast(Any, self))}
        own = asdict(cast(Any, self))
        return {name: value for name, value in own.items() if value != defaults[name]}


@dataclass(frozen=True, kw_only=True)
class Limits(ConfigEntry):
    """The limits of a server that apply to every request. A request may lower these limits, but it
    cannot raise them.

    Args:
        decode_budget: how many tokens of prompt and answer every head stores while a request
            generates; 0 for no limit. It must be larger than `evict_every`.
        decode_policy: the method that evicts tokens, one of `DECODE_POLICIES`.
        evict_every: generated tokens between two evictions, each of which evicts this many tokens.
            It must be at least the number of queries that the method needs.

    Raises:
        InvalidArgumentError: a method that cannot be served, a value that is out of range, or
            another limit without a `decode_budget`, where it has no effect.
        InvalidTypeError: a value has the wrong type.
    """

    decode_budget: int = 0
    decode_policy: str = DECODE_POLICIES[0]
    evict_every: int = DEFAULT_EVERY

    def __post_init__(self) -> None:
        """Check the values of the limits, and that they can be used together.

        Raises:
            InvalidArgumentError: a value is out of range or has no effect, or the two numbers of
                tokens do not go together.
            InvalidTypeError: a value has the wrong type.
        """
        require_int("decode_budget", self.decode_budget, minimum=0)
        require_int("evict_every", self.evict_every, minimum=1)
        require_choice("decode_policy", self.decode_policy, DECODE_POLICIES)
        every, own = self.evict_every, self.to_config()
        if not self.decode_budget and own:
            problem = "this limit has no effect if decode_budget is not set"
            raise wrong(next(iter(own)), problem, "Set decode_budget as well, or remove this limit")
        if 0 < self.decode_budget <= every:
            more = f"more than evict_every, which is {every}"
            problem = f"the value must be {more}, but got {self.decode_budget}"
            raise wrong("decode_budget", problem, "Increase decode_budget, or reduce evict_every")
        if every < (needed := self.pending_queries_per_answer):
            least = f"at least {needed}, because {self.decode_policy} needs {needed} queries"
            problem = f"the value must be {least}, but got {every}"
            raise wrong(
                "evict_every", problem, "Increase evict_every, or use a different decode_policy"
            )

    def limit_answer(self, tokens: int | None, prompt_policy: Policy | None) -> AnswerLimit | None:
        """Return the limit on the tokens that a request stores while it generates. The result is
        None if neither the server nor the request has a decode budget.

        Args:
            tokens: the `decode_budget` of the request, at most that of the server; None takes that
                of the server.
            prompt_policy: the method that compresses the prompt; None if the prompt is not
                compressed.

        Raises:
            RefusedError: the request has a decode budget and the server has none, the prompt is not
                compressed, or the decode budget is smaller than the kept prompt and the tokens
                between two evictions.
            InvalidArgumentError: `tokens` is out of range.
            InvalidTypeError: `tokens` is no integer.
        """
        tokens, every = self.decode_budget if tokens is None else tokens, self.evict_every
        require_int("decode_budget", tokens, minimum=0)
        if not self.decode_budget:
            if not tokens:
                return None
            problem = f"this server does not limit the length of answers, but got {tokens}"
            remedy = "Remove this setting, or start the server with --decode-budget"
            raise wrong("decode_budget", problem, remedy)
        require_int("decode_budget", tokens, minimum=1, maximum=self.decode_budget)
        if prompt_policy is None:
            problem = "the value must be at least 1 on a server with a decode budget, but got 0"
            raise wrong("budget", problem, f"Use a number between 1 and {tokens - every}")
        if tokens < (needed := count_kept_tokens(prompt_policy, MOST) + every):
            parts = f"which is the sum of the kept tokens of a prompt and evict_every ({every})"
            problem = f"the value must be at least {needed}, {parts}, but got {tokens}"
            raise wrong(
                "decode_budget", problem, "Increase decode_budget, or reduce budget or evict_every"
            )
        policy = self._eviction_policy(tokens - every)
        return AnswerLimit(policy=policy, max_tokens=tokens, evict_every=every)

    def _eviction_policy(self, kept_tokens: int) -> EvictingPolicy:
        """Build the method that evicts tokens from an answer, so that `kept_tokens` tokens are
        left. `decode_policy` names the method.

        Raises:
            RefusedError: `kept_tokens` is less than the method needs.
        """
        method: Callable[..., Policy] = POLICIES[self.decode_policy]
        options: dict[str, dict[str, Any]] = {
            RKV.name: {"evict_every": self.evict_every},
            StreamingLLM.name: {"positions": "original"},
        }
        own = options.get(self.decode_policy, {})
        try:
            return cast(EvictingPolicy, method(budget=kept_tokens, **own))
        except InvalidArgumentError as error:
            total, reason = kept_tokens + self.evict_every, str(error).rstrip(".")
            cause = f"if {self.evict_every} tokens are evicted at a time ({reason})"
            problem = (
                f"a value of {total} is not enough for the method {self.decode_policy}, {cause}"
            )
            raise wrong("decode_budget", problem, "Use a larger number of tokens") from None

    @property
    def pending_queries_per_answer(self) -> int:
        """How many recorded queries of one answer may be waiting for the next eviction; 0 without a
        decode budget.

        Raises:
            RefusedError: the decode budget is smaller than the method needs.
        """
        if not self.decode_budget:
            return 0
        return count_eviction_queries(self._eviction_policy(self.decode_budget - self.evict_every))


@dataclass(frozen=True, kw_only=True)
class Sessions(ConfigEntry):
    """The limit of a server on the memory that is taken by the histories of sessions.

    Args:
        most_bytes: the bytes of all histories together; 0 for a quarter of the cache of the engine,
            or less if the longest request leaves less.

    Raises:
        InvalidArgumentError: a value is out of range.
        InvalidTypeError: a value has the wrong type.
    """

    most_bytes: int = 0

    def __post_init__(self) -> None:
        require_int("most_bytes", self.most_bytes, minimum=0)

    @property
    def summary(self) -> str:
        """The limit as a text for the log of the server."""
        return format_bytes(self.most_bytes) if self.most_bytes else "a quarter of the cache"
