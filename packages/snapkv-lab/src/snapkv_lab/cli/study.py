"""`snapkv study NAME`: the paper's observations, on any model and document."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snapkv_app.cli import panels
from snapkv_app.cli.fields import with_options
from snapkv_app.cli.options import ModelOptions
from snapkv_app.cli.outputs import RESULTS, WritingOptions, results_folder
from snapkv_lab import drawing
from snapkv_lab.cli.workers import Plot, WorkerOptions, open_executor, results_option
from snapkv_lab.study import STUDIES, Sensitivity, Study
from snapkv_lab.study.attention import ReadingStudy

if TYPE_CHECKING:
    from snapkv_app.models import LoadedModel
    from snapkv_lab.study.base import Findings


EXAMPLES = {
    "study": ("snapkv study hit-rate --document contract.pdf",),
    "study hit-rate": ("snapkv study hit-rate --document contract.pdf --plot hits.svg",),
    "study overlap": ("snapkv study overlap --document contract.pdf",),
    "study instructions": (
        'snapkv study instructions --document contract.pdf -q "Who may end it?" -q Why?',
    ),
    "study position": ("snapkv study position --document contract.pdf",),
    "study sensitivity": ("snapkv study sensitivity --windows 16,32 --kernels 5,7",),
    "study fit-gate": ("snapkv study fit-gate --texts 24",),
}


@dataclass(frozen=True, kw_only=True)
class StudyOptions(ModelOptions, WritingOptions):
    """The command-line options that all studies have."""

    results: Annotated[str | None, results_option("study-NAME", "rows; a study"), RESULTS] = None
    plot: Plot = None
    json: panels.AsJson = False


@dataclass(frozen=True, kw_only=True)
class ReadingStudyOptions(StudyOptions):
    """The command-line options of studies that read documents."""

    document: Annotated[
        list[str] | None,
        panels.material(
            metavar="FILE",
            help=panels.FILES_AGAIN,
            show_default="essays, or Python's documentation",
        ),
    ] = None
    question: Annotated[
        list[str] | None,
        panels.material(
            "--question",
            "-q",
            help="A question; repeat the option for more",
            show_default="four questions that suit any text",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class AnsweringOptions(StudyOptions, WorkerOptions):
    """The command-line options of the study that compares the scores of answers."""


_OF_OPTIONS = {"documents": "document", "questions": "question"}
"""The fields of a study that have repeatable options, because texts may contain commas."""


# Without a docstring, so that the help of each command is the first line of its study.
def _study(*, settings: Study, options: StudyOptions) -> None:
    changes = {
        field: tuple(value)
        for field, option in _OF_OPTIONS.items()
        if (value := getattr(options, option, None))
    }
    study = replace(settings, **changes)
    if options.plot is not None:
        drawing.require_drawable(options.plot)

    from snapkv_lab.cli.tables import print_summary  # imports torch

    findings = _findings(study, options)
    for notice in findings.notices:
        typer.echo(f"notice: {notice}", err=True)
    print_summary(
        findings,
        lambda: study.table(findings.rows),
        as_json=options.json,
        place=f"rows: {findings.folder}\n{findings.closing}".rstrip(),
        warnings=[*findings.warnings, *findings.notices],
    )
    if options.plot is not None:
        drawing.save_figure(study.figure(findings.rows), Path(options.plot), drawing.PLAIN, dpi=100)


def _findings(study: Study, options: StudyOptions) -> "Findings":
    """Load the model, run the study in this process or with workers, and return its findings. Only
    the study of sensitivity can use workers. The records are in the folder of the options, or else
    in one named after the study, the model and the settings.
    """
    from snapkv_app.cli.loading import answers_progress, load_model

    def folder(loaded: "LoadedModel") -> Path:
        kind = f"study-{study.name}"
        return results_folder(options.results, kind, loaded.name, study.fingerprint(loaded))

    if isinstance(study, Sensitivity) and isinstance(options, AnsweringOptions):
        with open_executor(options) as (loaded, who), answers_progress(study.name) as advance:
            return study.measure(loaded, folder(loaded), advance, who)
    loaded = load_model(options)
    place = folder(loaded)
    with answers_progress(study.name) as advance:
        return study.measure(loaded, place, advance)


def _options_of(kind: type[Study]) -> type[StudyOptions]:
    if issubclass(kind, Sensitivity):
        return AnsweringOptions
    return ReadingStudyOptions if issubclass(kind, ReadingStudy) else StudyOptions


app = typer.Typer(name="study", help="Repeat an observation of the paper.", no_args_is_help=True)
for _kind in STUDIES.values():
    _command = with_options(_options_of(_kind), settings=_kind, panel="Study", hidden=_OF_OPTIONS)(
        _study
    )
    app.command(name=_kind.name)(_command)
