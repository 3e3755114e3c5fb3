"""`snapkv serve`: vLLM's OpenAI-compatible server with compressed prompts."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snapkv.cli.amounts import WholeNumber, byte_count
from snapkv.cli.fields import with_options
from snapkv.cli.interrupts import started
from snapkv.errors import InvalidArgumentError
from snapkv.validation import (
    DEFAULT,
    DEFAULT_EVERY,
    MAX_KERNEL_SIZE,
    MAX_WINDOW_SIZE,
    byte_budget,
    require_int,
)

if TYPE_CHECKING:
    from snapkv_vllm import ServingSettings

EXAMPLES = {"serve": ("snapkv serve demo --budget 512 --max-model-len 8192",)}

_FROM_0, _FROM_1 = WholeNumber(0, is_counted=False), WholeNumber(1, is_counted=False)
_LIMITS = ("decode_budget", "decode_policy", "evict_every")
_SIZES = ("budget", "protect_first", "max_window_size", "max_kernel_size")


class _ServedBudget(WholeNumber):
    """Leaves bytes to the settings, which say how many tokens to type."""

    def read(self, name: str, text: str) -> Any:
        return text.strip() if byte_budget(text) else super().read(name, text)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a server takes beside vLLM's own options."""

    policy: Annotated[
        str,
        typer.Option(
            help="Method: snapkv, adakv, streaming-llm or tova",
            show_default="snapkv with fading pooling",
        ),
    ] = DEFAULT
    budget: Annotated[
        Any,
        typer.Option(
            metavar="INTEGER", help="Tokens kept per head and layer; 0: only where a request asks"
        ),
        _ServedBudget(0, is_counted=False),
    ] = 1024
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Parameter of the method, as kernel_size=13"
        ),
    ] = None
    protect_first: Annotated[
        int,
        typer.Option(help="First tokens of every prompt that stay, such as a system message"),
        _FROM_0,
    ] = 0
    max_window_size: Annotated[
        int, typer.Option(help="The longest window that a request may ask for"), WholeNumber(1)
    ] = MAX_WINDOW_SIZE
    max_kernel_size: Annotated[
        int, typer.Option(help="The widest kernel that a request may ask for"), WholeNumber(1)
    ] = MAX_KERNEL_SIZE
    decode_budget: Annotated[
        int, typer.Option(help="Tokens held of prompt and answer while generating; 0: all"), _FROM_0
    ] = 0
    decode_policy: Annotated[
        str, typer.Option(help="What evicts while generating: r-kv, tova or streaming-llm")
    ] = "r-kv"
    evict_every: Annotated[
        int, typer.Option(help="Generated tokens between two evictions"), _FROM_1
    ] = DEFAULT_EVERY
    share: Annotated[
        bool, typer.Option("--share", help="Keep documents compressed, for requests that name them")
    ] = False
    share_bytes: Annotated[
        str | None,
        typer.Option(help="Of the cache for documents, such as 2GiB; default: a quarter of it"),
    ] = None
    share_across_keys: Annotated[
        bool, typer.Option("--share-across-keys", help="Documents of one API key are everybody's")
    ] = False
    share_library: Annotated[
        str | None, typer.Option(help="Share the documents of a library, see snapkv library")
    ] = None
    sessions: Annotated[
        bool,
        typer.Option("--sessions", help="Hold histories of sessions, for their next requests"),
    ] = False
    session_bytes: Annotated[
        str | None,
        typer.Option(help="Of the cache for histories, such as 2GiB; default: a quarter of it"),
    ] = None
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Print vLLM's own command instead of serving")
    ] = False

    def sharing(self) -> dict[str, Any] | None:
        """What is said of shared documents; None where there are none."""
        if not self.share:
            for name in ("share_bytes", "share_across_keys", "share_library"):
                if getattr(self, name) not in (None, False):
                    option = name.replace("_", "-")
                    raise InvalidArgumentError(
                        f"{option}: expected it with --share, got it alone; add --share, or leave "
                        f"--{option} out"
                    )
            return None
        most_bytes = self._bytes("share_bytes")
        library = "" if self.share_library is None else _library(self.share_library)
        return {
            "most_bytes": most_bytes,
            "across_keys": self.share_across_keys,
            "library": library,
        }

    def held_sessions(self) -> dict[str, Any] | None:
        """What is said of sessions; None where none are held."""
        if not self.sessions:
            if self.session_bytes is not None:
                raise InvalidArgumentError(
                    "session-bytes: expected it with --sessions, got it alone; add --sessions, or "
                    "leave --session-bytes out"
                )
            return None
        return {"most_bytes": self._bytes("session_bytes")}

    def _bytes(self, name: str) -> int:
        """A number of bytes, 0 where the server is to choose."""
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
    """Serve a model over HTTP with vLLM, from a compressed cache in the model's own bits.

    Behind MODEL goes any option of `vllm serve`, such as --max-model-len 32768.
    """
    if model.startswith("-"):
        raise InvalidArgumentError(
            f"model: expected the model before all options, got {model}; write for instance "
            "snapkv serve demo --budget 1024"
        )
    settings = _settings(options, options.sharing(), options.held_sessions())

    from snapkv.app.models import place_of
    from snapkv_vllm import server

    if options.print_command:
        typer.echo(server.command_line(place_of(model), settings, context.args, name=model))
        return
    started()
    server.serve(place_of(model), settings, context.args, name=model)


def _library(share_library: str) -> str:
    """The folder of a library; refused where there is none."""
    from snapkv.library.library import Library  # imports torch

    path = Path(share_library).expanduser().absolute()
    Library(path).required()
    return str(path)


def _settings(
    options: ServeOptions, sharing: dict[str, Any] | None, sessions: dict[str, Any] | None
) -> "ServingSettings":
    from snapkv.cli.policy import typed_assignments  # imports torch
    from snapkv.policies import SnapKV
    from snapkv.policies.default import default_parameters
    from snapkv_vllm import Limits, ServingSettings
    from snapkv_vllm.agents.held import Sessions
    from snapkv_vllm.documents.sharing import Sharing

    policy, parameters = options.policy, typed_assignments(options.policy, options.set_ or [])
    if policy == DEFAULT:
        policy, parameters = SnapKV.name, default_parameters(parameters)
    return ServingSettings(
        policy=policy,
        parameters=parameters,
        limits=Limits.from_config({name: getattr(options, name) for name in _LIMITS}),
        sharing=None if sharing is None else Sharing.from_config(sharing),
        sessions=None if sessions is None else Sessions.from_config(sessions),
        **{name: getattr(options, name) for name in _SIZES},
    )
