"""`snapkv config` shows the defaults of options, and where each default is set."""

from dataclasses import asdict

from snapkv_app.cli import panels
from snapkv_app.cli.defaults import FILE, OPTIONS, PROJECT_FILE, read_defaults
from snapkv_app.cli.grid import Grid, give

EXAMPLES = {"config": ("snapkv config", "snapkv config --json")}


def config(json: panels.AsJson = False) -> None:
    """Show the defaults that the environment or a file sets for options."""
    found = read_defaults()
    rows = tuple(
        (name, each.value, each.origin) if (each := found.get(name)) else (name, "-", "built in")
        for name in OPTIONS
    )
    headings = ("option", "default", "set by")
    caption = f"To change one, set SNAPKV_MODEL, {FILE}, or [tool.snapkv] in {PROJECT_FILE}."
    give(
        {name: asdict(found[name]) if name in found else None for name in OPTIONS},
        lambda: Grid(headings=headings, rows=rows, caption=caption, left=3),
        as_json=json,
    )
