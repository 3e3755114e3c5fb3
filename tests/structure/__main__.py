"""What the repository weighs: lines of source, tests and benchmarks, and words of pages.

Run from the root of the repository: ``python -m tests.structure``.
"""

from pathlib import Path

from tests.structure.source import Source

PACKAGE = Path("src/snapkv")
PLUGIN, LABORATORY, COMMANDS = {"serving"}, {"lab"}, {"app", "cli"}
PAGES = ("*.md", "docs/*.md", "docs/results/*.md")


def weights() -> dict[str, int]:
    """Every row of the table: what is weighed, and how many lines or words it has."""
    source = Source(PACKAGE.resolve())
    rooms: dict[str, int] = {}
    for module in source.modules.values():
        room = source.label(module).split("/")[0]
        rooms[room] = rooms.get(room, 0) + module.lines
    others = PLUGIN | LABORATORY
    library = {room: lines for room, lines in rooms.items() if room not in others}
    return {
        "library": sum(library.values()),
        "of it without app and cli": sum(n for r, n in library.items() if r not in COMMANDS),
        "plugin for vLLM": sum(rooms[room] for room in PLUGIN),
        "laboratory and benchmarks": sum(rooms[room] for room in LABORATORY) + _lines("benchmarks"),
        "tests": _lines("tests"),
        "words of pages": sum(
            len(path.read_text(encoding="utf-8").split())
            for pattern in PAGES
            for path in Path().glob(pattern)
        ),
    }


def _lines(folder):
    texts = (path.read_text(encoding="utf-8") for path in Path(folder).rglob("*.py"))
    return sum(len(text.splitlines()) for text in texts)


if __name__ == "__main__":
    for what, amount in weights().items():
        print(f"{what:<28}{amount:>8,}")
