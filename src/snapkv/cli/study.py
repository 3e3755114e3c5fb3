"""`snapkv study NAME`: what the paper observed, on any model and document."""

import json as json_format
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from snapkv.cli.fields import field_options, from_options
from snapkv.cli.options import ModelOptions, with_options
from snapkv.cli.outputs import RESULTS, Output, WritingOptions, results_folder
from snapkv.lab.study import STUDIES
from snapkv.lab.study.base import ReadingStudy

if TYPE_CHECKING:
    from snapkv.lab.study.base import Findings, Study

_material = "What to read"
_output = "Output"


@dataclass(frozen=True, kw_only=True)
class StudyOptions(ModelOptions, WritingOptions):
    """What every study takes."""

    output: Annotated[
        str | None,
        typer.Option(
            help="Folder of the rows; a study that was stopped is continued there",
            rich_help_panel=_output,
            show_default="snapkv-results/study-NAME-MODEL-HASH",
        ),
        RESULTS,
    ] = None
    plot: Annotated[
        str | None,
        typer.Option(help="Write the figure: .png, .svg or .pdf", rich_help_panel=_output),
        Output(),
    ] = None
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object", rich_help_panel=_output)
    ] = False


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(StudyOptions):
    """What every study of documents takes."""

    document: Annotated[
        list[str] | None,
        typer.Option(
            help="Text, source code, HTML, PDF or a folder; again for more",
            rich_help_panel=_material,
            show_default="essays, or Python's documentation",
        ),
    ] = None
    question: Annotated[
        list[str] | None,
        typer.Option(
            "--question",
            "-q",
            help="What to ask; again for more",
            rich_help_panel=_material,
            show_default="four that suit any text",
        ),
    ] = None


app = typer.Typer(name="study", help="Repeat an observation of the paper.", no_args_is_help=True)


def _command(kind: type["Study"]) -> Callable[..., None]:
    """The command that runs a study of that kind."""
    reads = issubclass(kind, ReadingStudy)
    options_kind = ReadingOptions if reads else StudyOptions

    def command(*, options: Any, **settings: Any) -> None:
        _study(kind, settings, options)

    named = [p for p in field_options(kind, panel="Study") if p.name not in _OF_OPTIONS]
    own = Parameter("options", Parameter.KEYWORD_ONLY, annotation=options_kind)
    vars(command)["__signature__"] = Signature([*named, own])
    command.__doc__ = (kind.__doc__ or "").partition("\n")[0]
    return with_options(options_kind)(command)


_OF_OPTIONS = {"documents": "document", "questions": "question"}
"""Fields of a study that options give which may be repeated, since texts may hold commas."""

for _kind in STUDIES.values():
    app.command(name=_kind.name)(_command(_kind))


def _study(kind: type["Study"], settings: dict[str, Any], options: StudyOptions) -> None:
    from rich.console import Console  # torch and the model come with what follows

    given = {
        field: tuple(value)
        for field, option in _OF_OPTIONS.items()
        if (value := getattr(options, option, None))
    }
    study: Study = replace(from_options(kind, settings), **given)
    if options.plot is not None:
        from snapkv.lab.drawing import require_drawable

        require_drawable(options.plot)

    from snapkv.cli.loading import load_model
    from snapkv.cli.progress import AnswersProgress

    console = Console(stderr=True)
    loaded = load_model(options, console)
    kind_name = f"study-{study.name}"
    folder = results_folder(options.output, kind_name, loaded.name, study.fingerprint(loaded))
    with AnswersProgress(console, study.name) as progress:
        findings = study.into(loaded, folder, progress.advance)
    _show(study, findings, options)


def _show(study: "Study", findings: "Findings", options: StudyOptions) -> None:
    from snapkv.cli.grid import show
    from snapkv.cli.tables import study_table

    for notice in findings.notices:
        typer.echo(f"notice: {notice}", err=True)
    if options.json:
        found = {
            "run": findings.run,
            "folder": str(findings.folder),
            "rows": findings.rows,
            "warnings": [*findings.warnings, *findings.notices],
        }
        typer.echo(json_format.dumps(found, indent=2))
    else:
        show(study_table(study.table(findings.rows)))
        typer.echo(f"rows: {findings.folder}", err=True)
    if findings.unwritten is not None:  # behind what took so long
        raise findings.unwritten
    if options.plot is not None:
        from snapkv.lab.study.figures import save

        save(study.figure(findings.rows), options.plot)
