"""What a long prompt costs each token after it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from snapkv import CompressedCache, FullCache, SnapKV
from snapkv_lab.experiments.reading import ReadPrompt, read_prompt
from snapkv_lab.experiments.records import Row
from snapkv_lab.measure.timing import alternate, ratios, spent_on, spread

SHORT_TOKENS, LONG_TOKENS = 1024, 6144
BUDGET = 512
TOKENS = 64


@torch.inference_mode()
def measure_decode(model: Any, prompts: dict[int, list[int]]) -> Iterator[Row]:
    """Rows of times per token, then rows of ratios of a long prompt to a short one.

    All caches decode in turn, one token each, in one process.

    Args:
        model: the model.
        prompts: token ids by length, of `SHORT_TOKENS` and `LONG_TOKENS`.
    """
    decoders: dict[str, Callable[[], float]] = {}
    reports = {}
    for prompt_tokens, ids in prompts.items():
        prompt = read_prompt(model, ids)
        for policy in (SnapKV(BUDGET), FullCache()):
            name = f"{policy.name}/{prompt_tokens}"
            cache = prompt.compressed(policy)
            reports[name] = cache.report()
            decoders[name] = decoder(prompt, cache)
    times = alternate(decoders, rounds=TOKENS, warmup_rounds=4)
    for name, samples in times.items():
        report = reports[name]
        yield {
            **_settings(name),
            "ms_per_token": spread(samples, 2),
            "tokens": TOKENS,
            "held_bytes": report.held_bytes,
            "full_bytes": report.full_bytes,
        }
    for policy in ("snapkv", "full"):
        long, short = f"{policy}/{LONG_TOKENS}", f"{policy}/{SHORT_TOKENS}"
        pairs = spread(ratios(times[long], times[short]), 4)
        yield {**_settings(long), "against_tokens": SHORT_TOKENS, "pairs": TOKENS, "ratio": pairs}


def _settings(name: str) -> Row:
    cache, _, prompt_tokens = name.partition("/")
    return {
        "benchmark": "decode",
        "cache": cache,
        "prompt_tokens": int(prompt_tokens),
        "budget": BUDGET if cache == "snapkv" else None,
    }


def decoder(prompt: ReadPrompt, cache: CompressedCache) -> Callable[[], float]:
    """A function that decodes one greedy token and returns the time in ms."""
    model = prompt.model
    token: Tensor = prompt.last_logits[:, -1:].argmax(dim=-1)

    def step() -> None:
        nonlocal token
        cache.expect_tokens(token)
        token = model(token, past_key_values=cache).logits[:, -1:].argmax(dim=-1)

    return lambda: spent_on(step).wall_ms
