"""Count the repository's lines of code, which `test_weight.py` compares with their limits.

python -m tests.weight    show the counts, and lower each limit to what there is

A line of code is one that is neither blank, nor a comment, a docstring or an import.
Explanations are free: docstrings, comments and pages have no limit.
"""

import ast
import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("snapkv", "snapkv-app", "snapkv-lab", "snapkv-vllm")
LIMITS = Path(__file__).with_name("weight.json")


def weights() -> dict[str, int]:
    """Count the lines of code of each package's source, and those of all tests together. The keys
    are those of `weight.json`.
    """
    found = {f"code of {name}": _code_in(ROOT / "packages" / name / "src") for name in PACKAGES}
    tests = [ROOT / "tests", *(ROOT / "packages" / name / "tests" for name in PACKAGES)]
    return found | {"code of tests": sum(map(_code_in, tests))}


def limits() -> dict[str, int]:
    """Return the largest value that each count may have."""
    found: dict[str, int] = json.loads(LIMITS.read_text("utf-8"))
    return found


def lines_of_code(text: str) -> int:
    """Count the lines of Python source that are code: neither blank, nor a comment, a docstring or
    an import.

    Raises:
        SyntaxError: `text` is not valid Python.
    """
    left = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            left -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(left)


def _is_docstring(node: ast.AST) -> bool:
    """Whether the node is a string that stands alone as a statement."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def _code_in(folder: Path) -> int:
    return sum(lines_of_code(path.read_text("utf-8")) for path in folder.rglob("*.py"))


def main() -> None:
    """Print each count with its limit, and lower the limits that are above their counts in
    `LIMITS`. No limit is raised; a count without a limit gets one.
    """
    known, here = limits(), weights()
    for what, now in here.items():
        print(f"{what:<24}{now:>8,}  at most {known.get(what, now):>8,}")
    lowered = {what: min(now, known.get(what, now)) for what, now in here.items()}
    LIMITS.write_text(json.dumps(lowered, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
