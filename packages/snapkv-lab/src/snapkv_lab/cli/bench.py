"""`snapkv bench`: the time and the memory of caches, for a model or a shape with random weights."""

import json as json_format
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from snapkv.cache.saving.writing import append_line, open_for_lines
from snapkv.errors import OutputError, wrong
from snapkv.validation import require_each_at_least
from snapkv_app.cli import panels
from snapkv_app.cli.amounts import WholeNumber, integers
from snapkv_app.cli.fields import with_options
from snapkv_app.cli.options import ComparedOptions, ReadingOptions
from snapkv_app.cli.outputs import RowsFile, WritingOptions
from snapkv_lab.cli.workers import Plot

EXAMPLES = {
    "bench": ("snapkv bench decode --lengths 1k,4k --policy snapkv,tova",),
    "bench decode": (
        "snapkv bench decode --lengths 1k,4k --policy snapkv,tova",
        "snapkv bench decode --lengths 8k --budget 512 --output rows.jsonl",
    ),
    "bench prefill": (
        "snapkv bench prefill --lengths 2k --prefill exact --prefill layer-by-layer",
    ),
    "bench memory": ("snapkv bench memory --lengths 4k --prefill layer-by-layer",),
    "bench throughput": ("snapkv bench throughput --lengths 4k --memory-gb 8",),
}

_MOST_GB = 10**9

Rows = Iterable[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class BenchOptions(ComparedOptions, WritingOptions):
    """The command-line options that all benches have."""

    shape: Annotated[
        str | None,
        panels.model(
            help="Random weights in a published shape instead of --model: llama-3.1-8b, ..."
        ),
    ] = None
    num_layers: Annotated[
        int | None,
        panels.model(help="Number of layers, if fewer than in the shape"),
        WholeNumber(1),
    ] = None
    baseline: Annotated[
        str,
        panels.sweep(
            help="Caches of transformers to compare with: transformers, also -static and -int4"
        ),
    ] = "transformers"
    lengths: Annotated[
        str, panels.work(metavar="INTEGER,...", help="Prompt tokens, with commas: 1k,8k")
    ] = "1k,4k"
    batch: Annotated[str, panels.work(metavar="INTEGER,...", help="Batch sizes, with commas")] = "1"
    rounds: Annotated[
        int, panels.work(help="How often every cache is measured"), WholeNumber(2)
    ] = 5
    output: Annotated[
        str | None, panels.output(help="File to add the rows to, as JSON"), RowsFile(key="bench")
    ] = None
    plot: Plot = None
    json: panels.AsJson = False

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            InvalidArgumentError: a length or a batch size is below 1, or options of a model and of
                a shape are mixed.
        """
        for name in ("lengths", "batch"):
            require_each_at_least(name, integers(name, getattr(self, name)), 1)
        of_models = ("model", "revision", "trust_remote_code")
        for name in of_models if self.shape else ("num_layers",):
            if value := getattr(self, name):
                expected = "none with --shape" if self.shape else "--shape with it"
                raise wrong(name, f"expected {expected}, but got {value}", "Remove this option")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(BenchOptions, ReadingOptions):
    """The command-line options of the benches that read prompts."""


Tokens = Annotated[int, typer.Option(help="Tokens generated per round"), WholeNumber(1)]

app = typer.Typer(name="bench", help="Measure time and memory.", no_args_is_help=True)


@app.command()
@with_options(BenchOptions)
def decode(tokens: Tokens = 16, *, options: BenchOptions) -> None:
    """Measure the time per generated token after prompts of several lengths."""
    from snapkv_lab.measure.decode import DecodeBench, copy_bandwidth

    def rows(model: Any, **compared: Any) -> Rows:
        compared |= {"batches": integers("batch", options.batch), "tokens": tokens}
        speed = copy_bandwidth(model.device)
        return DecodeBench(model=model, bytes_per_second=speed, **compared).rows()

    _run(options, rows)


@app.command()
@with_options(PrefillOptions)
def prefill(*, options: PrefillOptions) -> None:
    """Measure the time to read a prompt."""
    _run(options, lambda **compared: _prefill_bench(options, compared).times())


@app.command()
@with_options(PrefillOptions)
def memory(*, options: PrefillOptions) -> None:
    """Measure the peak memory while a prompt is read, and the memory after it."""

    def rows(**compared: Any) -> Rows:
        if compared["model"].device.type == "cuda" or os.environ.get(_ALONE):
            peaks: Rows = _prefill_bench(options, compared).peaks()
            return peaks
        return _measured_alone(sys.argv[1:], [each.label for each in compared["contenders"]])

    _run(options, rows)


def _prefill_bench(options: PrefillOptions, compared: dict[str, Any]) -> Any:
    from snapkv_lab.measure.prefill import PrefillBench

    return PrefillBench(batches=integers("batch", options.batch), **compared)


_ALONE = "SNAPKV_BENCH_ONLY"


def _measured_alone(arguments: list[str], labels: list[str]) -> Iterator[dict[str, Any]]:
    """Run the same command for one cache at a time in separate processes, and yield the rows.

    A process does not return all freed memory, so a second cache would start at a higher level.

    Args:
        arguments: the arguments of the command.
        labels: the labels of the caches.

    Raises:
        typer.Exit: a process failed; it has printed the reason. The rows of caches before it have
            been yielded.
    """
    from snapkv_lab.measure.held_bytes import FREED_MEMORY_HANDED_BACK

    for label in labels:
        done = subprocess.run(
            [sys.executable, "-m", "snapkv_app", *arguments, "--json"],
            env={**os.environ, **FREED_MEMORY_HANDED_BACK, _ALONE: label},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise typer.Exit(done.returncode)  # the process has printed the reason
        yield from json_format.loads(done.stdout)["rows"]


def _require_search(memory_gb: float, options: BenchOptions) -> None:
    """Check the options of the command `throughput`.

    Raises:
        InvalidArgumentError: the memory is out of range, or a batch size is given.
    """
    if not 0 < memory_gb <= _MOST_GB:
        problem = f"expected more than 0 and at most {_MOST_GB:,} GB, but got {memory_gb}"
        raise wrong("memory_gb", problem, "Set memory_gb to the memory of the device")
    if options.batch != BenchOptions.batch:
        problem = f"this command searches for the largest batch, but got {options.batch}"
        raise wrong(
            "batch",
            problem,
            "Remove this option, or use snapkv bench decode to measure one batch size",
        )


@app.command()
@with_options(BenchOptions)
def throughput(
    memory_gb: Annotated[float, typer.Option(help="GB for weights and caches together")] = 16.0,
    tokens: Tokens = 16,
    *,
    options: BenchOptions,
) -> None:
    """Measure the tokens per second at the largest batch that fits into the same memory."""
    _require_search(memory_gb, options)
    from snapkv_lab.measure.decode import throughput as rows

    _run(options, partial(rows, memory_bytes=int(memory_gb * 1e9), tokens=tokens))


def _run(options: BenchOptions, bench: Callable[..., Rows]) -> None:
    """Load the model, run the measurements, print the rows, and store and draw them if wanted.

    Args:
        options: the options of the command.
        bench: makes the rows from `model`, `contenders`, `lengths` and `rounds`.

    Raises:
        OutputError: a row could not be stored; all rows are printed first. Or the figure cannot be
            written.
    """
    from rich.console import Console

    from snapkv_app.cli.loading import load_model
    from snapkv_lab import drawing
    from snapkv_lab.cli.methods import compared_caches
    from snapkv_lab.cli.tables import bench_table, print_results
    from snapkv_lab.measure.environment import describe_device
    from snapkv_lab.report.figures import draw_bench

    alone = os.environ.get(_ALONE)  # the parent process stores and draws
    output, plot = (None, None) if alone else (options.output, options.plot)
    if plot is not None:
        drawing.require_drawable(plot)
    if options.shape is None:
        loaded = load_model(options)
        model, description = loaded.model, loaded.description()
    else:
        model, description = _shaped(options, options.shape)
    block = {"model": description, "environment": describe_device(model.device)}
    lengths = integers("lengths", options.lengths)
    rows: list[dict[str, Any]] = []
    unwritten: OutputError | None = None
    contenders = [each for each in compared_caches(options) if alone in (None, each.label)]
    with Console(stderr=True).status("measuring") as status:
        for row in bench(
            model=model, contenders=contenders, lengths=lengths, rounds=options.rounds
        ):
            rows.append(row)
            status.update(f"measuring: {len(rows)} rows")
            if output is not None and unwritten is None:
                unwritten = _append(Path(output), row | block)
    results = block | {"rows": rows}
    print_results(results, lambda: bench_table(rows), as_json=options.json, unwritten=unwritten)
    if plot is not None:
        drawing.save_figure(draw_bench(rows), Path(plot))


def _shaped(options: BenchOptions, shape: str) -> tuple[Any, dict[str, Any]]:
    """Build a model with random weights, and return it with a description for the results.

    Args:
        options: the options of the command, with the device, the dtype and the number of layers.
        shape: the name of a published shape.

    Returns:
        The model, and a dictionary with "shape", "layers", "dtype" and "device".

    Raises:
        InvalidArgumentError: the shape, the device or the dtype is not known.
        OutOfMemoryError: the weights do not fit on the device.
    """
    from rich.console import Console

    from snapkv_app.cli.loading import begin
    from snapkv_app.models import chosen_device, chosen_dtype
    from snapkv_lab.measure.random_models import random_model

    begin(verbose=options.verbose)
    device = chosen_device(options.device or "auto")
    default = "bfloat16" if device.type == "cuda" else "float32"
    dtype = chosen_dtype(default if options.dtype in (None, "auto") else options.dtype)
    with Console(stderr=True).status(f"making random weights in the shape of {shape}"):
        model = random_model(
            shape,
            device=device,
            dtype=dtype,
            layers=options.num_layers,
            attn_implementation=options.attn_implementation,
        )
    described = {"shape": shape, "layers": model.config.num_hidden_layers}
    return model, described | {"dtype": str(dtype).removeprefix("torch."), "device": str(device)}


def _append(path: Path, row: dict[str, Any]) -> OutputError | None:
    """Add a row to a file, as one line of JSON.

    Returns:
        The error if that fails, so that the caller can print the rows first; else None.
    """
    try:
        with open_for_lines(path) as file:
            append_line(file, json_format.dumps(row), path)
    except OutputError as error:
        return error
    return None
