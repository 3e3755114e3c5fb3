"""`snapkv plan` estimates whether a model and its prompts fit, and the gain of compression."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from snapkv.errors import InvalidArgumentError, wrong
from snapkv.validation import closest, format_bytes, require_dtype, require_int
from snapkv_app.cli import panels
from snapkv_app.cli.amounts import (
    EXACT,
    POSITIVE,
    TokenBudgetParameter,
    byte_count,
    count,
    one_storage,
)
from snapkv_app.cli.fields import with_options
from snapkv_app.cli.grid import Grid, give
from snapkv_app.footprints import find_footprint
from snapkv_app.plan import CacheNeeds, Footprint, Plan, Request
from snapkv_app.plan import plan as make_plan
from snapkv_app.plan.cards import CARDS, card_bytes
from snapkv_app.plan.footprint import is_counted
from snapkv_app.plan.shapes import SHAPES, described

EXAMPLES = {
    "plan": (
        "snapkv plan --model llama-3.1-8b --context 128k --gpu-memory 80GB",
        "snapkv plan --shapes",
    ),
}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of the command `snapkv plan`, of which only the dtype is checked here."""

    context: Annotated[
        str | None, panels.work(help="Number of prompt tokens, such as 32k or 1.5k")
    ] = None
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
            show_default="the checkpoint's own; quantized weights count as stored",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, panels.model("--trust-remote-code", help="Run code that comes with the model")
    ] = False
    batch: Annotated[int, panels.work(help="Number of prompts in one batch"), POSITIVE] = 1
    max_new_tokens: Annotated[
        int, panels.work(help="The largest number of tokens in an answer"), POSITIVE
    ] = 128
    budget: Annotated[
        Any,
        panels.policy(
            metavar="INTEGER|12%|64MiB",
            help="Tokens kept per head and layer, window included; or a total in bytes",
            show_default="1024",
        ),
        TokenBudgetParameter(),
    ] = None
    bits: Annotated[
        str,
        panels.policy(
            metavar="exact|int8|int4|k8v4",
            help="How keys and values are stored: unquantized or in few bits",
        ),
    ] = EXACT
    keep_ratio: panels.KeepRatio = None
    window_size: Annotated[
        int,
        panels.policy(help="Number of tokens at the end of the prompt that are always kept"),
        POSITIVE,
    ] = 32
    gpu_memory: Annotated[
        str | None,
        panels.device(
            help="Device memory, such as 80GB or 24GiB, or a card: H100; shows what fits"
        ),
    ] = None
    reserve: Annotated[str, panels.device(help="Memory that the driver and the allocator need")] = (
        "1GB"
    )
    bandwidth: Annotated[
        str | None, panels.device(help="Memory bandwidth per second, such as 2TB: shows times")
    ] = None
    json: panels.AsJson = False

    def __post_init__(self) -> None:
        """Check the dtype before torch is imported.

        Raises:
            InvalidArgumentError: the dtype is unknown.
        """
        if self.dtype is not None:
            require_dtype(self.dtype)


def memory_of(text: str) -> int:
    """Parse the memory of a device, and return it in bytes.

    `text` is a number of bytes with a unit, or the name of a card.

    Raises:
        InvalidArgumentError: `text` is neither of them, or is a card that is sold with several
            sizes of memory, without naming one of them.
    """
    found = card_bytes(text)
    if found is not None:
        return found
    try:
        return byte_count("gpu_memory", text)
    except InvalidArgumentError:
        raise wrong(
            "gpu_memory",
            "expected a size with a unit, such as 80GB or 24GiB, or a card such as H100 or RTX "
            f"4090, but got {text!r}",
            f"For example, use --gpu-memory {closest(text, CARDS) or '80GB'}",
        ) from None


@with_options(PlanOptions)
def plan(*, options: PlanOptions) -> None:
    """Estimate the memory of a long prompt and what compression gains, without the weights.

    Raises:
        InvalidArgumentError: `--context` is missing or is a list, or an option is out of range.
        ModelNotFoundError: there is no model with that name.
        UnsupportedModelError: the sizes of the model's family are not known.
    """
    if options.shapes:
        shapes = {name: described(name) for name in SHAPES}
        give(shapes, lambda: shapes_table(shapes), as_json=options.json)
        return
    if options.context is None or "," in options.context:
        got = "none" if options.context is None else repr(options.context)
        remedy = "For example, run snapkv plan --model llama-3.1-8b --context 128k"
        raise wrong("context", f"expected exactly one number of tokens, but got {got}", remedy)
    tokens = count("context", options.context)
    require_int("context", tokens, minimum=1)
    bits = one_storage(options.bits)
    memory = None if options.gpu_memory is None else memory_of(options.gpu_memory)
    reserve = byte_count("reserve", options.reserve)
    bandwidth = None if options.bandwidth is None else byte_count("bandwidth", options.bandwidth)

    request = Request(
        context_tokens=tokens,
        batch=options.batch,
        budget=options.budget,
        keep_ratio=options.keep_ratio,
        window_size=options.window_size,
        bits=bits,
        new_tokens=options.max_new_tokens,
        memory_bytes=memory,
        reserve_bytes=reserve,
        bandwidth_bytes=bandwidth,
    )
    model = options.model or "demo"
    footprint = find_footprint(
        model,
        dtype=None if options.dtype == "auto" else options.dtype,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )
    made = make_plan(model, footprint, request)
    give(asdict(made), lambda: plan_table(made), as_json=options.json)
    for sentence in () if options.json else made.verdict:
        typer.echo(sentence)


def plan_table(plan: Plan) -> Grid:
    """Build a table of what a request needs with the full cache and with a compressed cache."""
    columns = [_plan_cells(plan, needs) for needs in (plan.full, plan.compressed)]
    rows = [
        ("weights", *[format_bytes(plan.footprint.weights_bytes)] * 2),
        *((name, *(column[name] for column in columns)) for name in columns[0]),
        ("decoding, at most", "1.0x", f"{plan.decode_speedup:.1f}x"),
    ]
    if plan.request.memory_bytes is not None:
        gains = [needs.throughput for needs in (plan.full, plan.compressed)]
        texts = ("-" if gain is None else f"{gain:.1f}x" for gain in gains)
        rows.append(("throughput, prefill batch", *texts))
    return Grid(
        title=_plan_title(plan), headings=("", "full cache", "compressed"), rows=tuple(rows)
    )


def shapes_table(shapes: Mapping[str, dict[str, Any]]) -> Grid:
    """Build a table with a row for each published shape.

    `shapes` has the result of `plan.shapes.described` for each shape, by its name.
    """
    rows = [
        (
            name,
            f"{shape['parameters'] / 1e9:.1f}B",
            shape["weights"],
            f"{shape['growing_layers']} of {shape['layers']}",
            f"{shape['kv_heads']}x{shape['head_dim']}",
            f"{shape['kv_bytes_per_token'] / 1024:,.0f}",
            f"{shape['positions']:,}",
        )
        for name, shape in shapes.items()
    ]
    return Grid(
        headings=("shape", "size", "weights", "layers", "KV", "KiB", "positions"),
        rows=tuple(rows),
        caption="layers: full-attention layers of all layers. KV: KV heads x head size, or "
        "one latent. KiB: cache per token of a long prompt, in 16 bits.",
    )


def _plan_title(plan: Plan) -> str:
    request = plan.request
    prompts = f"{request.batch:,} prompts" if request.batch > 1 else "a prompt"
    return (
        f"{plan.model}, {_describe_weights(plan.footprint)}: {prompts} of "
        f"{request.context_tokens:,} tokens, {plan.kept_tokens:,.0f} kept{_in_bits(request)}, "
        f"answers of {request.new_tokens:,}"
    )


def _in_bits(request: Request) -> str:
    return "" if request.codes is None else f" in {request.codes}"


def _describe_weights(model: Footprint) -> str:
    """Return the dtype, and after it the quantization of the weights if the plan counts it."""
    if model.quantization is None or not is_counted(model.quantization):
        return model.dtype
    return f"{model.dtype}, weights in {model.quantization}"


def _plan_cells(plan: Plan, needs: CacheNeeds) -> dict[str, str]:
    """Return the cells of a column of the plan's table, by the heading of their row.

    There are no cells about what fits without a size of memory, and none about time without a
    bandwidth.
    """
    cells = {
        "cache after the prompt": format_bytes(needs.cache_bytes),
        "prefill peak, weights excluded": format_bytes(needs.prefill_peak_bytes),
        "total": format_bytes(needs.total_bytes),
    }
    if plan.request.memory_bytes is not None:
        positions = plan.footprint.max_positions
        limit = None if positions is None else positions - plan.request.new_tokens
        in_pieces = needs.longest_prompt_in_pieces_tokens
        cells |= {
            "longest prompt, read in one pass": _format_longest(needs.longest_prompt_tokens, limit),
            "longest prompt, read in pieces": _format_longest(in_pieces, limit),
            "largest batch, prefill": f"{needs.largest_batch:,}",
            "largest batch, decoding": f"{needs.largest_decoding_batch:,}",
        }
    cells["read per decoding step"] = format_bytes(needs.step_bytes)
    if needs.step_ms is not None:
        cells["time per step, about"] = f"{needs.step_ms:.1f} ms"
    return cells


def _format_longest(tokens: int | None, limit: int | None) -> str:
    """Return the text of a table's cell for a number of tokens, such as "4,096" or "none".

    Args:
        tokens: the number of tokens that fit; "none" is written for 0 and None.
        limit: the number for which the model has positions; if `tokens` equals it, a remark says
            so. None if the model has no limit.
    """
    if not tokens:
        return "none"
    return f"{tokens:,} (all positions)" if tokens == limit else f"{tokens:,}"
