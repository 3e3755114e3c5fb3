"""The options that commands share, declared once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from snapkv.errors import InvalidArgumentError
from snapkv.validation import (
    AUTO,
    DEFAULT,
    nearest,
    require_device,
    require_dtype,
    require_share,
)
from snapkv_app.cli import panels
from snapkv_app.cli.amounts import (
    EXACT,
    POSITIVE,
    TokenBudgetParameter,
    WholeNumber,
    count,
    kernel,
    storage_bits,
    token_budgets,
)
from snapkv_app.cli.methods import (
    accepted,
    chosen,
    known_method,
    parsed,
    require_values,
    specs,
    typed_assignments,
)
from snapkv_app.cli.standard_output import hide_messages
from snapkv_app.prefills import PREFILLS, Exact, Prefill
from snapkv_app.prompts import require_unicode
from snapkv_app.settings import GenerationSettings


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and where. None means that the option was not given."""

    model: Annotated[
        str | None,
        panels.model(help="Hub id, folder or .gguf file", show_default="the offline demo model"),
    ] = None
    revision: panels.Revision = None
    device: Annotated[
        str | None,
        panels.model(help="cpu, cuda, cuda:1, ...", show_default="the GPU if there is one"),
    ] = None
    dtype: Annotated[
        str | None,
        panels.model(help="float32, bfloat16 or float16", show_default="the checkpoint's own"),
    ] = None
    attn_implementation: Annotated[
        str | None, panels.model(help="sdpa, eager, ...", show_default="transformers' choice")
    ] = None
    trust_remote_code: Annotated[
        bool, panels.model("--trust-remote-code", help="Run code that comes with the model")
    ] = False
    verbose: Annotated[
        bool, panels.output("--verbose", help="Show the messages of transformers and torch")
    ] = False
    quiet: Annotated[
        bool,
        panels.output(
            "--quiet", callback=hide_messages, help="Print the result and errors, nothing else"
        ),
    ] = False

    def __post_init__(self) -> None:
        """Refuse missing files of models, unknown devices and dtypes before torch is imported."""
        if self.model is not None:
            from snapkv_app.model_places import local_place  # imports the hub's client

            local_place(self.model)
        if self.device is not None:
            require_device(self.device)
        if self.dtype is not None:
            require_dtype(self.dtype)


OWN_FLAGS = (
    "budget",
    "keep_ratio",
    "window_size",
    "kernel_size",
    "pooling",
    "decay",
    "group_reduce",
    "window_reduce",
)
"""Method parameters that have their own option; all others are given with ``--set``."""


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(ModelOptions):
    """One method."""

    policy: Annotated[
        str,
        panels.policy(
            help="Method; `snapkv policies` lists them",
            show_default="snapkv's largest votes, one budget for all layers",
        ),
    ] = DEFAULT
    budget: Annotated[
        Any,
        panels.policy(
            metavar="INTEGER|auto|12%|64MiB",
            help="Tokens kept per head and layer, window included; or a total in bytes",
            show_default="auto, set from the votes; 1024 with another --policy",
        ),
        TokenBudgetParameter(None),  # checked together with the window
    ] = None
    keep_ratio: panels.KeepRatio = None
    window_size: Annotated[
        int | None,
        panels.policy(help="Last tokens of the prompt, which vote and are kept"),
        POSITIVE,
    ] = None
    kernel_size: Annotated[
        str | None,
        panels.policy(
            metavar="INTEGER|BEFORE+AFTER",
            help="Width of the pooling kernel, odd; or positions before and after: 0+12",
        ),
    ] = None
    pooling: Annotated[str | None, panels.policy(help="max, avg or fading")] = None
    decay: Annotated[float | None, panels.policy(help="Factor per token of fading, 0.935")] = None
    group_reduce: Annotated[
        str | None, panels.policy(help="mean, max, sum or none, over heads that share keys")
    ] = None
    window_reduce: Annotated[
        str | None, panels.policy(help="mean or max, over the queries of the window")
    ] = None
    set_: Annotated[
        list[str] | None,
        panels.policy("--set", metavar="NAME=VALUE", help="Any other parameter of the method"),
    ] = None
    seed: Annotated[
        int | None,
        panels.answer(help="Random seed of sampling and of methods that choose at random"),
        WholeNumber(0, is_counted=False),
    ] = None

    def __post_init__(self) -> None:
        """Refuse wrong parameters before torch is imported and the model loaded."""
        super().__post_init__()
        if self.policy:
            object.__setattr__(self, "policy", known_method(self.policy))
            require_values(self.policy, self.parameters)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that the options give to the method."""
        given = {name: value for name in OWN_FLAGS if (value := getattr(self, name)) is not None}
        if self.kernel_size is not None:
            given["kernel_size"] = kernel(self.kernel_size)
        given = typed_assignments(self.policy, self.set_ or [], given)
        if self.policy == DEFAULT and "keep_ratio" not in given:
            given.setdefault("budget", AUTO)
        if self.seed is not None and "seed" in accepted(self.policy, given):
            given.setdefault("seed", self.seed)
        return given

    @property
    def has_parameters(self) -> bool:
        """Whether any parameter of a method is given."""
        return bool(self.set_) or any(getattr(self, name) is not None for name in OWN_FLAGS)


@dataclass(frozen=True, kw_only=True)
class MethodOptions(PolicyOptions):
    """One method, and how it answers."""

    answer_start: Annotated[
        str, panels.answer(help="Text that the answer begins with; the model continues it")
    ] = ""
    max_new_tokens: Annotated[int, panels.answer(help="Longest answer, in tokens")] = (
        GenerationSettings.max_new_tokens
    )
    temperature: Annotated[float, panels.answer(help="Of sampling; 0 is greedy decoding")] = (
        GenerationSettings.temperature
    )

    def __post_init__(self) -> None:
        """Also refuse an `answer_start` that is not valid Unicode."""
        super().__post_init__()
        require_unicode("answer_start", self.answer_start)

    def settings(self) -> GenerationSettings:
        """How to generate."""
        return GenerationSettings(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=GenerationSettings.seed if self.seed is None else self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class RunOptions(MethodOptions):
    """All options of `ask` and `generate` except the prompt."""

    exact_bits: Annotated[
        bool,
        panels.policy(
            "--exact-bits",
            help="With a budget in bytes, store keys and values unquantized; the default method "
            "stores them in 8 and 4 bits then",
        ),
    ] = False
    protect: Annotated[
        list[str] | None,
        panels.policy(metavar="TEXT", help="Text of the prompt that is kept whatever its votes"),
    ] = None
    protect_first: Annotated[
        int, panels.policy(help="First tokens of the prompt that are kept"), WholeNumber(0)
    ] = 0
    protect_system: Annotated[
        bool | None,
        panels.policy(
            "--protect-system/--no-protect-system",
            help="Keep the chat's system message",
            show_default="in ask and chat, where it fits",
        ),
    ] = None
    prefill: Annotated[
        str,
        panels.answer(
            help="How the prompt is read: exact, or layer-by-layer (also exact, in less memory), "
            "with parameters as in layer-by-layer:chunk_tokens=2k"
        ),
    ] = "exact"
    assistant: Annotated[
        str | None, panels.drafts(metavar="MODEL", help="A smaller model that drafts tokens")
    ] = None
    prompt_lookup: Annotated[
        int | None,
        panels.drafts(metavar="N", help="Draft N tokens by copying from the prompt"),
        POSITIVE,
    ] = None
    compare: Annotated[
        bool,
        panels.output(
            "--compare",
            help="Also answer from the full cache, side by side; if they differ, suggest a command",
        ),
    ] = False
    check: Annotated[
        int | None,
        panels.output(
            metavar="N",
            help="Compare N tokens with the full cache's (needs its memory); exit 3 if they differ",
        ),
        POSITIVE,
    ] = None
    json: Annotated[
        bool, panels.output("--json", help="Print one JSON object; with --verbose, every layer")
    ] = False

    def __post_init__(self) -> None:
        """Refuse an unknown prefill, and a check of sampled or of too many tokens."""
        super().__post_init__()
        if self.assistant is not None:
            from snapkv_app.model_places import local_place  # imports the hub's client

            local_place(self.assistant, argument="assistant")
        _ = self.reading
        if self.check is None:
            return
        if self.temperature:
            raise InvalidArgumentError(
                f"check: expected temperature 0, since sampled tokens differ by chance, got "
                f"{self.temperature}; leave temperature or check out"
            )
        if self.check > self.max_new_tokens:
            raise InvalidArgumentError(
                f"check: expected at most max_new_tokens={self.max_new_tokens}, got {self.check}; "
                "check fewer, or raise max_new_tokens"
            )

    @property
    def reading(self) -> Prefill:
        """How the prompt is read."""
        return read_prefill(self.prefill)


DRAFTS = ("assistant", "prompt_lookup")
"""The options that choose a source of drafts."""


@dataclass(frozen=True, kw_only=True)
class AskOptions(RunOptions):
    """The options of `ask`, which reads files or a library."""

    passages: Annotated[
        int | None,
        panels.material(
            help="Read at most this many tokens: of longer documents, the passages that match the "
            "question best by BM25",
        ),
        POSITIVE,
    ] = None
    library: Annotated[
        str | None,
        panels.library(metavar="FOLDER", help="Answer from documents that `library add` has read"),
    ] = None
    documents: Annotated[
        int | None,
        panels.library(help="How many documents of the library to answer from", show_default="3"),
        WholeNumber(1),
    ] = None
    allow_changed: Annotated[
        bool,
        panels.library(
            "--allow-changed",
            help="Answer even if the files of documents have changed since they were read",
        ),
    ] = False
    recompute: Annotated[
        float | None,
        panels.library(
            help="Fraction of their tokens that the second layer recomputes; up to 0.5, the last "
            "layer recomputes a tenth as many. 0: none, 1: all tokens in all layers",
            show_default="0.2",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse options that a library excludes, and options that need one."""
        super().__post_init__()
        if self.recompute is not None:
            require_share("recompute", self.recompute, "0.2")
        given: dict[str, Any]
        if self.library is None:
            expected = "--library with it"
            given = {"documents": self.documents, "recompute": self.recompute}
            given["allow_changed"] = self.allow_changed or None
        else:
            expected = "none with --library"
            given = {name: getattr(self, name) or None for name in (*DRAFTS, "protect_first")}
            given |= {"protect": self.protect, "protect_system": self.protect_system}
            given["passages"] = self.passages
            given["prefill"] = None if self.reading == Exact() else self.prefill
        for name, value in given.items():
            if value is not None:
                raise InvalidArgumentError(
                    f"{name}: expected {expected}, got {value}; leave it out"
                )


StorageBits = Annotated[
    str,
    panels.sweep(
        metavar="exact|int8|int4|k8v4,...",
        help="How all methods store keys and values: unquantized or in few bits; with commas for "
        "more",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ComparedOptions(ModelOptions):
    """The methods that are compared."""

    policy: Annotated[
        list[str] | None,
        panels.sweep(
            help="Method, with parameters: snapkv:kernel_size=13; again or with commas for more",
            show_default=DEFAULT,
        ),
    ] = None
    budget: Annotated[
        str,
        panels.sweep(
            metavar="INTEGER|auto|12%|64MiB,...",
            help="Tokens kept per head and layer, or bytes, with commas for more",
        ),
    ] = "1024"
    bits: StorageBits = EXACT

    def __post_init__(self) -> None:
        """Check names, budgets and bits; the methods check the values of their parameters."""
        super().__post_init__()
        if self.policy is not None and not all(text.strip(" ,") for text in self.policy):
            raise InvalidArgumentError(
                "policy: expected the name of a method, got an empty one; leave it out for the "
                "default"
            )
        for spec in specs(self.policy or ()):
            chosen(*parsed(spec))
        token_budgets(self.budget)
        storage_bits(self.bits)

    @property
    def prefills(self) -> list[tuple[str, Prefill]]:
        """The ways to read prompts, by the texts that named them."""
        return read_prefills(["exact"])


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(ComparedOptions):
    """The methods that are compared, and the ways to read prompts."""

    prefill: Annotated[
        list[str] | None,
        panels.sweep(
            help="How prompts are read: exact, layer-by-layer, ...; again for more",
            show_default="exact",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Also check the ways to read prompts."""
        super().__post_init__()
        _ = self.prefills

    @property
    def prefills(self) -> list[tuple[str, Prefill]]:
        """The ways to read prompts, by the texts that named them."""
        return read_prefills(self.prefill or ["exact"])


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ComparedOptions):
    """What every evaluation takes."""

    baseline: Annotated[
        list[str] | None,
        panels.sweep(help="A baseline at its default budget; none for none", show_default="full"),
    ] = None
    json: panels.AsJson = False


def read_prefill(text: str) -> Prefill:
    """The `Prefill` that ``NAME`` or ``NAME:PARAMETER=VALUE,PARAMETER=VALUE`` names."""
    name, _, rest = text.partition(":")
    if name not in PREFILLS:
        raise InvalidArgumentError(
            f"prefill: expected one of {', '.join(PREFILLS)}, got {name!r}{nearest(name, PREFILLS)}"
        )
    kind = PREFILLS[name]
    given = [_prefill_parameter(kind, part) for part in rest.split(",") if part.strip()]
    if len(dict(given)) < len(given):
        raise InvalidArgumentError(
            f"prefill: expected every parameter once, got {text!r}; leave the repeated one out"
        )
    return kind(**dict(given))


def read_prefills(texts: Sequence[str]) -> list[tuple[str, Prefill]]:
    """`read_prefill` of several texts, by those texts."""
    if len(set(texts)) < len(texts):
        raise InvalidArgumentError(
            f"prefill: expected every way of reading once, got {' '.join(texts)}; leave the "
            "repeated one out"
        )
    return [(text, read_prefill(text)) for text in texts]


def _prefill_parameter(kind: type[Prefill], text: str) -> tuple[str, Any]:
    name, equals, value = (part.strip() for part in text.partition("="))
    name = name.replace("-", "_")
    known = [field.name for field in fields(kind)]
    if not equals or name not in known:
        raise InvalidArgumentError(
            f"prefill: expected {kind.name} with {', '.join(known) or 'no parameters'} as "
            f"NAME=VALUE, got {text!r}{nearest(name, known)}"
        )
    return name, count(name, value, f"--prefill {kind.name}:{name}=")
