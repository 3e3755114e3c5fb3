"""What a server keeps of a prompt, by default and for one request; no vLLM is needed here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from snapkv.errors import InvalidArgumentError
from snapkv.policies import POLICIES, Policy, SnapKV, StreamingLLM
from snapkv.serving.protecting import ProtectingFirst
from snapkv.validation import DEFAULT_BUDGET, nearest, require_int

KEY = "snapkv"
"""The server's settings in vLLM's `additional_config`."""

PREFIX = "snapkv_"
"""What the names of a request's own settings begin with, in `extra_args` and `vllm_xargs`."""

SERVED = ("snapkv", "streaming-llm", "tova")
"""Methods that keep the same number of tokens in all layers and heads, known in advance."""

OF_A_REQUEST = ("budget", "window_size", "kernel_size", "pooling", "decay")
"""Parameters that a request may set for itself."""

_PROTECT_FIRST = "protect_first"


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """The method that compresses prompts, and its parameters.

    Args:
        policy: one of `SERVED`.
        budget: tokens kept per KV head and layer; 0 compresses only requests with a budget.
        parameters: further parameters of the method, by name.
        protect_first: how many of a prompt's first tokens stay whatever their votes, such as those
            of a system message; they count towards the budget.

    Raises:
        InvalidArgumentError: a method that cannot be served, or a value out of range.
        InvalidTypeError: a value of the wrong type.
    """

    policy: str = SnapKV.name
    budget: int = DEFAULT_BUDGET
    parameters: Mapping[str, Any] = field(default_factory=dict)
    protect_first: int = 0

    def __post_init__(self) -> None:
        """Check everything once, here."""
        if self.policy not in SERVED:
            raise InvalidArgumentError(
                f"policy: expected one of {', '.join(SERVED)}, got {self.policy!r}"
                f"{_why_not_served(self.policy)}; pass one of them"
            )
        require_int("budget", self.budget, minimum=0)
        require_int(_PROTECT_FIRST, self.protect_first, minimum=0)
        made = self._made(self.budget or None, self.parameters)
        if self.budget:
            _protecting(made, self.protect_first)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The settings out of vLLM's `additional_config`.

        Raises:
            InvalidArgumentError: unknown names.
        """
        given = dict(config.get(KEY) or {})
        names = ("policy", "budget", _PROTECT_FIRST)
        own = {key: given.pop(key) for key in names if key in given}
        return cls(**own, parameters=given)

    def to_config(self) -> dict[str, Any]:
        """The entry in vLLM's `additional_config`, ready for JSON."""
        first = {_PROTECT_FIRST: self.protect_first} if self.protect_first else {}
        return {KEY: {"policy": self.policy, "budget": self.budget, **first, **self.parameters}}

    def for_request(self, extra_args: Mapping[str, Any] | None) -> Policy | None:
        """The method for one request; None leaves its prompt whole.

        Args:
            extra_args: `SamplingParams.extra_args`, in HTTP bodies `vllm_xargs`; names that do not
                begin with `PREFIX` belong to others.

        Raises:
            InvalidArgumentError: an unknown name, or a value out of range.
            InvalidTypeError: a value of the wrong type.
        """
        given = {
            key.removeprefix(PREFIX): value
            for key, value in (extra_args or {}).items()
            if key.startswith(PREFIX)
        }
        for name in given:
            self._require_known(name)
        budget = given.pop("budget", self.budget)
        require_int(f"{PREFIX}budget", budget, minimum=0)
        first = given.pop(_PROTECT_FIRST, self.protect_first)
        require_int(f"{PREFIX}{_PROTECT_FIRST}", first, minimum=0)
        own = dict(self.parameters)
        if "pooling" in given:  # of the server's, what the request's has no use for
            own.pop("kernel_size" if given["pooling"] == "fading" else "decay", None)
        policy = self._made(budget or None, own | given)
        return _protecting(policy, first) if budget else None

    def _require_known(self, name: str) -> None:
        known = [one for one in OF_A_REQUEST if one in _parameters(self.policy)]
        known.append(_PROTECT_FIRST)
        if name not in known:
            names = [PREFIX + one for one in known]
            raise InvalidArgumentError(
                f"{PREFIX}{name}: expected one of {', '.join(names)}, got {PREFIX}{name}; leave it "
                f"out{nearest(PREFIX + name, names)}"
            )

    def _made(self, budget: int | None, parameters: Mapping[str, Any]) -> Policy:
        """The policy; without a budget, only to check the other parameters."""
        known = _parameters(self.policy)
        for name, value in parameters.items():
            if name not in known:
                raise InvalidArgumentError(
                    f"{name}: expected a parameter of {self.policy}, which has "
                    f"{', '.join(known)}, got {name}={value!r}; leave it out{nearest(name, known)}"
                )
        given = {**_DEFAULTS.get(self.policy, {}), **parameters}
        _require_servable(given)
        kind: Callable[..., Policy] = POLICIES[self.policy]
        return kind(**given, budget=budget or _ample(given))


def _protecting(policy: Policy, first_tokens: int) -> Policy:
    return ProtectingFirst(policy, first_tokens) if first_tokens else policy


# StreamingLLM's other numbering would need keys to be turned inside vLLM's cache.
_DEFAULTS: dict[str, dict[str, Any]] = {StreamingLLM.name: {"positions": "original"}}

_UNSERVABLE = {"keep_ratio", "recent"}


def _parameters(policy: str) -> list[str]:
    names = [one.name for one in fields(POLICIES[policy]) if one.init]
    return [name for name in names if name not in _UNSERVABLE]


def _ample(given: Mapping[str, Any]) -> int:
    """A budget that any window and its sinks fit into, for checking the rest."""
    return DEFAULT_BUDGET + sum(abs(size) for size in given.values() if isinstance(size, int))


def _require_servable(given: Mapping[str, Any]) -> None:
    """Refuse values that the library knows and a server's cache cannot hold."""
    if given.get("group_reduce") == "none":
        raise InvalidArgumentError(
            "group_reduce: expected mean, max or sum, since vLLM stores keys and values once per "
            "KV head, got 'none'; leave it at 'mean'"
        )
    if given.get("positions") == "cache":
        raise InvalidArgumentError(
            "positions: expected original, since keys are not turned inside vLLM's cache, got "
            "'cache'; leave it out"
        )


def _why_not_served(policy: object) -> str:
    reasons = {
        "pyramidkv": "whose layers keep different numbers of tokens, while one table of blocks "
        "serves all layers",
        "adakv": "whose heads keep different numbers of tokens, while a block holds all heads",
        "h2o": "which needs the queries of the whole prompt",
        "full": "which is a budget of 0",
    }
    if not isinstance(policy, str):
        return ""
    if policy in reasons:
        return f", {reasons[policy]}"
    return nearest(policy, SERVED)


def kept_tokens(policy: Policy, prompt_tokens: int) -> int:
    """Tokens that every layer and KV head keeps of a prompt of that length.

    Args:
        policy: what `ServingSettings.for_request` gave.
        prompt_tokens: length of the prompt.
    """
    budget: int = getattr(policy, "budget", prompt_tokens)
    return min(budget, prompt_tokens)
