"""How much memory reading a prompt needs at its peak, each cache in a process of its own.

    python -m snapkv_lab.experiments peak_memory snapkv 4096     one row on standard output

Linux only: the peak of the process is reset and read through ``/proc``. The allocator is told to
hand freed tensors back at once, so that resident memory counts live tensors and not its reserves.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import torch

from snapkv.app.models import load
from snapkv_lab.experiments.magic_number import prompt_of
from snapkv_lab.experiments.prefill import BUDGET, CONTENDERS, PROMPT_TOKENS
from snapkv_lab.experiments.records import Row
from snapkv_lab.measure.held_bytes import cache_bytes, peak_growth_bytes, resident_bytes

_WARMUP_TOKENS = 64
HAND_BACK_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def measure_peaks(prompt_tokens: int = PROMPT_TOKENS) -> Iterator[Row]:
    """One row per cache."""
    for contender in CONTENDERS:
        command = [
            sys.executable,
            "-m",
            "snapkv_lab.experiments.peak_memory",
            contender,
            str(prompt_tokens),
        ]
        done = subprocess.run(
            command,
            env={**os.environ, **HAND_BACK_FREED_MEMORY},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        yield json.loads(done.stdout)


@torch.inference_mode()
def peak_of_reading(contender: str, prompt_tokens: int) -> Row:
    """Bytes the process grows by, at its peak, while it reads the prompt."""
    loaded = load("demo")
    model = loaded.model
    ids = torch.tensor([prompt_of(loaded, prompt_tokens)], device=model.device)
    cache = CONTENDERS[contender].make(model, prompt_tokens)
    model(ids[:, :_WARMUP_TOKENS], use_cache=False, logits_to_keep=1)
    before = resident_bytes("VmRSS")
    peak = peak_growth_bytes(
        lambda: model(ids, past_key_values=cache, logits_to_keep=1), model.device
    )
    return {
        "benchmark": "peak memory",
        "cache": contender,
        "prompt_tokens": prompt_tokens,
        "budget": BUDGET,
        "peak_growth_bytes": peak,
        "growth_bytes": resident_bytes("VmRSS") - before,
        "held_bytes": cache_bytes(cache),
        "kept_bytes": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers),
    }


if __name__ == "__main__":
    print(json.dumps(peak_of_reading(sys.argv[1], int(sys.argv[2]))))
