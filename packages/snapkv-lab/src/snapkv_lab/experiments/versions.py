"""Two checkouts of this project beside each other: has a change cost time?

Each checkout runs in a process of its own, which loads the demo model once; they take turns. A
ratio is the median over pairs of the same round. To be run with nothing else on the machine.
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.measuring import Peer, Turns
from snapkv_lab.experiments.pages import Table
from snapkv_lab.experiments.records import ROOT, Row, git

THREADS = 2
CELLS = (
    *("reading", "token", "token of four padded rows", "token of ragged heads", "token of h2o"),
    "generating",
)


def _source(root: Path) -> Path:
    """Where a checkout has its source; until 0.1.0 there was one package."""
    today = root / "packages/snapkv/src"
    return today if today.is_dir() else root / "src"


def _checkout(root: Path, tokens: int) -> Peer:
    worker = Path(__file__).with_name("versions_worker.py")
    settings = {"OMP_NUM_THREADS": f"{THREADS}", "OMP_WAIT_POLICY": "PASSIVE"}
    environment = os.environ | settings | {"PYTHONPATH": str(_source(root)), "GOMP_SPINCOUNT": "0"}
    # -P: what lies beside the worker is not to be imported instead.
    command = [sys.executable, "-P", str(worker), str(tokens), str(THREADS)]
    return Peer(command, env=environment, cwd=root)


def _measure(given: Given) -> Iterator[Row]:
    before = Path(given.against).resolve()
    if not (_source(before) / "snapkv").is_dir():
        sys.exit(f"--against: expected a checkout of this project, got {before}")
    commit = git("-C", str(before), "rev-parse", "--short=10", "HEAD")
    sides = {"before": _checkout(before, given.tokens), "now": _checkout(ROOT, given.tokens)}
    for cell in CELLS:
        work = {name: partial(_asked, side, cell) for name, side in sides.items()}
        turns = Turns(work, rounds=given.rounds)
        yield {
            "work": cell,
            "against": commit,
            "before_ms": turns.ms("before", 1),
            "now_ms": turns.ms("now", 1),
            "ratio": turns.ratio("now", "before"),
        }


def _asked(side: Peer, cell: str) -> float:
    answer = side.ask({"cell": cell})
    if answer is None:
        raise SystemExit("a checkout's process has ended; what it said is above")
    return float(answer)


VERSIONS = Experiment(
    name="versions",
    title="Two checkouts of this project beside each other",
    measure=_measure,
    options={
        "against": "../before",
        "tokens": Sized(4096, 640),
        "rounds": Sized(9, 2),
    },
    tables=[
        Table(
            {
                "work": "{work}",
                "before, ms": "{before_ms[p50]:.1f}",
                "now, ms": "{now_ms[p50]:.1f}",
                "now against before": "{ratio:spread|.3f}",
            },
            "Beside commit {against}",
        )
    ],
)
