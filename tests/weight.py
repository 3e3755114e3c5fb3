"""What the repository weighs: numbers that may only fall, which `test_weight.py` holds it to.

python -m tests.weight    show them, and set the limits down to what there is
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("snapkv", "snapkv-lab", "snapkv-vllm")
LIMITS = Path(__file__).with_name("weight.json")


def weights() -> dict[str, int]:
    """Lines of Python, of every package's source and of all tests; words of the pages."""
    found = {f"lines of {name}": _lines(ROOT / "packages" / name / "src") for name in PACKAGES}
    tests = [ROOT / "tests", *(ROOT / "packages" / name / "tests" for name in PACKAGES)]
    return found | {"lines of tests": sum(map(_lines, tests)), "words of pages": _words()}


def limits() -> dict[str, int]:
    """The most that each may be."""
    found: dict[str, int] = json.loads(LIMITS.read_text("utf-8"))
    return found


def _lines(folder: Path) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))


def _words() -> int:
    """Of the pages that people read, without marks of tools; a changelog has to grow."""
    folders = [ROOT, ROOT / "docs", *(ROOT / "packages" / name for name in PACKAGES)]
    pages = {page for folder in folders for page in folder.glob("*.md")}
    texts = (page.read_text("utf-8") for page in pages - {ROOT / "CHANGELOG.md"})
    return sum(len(re.sub(r"<!--.*?-->", "", text, flags=re.S).split()) for text in texts)


def main() -> None:
    """Show what there is beside its limit, and lower the limits that are above it."""
    known, here = limits(), weights()
    for what, now in here.items():
        print(f"{what:<24}{now:>8,}  at most {known.get(what, now):>8,}")
    lowered = {what: min(now, known.get(what, now)) for what, now in here.items()}
    LIMITS.write_text(json.dumps(lowered, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
