"""`snapkv plan`: whether a model and its prompts fit, and what compression would change."""

import json as json_format
from typing import Annotated, Any

import typer

from snapkv.cli import interrupts
from snapkv.cli.fields import byte_count, integers
from snapkv.errors import InvalidArgumentError
from snapkv.validation import DEFAULT_BUDGET, require_int

_model, _work, _keep, _device, _output = "Model", "Work", "What to keep", "Device", "Output"


def plan(
    context: Annotated[
        str, typer.Option(help="Prompt tokens, such as 32k or 128k", rich_help_panel=_work)
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="Hub id, folder, .gguf file or a published shape such as llama-3.1-8b",
            show_default="the offline demo model",
            rich_help_panel=_model,
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub id", rich_help_panel=_model)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16",
            show_default="the checkpoint's own",
            rich_help_panel=_model,
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code of the model", rich_help_panel=_model),
    ] = False,
    batch: Annotated[int, typer.Option(help="Prompts together", rich_help_panel=_work)] = 1,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens of every answer", rich_help_panel=_work)
    ] = 128,
    budget: Annotated[
        int | None,
        typer.Option(
            help="Tokens kept per head and layer, window included",
            show_default="1024",
            rich_help_panel=_keep,
        ),
    ] = None,
    keep_ratio: Annotated[
        float | None,
        typer.Option(
            help="Instead of --budget, the fraction of the prefix to keep", rich_help_panel=_keep
        ),
    ] = None,
    window_size: Annotated[
        int, typer.Option(help="Last tokens, always kept", rich_help_panel=_keep)
    ] = 32,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            help="Of the device, such as 80GB or 24GiB: shows what fits", rich_help_panel=_device
        ),
    ] = None,
    reserve: Annotated[
        str,
        typer.Option(help="Of it, what the driver and the allocator take", rich_help_panel=_device),
    ] = "1GB",
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Of its memory per second, such as 2TB: shows times", rich_help_panel=_device
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object", rich_help_panel=_output)
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="Show what transformers has to say", rich_help_panel=_output
        ),
    ] = False,
) -> None:
    """Say what a long prompt takes and whether compression helps, from the configuration alone."""
    tokens = integers("context", context)
    if len(tokens) != 1:
        raise InvalidArgumentError(
            f"context: expected one number of tokens, got {context!r}; write for instance 128k"
        )
    for name, number in {
        "context": tokens[0],
        "batch": batch,
        "max_new_tokens": max_new_tokens,
        "budget": DEFAULT_BUDGET if budget is None else budget,
        "window_size": window_size,
    }.items():
        require_int(name, number, minimum=1)
    memory = None if gpu_memory is None else byte_count("gpu_memory", gpu_memory)

    from snapkv.plan import Plan, Request, footprint_of  # imports torch; bad input is named before

    request = Request(
        context_tokens=tokens[0],
        batch=batch,
        budget=budget,
        keep_ratio=keep_ratio,
        window_size=window_size,
        new_tokens=max_new_tokens,
        memory_bytes=memory,
        reserve_bytes=byte_count("reserve", reserve),
        bandwidth_bytes=None if bandwidth is None else byte_count("bandwidth", bandwidth),
    )
    outline = _outline(
        model, dtype, verbose, revision=revision, trust_remote_code=trust_remote_code
    )
    name = model or "demo"
    _show(Plan(model=name, footprint=footprint_of(outline), request=request), json)


def _outline(name: str | None, dtype: str | None, verbose: bool, **hub: Any) -> Any:
    """The model without weights: of a published shape, or of a configuration."""
    from snapkv.cli.loading import silence
    from snapkv.measure import shapes
    from snapkv.models import DEMO, chosen_dtype, load_outline

    interrupts.started()  # a GGUF file may have to be converted
    if not verbose:
        silence()
    if name in shapes.SHAPES:
        return shapes.outline(name, dtype=chosen_dtype(dtype or "bfloat16"))
    return load_outline(DEMO if name is None else name, dtype=dtype or "auto", **hub)


def _show(made: Any, json: bool) -> None:
    from rich.console import Console

    from snapkv.cli.tables import plan_table
    from snapkv.plan import verdict

    sentences = verdict(made)
    if json:
        typer.echo(json_format.dumps(made.describe() | {"verdict": sentences}, indent=2))
        return
    Console().print(plan_table(made))
    for sentence in sentences:
        typer.echo(sentence)
