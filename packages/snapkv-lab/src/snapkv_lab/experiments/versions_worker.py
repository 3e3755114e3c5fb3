"""One checkout of this project, driven by `snapkv_lab.experiments.versions` of another.

Needs no more than the names of snapkv that it uses, which both must have. Answers each line on
standard input, {"cell": NAME}, with the milliseconds of one round; what it needs is made the first
time.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import snapkv

try:
    from snapkv.app.models import load
except ImportError:  # the checkout is from before there was `app`
    from snapkv.models import load

BUDGET = 512
TOKENS, THREADS = map(int, sys.argv[1:])
torch.set_num_threads(THREADS)
MODEL = load("demo").model


def _ids(rows: int, tokens: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1000, 40000, (rows, tokens), generator=generator)


def _cache(policy: Any = None) -> Any:
    return snapkv.CompressedCache(MODEL, policy or snapkv.SnapKV(BUDGET))


def _reading() -> Callable[[], Any]:
    ids = _ids(1, TOKENS)
    return lambda: MODEL(ids, past_key_values=_cache(), logits_to_keep=1)


def _behind(cache: Any, rows: int = 1, pads: int = 0) -> Callable[[], Any]:
    """Eight tokens behind a prompt, in half of whose rows there are pads."""
    ids = _ids(rows, TOKENS)
    mask = torch.ones_like(ids)
    mask[: rows // 2, :pads] = 0
    options: dict[str, Any] = {"attention_mask": mask} if pads else {}
    MODEL(ids, past_key_values=cache, logits_to_keep=1, **options)
    token = ids[:, :1]

    def steps() -> None:
        for _ in range(8):
            if pads:
                longer = torch.cat([options["attention_mask"], torch.ones_like(token)], dim=1)
                options["attention_mask"] = longer
            MODEL(token, past_key_values=cache, **options)

    return steps


def _generating() -> Callable[[], Any]:
    ids, options = _ids(1, TOKENS // 4), {"max_new_tokens": 16, "min_new_tokens": 16}
    options |= {"do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    return lambda: MODEL.generate(ids, attention_mask=mask, past_key_values=_cache(), **options)


CELLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "reading": _reading,
    "token": lambda: _behind(_cache()),
    "token of four padded rows": lambda: _behind(_cache(), rows=4, pads=37),
    "token of ragged heads": lambda: _behind(_cache(snapkv.AdaKV(snapkv.SnapKV(BUDGET)))),
    "token of h2o": lambda: _behind(_cache(snapkv.H2O(BUDGET))),
    "generating": _generating,
}


@torch.inference_mode()
def main() -> None:
    prepared: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        cell = json.loads(line)["cell"]
        work = prepared.setdefault(cell, prepared.get(cell) or CELLS[cell]())
        begin = time.perf_counter()
        work()
        ms = 1000 * (time.perf_counter() - begin)
        print(json.dumps(ms / 8 if cell.startswith("token") else ms), flush=True)


if __name__ == "__main__":
    main()
