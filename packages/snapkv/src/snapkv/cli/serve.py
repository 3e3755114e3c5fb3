"""`snapkv serve`: vLLM's OpenAI-compatible server with compressed prompts."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapkv.cli import interrupts
from snapkv.cli.amounts import byte_count
from snapkv.errors import InvalidArgumentError
from snapkv.validation import (
    DEFAULT,
    DEFAULT_CHUNK,
    DEFAULT_EVERY,
    MAX_KERNEL_SIZE,
    MAX_WINDOW_SIZE,
    require_at_least,
    require_int,
)

if TYPE_CHECKING:
    from snapkv_vllm import ServingSettings

_LEAST = {
    "budget": 0,
    "protect_first": 0,
    "cap": 0,
    "chunk_tokens": 1,
    "decode_budget": 0,
    "evict_every": 1,
}
"""The least that numbers may be which are checked before torch is waited for."""

_Policy = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        help="Method: snapkv, adakv, streaming-llm or tova",
        show_default="snapkv with fading pooling",
    ),
]
_Budget = Annotated[
    int,
    typer.Option(
        metavar="INTEGER", help="Tokens kept per head and layer; 0: only where a request asks"
    ),
]
_Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Parameter of the method, as kernel_size=13"),
]
_ProtectFirst = Annotated[
    int,
    typer.Option(
        metavar="INTEGER",
        help="First tokens of every prompt that stay, such as a system message",
    ),
]
_Cap = Annotated[
    int,
    typer.Option(
        metavar="INTEGER", help="Tokens held of a prompt while it is read in chunks; 0: all"
    ),
]
_ChunkTokens = Annotated[
    int,
    typer.Option(
        metavar="INTEGER", help="Tokens of a chunk, between two compressions of a prompt with a cap"
    ),
]
_DecodeBudget = Annotated[
    int,
    typer.Option(
        metavar="INTEGER", help="Tokens held of prompt and answer while generating; 0: all"
    ),
]
_DecodePolicy = Annotated[
    str,
    typer.Option(metavar="TEXT", help="What evicts while generating: r-kv, tova or streaming-llm"),
]
_EvictEvery = Annotated[
    int, typer.Option(metavar="INTEGER", help="Generated tokens between two evictions")
]
_Share = Annotated[
    bool, typer.Option("--share", help="Keep documents compressed, for requests that name them")
]
_ShareBytes = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="Of the cache for documents, such as 2GiB; default: a quarter of it"
    ),
]
_ShareAcrossKeys = Annotated[
    bool, typer.Option("--share-across-keys", help="Documents of one API key are everybody's")
]
_ShareFolder = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Keep documents there as files, also for the next start"),
]
_MaxWindowSize = Annotated[
    int, typer.Option(metavar="INTEGER", help="The longest window that a request may ask for")
]
_MaxKernelSize = Annotated[
    int, typer.Option(metavar="INTEGER", help="The widest kernel that a request may ask for")
]

_PrintCommand = Annotated[
    bool, typer.Option("--print-command", help="Print vLLM's own command instead of serving")
]


def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, folder, GGUF file, or demo")
    ],
    policy: _Policy = DEFAULT,
    budget: _Budget = 1024,
    set_: _Assignments = None,
    protect_first: _ProtectFirst = 0,
    max_window_size: _MaxWindowSize = MAX_WINDOW_SIZE,
    max_kernel_size: _MaxKernelSize = MAX_KERNEL_SIZE,
    cap: _Cap = 0,
    chunk_tokens: _ChunkTokens = DEFAULT_CHUNK,
    decode_budget: _DecodeBudget = 0,
    decode_policy: _DecodePolicy = "r-kv",
    evict_every: _EvictEvery = DEFAULT_EVERY,
    share: _Share = False,
    share_bytes: _ShareBytes = None,
    share_across_keys: _ShareAcrossKeys = False,
    share_folder: _ShareFolder = None,
    print_command: _PrintCommand = False,
) -> None:
    """Serve a model over HTTP with vLLM, from a compressed cache.

    Behind MODEL goes any option of `vllm serve`, such as --max-model-len 32768.
    """
    _require_first(model)
    caps = {"max_window_size": max_window_size, "max_kernel_size": max_kernel_size}
    limits: dict[str, int | str] = {
        "cap": cap,
        "chunk_tokens": chunk_tokens,
        "decode_budget": decode_budget,
        "decode_policy": decode_policy,
        "evict_every": evict_every,
    }
    sizes = {"budget": budget, "protect_first": protect_first, **caps}
    sharing = _sharing(share, share_bytes, share_across_keys, share_folder)
    settings = _settings(policy, set_ or [], limits, sharing, **sizes)
    from snapkv.app.models import place_of

    if print_command:
        from snapkv_vllm.server import command_line

        typer.echo(command_line(place_of(model), settings, context.args, name=model))
        return
    from snapkv_vllm.server import serve as run_server

    interrupts.started()
    run_server(place_of(model), settings, context.args, name=model)


def _require_first(model: str) -> None:
    """Raise where an option stands in the model's place."""
    if model.startswith("-"):
        raise InvalidArgumentError(
            f"model: expected the model before all options, got {model}; write for instance "
            "snapkv serve demo --budget 1024"
        )


def _sharing(
    share: bool, share_bytes: str | None, share_across_keys: bool, share_folder: str | None
) -> dict[str, int | bool | str] | None:
    """What the options say of shared documents; None where there are none."""
    if share:
        most_bytes = 0 if share_bytes is None else byte_count("share_bytes", share_bytes)
        if share_bytes is not None:
            require_int("share_bytes", most_bytes, minimum=1)
        folder = "" if share_folder is None else _folder(share_folder)
        return {"most_bytes": most_bytes, "across_keys": share_across_keys, "folder": folder}
    alone = {"bytes": share_bytes, "across-keys": share_across_keys or None, "folder": share_folder}
    for option, given in alone.items():
        if given is not None:
            raise InvalidArgumentError(
                f"share-{option}: expected it with --share, got it alone; add --share, or leave "
                f"--share-{option} out"
            )
    return None


def _folder(share_folder: str) -> str:
    """Where documents are kept, made where it is not there."""
    path = Path(share_folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"share_folder: expected a folder, got {share_folder!r}: {error.strerror}; choose "
            "another one"
        ) from error
    return str(path)


def _settings(
    policy: str,
    assignments: list[str],
    limits: Mapping[str, int | str],
    sharing: Mapping[str, int | bool | str] | None,
    **sizes: int,
) -> "ServingSettings":
    """What the options say; checked before torch is imported, as far as they can be."""
    numbers = {**limits, **sizes}
    for name, least in _LEAST.items():
        require_int(name, numbers[name], minimum=least)
    require_at_least("max_window_size", sizes["max_window_size"], 1)
    require_at_least("max_kernel_size", sizes["max_kernel_size"], 1)

    from snapkv.cli.policy import typed_assignments  # imports torch
    from snapkv.policies import SnapKV
    from snapkv.policies.default import default_parameters
    from snapkv_vllm import Limits, ServingSettings
    from snapkv_vllm.documents.sharing import Sharing

    parameters = typed_assignments(policy, assignments)
    if policy == DEFAULT:
        policy, parameters = SnapKV.name, default_parameters(parameters)
    return ServingSettings(
        policy=policy,
        parameters=parameters,
        limits=Limits.from_config(limits),
        sharing=None if sharing is None else Sharing.from_config(sharing),
        **sizes,
    )
