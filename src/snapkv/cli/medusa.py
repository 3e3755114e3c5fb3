"""`snapkv medusa train`: heads that draft for a model."""

import json as json_format
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer

from snapkv.app import text_files
from snapkv.app.settings import MedusaTraining
from snapkv.cli.fields import field_options, from_options
from snapkv.cli.options import ModelOptions, with_options
from snapkv.cli.outputs import RunFolder

_FILES = (
    *("plan.json", "answers.jsonl", "training.safetensors"),
    *("medusa_lm_head.safetensors", "config.json"),
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(ModelOptions):
    """What `train` takes beside its numbers."""

    output: Annotated[
        str,
        typer.Option(help="Folder of the heads; a run that was stopped is continued there"),
        RunFolder(files=_FILES, record="plan.json", key="num_heads"),
    ] = "medusa-heads"
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False


app = typer.Typer(name="medusa", help="Heads that draft tokens.", no_args_is_help=True)


_Data = Annotated[
    list[str], typer.Option(help="Text, source code, HTML, PDF or a folder; again for more")
]


def _train(*, data: list[str], options: TrainOptions, **numbers: Any) -> None:
    """Train heads on a model's own answers about documents; the model stays as it is."""
    training = from_options(MedusaTraining, numbers)
    read, warnings = text_files.read_noting(data)

    from rich.console import Console  # torch and the model come with what follows

    from snapkv.app.training.medusa import train
    from snapkv.cli.loading import load_model
    from snapkv.cli.progress import AnswersProgress

    console = Console(stderr=True)
    loaded = load_model(options, console)
    with AnswersProgress(console, "medusa train") as progress:
        heads = train(
            loaded,
            [document.text for document in read],
            Path(options.output),
            training,
            progress.advance,
        )
    if options.json:
        found = {
            "heads": options.output,
            "accuracies": heads.accuracies,
            "warnings": warnings,
        }
        typer.echo(json_format.dumps(found, indent=2))
        return
    for number, (first, *others) in enumerate(heads.accuracies, start=1):
        typer.echo(
            f"head {number}: right {first:.1%} of the time, {first + sum(others):.1%} among its "
            f"first {1 + len(others)}"
        )
    typer.echo(f"heads: {options.output}", err=True)


vars(_train)["__signature__"] = Signature(
    [
        Parameter("data", Parameter.KEYWORD_ONLY, annotation=_Data),
        *field_options(MedusaTraining, panel="Training"),
        Parameter("options", Parameter.KEYWORD_ONLY, annotation=TrainOptions),
    ]
)
app.command(name="train")(with_options(TrainOptions)(_train))
