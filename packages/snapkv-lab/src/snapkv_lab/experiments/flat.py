"""What is promised of a machine with two cores, measured there: ratios of runs that take turns.

Decoding time behind prompts of several lengths, against the full cache in batches, what the vote
adds to reading, and memory. To be run with nothing else on the machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from snapkv import SnapKV
from snapkv.app.models import LoadedModel
from snapkv_lab.experiments.decode import decoder
from snapkv_lab.experiments.experiment import Experiment, Given, Shown, of, table
from snapkv_lab.experiments.magic_number import SEED, prompt_of
from snapkv_lab.experiments.peak_memory import measure_peaks
from snapkv_lab.experiments.prefill import measure_overhead
from snapkv_lab.experiments.reading import read_prompt
from snapkv_lab.experiments.records import Row
from snapkv_lab.measure.contenders import compressed, full
from snapkv_lab.measure.decode import DecodeBench
from snapkv_lab.measure.timing import alternate, ratios, spread

THREADS = 2
POLICY = SnapKV(512)
_FULL_CACHES = ("transformers", "transformers-static")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured; `SMALL` is the same in a minute."""

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    flat_tokens: int = 64
    batch: int = 4
    batch_length: int = 8192
    batch_tokens: int = 8
    batch_rounds: int = 7
    overhead_lengths: tuple[int, ...] = (4096, 8192)
    overhead_rounds: int = 5
    peak_length: int = 8192


SMALL = Sizes(
    lengths=(640, 768),
    flat_tokens=2,
    batch=2,
    batch_length=640,
    batch_tokens=1,
    batch_rounds=2,
    overhead_lengths=(640,),
    overhead_rounds=2,
    peak_length=640,
)


def measure(given: Given) -> Iterator[Row]:
    """All rows."""
    sizes = SMALL if given.small else Sizes()
    return (row | {"seed": SEED} for row in _measurements(given.loaded, sizes))


def _measurements(loaded: LoadedModel, sizes: Sizes) -> Iterator[Row]:
    yield from flat_decoding(loaded, sizes)
    yield from full_against_compressed(loaded.model, sizes)
    for length in sizes.overhead_lengths:
        ids = torch.tensor([prompt_of(loaded, length)])
        yield from measure_overhead(loaded.model, ids, POLICY, rounds=sizes.overhead_rounds)
    yield from measure_peaks(sizes.peak_length)


@torch.inference_mode()
def flat_decoding(loaded: LoadedModel, sizes: Sizes) -> Iterator[Row]:
    """Time per token behind real prompts, one token each in turn; ratios to the shortest."""
    decoders: dict[int, Callable[[], float]] = {}
    for length in sizes.lengths:
        prompt = read_prompt(loaded.model, prompt_of(loaded, length))
        decoders[length] = decoder(prompt, prompt.compressed(POLICY))
        prompt.layers.clear()  # the full cache
    named = {str(length): step for length, step in decoders.items()}
    times = alternate(named, rounds=sizes.flat_tokens, warmup_rounds=4)
    base = times[str(sizes.lengths[0])]
    for length in sizes.lengths:
        yield {
            "benchmark": "flat",
            "prompt_tokens": length,
            "budget": POLICY.budget,
            "tokens": sizes.flat_tokens,
            "ms_per_token": spread(times[str(length)], 2),
            "ratio": spread(ratios(times[str(length)], base), 4),
        }


def full_against_compressed(model: Any, sizes: Sizes) -> Iterator[Row]:
    """A batch of long prompts, the caches filled with random keys and values."""
    bench = DecodeBench(
        model=model,
        contenders=[
            compressed("snapkv", POLICY),
            full("transformers"),
            full("transformers-static"),
        ],
        lengths=[sizes.batch_length],
        batches=[sizes.batch],
        tokens=sizes.batch_tokens,
        rounds=sizes.batch_rounds,
    )
    for row in bench.rows():
        yield {"benchmark": "batch", "budget": POLICY.budget, **row}


def _tables(rows: list[Row]) -> list[str]:
    flat, batch = of(rows, benchmark="flat"), of(rows, benchmark="batch")
    return [
        f"## Time per token by length of the prompt, budget {flat[0]['budget']}",
        table(
            flat,
            {
                "prompt tokens": "{prompt_tokens:,}",
                "ms per token": "{ms_per_token[p50]:.1f}",
                "against the shortest": "{ratio:spread|.3f}",
            },
        ),
        f"## Against the full cache, {batch[0]['batch']} requests of {batch[0]['length']:,} tokens",
        table(
            batch,
            {
                "cache": "{cache}",
                "ms per token": "{ms_per_token[p50]:.1f}",
                "against snapkv": "{ratio:spread|.3f}",
                "bytes held": "{held_bytes:bytes}",
            },
        ),
        "## Vote, selection and gather",
        table(
            of(rows, benchmark="overhead"),
            {
                "prompt tokens": "{prompt_tokens:,}",
                "reading, s": "{reading_ms[p50]:seconds|.2f}",
                "compressing, ms": "{compressing_ms[p50]:.0f}",
                "share": "{share[p50]:.2%}",
            },
        ),
        "## Memory",
        table(
            of(rows, benchmark="peak memory"),
            {
                "cache": "{cache}",
                "peak": "{peak_growth_bytes:bytes}",
                "held after it": "{held_bytes:bytes}",
            },
        ),
    ]


EXPERIMENT = Experiment(
    name="flat",
    title="Flat after the prompt",
    takes="an hour or less, with nothing else on the machine,",
    measure=measure,
    small=True,
    threads=THREADS,
    tables=_tables,
    shown={
        "flat": Shown(
            "Time per token by length of the prompt, budget 512",
            ("prompt tokens", "ms per token", "against the shortest"),
            ("1,024", "8,192"),
        ),
        "batch": Shown(
            "Against the full cache, 4 requests of 8,192 tokens",
            ("cache", "ms per token", "against snapkv", "bytes held"),
        ),
        "voting": Shown(
            "Vote, selection and gather",
            ("prompt tokens", "reading, s", "compressing, ms", "share"),
        ),
        "peak": Shown("Memory", ("cache", "peak", "held after it"), ("transformers", "snapkv")),
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
