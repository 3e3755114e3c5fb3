"""Time beside kvpress's SnapKV: the same model, prompt and budget, each run in turn.

    make kvpress                    its environment: it does not take the transformers used here
    python -m benchmarks.kvpress    measure, write the rows, render the page (about six minutes)

kvpress runs in a process of its own, which waits while another works. Rows:
`docs/results/kvpress.jsonl`. Page: `docs/results/kvpress.md`.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode import decoder
from benchmarks.environment import describe_environment
from benchmarks.magic_number import SEED
from benchmarks.prefill import reader
from benchmarks.prompts import prompt_of
from benchmarks.reading import ReadPrompt, read_prompt
from benchmarks.records import RESULTS, Row, environment_line, markdown_table, measure_or_render
from snapkv import FullCache, SnapKV
from snapkv.measure.contenders import Contender, compressed, full
from snapkv.measure.timing import alternate, ratios, spread
from snapkv.models import load

ROWS = RESULTS / "kvpress.jsonl"
PAGE = RESULTS / "kvpress.md"
PYTHON = Path(__file__).parent.parent / ".venv-kvpress" / "bin" / "python"

POLICY = SnapKV(512, window_size=32, kernel_size=7, pooling="avg")
"""kvpress pools with averages."""

LENGTHS = (1024, 4096)
PREFILL_ROUNDS, DECODE_ROUNDS = 5, 48
_NAMES = {
    "kvpress": "kvpress, SnapKVPress",
    "kvpress full": "full cache, kvpress's transformers",
    "snapkv": "snapkv",
    "transformers": "full cache",
}
EXPLAINED = """\
A token behind the compressed prompt gains more here, measured against the full cache on the same
transformers; that this transformers is slower per token than kvpress's hides it in the column
before. Reading 1,024 tokens costs a few percent over the full cache, here about one more than in
kvpress: the choice of every layer is checked against the model's own attention. At 4,096 tokens
neither is slower than its full cache."""

_FULL = {"kvpress": "kvpress full", "snapkv": "transformers"}
"""What a method is a part of: the full cache on the same transformers."""


class KvpressPeer:
    """The process that runs kvpress; `run` does one piece of work there.

    Args:
        python: the interpreter of its environment.
        settings: as `benchmarks.kvpress_peer` takes them.
    """

    def __init__(self, python: Path, settings: dict[str, Any]) -> None:
        script = Path(__file__).with_name("kvpress_peer.py")
        self._process = subprocess.Popen(
            [str(python), "-I", str(script)],  # nothing of this environment on its path
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions = self._ask(settings)

    def run(self, what: str) -> float:
        """Do "prefill" or "decode" once, or the same of the full cache ("prefill full"); ms."""
        return float(self._ask({"run": what})["wall_ms"])

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self.close()
            raise RuntimeError(f"the kvpress process ended with status {self._process.returncode}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@torch.inference_mode()
def measure(
    model: Any,
    prompts: dict[int, list[int]],
    *,
    prefill_rounds: int = PREFILL_ROUNDS,
    decode_rounds: int = DECODE_ROUNDS,
) -> Iterator[Row]:
    """Rows per length and cache: reading the prompt, then decoding behind it.

    Args:
        model: a model of full attention.
        prompts: token ids by length.
        prefill_rounds: turns of every cache that count.
        decode_rounds: tokens of every cache that count.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for length, ids in prompts.items():
            settings = _settings(folder, model, ids)
            with contextlib.closing(KvpressPeer(PYTHON, settings)) as peer:
                named = {
                    "prompt_tokens": length,
                    "policy": POLICY.describe(),
                    "peer": peer.versions,
                }
                read = {
                    "kvpress": lambda: peer.run("prefill"),  # runs at once
                    "kvpress full": lambda: peer.run("prefill full"),
                    **_readers(model, ids),
                }
                yield from _rows("prefill", read, prefill_rounds, named)
                steps = {
                    "kvpress": lambda: peer.run("decode"),
                    "kvpress full": lambda: peer.run("decode full"),
                    **_decoders(read_prompt(model, ids)),
                }
                yield from _rows("decode", steps, decode_rounds, named)


def _settings(folder: str, model: Any, ids: list[int]) -> dict[str, Any]:
    return {
        "model": folder,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "prompt_ids": ids,
        "budget": POLICY.budget,
        "window_size": POLICY.window_size,
        "kernel_size": POLICY.kernel_size,
    }


def _readers(model: Any, ids: list[int]) -> dict[str, Callable[[], float]]:
    prompt, contenders = torch.tensor([ids]), (compressed("snapkv", POLICY), full("transformers"))

    def timed(contender: Contender) -> Callable[[], float]:
        read = reader(model, prompt, contender)
        return lambda: read().wall_ms

    return {each.label: timed(each) for each in contenders}


def _decoders(prompt: ReadPrompt) -> dict[str, Callable[[], float]]:
    return {
        "snapkv": decoder(prompt, prompt.compressed(POLICY)),
        "transformers": decoder(prompt, prompt.compressed(FullCache())),
    }


def _rows(
    benchmark: str, work: dict[str, Callable[[], float]], rounds: int, named: Row
) -> Iterator[Row]:
    times = alternate(work, rounds=rounds, warmup_rounds=1)
    for name, samples in times.items():
        yield {
            "benchmark": benchmark,
            "cache": name,
            **named,
            "rounds": rounds,
            "ms": spread(samples, 2),
            "against_kvpress": spread(ratios(samples, times["kvpress"]), 4),
            "against_full": spread(ratios(samples, times[_FULL.get(name, name)]), 4),
        }


def render(rows: list[Row]) -> str:
    """The page that these rows make."""
    peer, policy = rows[0]["peer"], rows[0]["policy"]
    parts = [
        "# Beside kvpress",
        f"SnapKV as kvpress {peer['kvpress']} does it (transformers {peer['transformers']}, in an "
        f"environment of its own) and as it is done here: the same weights and prompt, budget "
        f"{policy['budget']}, window {policy['window_size']}, kernel {policy['kernel_size']}, "
        f"{policy['pooling']} pooling. Processes take turns; a ratio is the median over pairs of "
        "the same round. The versions of transformers differ, so a difference is not of the method "
        "alone: the last column is against the full cache on the same transformers.",
        environment_line(rows) + ".",
        markdown_table(
            ["work", "cache", "prompt tokens", "ms", "against kvpress", "against its full cache"],
            [
                [
                    row["benchmark"],
                    _NAMES[row["cache"]],
                    f"{row['prompt_tokens']:,}",
                    f"{row['ms']['p50']:,.1f}",
                    f"{row['against_kvpress']['p50']:.3f}",
                    f"{row['against_full']['p50']:.3f}",
                ]
                for row in rows
            ],
        ),
        EXPLAINED,
        "Rendered from `kvpress.jsonl` by `python -m benchmarks.kvpress`; each row has all "
        "settings.",
    ]
    return "\n\n".join(parts) + "\n"


def _measurements() -> Iterator[Row]:
    if not PYTHON.is_file():
        sys.exit(f"expected kvpress's environment, got no {PYTHON}; run make kvpress")
    environment, loaded = describe_environment(), load("demo")
    for row in measure(loaded.model, {n: prompt_of(loaded, n) for n in LENGTHS}):
        print(row, file=sys.stderr)
        yield {**row, "seed": SEED, "model": loaded.description(), "environment": environment}


if __name__ == "__main__":
    measure_or_render(__doc__, _measurements, render, rows=ROWS, page=PAGE)
