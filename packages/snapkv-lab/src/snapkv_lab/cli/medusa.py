"""`snapkv medusa train`: train heads that draft tokens for a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from snapkv_app import text_files
from snapkv_app.cli import panels
from snapkv_app.cli.fields import with_options
from snapkv_app.cli.options import ModelOptions
from snapkv_app.cli.outputs import RunFolder
from snapkv_app.cli.standard_output import write_json
from snapkv_lab.medusa_training import MedusaTraining

EXAMPLES = {
    "medusa": ("snapkv medusa train --document notes.txt --to medusa-heads",),
    "medusa train": (
        "snapkv medusa train --document notes.txt --to medusa-heads",
        "snapkv medusa train --document contract.pdf --num-heads 2 --answers 200",
    ),
}

_FILES = (
    *("run.json", "samples.jsonl", "training.safetensors"),
    *("medusa_lm_head.safetensors", "config.json"),
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ModelOptions):
    """The command-line options of `train`, in addition to the settings of the training."""

    to: Annotated[
        str,
        typer.Option(help="Folder of the heads; a stopped run continues there"),
        RunFolder(files=_FILES, key="training"),
    ] = "medusa-heads"
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False


app = typer.Typer(name="medusa", help="Heads that draft tokens.", no_args_is_help=True)


@app.command()
@with_options(TrainOptions, settings=MedusaTraining, panel="Training")
def train(
    *,
    document: Annotated[list[str], typer.Option(metavar="FILE", help=panels.FILES_AGAIN)],
    settings: MedusaTraining,
    options: TrainOptions,
) -> None:
    """Train heads on the model's answers about documents; the model is not changed."""
    read, warnings = text_files.read_with_notices(document)

    from snapkv_app.cli.loading import answers_progress, load_model
    from snapkv_lab.medusa.training import train_heads  # imports torch

    loaded = load_model(options)
    texts = [document.text for document in read]
    with answers_progress("medusa train") as advance:
        heads = train_heads(loaded, texts, Path(options.to), settings, advance)
    if options.json:
        results = {"heads": options.to, "accuracies": heads.accuracies, "warnings": warnings}
        write_json(results)
        return
    for number, (first, *others) in enumerate(heads.accuracies, start=1):
        typer.echo(
            f"head {number}: right {first:.1%} of the time, {first + sum(others):.1%} among its "
            f"first {1 + len(others)}"
        )
    typer.echo(f"heads: {options.to}", err=True)
