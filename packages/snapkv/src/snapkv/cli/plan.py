"""`snapkv plan`: whether a model and its prompts fit, and what compression would change."""

from dataclasses import dataclass
from typing import Annotated

import typer

from snapkv.cli import panels
from snapkv.cli.amounts import byte_count, count
from snapkv.cli.options import with_options
from snapkv.cli.whole_numbers import POSITIVE
from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_int


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a plan takes."""

    context: Annotated[str | None, panels.work(help="Prompt tokens, such as 32k or 1.5k")] = None
    model: Annotated[
        str | None,
        panels.model(
            help="Hub id, folder, .gguf file or a published shape such as llama-3.1-8b",
            show_default="the offline demo model",
        ),
    ] = None
    shapes: Annotated[bool, panels.model("--shapes", help="List the published shapes instead")] = (
        False
    )
    revision: panels.Revision = None
    dtype: Annotated[
        str | None,
        panels.model(
            help="float32, bfloat16 or float16",
            show_default="the checkpoint's own, and its quantized weights as they are",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, panels.model("--trust-remote-code", help="Run code of the model")
    ] = False
    batch: Annotated[int, panels.work(help="Prompts together"), POSITIVE] = 1
    max_new_tokens: Annotated[int, panels.work(help="Where an answer is cut off"), POSITIVE] = 128
    budget: Annotated[
        int | None,
        panels.policy(help="Tokens kept per head and layer, window included", show_default="1024"),
        POSITIVE,
    ] = None
    keep_ratio: panels.KeepRatio = None
    window_size: Annotated[
        int, panels.policy(help="Last tokens of the prompt, always kept"), POSITIVE
    ] = 32
    gpu_memory: Annotated[
        str | None, panels.device(help="Of the device, such as 80GB or 24GiB: shows what fits")
    ] = None
    reserve: Annotated[str, panels.device(help="Of it, what the driver and the allocator take")] = (
        "1GB"
    )
    bandwidth: Annotated[
        str | None, panels.device(help="Of its memory per second, such as 2TB: shows times")
    ] = None
    json: panels.AsJson = False
    verbose: Annotated[
        bool, panels.output("--verbose", help="Show what transformers has to say")
    ] = False


@with_options(PlanOptions)
def plan(*, options: PlanOptions) -> None:
    """Say what a long prompt takes and whether compression helps, from the configuration alone."""
    if options.shapes:
        _list_shapes(as_json=options.json)
        return
    if options.context is None or "," in options.context:
        got = "none" if options.context is None else repr(options.context)
        raise InvalidArgumentError(
            f"context: expected one number of tokens, got {got}; write for instance "
            "snapkv plan --model llama-3.1-8b --context 128k"
        )
    tokens = count("context", options.context)
    require_int("context", tokens, minimum=1)
    memory, reserve, bandwidth = (
        byte_count(name, text) if (text := getattr(options, name)) is not None else None
        for name in ("gpu_memory", "reserve", "bandwidth")
    )

    from snapkv.app.models import DEMO, load_outline  # imports torch; bad input is named before
    from snapkv.cli.grid import give
    from snapkv.cli.loading import begin
    from snapkv.cli.tables import plan_table
    from snapkv.plan import Plan, Request, footprint_of, verdict

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
    begin(verbose=options.verbose)  # a GGUF file may have to be converted
    outline = load_outline(
        options.model or DEMO,
        dtype=options.dtype or "auto",
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )
    made = Plan(model=options.model or DEMO, footprint=footprint_of(outline), request=request)
    sentences = verdict(made)
    found = made.describe() | {"verdict": sentences}
    give(found, lambda: plan_table(made), as_json=options.json)
    for sentence in () if options.json else sentences:
        typer.echo(sentence)


def _list_shapes(*, as_json: bool) -> None:
    from snapkv.cli.grid import give
    from snapkv.cli.tables import shapes_table
    from snapkv.plan.shapes import SHAPES, described

    found = {name: described(name) for name in SHAPES}
    give(found, lambda: shapes_table(found), as_json=as_json)
