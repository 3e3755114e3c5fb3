"""`snapkv plan`: whether a model and its prompts fit, and what compression would change."""

import json as json_format
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from snapkv.cli import interrupts
from snapkv.cli.amounts import byte_count, count
from snapkv.cli.options import with_options
from snapkv.errors import InvalidArgumentError
from snapkv.validation import DEFAULT_BUDGET, require_int

_model, _work, _keep, _device, _output = "Model", "Work", "What to keep", "Device", "Output"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a plan takes."""

    context: Annotated[
        str | None, typer.Option(help="Prompt tokens, such as 32k or 1.5k", rich_help_panel=_work)
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="Hub id, folder, .gguf file or a published shape such as llama-3.1-8b",
            show_default="the offline demo model",
            rich_help_panel=_model,
        ),
    ] = None
    shapes: Annotated[
        bool,
        typer.Option("--shapes", help="List the published shapes instead", rich_help_panel=_model),
    ] = False
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub id", rich_help_panel=_model)
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16",
            show_default="the checkpoint's own, and its quantized weights as they are",
            rich_help_panel=_model,
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code of the model", rich_help_panel=_model),
    ] = False
    batch: Annotated[int, typer.Option(help="Prompts together", rich_help_panel=_work)] = 1
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens of every answer", rich_help_panel=_work)
    ] = 128
    budget: Annotated[
        int | None,
        typer.Option(
            help="Tokens kept per head and layer, window included",
            show_default="1024",
            rich_help_panel=_keep,
        ),
    ] = None
    keep_ratio: Annotated[
        float | None,
        typer.Option(
            help="Instead of --budget, the fraction of the prefix to keep", rich_help_panel=_keep
        ),
    ] = None
    window_size: Annotated[
        int, typer.Option(help="Last tokens, always kept", rich_help_panel=_keep)
    ] = 32
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            help="Of the device, such as 80GB or 24GiB: shows what fits", rich_help_panel=_device
        ),
    ] = None
    reserve: Annotated[
        str,
        typer.Option(help="Of it, what the driver and the allocator take", rich_help_panel=_device),
    ] = "1GB"
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Of its memory per second, such as 2TB: shows times", rich_help_panel=_device
        ),
    ] = None
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object", rich_help_panel=_output)
    ] = False
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="Show what transformers has to say", rich_help_panel=_output
        ),
    ] = False


@with_options(PlanOptions)
def plan(*, options: PlanOptions) -> None:
    """Say what a long prompt takes and whether compression helps, from the configuration alone."""
    if options.shapes:
        _list_shapes(options.json)
        return
    if options.context is None or "," in options.context:
        raise InvalidArgumentError(
            f"context: expected one number of tokens, got "
            f"{options.context or 'none'!r}; write for instance --context 128k"
        )
    tokens = count("context", options.context)
    for name, number in {
        "context": tokens,
        "batch": options.batch,
        "max_new_tokens": options.max_new_tokens,
        "budget": DEFAULT_BUDGET if options.budget is None else options.budget,
        "window_size": options.window_size,
    }.items():
        require_int(name, number, minimum=1)
    memory, reserve, bandwidth = (
        None if text is None else byte_count(name, text)
        for name, text in (
            ("gpu_memory", options.gpu_memory),
            ("reserve", options.reserve),
            ("bandwidth", options.bandwidth),
        )
    )

    from snapkv.plan import Plan, Request, footprint_of  # imports torch; bad input is named before

    request = Request(
        context_tokens=tokens,
        batch=options.batch,
        budget=options.budget,
        keep_ratio=options.keep_ratio,
        window_size=options.window_size,
        new_tokens=options.max_new_tokens,
        memory_bytes=memory,
        reserve_bytes=reserve or 0,
        bandwidth_bytes=bandwidth,
    )
    footprint = footprint_of(_outline(options))
    _show(Plan(model=options.model or "demo", footprint=footprint, request=request), options.json)


def _outline(options: PlanOptions) -> Any:
    """The model without weights."""
    from snapkv.app.models import DEMO, load_outline
    from snapkv.cli.loading import silence

    interrupts.started()  # a GGUF file may have to be converted
    if not options.verbose:
        silence()
    return load_outline(
        options.model or DEMO,
        dtype=options.dtype or "auto",
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )


def _list_shapes(json: bool) -> None:
    from snapkv.cli.grid import show
    from snapkv.cli.tables import shapes_table
    from snapkv.plan.shapes import SHAPES, described

    found = {name: described(name) for name in SHAPES}
    if json:
        typer.echo(json_format.dumps(found, indent=2))
    else:
        show(shapes_table(found))


def _show(made: Any, json: bool) -> None:
    from snapkv.cli.grid import show
    from snapkv.cli.tables import plan_table
    from snapkv.plan import verdict

    sentences = verdict(made)
    if json:
        typer.echo(json_format.dumps(made.describe() | {"verdict": sentences}, indent=2))
        return
    show(plan_table(made))
    for sentence in sentences:
        typer.echo(sentence)
