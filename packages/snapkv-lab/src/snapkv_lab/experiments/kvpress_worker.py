"""kvpress's presses, driven by `snapkv_lab.experiments.kvpress` from another environment.

This file runs with that environment's Python and imports nothing of snapkv. It reads one JSON
object per line from standard input and answers each with one: first the keyword arguments of
`Worker`, then the name of a method under "do" with its arguments.
"""

import contextlib
import copy
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

# Libraries may print to standard output, which must only carry answers.
_ANSWERS = os.fdopen(os.dup(sys.stdout.fileno()), "w")
os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

import kvpress
import torch
import transformers
from kvpress import SnapKVPress
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache

Answer = dict[str, Any]


class Worker:
    """A model with a cache that can be compressed by kvpress.

    `model` is a folder, and `options` are its dtype and attn_implementation. `press` has
    window_size and kernel_size; None for a full cache.
    """

    def __init__(
        self, model: str, device: str, threads: int, press: dict[str, int] | None, **options: str
    ) -> None:
        torch.set_num_threads(threads)
        self._device, self._press = torch.device(device), press
        self._model = AutoModelForCausalLM.from_pretrained(model, **options)
        self._model.to(self._device).eval()
        self._cache: Any = None
        self._seen = 0
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)

    def versions(self) -> Answer:
        """Return the versions of kvpress, transformers and torch by name."""
        return {
            "kvpress": version("kvpress"),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }

    def read(self, ids: list[list[int]], kept_tokens: int) -> Answer:
        """Read a prompt into a new cache and keep the given number of tokens.

        Args:
            ids: (B, T) token ids.
            kept_tokens: how many tokens each head keeps, if the worker has a press.

        Returns:
            A dictionary with "ms", the time in milliseconds, and "kept_tokens", how many tokens the
            first layer has.
        """
        prompt = torch.tensor(ids, device=self._device)
        press = self._make_press(prompt.shape[1], kept_tokens)
        hooks = contextlib.nullcontext() if press is None else press(self._model)

        def work() -> None:
            cache = DynamicCache(config=self._model.config)
            with hooks:
                logits = self._model(prompt, past_key_values=cache, logits_to_keep=1).logits
            self._cache, self._token = cache, logits[:, -1:].argmax(dim=-1)

        spent = self._measure_time(work)
        self._seen = prompt.shape[1]
        return spent

    def decode(self, tokens: int) -> Answer:
        """Generate greedy tokens after the last prompt, in the loop of kvpress's pipeline.

        A prompt must have been read by `read`; the next call continues after these tokens.

        Returns:
            "ms", "kept_tokens" (including those that were added), and "tokens", the (B, tokens)
            token ids.
        """
        generated: list[Tensor] = []

        def work() -> None:
            for _ in range(tokens):  # the cache counts only kept tokens, so positions are passed
                generated.append(self._token)
                positions = torch.tensor([[self._seen]], device=self._device)
                logits = self._model(
                    self._token, past_key_values=self._cache, position_ids=positions
                ).logits
                self._token = logits[:, -1:].argmax(dim=-1)
                self._seen += 1

        spent = self._measure_time(work)
        return spent | {"tokens": torch.cat(generated, dim=1).tolist()}

    def compress(
        self, ids: list[list[int]], press: str | None, ratio: float, bits: int | None
    ) -> Answer:
        """Read a prompt into a new cache, compress it with a press, and store it in a few bits.

        Args:
            ids: (1, T) token ids.
            press: the name of a class of kvpress, or None to keep all tokens.
            ratio: the share of the tokens that the press drops.
            bits: the bits of a quantized cache, or None for an unquantized one.

        Returns:
            "held_bytes", the bytes of keys and values in the cache.
        """
        cache: Any = DynamicCache(config=self._model.config)
        if bits is not None:
            cache = QuantizedCache("quanto", self._model.config, nbits=bits)
        hooks = contextlib.nullcontext()
        if press is not None:
            hooks = getattr(kvpress, press)(compression_ratio=ratio)(self._model)
        prompt = torch.tensor(ids, device=self._device)
        with hooks:
            self._last_logits = self._model(prompt, past_key_values=cache, logits_to_keep=1).logits
        self._cache, self._seen = cache, prompt.shape[1]
        kinds = ("keys", "values", "_quantized_keys", "_quantized_values")
        held = [
            vars(layer)[kind] for layer in cache.layers for kind in kinds if kind in vars(layer)
        ]
        return {"held_bytes": sum(map(_bytes, held))}

    def answer(self, between: list[int], answer: list[int]) -> Answer:
        """Feed the right answer to a copy of the cache that `compress` made.

        Args:
            between: token ids that are read between the prompt and the answer.
            answer: token ids of the right answer.

        Returns:
            For each token of the answer, "likeliest", whether it is the most likely one, and
            "losses", its negative log-likelihood in nats.
        """
        fed = torch.tensor([between + answer[:-1]], device=self._device)
        positions = torch.arange(self._seen, self._seen + fed.shape[1], device=self._device)[None]
        cache = copy.copy(self._cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]  # updates replace tensors
        after = self._model(fed, past_key_values=cache, position_ids=positions).logits
        logits = torch.cat([self._last_logits, after], dim=1)[0, len(between) :].float()
        right = torch.tensor(answer, device=self._device)
        losses = torch.nn.functional.cross_entropy(logits, right, reduction="none")
        return {"likeliest": (logits.argmax(-1) == right).tolist(), "losses": losses.tolist()}

    def _make_press(self, length: int, kept_tokens: int) -> SnapKVPress | None:
        """Return a press that keeps the given number of tokens, or None if there is nothing to
        drop.

        Args:
            length: the number of tokens of the prompt.
            kept_tokens: how many of them stay. The ratio of the press is a little lower than exact,
                because kvpress rounds the number of kept tokens down.
        """
        if self._press is None or kept_tokens >= length:
            return None
        return SnapKVPress(1 - (kept_tokens + 0.5) / length, **self._press)

    def _measure_time(self, work: Callable[[], Any]) -> Answer:
        """Run a function, and return "ms", the time that it took, and "kept_tokens".

        The latter is how many tokens the first layer of the cache has afterwards.
        """
        self._synchronize()
        started = time.perf_counter()
        work()
        self._synchronize()
        ms = 1000 * (time.perf_counter() - started)
        return {"ms": ms, "kept_tokens": self._cache.layers[0].keys.shape[-2]}

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _bytes(tensor: Any) -> int:
    """Return the bytes of a tensor, or of all tensors that a quantized tensor consists of."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.nbytes)


@torch.inference_mode()
def main() -> None:
    """Answer requests from standard input until it ends.

    If a request fails, its answer has only "error", and the process continues.
    """
    transformers.utils.logging.disable_progress_bar()
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if worker is None:
                worker = Worker(**request)
                response = worker.versions()
            else:
                response = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            response = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(response), file=_ANSWERS, flush=True)


if __name__ == "__main__":
    main()
