"""The options that commands share, and how a command gets them."""

import copy
import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from typer.models import OptionInfo

from snapkv.app.prefills import Prefill
from snapkv.app.settings import GenerationSettings
from snapkv.cli import panels
from snapkv.cli.amounts import kernel, token_budgets
from snapkv.cli.fields import NAMES, field_options, from_options, keyword
from snapkv.cli.outputs import Output, require_outputs
from snapkv.cli.prefill import read_prefill, read_prefills
from snapkv.cli.whole_numbers import POSITIVE, TokenBudget, WholeNumber
from snapkv.errors import InvalidArgumentError
from snapkv.validation import (
    DEFAULT,
    DEFAULT_BUDGET,
    DEFAULT_WINDOW,
    FADING_SINKS,
    GROUP_REDUCTIONS,
    SMALL_WINDOW,
    require_budget,
    require_choice,
    require_pooling,
)

Mark = TypeVar("Mark")


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
        bool, panels.output("--verbose", help="Show what transformers and torch have to say")
    ] = False


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(ModelOptions):
    """One method."""

    policy: Annotated[
        str,
        panels.policy(
            help="Method; `snapkv policies` lists them", show_default="snapkv with fading pooling"
        ),
    ] = DEFAULT
    budget: Annotated[
        Any,
        panels.policy(
            metavar="INTEGER|auto",
            help="Tokens kept per head and layer, window included",
            show_default="auto, chosen by the votes; 1024 with --policy",
        ),
        TokenBudget(),
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
            metavar="INTEGER|BEFORE+BEHIND",
            help="Width of the pooling over neighbours, odd, or how far it reaches: 0+12",
        ),
    ] = None
    pooling: Annotated[str | None, panels.policy(help="max, avg or fading")] = None
    decay: Annotated[float | None, panels.policy(help="Factor per token of fading, 0.935")] = None
    group_reduce: Annotated[
        str | None, panels.policy(help="mean, max, sum or none, over heads that share keys")
    ] = None
    set_: Annotated[
        list[str] | None,
        panels.policy("--set", metavar="NAME=VALUE", help="Any other parameter of the method"),
    ] = None
    seed: Annotated[
        int | None,
        panels.answer(help="Of the sampling, and of a method that draws at random"),
        WholeNumber(0, is_counted=False),
    ] = None

    def __post_init__(self) -> None:
        """Refuse what no method takes, before torch and the model are waited for.

        The methods check all of it again, and what these options cannot know.
        """
        width = None if self.kernel_size is None else kernel(self.kernel_size)
        usual = "fading" if self.policy == DEFAULT and width is None else "max"
        pooling = self.pooling or usual
        if not self.set_:
            require_pooling(pooling, width, self.decay)
        if self.group_reduce is not None:
            require_choice("group_reduce", self.group_reduce, GROUP_REDUCTIONS)
        if self.keep_ratio is not None:
            require_budget(self.budget, self.keep_ratio, 1)
        elif self.policy in (DEFAULT, "snapkv") and not self.set_:
            self._require_room(FADING_SINKS if pooling == "fading" else 0)

    @property
    def has_parameters(self) -> bool:
        """Whether any parameter of a method is given."""
        own = (self.budget, self.keep_ratio, self.window_size, self.kernel_size, self.pooling)
        return any(each is not None for each in (*own, self.decay, self.group_reduce, self.set_))

    def _require_room(self, sink_tokens: int) -> None:
        """Refuse a number of tokens that has no room for the window and what is always kept."""
        is_default = self.policy == DEFAULT
        tokens = DEFAULT_BUDGET if self.budget is None and not is_default else self.budget
        if isinstance(tokens, int):
            window = self.window_size or (SMALL_WINDOW if is_default else DEFAULT_WINDOW)
            require_budget(tokens, None, window, sink_tokens)


@dataclass(frozen=True, kw_only=True)
class MethodOptions(PolicyOptions):
    """One method, and how it answers."""

    answer_start: Annotated[
        str, panels.answer(help="Text that the answer begins with; the model continues it")
    ] = ""
    max_new_tokens: Annotated[int, panels.answer(help="Where an answer is cut off")] = (
        GenerationSettings.max_new_tokens
    )
    temperature: Annotated[float, panels.answer(help="0 takes the likeliest token each time")] = (
        GenerationSettings.temperature
    )

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

    protect: Annotated[
        list[str] | None,
        panels.policy(metavar="TEXT", help="Text of the prompt that stays whatever its votes"),
    ] = None
    protect_first: Annotated[
        int, panels.policy(help="First tokens of the prompt that stay"), WholeNumber(0)
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
            help="How the prompt is read: exact, selective, gemfilter, layer-by-layer, chunked; "
            "with parameters as in selective:layer=15,keep_ratio=0.2"
        ),
    ] = "exact"
    medusa: Annotated[
        str | None, panels.drafts(metavar="HEADS", help="Medusa heads: demo, a folder or a hub id")
    ] = None
    assistant: Annotated[
        str | None, panels.drafts(metavar="MODEL", help="A smaller model that drafts")
    ] = None
    prompt_lookup: Annotated[
        int | None,
        panels.drafts(metavar="N", help="Draft N tokens out of the prompt"),
        POSITIVE,
    ] = None
    self_speculate: Annotated[
        bool,
        panels.drafts(
            "--self-speculate", help="The compressed cache drafts for a full one, whose text it is"
        ),
    ] = False
    compare: Annotated[
        bool,
        panels.output(
            "--compare",
            help="Answer from the full cache too, side by side; where they differ, what to try",
        ),
    ] = False
    check: Annotated[
        int | None,
        panels.output(
            metavar="N",
            help="Compare N tokens with the full cache's, at its price; exit 3 if they differ",
        ),
        POSITIVE,
    ] = None
    json: Annotated[
        bool, panels.output("--json", help="Print one JSON object; --verbose: with every layer")
    ] = False

    def __post_init__(self) -> None:
        """Refuse no way of reading, a check of tokens that are drawn, or of more than come."""
        super().__post_init__()
        _ = self.reading
        if self.check is None:
            return
        if self.temperature:
            raise InvalidArgumentError(
                f"check: expected temperature 0, since drawn tokens differ by chance, got "
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


DRAFTS = ("medusa", "assistant", "prompt_lookup", "self_speculate")
"""The options that name where drafts come from."""


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
            metavar="INTEGER|auto,...", help="Tokens kept per head and layer, with commas for more"
        ),
    ] = "1024"

    def __post_init__(self) -> None:
        """Check the budgets; the methods check the rest."""
        token_budgets(self.budget)

    @property
    def prefills(self) -> list[tuple[str, Prefill]]:
        """How prompts are read, each way under the text that it was given by."""
        return read_prefills(["exact"])


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(ComparedOptions):
    """The methods that are compared, and the ways to read prompts."""

    prefill: Annotated[
        list[str] | None,
        panels.sweep(
            help="How prompts are read: exact, selective:layer=15, ...; again for more",
            show_default="exact",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Check the ways of reading, too."""
        super().__post_init__()
        _ = self.prefills

    @property
    def prefills(self) -> list[tuple[str, Prefill]]:
        """As the option names them."""
        return read_prefills(self.prefill or ["exact"])


@dataclass(frozen=True, kw_only=True)
class SweepOptions(ComparedOptions):
    """What every evaluation takes."""

    baseline: Annotated[
        list[str] | None,
        panels.sweep(
            help="Method to run beside them, at its own budget; none for none", show_default="full"
        ),
    ] = None
    json: panels.AsJson = False


Command = Callable[..., None]


def with_options(
    kind: type, *, settings: type | None = None, panel: str = "", hidden: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Give a command that takes `options` of a dataclass every field of it as an option.

    Outputs among them are checked before the command begins, see `snapkv.cli.outputs`.

    Args:
        kind: the dataclass.
        settings: another one, of which the command takes `settings`, see `snapkv.cli.fields`; the
            first line of its docstring is the help of a command that has none.
        panel: where its fields stand in the help.
        hidden: those of them that are no options.
    """
    hints = get_type_hints(kind, include_extras=True)
    shared = [keyword(field.name, field.default, hints[field.name]) for field in fields(kind)]
    more = field_options(settings, panel=panel, hidden=hidden) if settings else []

    def given_options(command: Command) -> Command:
        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.name not in ("options", "settings")]
        parameters = [_shown(p) for p in (*own, *more, *shared)]
        marked = {p.name: output for p in shared if (output := _mark(p, Output))}
        counted = {p.name: number for p in parameters if (number := _mark(p, WholeNumber))}

        @functools.wraps(command)
        def with_every_option(**given: Any) -> None:
            for name, number in counted.items():
                if given[name] is not None:
                    given[name] = number.read(name, str(given[name]))
            require_outputs(marked, given)
            options = kind(**{p.name: given.pop(p.name) for p in shared})
            if settings is not None:
                own_settings = {p.name: given.pop(p.name) for p in more}
                given["settings"] = from_options(settings, own_settings)
            command(**given, options=options)

        with_every_option.__doc__ = command.__doc__ or (settings.__doc__ or "").partition("\n")[0]
        vars(with_every_option)["__signature__"] = signature.replace(parameters=parameters)
        with_every_option.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_every_option

    return given_options


def _shown(parameter: inspect.Parameter) -> inspect.Parameter:
    """An option as its help shows it: what it takes in capitals, or the words to choose from."""
    if _is_count(parameter):
        return _as_text(parameter)
    hint, info, *marks = get_args(parameter.annotation) or (None, None)
    kinds = get_args(hint) or (hint,)
    if not isinstance(info, OptionInfo) or info.metavar or bool in kinds or hint is Any:
        return parameter
    shown = copy.copy(info)
    is_choice = get_origin(hint) is Literal
    shown.metavar = "|".join(kinds) if is_choice else NAMES[float if float in kinds else str]
    return parameter.replace(annotation=Annotated[hint, shown, *marks])


def _is_count(parameter: inspect.Parameter) -> bool:
    """Whether an option is a whole number, or one that may be left out."""
    return get_args(parameter.annotation)[:1] in ((int,), (int | None,))


def _as_text(parameter: inspect.Parameter) -> inspect.Parameter:
    """The option as text for `WholeNumber.read`, so that 4k works wherever a number does."""
    hint, info, *marks = get_args(parameter.annotation)
    shown = copy.copy(info)
    shown.metavar = info.metavar or NAMES[int]
    text = str if hint is int else str | None
    unset = parameter.default in (None, parameter.empty)
    default = parameter.default if unset else str(parameter.default)
    marks = marks or [WholeNumber()]
    return parameter.replace(annotation=Annotated[text, shown, *marks], default=default)


def _mark(parameter: inspect.Parameter, kind: type[Mark]) -> Mark | None:
    """What stands beside the type of an option, of that kind."""
    return next((each for each in get_args(parameter.annotation) if isinstance(each, kind)), None)
