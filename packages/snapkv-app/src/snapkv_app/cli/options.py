"""The options that several commands have, each declared at one place."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from snapkv.errors import wrong
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
    ReadingLimitParameter,
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
    """The options that choose the model and its device; None for an option that is not given."""

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
        """Check the model, the device and the dtype before torch is imported.

        Whether a model is on the hub, and whether this machine has the device, is not checked.

        Raises:
            ModelNotFoundError: `model` names a file or folder that does not exist or is no model.
            MissingDependencyError: `model` is "demo", and its package is not installed.
            InvalidArgumentError: the device or the dtype is unknown.
        """
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
    """The options that choose the model and one method with its parameters."""

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
        panels.policy(help="Number of tokens at the end of the prompt that vote and are kept"),
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
    decay: Annotated[
        float | None, panels.policy(help="Factor for each token of fading, such as 0.935")
    ] = None
    group_reduce: Annotated[
        str | None, panels.policy(help="mean, max, sum or none, over the query heads of a KV head")
    ] = None
    window_reduce: Annotated[
        str | None, panels.policy(help="mean or max, over the queries of the window")
    ] = None
    set_: Annotated[
        list[str] | None,
        panels.policy("--set", metavar="NAME=VALUE", help="Another parameter of the method"),
    ] = None
    seed: Annotated[
        int | None,
        panels.answer(help="Random seed of sampling and of methods that choose at random"),
        WholeNumber(0, is_counted=False),
    ] = None

    def __post_init__(self) -> None:
        """Check the parameters of the method before torch is imported and the model is loaded.

        The name of a method's class is replaced by the name of the method. An empty name, which
        stands for the method of a library, is not checked.

        Raises:
            InvalidArgumentError: the method or a parameter is unknown, or a value is wrong.
        """
        super().__post_init__()
        if self.policy:
            object.__setattr__(self, "policy", known_method(self.policy))
            require_values(self.policy, self.parameters)

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the method that the options set, by name.

        The default method without a `keep_ratio` has the budget "auto" if none is set. The `seed`
        is included if the method has one.

        Raises:
            InvalidArgumentError: a parameter is malformed or is set twice.
        """
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
        """Whether an option sets any parameter of the method."""
        return bool(self.set_) or any(getattr(self, name) is not None for name in OWN_FLAGS)


@dataclass(frozen=True, kw_only=True)
class MethodOptions(PolicyOptions):
    """The options that choose the model, one method, and how the answer is generated."""

    answer_start: Annotated[
        str, panels.answer(help="Text that the answer begins with; the model continues it")
    ] = ""
    max_new_tokens: Annotated[
        int, panels.answer(help="The largest number of tokens in the answer")
    ] = GenerationSettings.max_new_tokens
    temperature: Annotated[
        float, panels.answer(help="The temperature of sampling; 0 is greedy decoding")
    ] = GenerationSettings.temperature

    def __post_init__(self) -> None:
        """Check the options, among them that `answer_start` is valid Unicode.

        Raises:
            InvalidArgumentError: `answer_start` is not valid Unicode.
        """
        super().__post_init__()
        require_unicode("answer_start", self.answer_start)

    def settings(self) -> GenerationSettings:
        """Return the settings of generation.

        Raises:
            InvalidArgumentError: a value is out of range.
        """
        return GenerationSettings(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=GenerationSettings.seed if self.seed is None else self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class RunOptions(MethodOptions):
    """The options of `ask`, `generate` and `chat`, except those for the prompt."""

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
        panels.policy(
            metavar="TEXT", help="Text of the prompt that is always kept; may be repeated"
        ),
    ] = None
    protect_first: Annotated[
        int,
        panels.policy(help="Number of tokens at the start of the prompt that are always kept"),
        WholeNumber(0),
    ] = 0
    protect_system: Annotated[
        bool | None,
        panels.policy(
            "--protect-system/--no-protect-system",
            help="Always keep the system message of the chat",
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
        """Check the options, among them the assistant, the way to read, and ``--check``.

        Raises:
            ModelNotFoundError: `assistant` names a file or folder that does not exist or is no
                model.
            MissingDependencyError: `assistant` is "demo", and its package is not installed.
            InvalidArgumentError: the way to read is unknown, or ``--check`` is for sampled tokens
                or for more tokens than are generated.
        """
        super().__post_init__()
        if self.assistant is not None:
            from snapkv_app.model_places import local_place  # imports the hub's client

            local_place(self.assistant, argument="assistant")
        _ = self.reading
        if self.check is None:
            return
        if self.temperature:
            problem = (
                "this option can only be used with temperature 0, because sampled tokens are "
                "random, but got "
            )
            problem += f"{self.temperature}"
            raise wrong("check", problem, "Remove either --temperature or --check")
        if self.check > self.max_new_tokens:
            problem = f"expected at most max_new_tokens={self.max_new_tokens}, but got {self.check}"
            raise wrong("check", problem, "Check fewer tokens, or increase max_new_tokens")

    @property
    def reading(self) -> Prefill:
        """The way to read the prompt.

        Raises:
            InvalidArgumentError: `prefill` is not valid.
        """
        return read_prefill(self.prefill)


DRAFTS = ("assistant", "prompt_lookup")
"""The options that choose how tokens are drafted."""


@dataclass(frozen=True, kw_only=True)
class AskOptions(RunOptions):
    """The options of `ask`, which reads files or uses a library."""

    passages: Annotated[
        Any,
        panels.material(
            metavar="INTEGER[,90s]",
            help="Read at most this many tokens, for at most 60 or another number of seconds: of "
            "longer documents, the passages that match the question best by BM25",
        ),
        ReadingLimitParameter(),
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
        """Check the options, among them that those for a library and for files are not mixed.

        Raises:
            InvalidArgumentError: an option for a library is given without a library, an option for
                files is given with one, or `recompute` is out of range.
        """
        super().__post_init__()
        if self.recompute is not None:
            require_share("recompute", self.recompute, "0.2")
        given: dict[str, Any]
        if self.library is None:
            problem, remedy = (
                "this option can only be used with --library",
                "Add --library, or remove this option",
            )
            given = {"documents": self.documents, "recompute": self.recompute}
            given["allow_changed"] = self.allow_changed or None
        else:
            problem, remedy = "this option cannot be used with --library", "Remove this option"
            given = {name: getattr(self, name) or None for name in (*DRAFTS, "protect_first")}
            given |= {"protect": self.protect, "protect_system": self.protect_system}
            given["passages"] = self.passages
            given["prefill"] = None if self.reading == Exact() else self.prefill
        for name, value in given.items():
            if value is not None:
                raise wrong(name, f"{problem}, but got {value}", remedy)


StorageBits = Annotated[
    str,
    panels.sweep(
        metavar="exact|int8|int4|k8v4,...",
        help="How all methods store keys and values: unquantized or in few bits; may be a list "
        "with commas",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ComparedOptions(ModelOptions):
    """The options that choose the model, and the methods and budgets to compare."""

    policy: Annotated[
        list[str] | None,
        panels.sweep(
            help="Method, with parameters: snapkv:kernel_size=13; may be repeated",
            show_default=DEFAULT,
        ),
    ] = None
    budget: Annotated[
        str,
        panels.sweep(
            metavar="INTEGER|auto|12%|64MiB,...",
            help="Tokens kept per head and layer, or bytes; may be a list with commas",
        ),
    ] = "1024"
    bits: StorageBits = EXACT

    def __post_init__(self) -> None:
        """Check the methods, budgets and bits before torch is imported.

        The values of parameters are not checked, which the methods do themselves later.

        Raises:
            InvalidArgumentError: a method, a parameter, a budget or a storage is not valid.
        """
        super().__post_init__()
        if self.policy is not None and not all(text.strip(" ,") for text in self.policy):
            problem = "expected the name of a method, but got an empty name"
            raise wrong("policy", problem, "Remove this option to use the default method")
        for spec in specs(self.policy or ()):
            chosen(*parsed(spec))
        token_budgets(self.budget)
        storage_bits(self.bits)

    @property
    def prefills(self) -> list[tuple[str, Prefill]]:
        """The ways to read prompts, each with the text that names it."""
        return read_prefills(["exact"])


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(ComparedOptions):
    """The options that choose the methods to compare, and the ways to read prompts."""

    prefill: Annotated[
        list[str] | None,
        panels.sweep(
            help="How prompts are read: exact, layer-by-layer, ...; may be repeated",
            show_default="exact",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Check the options, among them the ways to read prompts.

        Raises:
            InvalidArgumentError: one of them is unknown, or is repeated.
        """
        super().__post_init__()
        _ = self.prefills

    @property
    def prefills(self) -> list[tuple[str, Prefill]]:
        """The ways to read prompts, each with the text that names it."""
        return read_prefills(self.prefill or ["exact"])


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ComparedOptions):
    """The options that every evaluation has."""

    baseline: Annotated[
        list[str] | None,
        panels.sweep(
            help="Baseline, at its default budget; the word none for no baseline",
            show_default="full",
        ),
    ] = None
    json: panels.AsJson = False


def read_prefill(text: str) -> Prefill:
    """Parse a way to read prompts, ``NAME`` or ``NAME:PARAMETER=VALUE,PARAMETER=VALUE``.

    Raises:
        InvalidArgumentError: the name, a parameter or a value is not valid, or a parameter is
            repeated.
    """
    name, _, rest = text.partition(":")
    if name not in PREFILLS:
        problem = f"expected one of {', '.join(PREFILLS)}, but got {name!r}"
        raise wrong("prefill", problem, nearest(name, PREFILLS, "Use one of these values"))
    kind = PREFILLS[name]
    given = [_prefill_parameter(kind, part) for part in rest.split(",") if part.strip()]
    if len(dict(given)) < len(given):
        problem = f"every parameter can be set only once, but got {text!r}"
        raise wrong("prefill", problem, "Remove the parameter that is repeated")
    return kind(**dict(given))


def read_prefills(texts: Sequence[str]) -> list[tuple[str, Prefill]]:
    """Parse several ways to read prompts, and return each with its text.

    Raises:
        InvalidArgumentError: a text is repeated, or is not valid.
    """
    if len(set(texts)) < len(texts):
        problem = f"every way to read prompts can be used only once, but got {' '.join(texts)}"
        raise wrong("prefill", problem, "Remove the value that is repeated")
    return [(text, read_prefill(text)) for text in texts]


def _prefill_parameter(kind: type[Prefill], text: str) -> tuple[str, Any]:
    """Parse one parameter of a way to read prompts.

    Raises:
        InvalidArgumentError: the parameter is unknown, or its value is not a whole number.
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    name = name.replace("-", "_")
    known = [field.name for field in fields(kind)]
    if not equals or name not in known:
        problem = f"expected {kind.name} with {', '.join(known) or 'no parameters'} as NAME=VALUE"
        remedy = nearest(name, known, "Remove this parameter")
        raise wrong("prefill", f"{problem}, but got {text!r}", remedy)
    return name, count(name, value, f"--prefill {kind.name}:{name}=")
