"""`snapkv policies` lists the methods with their summaries and parameters."""

import typer

from snapkv_app.cli import panels
from snapkv_app.cli.methods import methods
from snapkv_app.cli.standard_output import write_json

EXAMPLES = {"policies": ("snapkv policies", "snapkv policies --json")}


def policies(json: panels.AsJson = False) -> None:
    """List the methods with their parameters and defaults."""
    if json:
        write_json(methods())
        return
    for name, facts in methods().items():
        typer.echo(f"{name}: {facts['summary']}")
        for parameter, details in facts["parameters"].items():
            typer.echo(f"    {parameter}={details['default']}  ({details['type']})")
