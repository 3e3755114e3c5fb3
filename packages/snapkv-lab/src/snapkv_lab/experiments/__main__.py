"""Run an experiment: its rows and its page are written to `docs/results`.

python -m snapkv_lab.experiments            list them, each with what it asks
python -m snapkv_lab.experiments NAME ...   run one; `--help` behind it says what it takes
"""

import ast
import runpy
import sys
from pathlib import Path

from snapkv.validation import nearest


def experiments() -> dict[str, str]:
    """What can be run, and the first line of what it says of itself."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        text = path.read_text("utf-8")
        if 'if __name__ == "__main__"' in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    return found


def main() -> None:
    """Run the named one as a program of its own."""
    known, name = experiments(), sys.argv[1] if len(sys.argv) > 1 else ""
    if name in known:
        del sys.argv[0]
        runpy.run_module(f"snapkv_lab.experiments.{name}", run_name="__main__", alter_sys=True)
    elif name in ("", "--list"):
        for each, says in known.items():
            print(f"{each:<24}{says}")
    else:
        sys.exit(
            f"experiments: expected one of {', '.join(known)}, got {name!r}{nearest(name, known)}"
        )


if __name__ == "__main__":
    main()
