"""Two checkouts of this project beside each other: has a change cost time?

    python -m snapkv_lab.experiments versions --against ../before  all cells, a ratio for each
    python -m snapkv_lab.experiments versions --against ../before --small
        short prompts: does it run?

Each checkout runs in a process of its own, which loads the demo model once; they take turns, round
by round, the first one changing. A ratio is the median over pairs of the same round.
To be run with nothing else on the machine. Both must have the names that `_Worker` uses.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
THREADS = 2
BUDGET = 512


class _Worker:
    """One checkout: measures what its standard input asks for, in milliseconds."""

    def __init__(self, tokens: int) -> None:
        import torch

        import snapkv

        try:
            from snapkv.app.models import load
        except ImportError:  # the checkout is from before there was `app`
            from snapkv.models import load

        torch.set_num_threads(THREADS)
        self.torch, self.snapkv, self.tokens = torch, snapkv, tokens
        self.model = load("demo").model
        self._prepared: dict[str, Callable[[], float]] = {}

    def measure(self, cell: str) -> float:
        """One round of a cell; what it needs is made the first time."""
        if cell not in self._prepared:
            self._prepared[cell] = getattr(self, f"_{cell.replace(' ', '_')}")()
        with self.torch.inference_mode():
            return self._prepared[cell]()

    def _ids(self, rows: int, tokens: int) -> Any:
        generator = self.torch.Generator().manual_seed(0)
        return self.torch.randint(1000, 40000, (rows, tokens), generator=generator)

    def _timed(self, work: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1000

    def _cache(self, policy: Any = None) -> Any:
        kept = self.snapkv.SnapKV(BUDGET) if policy is None else policy
        return self.snapkv.CompressedCache(self.model, kept)

    def _reading(self) -> Callable[[], float]:
        ids = self._ids(1, self.tokens)
        return lambda: self._timed(
            lambda: self.model(ids, past_key_values=self._cache(), logits_to_keep=1)
        )

    def _behind(self, cache: Any, rows: int = 1, pads: int = 0) -> Callable[[], float]:
        torch, ids = self.torch, self._ids(rows, self.tokens)
        mask = torch.ones_like(ids)
        mask[: rows // 2, :pads] = 0
        options: dict[str, Any] = {"attention_mask": mask} if pads else {}
        with torch.inference_mode():
            self.model(ids, past_key_values=cache, logits_to_keep=1, **options)
        token = ids[:, :1]

        def step() -> None:
            if pads:
                options["attention_mask"] = torch.cat(
                    [options["attention_mask"], torch.ones_like(token)], dim=1
                )
            self.model(token, past_key_values=cache, **options)

        return lambda: self._timed(lambda: [step() for _ in range(8)]) / 8

    def _token(self) -> Callable[[], float]:
        return self._behind(self._cache())

    def _token_of_four_padded_rows(self) -> Callable[[], float]:
        return self._behind(self._cache(), rows=4, pads=37)

    def _token_of_ragged_heads(self) -> Callable[[], float]:
        return self._behind(self._cache(self.snapkv.AdaKV(self.snapkv.SnapKV(BUDGET))))

    def _token_of_h2o(self) -> Callable[[], float]:
        return self._behind(self._cache(self.snapkv.H2O(BUDGET)))

    def _generating(self) -> Callable[[], float]:
        ids = self._ids(1, self.tokens // 4)
        options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}

        def generate() -> None:
            self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                past_key_values=self._cache(),
                pad_token_id=0,
                **options,
            )

        return lambda: self._timed(generate)


CELLS = (
    "reading",
    "token",
    "token of four padded rows",
    "token of ragged heads",
    "token of h2o",
    "generating",
)


def _work(tokens: int) -> None:
    worker = _Worker(tokens)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.measure(line.strip())), flush=True)


class _Checkout:
    """A process that measures with the code of one checkout."""

    def __init__(self, root: Path, tokens: int) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(_source(root)),
            "OMP_NUM_THREADS": str(THREADS),
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "0",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(HERE), "--worker", "--tokens", str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=root,
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit("a checkout's process has ended; what it said is above")
        return line

    def measure(self, cell: str) -> float:
        """One round of a cell."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{cell}\n")
        self._process.stdin.flush()
        return float(json.loads(self._answer()))


def _source(root: Path) -> Path:
    """Where a checkout has its source; until 0.1.0 there was one package."""
    today = root / "packages/snapkv/src"
    return today if today.is_dir() else root / "src"


def compare(before: Path, tokens: int, rounds: int) -> None:
    """Measure and print a line for each cell."""
    sides = {"before": _Checkout(before, tokens), "now": _Checkout(HERE.parents[5], tokens)}
    for cell in CELLS:
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 1):
            order = list(sides) if number % 2 else list(sides)[::-1]
            for name in order:
                times[name].append(sides[name].measure(cell))
        pairs = [n / b for n, b in zip(times["now"][1:], times["before"][1:], strict=True)]
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        print(
            f"{cell:28} before {medians['before']:9.1f} ms   now {medians['now']:9.1f} ms   "
            f"ratio {statistics.median(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f})",
            flush=True,
        )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, help="the other checkout's folder")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        _work(given.tokens)
        return
    if given.against is None or not (_source(given.against) / "snapkv").is_dir():
        parser.error(f"--against: expected a checkout of this project, got {given.against}")
    tokens, rounds = (640, 2) if given.small else (given.tokens, given.rounds)
    compare(given.against.resolve(), tokens, rounds)


if __name__ == "__main__":
    main()
