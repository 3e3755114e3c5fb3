"""How much memory reading a prompt needs at its peak, each cache in a process of its own.

    python -m benchmarks.peak_memory snapkv     one row on standard output

Linux only: the peak of the process is reset and read through ``/proc``. The allocator is told to
hand freed tensors back at once, so that resident memory counts live tensors and not its reserves.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.magic_number import make_documents
from benchmarks.prefill import BUDGET, CONTENDERS, PROMPT_TOKENS, make_cache
from benchmarks.records import Row
from snapkv.evaluate.haystack import load_haystack
from snapkv.models import load

_WARMUP_TOKENS = 64
_HAND_BACK_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def measure_peaks() -> Iterator[Row]:
    """One row per cache."""
    for contender in CONTENDERS:
        command = [sys.executable, "-m", "benchmarks.peak_memory", contender]
        done = subprocess.run(
            command,
            env={**os.environ, **_HAND_BACK_FREED_MEMORY},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        yield json.loads(done.stdout)


@torch.inference_mode()
def peak_of_reading(contender: str) -> Row:
    """Bytes the process grows by, at its peak, while it reads the prompt."""
    loaded = load("demo")
    document, *_ = make_documents(
        loaded.tokenizer, load_haystack(), prompt_tokens=PROMPT_TOKENS, count=1
    )
    ids = torch.tensor([document.prompt_ids], device=loaded.model.device)
    loaded.model(ids[:, :_WARMUP_TOKENS], use_cache=False, logits_to_keep=1)
    cache = make_cache(loaded.model, contender)
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # start the peak again from here
    loaded.model(ids, past_key_values=cache, logits_to_keep=1)
    return {
        "benchmark": "peak memory",
        "cache": contender,
        "prompt_tokens": PROMPT_TOKENS,
        "budget": BUDGET,
        "peak_growth_bytes": _resident_bytes("VmHWM") - before,
        "growth_bytes": _resident_bytes("VmRSS") - before,
    }


def _resident_bytes(field: str) -> int:
    """A field of ``/proc/self/status``, which counts KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


if __name__ == "__main__":
    print(json.dumps(peak_of_reading(sys.argv[1])))
