"""What a server keeps of a prompt, by default and for one request; no vLLM is needed here."""

from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv.policies import Policy, StreamingLLM
from snapkv.policies.default import adapt_to_question
from snapkv.policies.spans import Spans
from snapkv.validation import (
    DEFAULT,
    DEFAULT_BUDGET,
    MAX_KERNEL_SIZE,
    MAX_WINDOW_SIZE,
    POOLINGS,
    byte_budget,
    nearest,
    require_at_least,
    require_int,
)
from snapkv_vllm.admission.compatibility import require_compatible
from snapkv_vllm.admission.limits import Limits, Sessions
from snapkv_vllm.admission.methods import (
    METHODS,
    WithSpans,
    first_tokens,
    last_tokens,
    parameters_of,
    require_first_protected,
    scoring,
)
from snapkv_vllm.admission.names import (
    DECODE_BUDGET,
    OF_A_REQUEST,
    OF_METHODS,
    OWNED_SESSION,
    PREFIX,
    PROTECT_FIRST,
    SESSION,
    SPANS,
    own_settings,
    require_readable,
    require_session_name,
    shown,
    wrong,
)
from snapkv_vllm.admission.plans import PromptPlan
from snapkv_vllm.admission.spans import RequestSpans, entries_of

KEY = "snapkv"
"""The server's settings in vLLM's `additional_config`."""

_CAPS = {"max_window_size": MAX_WINDOW_SIZE, "max_kernel_size": MAX_KERNEL_SIZE}

# StreamingLLM's other numbering would need keys to be turned inside vLLM's cache.
_DEFAULTS: dict[str, dict[str, Any]] = {StreamingLLM.name: {"positions": "original"}}

_NOT_SERVED = {
    "pyramidkv": ", whose layers keep numbers that no votes decide; see across-layers",
    "h2o": ", which needs the queries of the whole prompt",
    "full": ", which is a budget of 0",
}

_NO_SPANS = RequestSpans()

_UNSERVABLE = {
    ("group_reduce", "none"): "mean, max or sum, since keys are stored once per KV head",
    ("positions", "cache"): "original, since keys are not turned inside vLLM's cache",
}
"""Values that the library knows and a server's cache cannot hold, and what it can."""


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """The method that compresses prompts, and its parameters.

    Args:
        policy: one of `snapkv_vllm.admission.methods.METHODS`.
        budget: tokens kept per KV head and layer; 0 compresses only requests with a budget.
        parameters: further parameters of the method, by name.
        protect_first: how many of a prompt's first tokens stay whatever their votes, such as those
            of a system message; they count towards the budget.
        max_window_size: the longest window, and the most voters, that the server or a request may
            ask for.
        max_kernel_size: the widest kernel; a pair (before, after) is before + 1 + after wide.
        limits: how many tokens a request may hold while its answer grows.
        sessions: whose histories are held; None where none are.

    Raises:
        InvalidArgumentError: a method that cannot be served, or a value out of range.
        InvalidTypeError: a value of the wrong type.
    """

    policy: str = DEFAULT
    budget: int = DEFAULT_BUDGET
    parameters: Mapping[str, Any] = field(default_factory=dict)
    protect_first: int = 0
    max_window_size: int = MAX_WINDOW_SIZE
    max_kernel_size: int = MAX_KERNEL_SIZE
    limits: Limits = field(default_factory=Limits)
    sessions: Sessions | None = None

    def __post_init__(self) -> None:
        policy = self.policy
        if not isinstance(policy, str) or policy not in METHODS:
            why = isinstance(policy, str) and (_NOT_SERVED.get(policy) or nearest(policy, METHODS))
            expected = f"one of {', '.join(METHODS)}"
            raise wrong("policy", expected, f"{policy!r}{why or ''}", "pass one of them")
        for cap in _CAPS:
            require_at_least(cap, getattr(self, cap), 1)
        require_compatible(settings=self)
        self._planned({}, prompt_tokens=1)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The settings out of vLLM's `additional_config`; unknown names are refused."""
        given = dict(config.get(KEY) or {})
        names = ("policy", "budget", PROTECT_FIRST, *_CAPS)
        own = {key: given.pop(key) for key in names if key in given}
        limits = Limits.from_config(given.pop("limits", {}))
        held = given.pop("sessions", None)
        sessions = None if held is None else Sessions.from_config(held)
        return cls(**own, parameters=given, limits=limits, sessions=sessions)

    def to_config(self) -> dict[str, Any]:
        """The entry in vLLM's `additional_config`, ready for JSON."""
        own: dict[str, Any] = {"policy": self.policy, "budget": self.budget}
        own |= {PROTECT_FIRST: self.protect_first} if self.protect_first else {}
        own |= {cap: getattr(self, cap) for cap in _CAPS if getattr(self, cap) != _CAPS[cap]}
        own |= {"limits": limits} if (limits := self.limits.to_config()) else {}
        own |= {} if self.sessions is None else {"sessions": self.sessions.to_config()}
        return {KEY: own | dict(self.parameters)}

    @property
    def summary(self) -> str:
        """All that decides what is kept, on one line, by the names of the settings."""
        made = self._made(self.budget or None, self.parameters)
        own = {
            name: getattr(one, name)
            for one in (scoring(made), made)
            for name in parameters_of(self.policy)
            if getattr(one, name, None) is not None
        }
        said = {"policy": self.policy, "budget": self.budget, **own}
        said |= {name: getattr(self, name) for name in (PROTECT_FIRST, *_CAPS)}
        sessions = "no" if self.sessions is None else self.sessions.summary
        said |= {**asdict(self.limits), "sessions": sessions}
        return ", ".join(f"{name} {value}" for name, value in said.items())

    def for_request(self, extra_args: Mapping[str, Any] | None) -> Policy | None:
        """The method for one request's prompt; None leaves it whole. Raises as `plan_for` does."""
        return self.plan_for(extra_args, prompt_tokens=1).policy

    def plan_for(self, extra_args: Mapping[str, Any] | None, prompt_tokens: int) -> PromptPlan:
        """When one request is compressed, and how.

        Args:
            extra_args: `SamplingParams.extra_args`, in HTTP bodies `vllm_xargs`; names that
                `admission.names` does not know belong to others.
            prompt_tokens: length of its prompt.

        Raises:
            InvalidArgumentError: an unknown name, one without its prefix, or a value out of range.
            InvalidTypeError: a value of the wrong type.
        """
        given = own_settings(extra_args or {})
        self._require_known(given)
        require_compatible(settings=self, given=extra_args or {})
        if (session := given.pop(SESSION, None)) is not None:
            require_session_name(PREFIX + SESSION, session, OWNED_SESSION)
        spans = _spans_of(given)
        try:
            return self._planned(given, prompt_tokens, spans)
        except (InvalidArgumentError, InvalidTypeError) as error:
            said = str(error).removeprefix(PREFIX)  # of spans it has the whole name
            raise type(error)(f"{PREFIX}{said}") from error

    def spans_of(self, extra_args: Mapping[str, Any]) -> RequestSpans:
        """What a request says of spans of its prompt."""
        return _spans_of(own_settings(extra_args))

    def whole_of(self, extra_args: Mapping[str, Any], prompt_tokens: int) -> Spans:
        """What a request wants to stay of its prompt whatever the votes, all without a budget."""
        given = own_settings(extra_args)
        spans = _spans_of(given)
        if given.get("budget", self.budget):
            first = min(given.get(PROTECT_FIRST, self.protect_first), prompt_tokens)
            return spans.protecting(first).protect
        others = [*spans.drop.parts, *(span for span, _ in spans.compress)]
        return Spans(((0, prompt_tokens),)).without(Spans.of(SPANS, others))

    def plan_of_turn(
        self,
        extra_args: Mapping[str, Any],
        held_tokens: int,
        spans: RequestSpans,
        *,
        votes: bool = True,
    ) -> PromptPlan:
        """As `plan_for`, of a session's request at whose end so many tokens are held.

        Without votes only what `spans` drop goes.
        """
        given = own_settings(extra_args)
        for name in (SPANS, SESSION):
            given.pop(name, None)
        if not votes:
            given["budget"] = 0
        return self._planned(given, held_tokens, spans)

    def costliest(self, prompt_tokens: int) -> list[Policy]:
        """Of what requests may ask for, the methods one of which takes the most memory.

        The most voters, in the window or before it, where votes are counted in another way, and
        every pooling. Of the longest prompt all but one token is kept, where the window leaves so
        much room.
        """
        asks: list[dict[str, Any]] = [{}]
        if "voters" in parameters_of(self.policy):
            most = self.max_window_size
            asks = [
                {"voters": most, "window_size": window, "pooling": pooling}
                for window in (most, 1)
                for pooling in POOLINGS
            ]
        every = map(self._parameters, asks)
        return [self._made(max(prompt_tokens - 1, _ample(own)), own) for own in every]

    def voters_of(self, extra_args: Mapping[str, Any], question_tokens: int) -> int | None:
        """How many tokens of a prompt vote that has so many from its question's first one on.

        None leaves it to the method. `adapt_to_question` decides, as in the library.
        """
        if question_tokens > self.max_window_size:
            return None
        given = own_settings(extra_args)
        own = {name: given[name] for name in parameters_of(self.policy) if name in given}
        made = self._made(None, self._parameters(own))
        return getattr(scoring(adapt_to_question(made, question_tokens)), "voters", None)

    @property
    def per_head_budget(self) -> bool:
        """Whether heads keep different numbers of tokens."""
        return self._made(None, self.parameters).per_head_budget

    def _planned(
        self,
        given: Mapping[str, Any],
        prompt_tokens: int,
        spans: RequestSpans = _NO_SPANS,
    ) -> PromptPlan:
        """What a request's settings, by their names without the prefix, make of the server's."""
        own = dict(given)
        budget = own.pop("budget", self.budget)
        _require_tokens(budget)
        require_int("budget", budget, minimum=0)
        first = own.pop(PROTECT_FIRST, self.protect_first)
        require_int(PROTECT_FIRST, first, minimum=0)
        decode_budget = own.pop(DECODE_BUDGET, None)
        parameters = self._parameters(own)
        made = self._made(budget or None, parameters)
        policy = made if budget else None
        growth = self.limits.growth_of(decode_budget, policy)
        for one in (policy, None if growth is None else growth.policy):
            if one is not None:
                require_first_protected(one, first)
        if spans:
            protecting = spans.protecting(min(first, prompt_tokens))
            policy = self._with_spans(made, protecting, budget, parameters, prompt_tokens)
        return PromptPlan(
            prompt_tokens=prompt_tokens,
            policy=policy,
            protect_first=0 if spans else first,
            growth=growth,
        )

    def _parameters(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The server's, without what the request's pooling has no use for, and the request's."""
        parameters = dict(self.parameters)
        if "pooling" in own:
            parameters.pop("kernel_size" if own["pooling"] == "fading" else "decay", None)
        return parameters | dict(own)

    def _with_spans(
        self,
        plain: Policy,
        spans: RequestSpans,
        budget: int,
        parameters: Mapping[str, Any],
        prompt_tokens: int,
    ) -> WithSpans:
        """`plain` with room for the spans, of what they leave the budget; 0 keeps all of that.

        `prompt_tokens` may be too few where a request is only checked.
        """
        window, first = last_tokens(plain), first_tokens(scoring(plain))
        of_spans = []
        for (start, end), kept in spans.compress:
            if start < first:
                least = f"a start of at least {first} to compress, since the first {first} stay"
                raise wrong(SPANS, least, f"{start} to {end}", "begin after them")
            outside = max(prompt_tokens, end + window) - (end - start)
            of_spans.append(scoring(self._made(outside + kept, parameters)))
        inner = self._made(budget + spans.lost_tokens, parameters) if budget else None
        try:
            made = WithSpans(inner, spans, tuple(of_spans))
        except InvalidArgumentError as error:
            kept = sum(kept for _, kept in spans.compress) + spans.protect.tokens
            raise wrong(
                SPANS,
                f"at most what the budget of {budget:,} has room for, to protect or compress to",
                f"{kept:,} tokens",
                f"raise the budget, or protect fewer ({error})",
            ) from None
        fits = budget >= prompt_tokens - spans.lost_tokens
        return replace(made, policy=None) if fits else made

    def _require_known(self, given: Mapping[str, Any]) -> None:
        others = set(OF_METHODS).difference(parameters_of(self.policy))
        names = [PREFIX + one for one in OF_A_REQUEST if one not in others]
        for name, value in given.items():
            said = PREFIX + shown(name)
            if name in (SESSION, SPANS):
                continue
            if PREFIX + name not in names:
                expected = f"one of {', '.join(names)}"
                raise wrong(said, expected, "another one", f"leave it out{nearest(said, names)}")
            require_readable(said, value)

    def _made(self, budget: int | None, parameters: Mapping[str, Any]) -> Policy:
        """The policy; without a budget, only to check the other parameters."""
        known = parameters_of(self.policy)
        for name, value in parameters.items():
            if name not in known:
                expected = f"a parameter of {self.policy}, which has {', '.join(known)}"
                remedy = f"leave it out{nearest(name, known)}"
                raise wrong(name, expected, f"{name}={value!r}", remedy)
        given = {**_DEFAULTS.get(self.policy, {}), **parameters}
        for (name, value), expected in _UNSERVABLE.items():
            if given.get(name) == value:
                raise wrong(name, expected, repr(value), "leave it out")
        kind = METHODS[self.policy]
        made = kind(**given, budget=_ample(given))
        # A longer window or a wider kernel would cost the other requests too much.
        kernel = getattr(scoring(made), "kernel_size", None) or 0
        width = kernel if isinstance(kernel, int) else sum(kernel) + 1
        _require_at_most("window_size", last_tokens(made), "max_window_size", self.max_window_size)
        _require_at_most("voters", made.query_tokens, "max_window_size", self.max_window_size)
        _require_at_most("kernel_size", width, "max_kernel_size", self.max_kernel_size)
        return made if budget is None else kind(**given, budget=budget)


def _require_tokens(budget: object) -> None:
    """Refuse bytes: answers that grow are promised in tokens."""
    given = byte_budget(budget) if isinstance(budget, str) else None
    if given is None:
        return
    tokens = f", {int(8192 * given['share'])} for 8k" if "share" in given else ""
    remedy = f"pass what snapkv plan --context N --budget {budget} keeps of N tokens{tokens}"
    raise wrong("budget", "a number of tokens on a server", repr(budget), remedy)


def _require_at_most(name: str, size: int, cap_name: str, cap: int) -> None:
    if size > cap:
        option = f"--{cap_name.replace('_', '-')} {size}"
        remedy = f"pass a smaller one, or start the server with {option}"
        raise wrong(name, f"at most {cap:,} on this server", f"{size:,}", remedy)


def _ample(given: Mapping[str, Any]) -> int:
    """A budget that any window and its sinks fit into, for checking the rest."""
    return DEFAULT_BUDGET + sum(abs(size) for size in given.values() if isinstance(size, int))


def _spans_of(given: MutableMapping[str, Any]) -> RequestSpans:
    return RequestSpans.of(entries_of(given.pop(SPANS))) if SPANS in given else _NO_SPANS
