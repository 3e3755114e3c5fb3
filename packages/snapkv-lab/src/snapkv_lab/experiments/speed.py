"""Time and memory: reading a long prompt with compression, and decoding after it."""

import itertools
from collections.abc import Iterator

from snapkv_lab.experiments import decode, prefill
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, of, table
from snapkv_lab.experiments.magic_number import SEED, prompt_of
from snapkv_lab.experiments.peak_memory import measure_peaks
from snapkv_lab.experiments.records import (
    Row,
)

_NAMES = {
    "transformers": "transformers' own cache and attention",
    "full": "snapkv, every token kept",
    "snapkv": "snapkv, compressed",
}


def measure(given: Given) -> Iterator[Row]:
    """All benchmarks, one after the other."""
    loaded, lengths = given.loaded, (decode.SHORT_TOKENS, decode.LONG_TOKENS)
    prompt = prompt_of(loaded, prefill.PROMPT_TOKENS)
    for row in itertools.chain(
        decode.measure_decode(loaded.model, {n: prompt_of(loaded, n) for n in lengths}),
        prefill.measure_prefill(loaded.model, prompt),
        measure_peaks(),
    ):
        yield row | {"seed": SEED}


def _name(row: Row) -> str:
    return _NAMES[row["cache"]]


def _tables(rows: list[Row]) -> list[str]:
    read, decoded = of(rows, benchmark="prefill"), of(rows, benchmark="decode")
    ratio = {
        (row["cache"], row["prompt_tokens"]): row["ratio"] for row in decoded if "ratio" in row
    }
    times = [
        row | {"against": ratio.get((row["cache"], row["prompt_tokens"]))}
        for row in sorted(decoded, key=lambda row: (row["cache"], row["prompt_tokens"]))
        if "ms_per_token" in row
    ]
    return [
        "## Reading a prompt",
        table(
            (row for row in read if "ms" in row),
            {
                "cache": _name,
                "seconds": "{ms[p50]:seconds|.2f}",
                "processor seconds": "{cpu_ms[p50]:seconds|.2f}",
            },
        ),
        table(
            (row for row in read if "ratio" in row),
            {
                "pairs": lambda row: f"{_NAMES[row['cache']]} / {_NAMES[row['against']]}",
                "time": "{ratio:spread|.3f}",
                "processor time": "{cpu_ratio:spread|.3f}",
            },
        ),
        "## Decoding after a prompt",
        table(
            times,
            {
                "cache": _name,
                "prompt tokens": "{prompt_tokens:,}",
                "ms per token": "{ms_per_token[p50]:.1f}",
                "against the short prompt": "{against:spread|.3f}",
                "bytes held": "{held_bytes:bytes}",
            },
        ),
        "## Peak memory of reading",
        table(
            of(rows, benchmark="peak memory"),
            {
                "cache": _name,
                "prompt tokens": "{prompt_tokens:,}",
                "peak": "{peak_growth_bytes:bytes}",
                "after the prompt": "{growth_bytes:bytes}",
            },
        ),
    ]


EXPERIMENT = Experiment(
    name="speed",
    title="Speed and memory",
    measure=measure,
    tables=_tables,
    shown={
        "decoding": Shown(
            "Decoding after a prompt", ("cache", "prompt tokens", "ms per token", "bytes held")
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
