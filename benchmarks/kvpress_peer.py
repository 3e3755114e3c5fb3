"""kvpress's SnapKV, driven from outside: runs in its own environment and imports none of ours.

Started by `benchmarks.kvpress`. Reads one JSON object a line from standard input and answers each
with one: first the settings, then ``{"run": "prefill"}`` and ``{"run": "decode"}``, each one run.
"""

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import torch
import transformers
from kvpress import SnapKVPress
from transformers import AutoModelForCausalLM, DynamicCache


class Peer:
    """A model, a prompt, and a cache that kvpress has compressed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._model = AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=settings["dtype"], attn_implementation="sdpa"
        ).eval()
        self._ids = torch.tensor([settings["prompt_ids"]])
        # kvpress takes the share to remove; a little less, so that rounding down keeps the budget.
        ratio = 1 - (settings["budget"] + 0.5) / self._ids.shape[1]
        self._press = SnapKVPress(
            ratio, window_size=settings["window_size"], kernel_size=settings["kernel_size"]
        )
        self._cache: Any = None
        self._token = self._ids[:, -1:]

    def prefill(self) -> None:
        """Read the prompt into a new cache."""
        cache = DynamicCache(config=self._model.config)
        with self._press(self._model):
            logits = self._model(self._ids, past_key_values=cache, logits_to_keep=1).logits
        self._cache, self._token = cache, logits[:, -1:].argmax(dim=-1)
        self._seen = self._ids.shape[1]

    def decode(self) -> None:
        """One greedy token."""
        positions = torch.tensor([[self._seen]])  # the cache counts what it stores, not what it saw
        logits = self._model(
            self._token, past_key_values=self._cache, position_ids=positions
        ).logits
        self._token = logits[:, -1:].argmax(dim=-1)
        self._seen += 1

    def kept_tokens(self) -> int:
        """Tokens that a layer stores."""
        return int(self._cache.layers[0].keys.shape[-2])


@torch.inference_mode()
def main() -> None:
    """Answer until standard input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is no answer
    peer = Peer(json.loads(sys.stdin.readline()))
    peer.prefill()
    ready = {
        "kvpress": version("kvpress"),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "kept_tokens": peer.kept_tokens(),
    }
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        work = {"prefill": peer.prefill, "decode": peer.decode}[json.loads(line)["run"]]
        started = time.perf_counter()
        work()
        spent = {"wall_ms": 1000 * (time.perf_counter() - started)}
        print(json.dumps(spent), file=answers, flush=True)


if __name__ == "__main__":
    main()
