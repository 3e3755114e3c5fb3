"""The paper's observations, on the demo model.

    python -m benchmarks.studies            measure, write the rows, render page and figures
    python -m benchmarks.studies overlap    measure this one, keep the rows of the others
    python -m benchmarks.studies --render   render page and figures from the rows that are there

Rows: `docs/results/studies.jsonl`, for each study one line that says how it was run and one per
row. Page and figures: `docs/results/studies.md`, `docs/results/studies/*.svg`. What was measured is
also in `snapkv-results/studies`, where a run that was stopped goes on.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill

from benchmarks.environment import describe_environment
from benchmarks.records import RESULTS, Row, environment_line, markdown_table, read_rows, write_rows
from snapkv.app.models import LoadedModel, load
from snapkv.lab.study import HitRate, Induction, Instructions, Overlap, Position, Sensitivity, Study
from snapkv.lab.study.base import weighted
from snapkv.lab.study.figures import save
from snapkv.lab.study.hit_rate import SELECTIONS

ROWS = RESULTS / "studies.jsonl"
PAGE = RESULTS / "studies.md"
FIGURES = RESULTS / "studies"

FOLDER = Path("snapkv-results") / "studies"

SENSITIVITY = Sensitivity(kernels=(1, 5, 7, 13), length=2048, digits=5, depths=5, template="none")

INDUCTION = Induction(samples=2)

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        HitRate(samples=2),
        Overlap(samples=2),
        Instructions(samples=2),
        Position(samples=2),
        SENSITIVITY,
        INDUCTION,
    )
}


def measure(names: Sequence[str]) -> Iterator[Row]:
    """Studies, one after the other."""
    environment, loaded = describe_environment(), load("demo")
    for name in names:
        yield from _measured(STUDIES[name], loaded, environment)


def _measured(study: Study, loaded: LoadedModel, environment: Row) -> Iterator[Row]:
    def show(what: str, done: int, total: int) -> None:
        print(f"{study.name}: {what} ({done} of {total})", file=sys.stderr)

    findings = study.into(loaded, FOLDER / study.name, show)
    model = loaded.description()
    yield {"study": study.name, "run": findings.run, "model": model, "environment": environment}
    for row in findings.rows:
        yield {"study": study.name, **{name: _short(value) for name, value in row.items()}}


def _short(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def render(rows: list[Row]) -> str:
    """The page that these rows make."""
    return "\n\n".join([_HEAD, *(_section(name, rows) for name in STUDIES)]) + "\n"


def findings_of(rows: list[Row], name: str) -> list[Row]:
    """The rows of one study, without the line that says how it was run."""
    return [row for row in rows if row["study"] == name and "run" not in row]


_HEAD = """\
# The paper's observations, on the demo model

The paper's observations on Mistral-7B-Instruct-v0.2 with prompts of 3,000 to 19,000 tokens,
repeated on a model of 135 million parameters with essays of 3,072 tokens. Answers are sampled at
temperature 0.7 and have a fixed number of tokens, whether or not the model would have ended them.
Numbers are means over documents; "0.90 (0.50 to 1.00)" is the mean over the 30 layers, with the
lowest and the highest.

Rendered from `studies.jsonl` by `python -m benchmarks.studies`. `snapkv study NAME` makes the same
rows of any model and document."""


def _section(name: str, all_rows: list[Row]) -> str:
    rows = findings_of(all_rows, name)
    runs = [row for row in all_rows if row["study"] == name and "run" in row]
    table = STUDIES[name].table(rows)
    return "\n\n".join(
        [
            f"## {name}",
            *(fill(text, 100) for text in SEEN[name](rows).strip().split("\n\n")),
            f"![{name}](studies/{name}.svg)",
            f"{table.title[0].upper()}{table.title[1:]}.",
            markdown_table(table.header, table.lines),
            environment_line(runs) + ".",
        ]
    )


def _hit_rate(rows: list[Row]) -> str:
    vote, recent = (_where(rows, selection=name) for name in SELECTIONS)
    early, late = [row for row in vote if row["layer"] < LATE], _late(vote)
    beyond = _sum(late, "important_beyond_sinks")
    return f"""
It holds. The last 32 tokens of the prompt have voted for {_rate(_where(vote, window=1))} of what
the first 128 tokens of the answer attend to with more than 0.05, and for
{_rate(_where(vote, window=4))} of what the last 128 attend to (weighted). The same number of
positions at the beginning and the end of the prefix covers {_rate(recent)}.

This says less than it seems to. From layer {LATE} on, {1 - beyond / _sum(late, "important"):.0%} of
the positions attended to this strongly are the first four tokens, whatever the question. Without
them {beyond / len(late):.2f} positions per head and token are left, of which the vote has
{_rate(late, beyond=True)}; where a layer has almost none, its rate is chance. Before layer {LATE}
there are {_sum(early, "important") / len(early):.1f} per head and token,
{_sum(early, "important_beyond_sinks") / _sum(early, "important"):.0%} of them after the first four
tokens, and the vote has {_rate(early)}: the prompt's last tokens attend to the same ones."""


LATE = 12
"""The layer from which on the first tokens draw most of the attention."""


def _overlap(rows: list[Row]) -> str:
    def mean(of: str, window: int, name: str) -> str:
        return f"{_mean(_where(rows, of=of, window=window), name):.2f}"

    oldest, common = min(row["window"] for row in rows), "overlap_of_common"
    return f"""
Both figures are confirmed. The last window of the prompt shares {mean("prompt", -1, "overlap")} of
its positions with the answer, the one before it {mean("prompt", -2, "overlap")}, the oldest
{mean("prompt", oldest, "overlap")}; 0.05 is chance. Along the answer, the agreement with the
prompt's last window falls from {mean("answer", 1, "overlap")} to {mean("answer", 4, "overlap")}.

Most of the rise towards the prompt's end has a simple reason: a window cannot attend to what comes
after it. Among the positions before the first window, which all windows see, the oldest window
shares {mean("prompt", oldest, common)} of its choice with the answer, the last one
{mean("prompt", -1, common)}."""


def _instructions(rows: list[Row]) -> str:
    other, same = (_where(rows, compared=name) for name in ("different questions", "one question"))
    halves = "overlap_of_halves"
    early = [_mean([row for row in of if row["layer"] < LATE], halves) for of in (other, same)]
    return f"""
It holds in the later layers. Different questions share {_mean(other, "overlap"):.2f} of the
positions that they choose. To see how much of the rest is due to the question, votes are split into
halves: the halves of the same question agree by {_mean(same, halves):.2f}. Before layer {LATE}
different questions agree just as well, {early[0]:.2f} against {early[1]:.2f}; from there on they
agree less, {_mean(_late(other), halves):.2f} against {_mean(_late(same), halves):.2f}. A choice
made without knowing the question would be right about most positions here, and wrong about some in
the later layers."""


def _position(rows: list[Row]) -> str:
    vote = _where(rows, selection="vote")
    last, first = (_where(vote, question=place) for place in ("last", "first"))
    return f"""
It holds: the hit rate is {_rate(last)} with the question last and {_rate(first)} with the question
first (weighted); from layer {LATE} on, without the first four tokens,
{_rate(_late(last), beyond=True)} and {_rate(_late(first), beyond=True)}. A high hit rate means that
the vote predicts what is attended to, not that the answer is right."""


def _sensitivity(rows: list[Row]) -> str:
    full, *settings = rows
    by_kernel = {
        kernel: _mean(_where(settings, kernel_size=kernel), "score")
        for kernel in sorted({row["kernel_size"] for row in settings})
    }
    means = ", ".join(f"{score:.2f} at {kernel}" for kernel, score in by_kernel.items())
    by_window = {
        window: _mean(_where(settings, window_size=window), "score")
        for window in sorted({row["window_size"] for row in settings})
    }
    windows = ", ".join(f"{score:.2f} at {window}" for window, score in by_window.items())
    return f"""
The kernel matters most: the mean over windows and kinds of pooling is {means}. A number of
{SENSITIVITY.digits} digits is {SENSITIVITY.digits} tokens for this model, and pooling keeps the
last ones. By window, the mean over kernels and kinds of pooling is {windows}. The full cache has
{full["score"]:.2f}; one sample is {1 / full["samples"]:.2f}."""


def _induction(rows: list[Row]) -> str:
    derived = _where(rows, of="derived")[0]
    before, behind = derived["kernel_size"]
    decays = {row["decay"]: row["kept"] for row in _where(rows, of="decay")}
    heads = _where(rows, of="head")
    needing = [row for row in heads if row["needed"] >= 1]
    lines = STUDIES["induction"].table(rows).lines
    sides = ", ".join(f"{line[1]} of them with {line[0]}" for line in lines)
    medians = " and ".join(sorted({line[5].lstrip("-") for line in lines}))
    return f"""
This is not a figure of the paper; it shows what the paper's clusters are for. The end of the prompt
begins to copy something. Most of the window's votes near the original fall before the token that is
copied next, on the words that the copy began with ({sides}); the median is {medians} tokens before
it. What is needed next comes after it.

{len(needing)} of {len(heads)} heads need at least one token of the copy per prompt, that is, pay it
more than {INDUCTION.threshold} of their attention while the copy is generated. Of what they need,
{derived["needed_near_votes"]:.0%} is within 32 tokens of one of the head's {INDUCTION.best_votes}
best votes, and {derived["reached"]:.0%} of that is at most {before} before and {behind} after one.
At a budget of {INDUCTION.budget} the centred pooling of 7 keeps {derived["kept_centred"]:.0%} of
what is needed, fading by 0.5 {decays[0.5]:.0%}, by {derived["decay"]} {derived["kept"]:.0%}, by
0.98 {decays[0.98]:.0%}. The pair depends on how much is copied: {INDUCTION.items} digits, words or
tokens here."""


SEEN = {
    "hit-rate": _hit_rate,
    "overlap": _overlap,
    "instructions": _instructions,
    "position": _position,
    "sensitivity": _sensitivity,
    "induction": _induction,
}
"""What the rows of each study show, in words."""


def _where(rows: list[Row], **values: object) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def _late(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["layer"] >= LATE]


def _sum(rows: list[Row], name: str) -> float:
    return sum(row[name] for row in rows)


def _mean(rows: list[Row], name: str) -> float:
    return fmean(row[name] for row in rows)


def _rate(rows: list[Row], *, beyond: bool = False) -> str:
    end = "_beyond_sinks" if beyond else ""
    return weighted(rows, f"hit_rate{end}", f"important{end}")


def main() -> None:
    """Measure unless told only to render."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--render", action="store_true", help="only render from the rows")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(STUDIES)}; all by default")
    given = parser.parse_args()
    if unknown := set(given.names) - set(STUDIES):
        parser.error(f"expected names of {', '.join(STUDIES)}, got {', '.join(unknown)}")
    if not given.render:
        names = given.names or list(STUDIES)
        others = [row for row in read_rows(ROWS) if row["study"] not in names]
        write_rows(ROWS, [*others, *measure(names)])
    rows = read_rows(ROWS)
    PAGE.write_text(render(rows), encoding="utf-8")
    FIGURES.mkdir(exist_ok=True)
    for name, study in STUDIES.items():
        save(study.figure(findings_of(rows, name)), str(FIGURES / f"{name}.svg"))
    print(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
