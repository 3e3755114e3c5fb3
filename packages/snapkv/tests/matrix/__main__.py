"""Write docs/results/families.jsonl and docs/families.md: `make families`.

The page lists a few families; `docs/conf.py` replaces it by the full list when it is built.

With `--changes`, print how results differ with the installed transformers: `make test-newest`.
"""

import json
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import transformers

from tests.matrix.cells import CELLS, judged
from tests.matrix.images import IMAGE_CELLS, image_row
from tests.matrix.shrinking import MODELS, SEEING, growing_layers, has_own_layers, tiny

DOCS = Path(__file__).parents[4] / "docs"
ROWS = DOCS / "results" / "families.jsonl"
SHOWN = (
    *("deepseek_v3", "falcon_h1", "gemma3", "gemma4", "gpt_oss", "llama", "llama4_text", "mistral"),
    *("phi3", "qwen3", "qwen3_next", "qwen3_vl"),
)
"""The families on the page that is committed to the repository."""

_INTRODUCTION = """# Which models work

Made by `make families` with transformers {version}. Every causal language model of that release,
tiny and with random weights, must answer from a cache that has dropped tokens as a full one does
whose attention hides them. Other models are accepted or refused by the layers they have.

- **grow**: how many of all layers have a cache that grows with the context (\\*: of the tiny
  model). Only they are compressed; layers with a sliding window or a recurrent state stay as they
  are.
- **compressed**: one prompt, then single tokens. **pads**: left-padded rows, and each row alone.
  **pieces**: the prompt in several passes. **turns**: further prompts, stored whole or compressed.
  **files**: saved, loaded, continued. **rows**: in another order, as in beam search. **int8**: 8
  bits. **AdaKV**: heads of different budgets. **drafts**: prompt lookup gives the tokens of plain
  decoding.
- A number says why something is refused; nothing here gives a wrong answer.
"""

_SOME = """
Twelve families follow. The page that `make docs` builds has all {count} models, and which are
refused; so has `docs/results/families.jsonl`.
"""

_IMAGES = """
## With an image

Models that see, through `generate`, with an image of the shape that each takes.

- **text**: none. **image**: one in the prompt. **pads**: left-padded rows with an image each.
  **pieces**: read with `prefill_chunk_size`, the image in several pieces. **turns**: an image, then
  text, then another image. **files**, **int8**, **AdaKV**: as above, after an image.
"""


def row(model_type: str) -> dict[str, Any]:
    """Test a model and return its row: the layers that grow with the context, and every cell."""
    found: dict[str, Any] = {"model": model_type}
    try:
        tiny(model_type)
    except Exception as error:
        return found | {"not_built": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    found |= dict(zip(("growing", "layers"), growing_layers(model_type), strict=True))
    first, *others = CELLS
    cells = {first: judged(model_type, first)}
    if cells[first].startswith("refused"):
        return found | {"refused": cells[first].removeprefix("refused: ")}
    found["cells"] = cells | {name: judged(model_type, name) for name in others}
    return found | (image_row(model_type) if model_type in SEEING else {})


def known() -> list[dict[str, Any]]:
    """Read the rows that were written last."""
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def page(rows: Sequence[dict[str, Any]], of: int | None = None) -> str:
    """Return the page for these rows; `of` is the number of all rows if these are a part."""
    reasons: dict[str, int] = {}
    refused, not_built, no_image = defaultdict(list), [], []
    lines, seeing = [], []
    for each in rows:
        name = each["model"]
        if "not_built" in each:
            not_built.append(name)
        elif "refused" in each:
            refused[_general(each["refused"])].append(name)
        else:
            own = "\\*" if has_own_layers(name) else ""
            grow = f"{each['growing']} of {each['layers']}{own}"
            lines.append(_line(name, grow, *_marks(each["cells"], reasons)))
        if "images" in each:
            seeing.append(_line(name, *_marks(each["images"], reasons)))
        elif "no_image" in each:
            no_image.append(name)
    parts = [_INTRODUCTION.format(version=rows[0]["transformers"])]
    if of is not None:
        parts.append(_SOME.lstrip().format(count=of))
    parts += ["## Compressed\n", _head("model", "grow", *CELLS), *lines]
    parts += [_IMAGES, _head("model", *IMAGE_CELLS), *seeing]
    if no_image:
        parts.append(f"\nNo image was tried with {', '.join(no_image)}.")
    parts += ["\n## Why not\n", *(f"{number}. {reason}" for reason, number in reasons.items())]
    if refused:
        parts.append("\n## Refused when the cache is made, or at the first prompt\n")
    parts += [f"- {reason}: {', '.join(models)}" for reason, models in sorted(refused.items())]
    if not_built:
        parts.append(f"\nNot tried, since no tiny one can be built here: {', '.join(not_built)}.")
    return "\n".join(parts) + "\n"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(*names: str) -> str:
    return _line(*names) + "\n|" + "---|" * len(names)


def _marks(cells: dict[str, str], reasons: dict[str, int]) -> Iterator[str]:
    return (_mark(cell, reasons) for cell in cells.values())


def _mark(cell: str, reasons: dict[str, int]) -> str:
    kind, _, reason = cell.partition(": ")
    if kind != "refused":
        return {"right": "yes"}.get(kind, kind.upper())
    return str(reasons.setdefault(_general(reason), len(reasons) + 1))


def _general(reason: str) -> str:
    """Return the problem without names, numbers and the remedy."""
    named = re.sub(r"\w+(For[A-Z]\w+|LMHeadModel|Attention)\b", "the model", reason)
    said = re.sub(r"one list of \d+ layers", "one list of layers", named)
    return re.split(r", but got |, such as |\. (?=[A-Z])", said)[0].replace("|", "\\|")


def changes(known: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each model that is new, removed, wrong, or differs from the known row."""
    yield from (f"{model}: gone" for model in sorted(known.keys() - {*MODELS}))
    for model in MODELS:
        now, before = _said(row(model)), _said(known.get(model, {}))
        other = (name for name in now if now[name] != before.get(name) or "wrong" in str(now[name]))
        if said := "; ".join(f"{name} {now[name]}" for name in other):
            yield f"{model}: {said if before else f'new: {said}'}"


def _said(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields and cells of a row, with one word for the cells if all are right."""
    parts = {name: row[name] for name in row if name not in ("cells", "images", "model")}
    for name in ("cells", "images"):
        cells = row.get(name, {})
        found = {f"{name}, {cell}": said for cell, said in cells.items()}
        parts |= {name: "all right"} if {*cells.values()} == {"right"} else found
    return {name: each for name, each in parts.items() if name != "transformers"}


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page that is committed to the repository."""
    return page([each for each in rows if each["model"] in SHOWN], len(rows))


def _list_changes() -> None:
    rows = known()
    sys.stdout.write(f"transformers {transformers.__version__}, and {rows[0]['transformers']}:\n")
    wrong = 0
    for line in changes({each["model"]: each for each in rows}):
        wrong += "wrong" in line
        sys.stdout.write(f"  {line}\n")
        sys.stdout.flush()
    sys.exit(f"{wrong} wrong" if wrong else 0)


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    if "--changes" in sys.argv:
        _list_changes()
    rows = []
    for model_type in MODELS:
        rows.append(row(model_type))
        sys.stderr.write(json.dumps(rows[-1]) + "\n")
    rows = [{"transformers": transformers.__version__} | each for each in rows]
    ROWS.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    (DOCS / "families.md").write_text(shown(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
