"""What the repository weighs, beside what it may: `python -m tests.weight`, from its root."""

import re
from pathlib import Path

SOURCE = "packages/snapkv/src/snapkv"
ROWS = {  # what, the folders it lies in, folders left out, at most
    "snapkv": ([SOURCE], [], 17_000),
    "snapkv without its commands": ([SOURCE], ["app", "cli", "inspector"], 13_000),
    "snapkv-vllm": (["packages/snapkv-vllm/src"], [], 5_500),
    "snapkv-lab": (["packages/snapkv-lab/src"], [], 13_000),
    "tests": (["tests", *(f"packages/{p}/tests" for p in ("snapkv", "snapkv-lab", "snapkv-vllm"))],
              [], 27_000),
}  # fmt: skip
MOST_WORDS = 25_000
GENERATED = (Path("docs/families.md"),)


def lines(folders: list[str], without: list[str]) -> int:
    """Of Python below the folders, but for those of these names right below a folder."""
    found = [(Path(folder), path) for folder in folders for path in Path(folder).rglob("*.py")]
    texts = [p.read_text("utf-8") for f, p in found if p.relative_to(f).parts[0] not in without]
    return sum(len(text.splitlines()) for text in texts)


def words() -> int:
    """Of the pages that people read; left out are marks of tools, and pages that are generated."""
    pages = [*Path().glob("*.md"), *Path("docs").glob("*.md"), *Path("packages").glob("*/*.md")]
    texts = (
        re.sub(r"<!--.*?-->", "", page.read_text("utf-8"), flags=re.S)
        for page in pages
        if page not in GENERATED
    )
    return sum(len(text.split()) for text in texts)


if __name__ == "__main__":
    weights = {what: (lines(*where), most) for what, (*where, most) in ROWS.items()}
    weights["words of pages"] = (words(), MOST_WORDS)
    print(f"{'lines of':<30}{'now':>8}{'aim':>8}")
    for what, (now, most) in weights.items():
        print(f"{what:<30}{now:>8,}{most:>8,}")
