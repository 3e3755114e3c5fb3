"""`snapkv bench`: time and memory of the caches, on a model or on a shape with random weights."""

import json as json_format
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from snapkv.cache.saving.writing import append_line, open_for_lines
from snapkv.cli import interrupts
from snapkv.cli.fields import integers
from snapkv.cli.options import ModelOptions, with_options
from snapkv.cli.outputs import Output, RowsFile, WritingOptions
from snapkv.errors import InvalidArgumentError, OutputError
from snapkv.validation import require_at_least, require_each_at_least, require_int

Row = dict[str, Any]

_MOST_GB = 10**9
_compare, _work, _output = "What to compare", "Work", "Output"


@dataclass(frozen=True, kw_only=True)
class BenchOptions(ModelOptions, WritingOptions):
    """What every bench takes."""

    shape: Annotated[
        str | None,
        typer.Option(
            help="Random weights in a published shape instead of a model: llama-3.1-8b, ...",
            rich_help_panel="Model",
        ),
    ] = None
    layers: Annotated[
        int | None, typer.Option(help="Fewer layers than the shape has", rich_help_panel="Model")
    ] = None
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Method, with parameters: snapkv:kernel_size=13; again or with commas for more",
            rich_help_panel=_compare,
            show_default="snapkv",
        ),
    ] = None
    budget: Annotated[
        str,
        typer.Option(
            help="Tokens kept per head and layer, with commas for more", rich_help_panel=_compare
        ),
    ] = "1024"
    storage: Annotated[
        str,
        typer.Option(
            help="dynamic, static, or both with a comma between them", rich_help_panel=_compare
        ),
    ] = "dynamic"
    baseline: Annotated[
        str,
        typer.Option(
            help="transformers' own caches: transformers, transformers-static, transformers-int4",
            rich_help_panel=_compare,
        ),
    ] = "transformers"
    lengths: Annotated[
        str, typer.Option(help="Prompt tokens, with commas: 1k,8k", rich_help_panel=_work)
    ] = "1k,4k"
    batch: Annotated[
        str, typer.Option(help="Requests together, with commas", rich_help_panel=_work)
    ] = "1"
    rounds: Annotated[
        int, typer.Option(help="Turns of every cache that count", rich_help_panel=_work)
    ] = 5
    output: Annotated[
        str | None,
        typer.Option(help="File to add the rows to, as JSON", rich_help_panel=_output),
        RowsFile(key="bench"),
    ] = None
    plot: Annotated[
        str | None,
        typer.Option(help="Draw the rows into a .png, .svg or .pdf file", rich_help_panel=_output),
        Output(),
    ] = None
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object", rich_help_panel=_output)
    ] = False

    def __post_init__(self) -> None:
        """Check the numbers before torch and the model are waited for."""
        for name in ("lengths", "batch"):
            require_each_at_least(name, integers(name, getattr(self, name)), 1)
        for budget in integers("budget", self.budget):
            require_int("budget", budget, minimum=1)
        require_at_least("rounds", self.rounds, 2)
        _require_counts(layers=self.layers)


def _require_counts(**numbers: int | None) -> None:
    """Refuse numbers that are not positive, or beyond reason; None was not given."""
    for name, number in numbers.items():
        if number is not None:
            require_at_least(name, number, 1)


app = typer.Typer(name="bench", help="Measure time and memory.", no_args_is_help=True)


@app.command()
@with_options(BenchOptions)
def decode(
    tokens: Annotated[int, typer.Option(help="Generated in every round")] = 16,
    *,
    options: BenchOptions,
) -> None:
    """Time per generated token behind prompts of several lengths."""
    _require_counts(tokens=tokens)
    from snapkv.lab.measure.bandwidth import copy_bandwidth
    from snapkv.lab.measure.decode import DecodeBench

    def rows(model: Any, **compared: Any) -> Iterable[Row]:
        batches, speed = integers("batch", options.batch), copy_bandwidth(model.device)
        bench = DecodeBench(
            model=model, **compared, batches=batches, tokens=tokens, bytes_per_second=speed
        )
        return bench.rows()

    _run(options, rows)


_ChunkTokens = Annotated[
    int | None, typer.Option(help="Read layer by layer, in pieces of that many tokens")
]
_CapTokens = Annotated[
    int | None, typer.Option(help="Hold every layer to that many tokens between pieces instead")
]


@app.command()
@with_options(BenchOptions)
def prefill(
    chunk_tokens: _ChunkTokens = None,
    cap_tokens: _CapTokens = None,
    *,
    options: BenchOptions,
) -> None:
    """Time to read a prompt."""
    _require_counts(chunk_tokens=chunk_tokens, cap_tokens=cap_tokens)
    pieces = {"chunk_tokens": chunk_tokens, "cap_tokens": cap_tokens}
    _run(options, lambda **compared: _prefill_bench(options, **pieces, **compared).times())


@app.command()
@with_options(BenchOptions)
def memory(
    chunk_tokens: _ChunkTokens = None,
    cap_tokens: _CapTokens = None,
    *,
    options: BenchOptions,
) -> None:
    """Most memory held at once while a prompt is read, and what is held after it."""
    _require_counts(chunk_tokens=chunk_tokens, cap_tokens=cap_tokens)
    pieces = {"chunk_tokens": chunk_tokens, "cap_tokens": cap_tokens}

    def rows(model: Any, contenders: list[Any], **work: Any) -> Iterable[Row]:
        if model.device.type == "cuda" or os.environ.get(_ALONE):
            compared = {"model": model, "contenders": contenders, **work}
            peaks: Iterable[Row] = _prefill_bench(options, **pieces, **compared).peaks()
            return peaks
        return _measured_alone(sys.argv[1:], [each.label for each in contenders])

    _run(options, rows)


_ALONE = "SNAPKV_BENCH_ONLY"
_HAND_BACK_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def _measured_alone(arguments: list[str], labels: list[str]) -> Iterator[Row]:
    """Rows of the same command with one cache each, in a process of its own.

    The memory of a process does not shrink to what it holds, so another cache would start from
    what the one before it has left.
    """
    for label in labels:
        done = subprocess.run(
            [sys.executable, "-m", "snapkv", *arguments, "--json"],
            env={**os.environ, **_HAND_BACK_FREED_MEMORY, _ALONE: label},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise typer.Exit(done.returncode)  # it has said why
        yield from json_format.loads(done.stdout)["rows"]


@app.command()
@with_options(BenchOptions)
def throughput(
    memory_gb: Annotated[float, typer.Option(help="GB for weights and caches together")] = 16.0,
    tokens: Annotated[int, typer.Option(help="Generated in every round")] = 16,
    *,
    options: BenchOptions,
) -> None:
    """Tokens per second at the largest batch whose caches fit into the same memory."""
    _require_counts(tokens=tokens)
    if not 0 < memory_gb <= _MOST_GB:
        raise InvalidArgumentError(
            f"memory_gb: expected more than 0 and at most {_MOST_GB:,} GB, got {memory_gb}; pass "
            "what the device has"
        )
    from snapkv.lab.measure.throughput import ThroughputBench

    limit: Row = {"memory_bytes": int(memory_gb * 1e9)}
    _run(options, lambda **compared: ThroughputBench(**compared, **limit, tokens=tokens).rows())


def _prefill_bench(options: BenchOptions, **settings: Any) -> Any:
    from snapkv.lab.measure.prefill import PrefillBench

    return PrefillBench(**settings, batches=integers("batch", options.batch))


def _run(options: BenchOptions, bench: Callable[..., Iterable[Row]]) -> None:
    """Load the model, measure, and show or store the rows.

    Args:
        options: of every bench.
        bench: gives the rows; takes `model`, `contenders`, `lengths` and `rounds`.
    """
    from rich.console import Console

    from snapkv.cli.caches import compared_caches
    from snapkv.cli.grid import show
    from snapkv.cli.loading import load_model
    from snapkv.cli.tables import bench_table
    from snapkv.lab.measure.environment import describe

    console = Console(stderr=True)
    alone = _ALONE in os.environ  # the process that asked for this one stores and draws
    if options.plot is not None and not alone:
        from snapkv.lab.drawing import require_drawable

        require_drawable(options.plot)
    if options.shape is None:
        loaded = load_model(options, console)
        model, named = loaded.model, loaded.description()
    else:
        model, named = _shaped(options, console)
    block = {"model": named, "environment": describe(model.device)}
    rows: list[Row] = []
    unwritten: OutputError | None = None
    only = os.environ.get(_ALONE)
    contenders = [each for each in compared_caches(options) if only in (None, each.label)]
    with console.status("measuring") as status:
        for row in bench(
            model=model,
            contenders=contenders,
            lengths=integers("lengths", options.lengths),
            rounds=options.rounds,
        ):
            rows.append(row)
            status.update(f"measuring: {len(rows)} rows")
            if options.output is not None and not alone and unwritten is None:
                unwritten = _append(Path(options.output), row | block)
    if options.json:
        typer.echo(json_format.dumps(block | {"rows": rows}, indent=2))
    else:
        show(bench_table(rows))
    if unwritten is not None:
        raise unwritten
    if options.plot is not None and not alone:
        from snapkv.lab import drawing
        from snapkv.lab.report.bench import draw

        drawing.save(draw(rows), Path(options.plot))


def _shaped(options: BenchOptions, console: Any) -> tuple[Any, dict[str, Any]]:
    """A model of random weights, and what a row says of it."""
    from snapkv.app.models import chosen_device, chosen_dtype
    from snapkv.cli.loading import silence
    from snapkv.lab.measure.random_models import random_model

    interrupts.started()
    if not options.verbose:
        silence()
    assert options.shape is not None
    device = chosen_device(options.device or "auto")
    default = "bfloat16" if device.type == "cuda" else "float32"
    dtype = chosen_dtype(options.dtype or default)
    with console.status(f"making random weights in the shape of {options.shape}"):
        model = random_model(
            options.shape,
            device=device,
            dtype=dtype,
            layers=options.layers,
            attn_implementation=options.attn_implementation,
        )
    described = {"shape": options.shape, "layers": model.config.num_hidden_layers}
    return model, described | {"dtype": str(dtype).removeprefix("torch."), "device": str(device)}


def _append(path: Path, row: Row) -> OutputError | None:
    """Add a row to a file; why not, where that cannot be done: what is measured is still shown."""
    try:
        with open_for_lines(path) as file:
            append_line(file, json_format.dumps(row), path)
    except OutputError as error:
        return error
    return None
