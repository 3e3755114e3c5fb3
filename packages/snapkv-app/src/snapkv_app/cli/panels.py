"""The panels of the help, each as a function that makes an option in it, and common options."""

from functools import partial
from typing import Annotated

import typer

model = partial(typer.Option, rich_help_panel="Model")
material = partial(typer.Option, rich_help_panel="What to read")
library = partial(typer.Option, rich_help_panel="Library")
policy = partial(typer.Option, rich_help_panel="What to keep")
answer = partial(typer.Option, rich_help_panel="Answer")
sweep = partial(typer.Option, rich_help_panel="What to compare")
drafts = partial(typer.Option, rich_help_panel="Drafts")
work = partial(typer.Option, rich_help_panel="Work")
device = partial(typer.Option, rich_help_panel="Device")
task = partial(typer.Option, rich_help_panel="Task")
output = partial(typer.Option, rich_help_panel="Output")

FILES_AGAIN = "Text, source code, HTML, PDF or a folder; may be repeated"
"""The help of `--document`, an option of other packages."""

AsJson = Annotated[bool, output("--json", help="Print one JSON object")]
KeepRatio = Annotated[
    float | None, policy(help="Instead of --budget, the fraction of the prefix to keep")
]
Revision = Annotated[str | None, model(help="Branch, tag or commit of a hub id")]
Documents = Annotated[
    list[str],
    typer.Argument(metavar="FILE", help="Text, source code, HTML, PDF, a folder, or - for stdin"),
]
SomeDocuments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE",
        help="Text, source code, HTML, PDF, a folder, or - for stdin; or else --library",
    ),
]
Question = Annotated[str, typer.Option("--question", "-q", help="What to answer")]
