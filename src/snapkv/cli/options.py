"""The options that commands share, and how a command gets them."""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

import typer

from snapkv.app.settings import GenerationSettings
from snapkv.cli.amounts import count
from snapkv.cli.fields import integers
from snapkv.cli.outputs import Output, require_outputs
from snapkv.validation import (
    DEFAULT_BUDGET,
    DEFAULT_WINDOW,
    GROUP_REDUCTIONS,
    POOLINGS,
    require_budget,
    require_choice,
    require_int,
    require_kernel,
)

_model = functools.partial(typer.Option, rich_help_panel="Model")
_policy = functools.partial(typer.Option, rich_help_panel="What to keep")
_answer = functools.partial(typer.Option, rich_help_panel="Answer")
_sweep = functools.partial(typer.Option, rich_help_panel="What to compare")
_drafts = functools.partial(typer.Option, rich_help_panel="Drafts")
_output = functools.partial(typer.Option, rich_help_panel="Output")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and where. None means that the option was not given."""

    model: Annotated[
        str | None,
        _model(help="Hub id, folder or .gguf file", show_default="the offline demo model"),
    ] = None
    revision: Annotated[str | None, _model(help="Branch, tag or commit of a hub id")] = None
    device: Annotated[
        str | None, _model(help="cpu, cuda, cuda:1, ...", show_default="the GPU if there is one")
    ] = None
    dtype: Annotated[
        str | None, _model(help="float32, bfloat16 or float16", show_default="the checkpoint's own")
    ] = None
    attn_implementation: Annotated[
        str | None, _model(help="sdpa, eager, ...", show_default="transformers' choice")
    ] = None
    trust_remote_code: Annotated[
        bool, _model("--trust-remote-code", help="Run code that comes with the model")
    ] = False
    verbose: Annotated[
        bool, _output("--verbose", help="Show what transformers and torch have to say")
    ] = False


@dataclass(frozen=True, kw_only=True)
class MethodOptions(ModelOptions):
    """One method, and how it answers."""

    policy: Annotated[str, _policy(help="Method; `snapkv policies` lists them")] = "snapkv"
    budget: Annotated[
        int | None, _policy(help="Tokens kept per head and layer, window included")
    ] = None
    keep_ratio: Annotated[
        float | None, _policy(help="Instead of --budget, the fraction of the prefix to keep")
    ] = None
    window_size: Annotated[
        int | None, _policy(help="Last tokens of the prompt, which vote and are kept")
    ] = None
    kernel_size: Annotated[
        int | None, _policy(help="Width of the pooling over neighbours, odd")
    ] = None
    pooling: Annotated[str | None, _policy(help="max or avg")] = None
    group_reduce: Annotated[
        str | None, _policy(help="mean, max, sum or none, over heads that share keys")
    ] = None
    set_: Annotated[
        list[str] | None,
        _policy("--set", metavar="NAME=VALUE", help="Any other parameter of the method"),
    ] = None

    answer_start: Annotated[
        str, _answer(help="Text that the answer begins with; the model continues it")
    ] = ""
    max_new_tokens: Annotated[int, _answer(help="Where an answer is cut off")] = (
        GenerationSettings.max_new_tokens
    )
    temperature: Annotated[float, _answer(help="0 takes the likeliest token each time")] = (
        GenerationSettings.temperature
    )
    seed: Annotated[
        int | None, _answer(help="Of the sampling, and of a method that draws at random")
    ] = None

    def __post_init__(self) -> None:
        """Refuse what no method takes, before torch and the model are waited for.

        The methods check all of it again, and what these options cannot know.
        """
        _require_ints(self, {"budget": 1, "window_size": 1, "seed": 0})
        if self.kernel_size is not None:
            require_kernel(self.kernel_size)
        for name, known in (("pooling", POOLINGS), ("group_reduce", GROUP_REDUCTIONS)):
            if (given := getattr(self, name)) is not None:
                require_choice(name, given, known)
        if self.keep_ratio is not None:
            require_budget(self.budget, self.keep_ratio, 1)
        elif self.policy == MethodOptions.policy and not self.set_:
            window = self.window_size or DEFAULT_WINDOW
            require_budget(self.budget or DEFAULT_BUDGET, None, window)

    def settings(self) -> GenerationSettings:
        """How to generate.

        Raises:
            InvalidArgumentError: a value out of range.
        """
        return GenerationSettings(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=GenerationSettings.seed if self.seed is None else self.seed,
        )


@dataclass(frozen=True, kw_only=True)
class RunOptions(MethodOptions):
    """Everything but the prompt of `ask` and `generate`."""

    medusa: Annotated[
        str | None,
        _drafts(metavar="HEADS", help="Medusa heads: demo, a folder or a hub id"),
    ] = None
    assistant: Annotated[
        str | None, _drafts(metavar="MODEL", help="A smaller model that drafts")
    ] = None
    prompt_lookup: Annotated[
        int | None, _drafts(metavar="N", help="Draft N tokens out of the prompt")
    ] = None
    self_speculate: Annotated[
        bool,
        _drafts(
            "--self-speculate",
            help="The compressed cache drafts for a full one, whose text it is",
        ),
    ] = False
    compare: Annotated[
        bool, _output("--compare", help="Answer from the full cache too, side by side")
    ] = False
    json: Annotated[bool, _output("--json", help="Print one JSON object instead of text")] = False

    def __post_init__(self) -> None:
        """Check what drafts, too."""
        super().__post_init__()
        _require_ints(self, {"prompt_lookup": 1})


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ModelOptions):
    """What every evaluation takes: the methods that it compares."""

    policy: Annotated[
        list[str] | None,
        _sweep(
            help="Method, with parameters: snapkv:kernel_size=13; again or with commas for more",
            show_default="snapkv",
        ),
    ] = None
    budget: Annotated[str, _sweep(help="Tokens kept per head and layer, with commas for more")] = (
        "1024"
    )
    baseline: Annotated[
        list[str] | None,
        _sweep(
            help="Method to run beside them, at its own budget; none for none",
            show_default="full",
        ),
    ] = None
    json: Annotated[bool, _output("--json", help="Print one JSON object")] = False

    def __post_init__(self) -> None:
        """Check the budgets; the methods check the rest."""
        for budget in integers("budget", self.budget):
            require_int("budget", budget, minimum=1)


def _require_ints(options: object, minima: Mapping[str, int]) -> None:
    """Refuse numbers below their minima; None stands for one that was not given."""
    for name, minimum in minima.items():
        if (number := getattr(options, name)) is not None:
            require_int(name, number, minimum=minimum)


Command = Callable[..., None]


@dataclass(frozen=True)
class WholeNumber:
    """Marks an option that takes a whole number as people write it, such as 4k."""


def _is_count(parameter: inspect.Parameter) -> bool:
    """Whether an option is a whole number, or one that may be left out."""
    return get_args(parameter.annotation)[:1] in ((int,), (int | None,))


def _as_text(parameter: inspect.Parameter) -> inspect.Parameter:
    """The option as text for `count`, so that 4k works wherever a number does."""
    hint, info, *marks = get_args(parameter.annotation)
    shown = copy.copy(info)
    shown.metavar = info.metavar or "INTEGER"
    text = str if hint is int else str | None
    unset = parameter.default in (None, parameter.empty)
    default = parameter.default if unset else str(parameter.default)
    return parameter.replace(
        annotation=Annotated[text, shown, WholeNumber(), *marks], default=default
    )


def _output_of(hint: Any) -> Output | None:
    """What an option is marked to write."""
    return next((mark for mark in get_args(hint) if isinstance(mark, Output)), None)


def with_options(kind: type) -> Callable[[Command], Command]:
    """Give a command that takes `options` of a dataclass every field of it as an option.

    Outputs among them are checked before the command begins, see `snapkv.cli.outputs`.
    """

    def given_options(command: Command) -> Command:
        hints = get_type_hints(kind, include_extras=True)
        names = [field.name for field in fields(kind)]
        shared = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in fields(kind)
        ]
        signature = inspect.signature(command)
        own = [parameter for name, parameter in signature.parameters.items() if name != "options"]
        counted = {p.name for p in (*own, *shared) if _is_count(p)}

        marked = {name: output for name in names if (output := _output_of(hints[name]))}

        @functools.wraps(command)
        def with_every_option(**given: Any) -> None:
            for name in counted:
                if given[name] is not None:
                    given[name] = count(name, str(given[name]))
            require_outputs(marked, given)
            options = kind(**{name: given.pop(name) for name in names})
            command(**given, options=options)

        parameters = [_as_text(p) if p.name in counted else p for p in (*own, *shared)]
        vars(with_every_option)["__signature__"] = signature.replace(parameters=parameters)
        with_every_option.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_every_option

    return given_options
