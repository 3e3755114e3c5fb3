"""How a server compresses prompts by default, and how one request does. This module does not import
vLLM.
"""

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
    count_sink_tokens,
    count_window_tokens,
    parameter_names,
    require_can_protect_first,
    scoring_policy,
)
from snapkv_vllm.admission.names import (
    DECODE_BUDGET,
    METHOD_SETTINGS,
    PREFIX,
    PROTECT_FIRST,
    REQUEST_SETTINGS,
    SESSION,
    SPANS,
    TENANT_SESSION_PATTERN,
    own_settings,
    printable,
    require_readable,
    require_session_name,
    wrong,
)
from snapkv_vllm.admission.plans import PromptPlan
from snapkv_vllm.admission.spans import RequestSpans, parse_spans

CONFIG_KEY = "snapkv"
"""The key of the server's settings in vLLM's `additional_config`."""

_CAPS = {"max_window_size": MAX_WINDOW_SIZE, "max_kernel_size": MAX_KERNEL_SIZE}

# Other positions of StreamingLLM would need keys to be rotated inside vLLM's cache.
_DEFAULTS: dict[str, dict[str, Any]] = {StreamingLLM.name: {"positions": "original"}}

_NOT_SERVED = {
    "pyramidkv": ", whose layers keep different numbers of tokens, for which across-layers serves",
    "h2o": ", which needs the queries of the whole prompt",
    "full": ", for which a budget of 0 serves",
}

_NO_SPANS = RequestSpans()

_UNSERVABLE = {
    ("group_reduce", "none"): "this must be mean, max or sum, as keys are stored per KV head",
    ("positions", "cache"): "this must be original, because keys are not rotated in vLLM's cache",
}
"""Parameter values that the library accepts and a server cannot serve, with the problem to report.
"""


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """The settings of a server: the method that compresses prompts, its parameters, and the limits
    for requests.

    Args:
        policy: one of `snapkv_vllm.admission.methods.METHODS`.
        budget: tokens kept per KV head and layer; 0 compresses only requests that set a budget.
        parameters: further parameters of the method, by name.
        protect_first: how many first tokens of a prompt are kept whatever their votes, for example
            those of a system message. They count towards the budget.
        max_window_size: the longest observation window, and the most voters, that the server or a
            request may set.
        max_kernel_size: the widest kernel that the server or a request may set; a pair (before,
            after) is before + 1 + after tokens wide.
        limits: how many tokens a request may store while it generates.
        sessions: how much of the cache the histories of sessions may take; None disables sessions.

    Raises:
        InvalidArgumentError: a method that cannot be served, an unknown parameter, a value that is
            out of range, or settings that contradict each other.
        InvalidTypeError: a value has the wrong type.
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
        """Check the values of the settings, and that they can be used together.

        Raises:
            InvalidArgumentError: the method cannot be served, a parameter is unknown, a value is
                out of range, or two settings contradict each other.
            InvalidTypeError: a value has the wrong type.
        """
        policy = self.policy
        if not isinstance(policy, str) or policy not in METHODS:
            why = _NOT_SERVED.get(str(policy), "")
            problem = f"the method must be one of {', '.join(METHODS)}, but got {policy!r}{why}"
            remedy = "Use one of these methods"
            raise wrong("policy", problem, remedy if why else nearest(str(policy), METHODS, remedy))
        for cap in _CAPS:
            require_at_least(cap, getattr(self, cap), 1)
        require_compatible(settings=self)
        self._plan({}, prompt_tokens=1)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build the settings of a server from vLLM's `additional_config`. Without the key
        `CONFIG_KEY` all settings have their defaults.

        Raises:
            InvalidArgumentError: an unknown name, a value that is out of range, or settings that
                contradict each other.
            InvalidTypeError: a value has the wrong type.
        """
        entry = dict(config.get(CONFIG_KEY) or {})
        names = ("policy", "budget", PROTECT_FIRST, *_CAPS)
        own = {key: entry.pop(key) for key in names if key in entry}
        limits = Limits.from_config(entry.pop("limits", {}))
        held = entry.pop("sessions", None)
        sessions = None if held is None else Sessions.from_config(held)
        return cls(**own, parameters=entry, limits=limits, sessions=sessions)

    def to_config(self) -> dict[str, Any]:
        """Return these settings as a new dictionary to be merged into vLLM's `additional_config`,
        from which `from_config` can build them.

        Its only key is `CONFIG_KEY`. Most settings that have their default value are left out. It
        can be written as JSON.
        """
        own: dict[str, Any] = {"policy": self.policy, "budget": self.budget}
        own |= {PROTECT_FIRST: self.protect_first} if self.protect_first else {}
        own |= {cap: getattr(self, cap) for cap in _CAPS if getattr(self, cap) != _CAPS[cap]}
        own |= {"limits": limits} if (limits := self.limits.to_config()) else {}
        own |= {} if self.sessions is None else {"sessions": self.sessions.to_config()}
        return {CONFIG_KEY: own | dict(self.parameters)}

    @property
    def summary(self) -> str:
        """All settings on one line of text for the log of the server: the method with its
        parameters, and the limits for requests. Parameters of the method that are None are left
        out.
        """
        made = self._make_policy(self.budget or None, self.parameters)
        own = {
            name: getattr(one, name)
            for one in (scoring_policy(made), made)
            for name in parameter_names(self.policy)
            if getattr(one, name, None) is not None
        }
        shown = {"policy": self.policy, "budget": self.budget, **own}
        shown |= {name: getattr(self, name) for name in (PROTECT_FIRST, *_CAPS)}
        sessions = "no" if self.sessions is None else self.sessions.summary
        shown |= {**asdict(self.limits), "sessions": sessions}
        return ", ".join(f"{name} {value}" for name, value in shown.items())

    def policy_for_request(self, extra_args: Mapping[str, Any] | None) -> Policy | None:
        """Check the settings of a request whose prompt is not known yet, and return the method that
        compresses the prompt; see `plan_request`.

        The result is None if the prompt is not compressed, because the budget is 0 and there are no
        spans. It is not checked that spans lie inside the prompt.

        Raises:
            InvalidArgumentError: an unknown setting, a name without its prefix, a value that is out
                of range, or settings that contradict each other.
            InvalidTypeError: a value has the wrong type.
        """
        return self.plan_request(extra_args, prompt_tokens=1).policy

    def plan_request(self, extra_args: Mapping[str, Any] | None, prompt_tokens: int) -> PromptPlan:
        """Plan when and how a request is compressed. It is not checked that spans lie inside the
        prompt; see `methods.require_spans_fit`.

        Args:
            extra_args: `SamplingParams.extra_args` of the request, which HTTP bodies call
                `vllm_xargs`; None if it has none. Settings of other software are ignored.
            prompt_tokens: the length of the prompt.

        Raises:
            InvalidArgumentError: an unknown setting, a name without its prefix, a value that is out
                of range, or settings that contradict each other.
            InvalidTypeError: a value has the wrong type.
        """
        requested = own_settings(extra_args or {})
        self._require_known_names(requested)
        require_compatible(settings=self, extra_args=extra_args or {})
        if (session := requested.pop(SESSION, None)) is not None:
            require_session_name(PREFIX + SESSION, session, TENANT_SESSION_PATTERN)
        spans = _pop_spans(requested)
        try:
            return self._plan(requested, prompt_tokens, spans)
        except (InvalidArgumentError, InvalidTypeError) as error:
            message = str(error).removeprefix(PREFIX)  # errors about spans have the prefix
            raise type(error)(f"{PREFIX}{message}") from error

    def spans_of_request(self, extra_args: Mapping[str, Any]) -> RequestSpans:
        """Return the spans of the prompt that a request drops, protects or compresses; empty if it
        has none.

        Raises:
            RefusedError: the list of spans is wrong, two spans with different edits overlap, or the
                name of another setting is written wrongly.
            InvalidTypeError: a number has the wrong type.
            InvalidArgumentError: a number is out of range.
        """
        return _pop_spans(own_settings(extra_args))

    def protected_spans_of(self, extra_args: Mapping[str, Any], prompt_tokens: int) -> Spans:
        """Return the spans of the prompt that a request keeps whatever the votes: those that it
        protects, and its `protect_first` tokens. With a budget of 0 these are all tokens that it
        neither drops nor compresses.

        Args:
            extra_args: the settings of the request, which must have been checked by `plan_request`.
            prompt_tokens: the length of the prompt.
        """
        requested = own_settings(extra_args)
        spans = _pop_spans(requested)
        if requested.get("budget", self.budget):
            first = min(requested.get(PROTECT_FIRST, self.protect_first), prompt_tokens)
            return spans.with_protected_start(first).protect
        others = [*spans.drop.parts, *(span for span, _ in spans.compress)]
        return Spans(((0, prompt_tokens),)).without(Spans.of(SPANS, others))

    def plan_turn(
        self,
        extra_args: Mapping[str, Any],
        held_tokens: int,
        spans: RequestSpans,
        *,
        votes: bool = True,
    ) -> PromptPlan:
        """Plan when and how a request of a session is compressed, if it begins with a history.

        The settings must have been checked by `plan_request`. In the plan that is returned,
        `prompt_tokens` is `held_tokens`.

        Args:
            extra_args: the settings of the request.
            held_tokens: how many tokens the request stores when its prompt has been read.
            spans: the edits of spans that the history does not contain yet.
            votes: False if only the edits of `spans` are carried out, without a compression of the
                other tokens.

        Raises:
            InvalidArgumentError: the protected tokens do not fit into the budget.
        """
        requested = own_settings(extra_args)
        for name in (SPANS, SESSION):
            requested.pop(name, None)
        if not votes:
            requested["budget"] = 0
        return self._plan(requested, held_tokens, spans)

    def most_expensive_policies(self, prompt_tokens: int) -> list[Policy]:
        """Return a list of methods, one of which needs the most memory that any request may cause
        at the end of its prompt. Spans are not considered.

        A method without `voters` gives one candidate. For other methods `voters` is
        `max_window_size`, with every pooling and with both the longest window and a window of 1,
        because voters before the window take another code path. The budget is `prompt_tokens - 1`,
        or what the window needs if that is more.

        Args:
            prompt_tokens: the length of the longest prompt.
        """
        variants: list[dict[str, Any]] = [{}]
        if "voters" in parameter_names(self.policy):
            most = self.max_window_size
            variants = [
                {"voters": most, "window_size": window, "pooling": pooling}
                for window in (most, 1)
                for pooling in POOLINGS
            ]
        every = map(self._merge_parameters, variants)
        return [self._make_policy(max(prompt_tokens - 1, _ample_budget(own)), own) for own in every]

    def count_voters(self, extra_args: Mapping[str, Any], question_tokens: int) -> int | None:
        """Return how many of the last tokens of a chat's prompt vote.

        Args:
            extra_args: the settings of the request.
            question_tokens: the number of tokens from the first token of the question to the end of
                the prompt.

        Returns:
            If the method has the parameters of `snapkv.default_policy`, all tokens of the question
            but at least the window, as in the library (`adapt_to_question`). Otherwise the
            parameter `voters`, which may be None. None if the method has no voters, or if the
            question is longer than `max_window_size`.

        Raises:
            InvalidArgumentError: a parameter of the method is out of range.
            InvalidTypeError: a parameter has the wrong type.
        """
        if question_tokens > self.max_window_size:
            return None
        requested = own_settings(extra_args)
        own = {name: requested[name] for name in parameter_names(self.policy) if name in requested}
        made = self._make_policy(None, self._merge_parameters(own))
        return getattr(scoring_policy(adapt_to_question(made, question_tokens)), "voters", None)

    @property
    def per_head_budget(self) -> bool:
        """Whether the heads of a layer may keep different numbers of tokens."""
        return self._make_policy(None, self.parameters).per_head_budget

    def _plan(
        self,
        requested: Mapping[str, Any],
        prompt_tokens: int,
        spans: RequestSpans = _NO_SPANS,
    ) -> PromptPlan:
        """Combine the settings of a request with the settings of the server, and return the plan of
        the request.

        Args:
            requested: the settings of the request, without their prefix, and without spans and
                session.
            prompt_tokens: the length of the prompt.
            spans: the edits of spans.

        Raises:
            InvalidArgumentError: an unknown parameter, a value that is out of range, or settings
                that contradict each other.
            InvalidTypeError: a value has the wrong type.
        """
        own = dict(requested)
        budget = own.pop("budget", self.budget)
        _require_tokens(budget)
        require_int("budget", budget, minimum=0)
        first = own.pop(PROTECT_FIRST, self.protect_first)
        require_int(PROTECT_FIRST, first, minimum=0)
        decode_budget = own.pop(DECODE_BUDGET, None)
        parameters = self._merge_parameters(own)
        made = self._make_policy(budget or None, parameters)
        policy = made if budget else None
        answer_limit = self.limits.limit_answer(decode_budget, policy)
        for one in (policy, None if answer_limit is None else answer_limit.policy):
            if one is not None:
                require_can_protect_first(one, first)
        if spans:
            spans = spans.with_protected_start(min(first, prompt_tokens))
            policy = self._add_spans(made, spans, budget, parameters, prompt_tokens)
        return PromptPlan(
            prompt_tokens=prompt_tokens,
            policy=policy,
            protect_first=0 if spans else first,
            answer_limit=answer_limit,
        )

    def _merge_parameters(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a new dictionary with the parameters of the server, in which those of the request
        replace them.

        Args:
            own: the parameters of the request, by name. If it sets another pooling, the server's
                parameter of the former pooling, "kernel_size" or "decay", is left out.
        """
        parameters = dict(self.parameters)
        if "pooling" in own:
            parameters.pop("kernel_size" if own["pooling"] == "fading" else "decay", None)
        return parameters | dict(own)

    def _add_spans(
        self,
        plain: Policy,
        spans: RequestSpans,
        budget: int,
        parameters: Mapping[str, Any],
        prompt_tokens: int,
    ) -> WithSpans:
        """Return a method that carries out the edits of the spans, and that applies the budget to
        all other tokens. If the budget is 0 or is enough for all other tokens, it keeps all of
        them.

        Args:
            plain: the method for a prompt without spans.
            spans: the edits.
            budget: the budget of the request; 0 keeps all tokens outside the spans.
            parameters: the parameters of the method.
            prompt_tokens: the length of the prompt; it may be too small if a request is only
                checked.

        Raises:
            RefusedError: a span to compress contains attention sinks, or the protected and
                compressed spans do not fit into the budget.
        """
        window, first = count_window_tokens(plain), count_sink_tokens(scoring_policy(plain))
        span_policies = []
        for (start, end), kept in spans.compress:
            if start < first:
                problem = (
                    f"the span {start} to {end} cannot be compressed, because the first {first} "
                    "tokens are kept"
                )
                raise wrong(SPANS, problem, f"Use a span that starts at {first} or later")
            outside = max(prompt_tokens, end + window) - (end - start)
            span_policies.append(scoring_policy(self._make_policy(outside + kept, parameters)))
        inner = self._make_policy(budget + spans.dropped_tokens, parameters) if budget else None
        try:
            made = WithSpans(inner, spans, tuple(span_policies))
        except InvalidArgumentError as error:
            kept = sum(kept for _, kept in spans.compress) + spans.protect.tokens
            reason = str(error).rstrip(".")
            problem = (
                f"the spans keep {kept:,} tokens, which exceeds the budget of {budget:,} ({reason})"
            )
            raise wrong(SPANS, problem, "Increase the budget, or protect fewer tokens") from None
        fits = budget >= prompt_tokens - spans.dropped_tokens
        return replace(made, policy=None) if fits else made

    def _require_known_names(self, requested: Mapping[str, Any]) -> None:
        """Check that every setting of a request exists, and that its value is short enough to be
        printed. The values of spans and session are not looked at.

        Args:
            requested: the settings of the request, without their prefix.

        Raises:
            RefusedError: a setting does not exist for the method of this server, or its value is
                too long.
            InvalidTypeError: a value is None.
        """
        others = set(METHOD_SETTINGS).difference(parameter_names(self.policy))
        names = [PREFIX + one for one in REQUEST_SETTINGS if one not in others]
        for name, value in requested.items():
            full = PREFIX + printable(name)
            if name in (SESSION, SPANS):
                continue
            if PREFIX + name not in names:
                problem = f"this server has no setting with this name, only {', '.join(names)}"
                raise wrong(
                    full, problem, nearest(full, names, "Remove this setting from the request")
                )
            require_readable(full, value)

    def _make_policy(self, budget: int | None, parameters: Mapping[str, Any]) -> Policy:
        """Build the method of this server, and check its parameters.

        Args:
            budget: how many tokens the method keeps; None for some budget that is large enough for
                the parameters, if the caller needs none.
            parameters: the parameters of the method; those that are left out have their defaults.

        Raises:
            RefusedError: an unknown parameter, a value that a server cannot serve, or a window or
                kernel above the limits of the server.
            InvalidArgumentError: another value is out of range, or the budget is too small.
            InvalidTypeError: a value has the wrong type.
        """
        known = parameter_names(self.policy)
        for name, value in parameters.items():
            if name not in known:
                parameters_known = f"has only the parameters {', '.join(known)}"
                problem = f"the method {self.policy} {parameters_known}, but got {name}={value!r}"
                raise wrong(name, problem, nearest(name, known, "Remove this parameter"))
        merged = {**_DEFAULTS.get(self.policy, {}), **parameters}
        for (name, value), expected in _UNSERVABLE.items():
            if merged.get(name) == value:
                raise wrong(name, f"{expected}, but got {value!r}", "Use one of these values")
        method = METHODS[self.policy]
        made = method(**merged, budget=_ample_budget(merged))
        # A longer window or a wider kernel would slow down the other requests of a step.
        kernel = getattr(scoring_policy(made), "kernel_size", None) or 0
        width = kernel if isinstance(kernel, int) else sum(kernel) + 1
        most = self.max_window_size
        _require_at_most("window_size", count_window_tokens(made), "max_window_size", most)
        _require_at_most("kernel_size", width, "max_kernel_size", self.max_kernel_size)
        # On a small budget, more tokens than the window may vote.
        made = made if budget is None else method(**merged, budget=budget)
        _require_at_most("voters", made.query_tokens, "max_window_size", most)
        return made


def _require_tokens(budget: object) -> None:
    """Check that a budget is not a text with a number of bytes or a share, because a server
    promises numbers of tokens. Other wrong values are accepted here.

    Raises:
        RefusedError: the budget is given in bytes or as a share of the cache.
        InvalidArgumentError: the budget is a share or a number of bytes that is out of range.
    """
    size = byte_budget(budget) if isinstance(budget, str) else None
    if size is None:
        return
    tokens = f", {int(8192 * size['share'])} for 8k" if "share" in size else ""
    plan = f"snapkv plan --context N --budget {budget}"
    problem = f"the budget of a server must be a number of tokens, but got {budget!r}"
    raise wrong("budget", problem, f"Use the number that {plan} shows for N tokens{tokens}")


def _require_at_most(name: str, size: int, cap_name: str, cap: int) -> None:
    """Check that a size is not above the limit that the server has set for it.

    Raises:
        RefusedError: `size` is above `cap`.
    """
    if size > cap:
        option = f"--{cap_name.replace('_', '-')} {size}"
        problem = f"the value can be at most {cap:,} on this server, but got {size:,}"
        raise wrong(name, problem, f"Use a smaller value, or start the server with {option}")


def _ample_budget(parameters: Mapping[str, Any]) -> int:
    """Return a budget that is large enough for the windows and sinks in `parameters`, so that their
    values can be checked without the real budget.
    """
    return DEFAULT_BUDGET + sum(abs(size) for size in parameters.values() if isinstance(size, int))


def _pop_spans(own: MutableMapping[str, Any]) -> RequestSpans:
    """Remove the list of spans from the settings `own` of a request, which is changed in place, and
    return its edits; empty if there is no list.

    Raises:
        RefusedError: the list of spans is wrong, or spans with different edits overlap.
        InvalidTypeError: a number has the wrong type.
        InvalidArgumentError: a number is out of range.
    """
    return RequestSpans.from_edits(parse_spans(own.pop(SPANS))) if SPANS in own else _NO_SPANS
