"""Time per token behind as many stored tokens: appended in place, or copied for every token.

transformers' own cache concatenates what is stored and what is new. Caches are filled directly.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from snapkv import SnapKV
from snapkv_lab.experiments.experiment import Experiment, Shown, table
from snapkv_lab.experiments.records import Row
from snapkv_lab.measure.contenders import Contender, compressed, filled, full
from snapkv_lab.measure.timing import alternate, ratios, spent_on, spread

PROMPT_TOKENS, TOKENS = 4096, 96
CELLS = ((1, 512), (1, 1024), (1, 2048), (4, 512), (4, 1024), (4, 2048), (8, 1024))
"""Batch and stored tokens."""


@torch.inference_mode()
def measure(
    model: Any,
    *,
    cells: Sequence[tuple[int, int]] = CELLS,
    prompt_tokens: int = PROMPT_TOKENS,
    tokens: int = TOKENS,
) -> Iterator[Row]:
    """A row per cell; transformers' cache has read a prompt of only what it stores."""
    for batch, stored in cells:
        ours, theirs = compressed("snapkv", SnapKV(stored)), full("transformers")
        work = {
            "snapkv": _decoder(model, ours, batch, prompt_tokens),
            "transformers": _decoder(model, theirs, batch, stored),
        }
        times = alternate(work, rounds=tokens, warmup_rounds=4)
        yield {
            "benchmark": "appending",
            "batch": batch,
            "stored_tokens": stored,
            "prompt_tokens": prompt_tokens,
            "tokens": tokens,
            "ms": spread(times["snapkv"], 2),
            "copying_ms": spread(times["transformers"], 2),
            "ratio": spread(ratios(times["snapkv"], times["transformers"]), 4),
        }


def _decoder(model: Any, contender: Contender, batch: int, seen: int) -> Callable[[], float]:
    cache = filled(contender, model, batch=batch, tokens=seen)
    token = torch.zeros(batch, 1, dtype=torch.int64, device=model.device)

    def step() -> float:
        with contender.at_work(model):
            return spent_on(lambda: model(token, past_key_values=cache)).wall_ms

    return step


EXPERIMENT = Experiment(
    name="appending",
    title="Appending in place",
    takes="two minutes",
    measure=lambda given: measure(given.loaded.model),
    tables=lambda rows: [
        table(
            rows,
            {
                "batch": "{batch}",
                "stored tokens": "{stored_tokens:,}",
                "in place, ms": "{ms[p50]:.1f}",
                "copying, ms": "{copying_ms[p50]:.1f}",
                "ratio": "{ratio[p50]:.3f}",
            },
        )
    ],
    shown={
        "appending": Shown(
            "Appending in place",
            ("batch", "in place, ms", "copying, ms", "ratio"),
            ("1 | 1,024", "4 | 1,024", "8 | 1,024"),
        )
    },
)


if __name__ == "__main__":
    EXPERIMENT.main()
