"""kvpress's SnapKV, driven from outside: runs in its own environment and imports none of ours.

Started by `benchmarks.kvpress`. Reads one JSON object a line from standard input and answers each
with one: first the settings, then ``{"run": "prefill"}`` and ``{"run": "decode"}``, each one run,
and the same of the full cache, ``{"run": "prefill full"}`` and ``{"run": "decode full"}``.
"""

import contextlib
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
    """A model, a prompt, a cache that kvpress has compressed, and a full one."""

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
        self._caches: dict[str, Any] = {}
        self._tokens: dict[str, torch.Tensor] = {}
        self._seen: dict[str, int] = {}

    def prefill(self, kind: str) -> None:
        """Read the prompt into a new cache, "press" or "full"."""
        cache = DynamicCache(config=self._model.config)
        with self._press(self._model) if kind == "press" else contextlib.nullcontext():
            logits = self._model(self._ids, past_key_values=cache, logits_to_keep=1).logits
        self._caches[kind], self._seen[kind] = cache, self._ids.shape[1]
        self._tokens[kind] = logits[:, -1:].argmax(dim=-1)

    def decode(self, kind: str) -> None:
        """One greedy token."""
        positions = torch.tensor([[self._seen[kind]]])  # a cache counts what it stores
        logits = self._model(
            self._tokens[kind], past_key_values=self._caches[kind], position_ids=positions
        ).logits
        self._tokens[kind] = logits[:, -1:].argmax(dim=-1)
        self._seen[kind] += 1

    def kept_tokens(self) -> int:
        """Tokens that a layer stores of the compressed cache."""
        return int(self._caches["press"].layers[0].keys.shape[-2])


@torch.inference_mode()
def main() -> None:
    """Answer until standard input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is no answer
    peer = Peer(json.loads(sys.stdin.readline()))
    for kind in ("press", "full"):
        peer.prefill(kind)
    ready = {
        "kvpress": version("kvpress"),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "kept_tokens": peer.kept_tokens(),
    }
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        name, _, kind = json.loads(line)["run"].partition(" ")
        work = {"prefill": peer.prefill, "decode": peer.decode}[name]
        started = time.perf_counter()
        work(kind or "press")
        spent = {"wall_ms": 1000 * (time.perf_counter() - started)}
        print(json.dumps(spent), file=answers, flush=True)


if __name__ == "__main__":
    main()
