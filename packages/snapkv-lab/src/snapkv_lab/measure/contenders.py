"""The caches that are compared by time, and caches that are filled as if a prompt had been read."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import Cache

from snapkv.cache.layer import CompressedLayer
from snapkv.errors import UnsupportedModelError, wrong
from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import passed
from snapkv.hf.device_memory import out_of_memory_explained
from snapkv.hf.install import install, uninstall
from snapkv.hf.model_parts import output_weight
from snapkv.ops import ScoreOptions
from snapkv.policies import Policy, PromptLayer
from snapkv.storage.bits import KVCodes
from snapkv.validation import nearest
from snapkv_app.prefills import Exact, Prefill
from snapkv_lab.measure.held_bytes import cache_bytes, peak_growth_bytes
from snapkv_lab.measure.timing import measure_time, synchronize

ROOM_TOKENS = 512
"""How many tokens after the prompt fit into caches of a fixed size."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A kind of cache with the label that tables give it. It keeps no reference to the caches it
    makes.

    Attributes:
        label: the name in tables.
        make: makes a cache for a model and a number of prompt tokens.
        policy: what the cache keeps; None for a cache of transformers.
        prefill: how prompts are read.
    """

    label: str
    make: Callable[[PreTrainedModel, int], Cache]
    policy: Policy | None = None
    prefill: Prefill = field(default_factory=Exact)

    def reader(self, model: PreTrainedModel, ids: Tensor) -> Callable[[], float]:
        """Return a function that reads a prompt into a new cache and returns the milliseconds it
        took. Nothing is read before it is called.

        Args:
            model: the model that reads.
            ids: (B, T) int64, the prompt.

        Raises:
            OutOfMemoryError: the returned function raises it if the prompt does not fit.
        """
        return lambda: measure_time(lambda: self._read(model, ids)).wall_ms

    def peak(self, model: PreTrainedModel, ids: Tensor) -> dict[str, int]:
        """Read a prompt into a new cache, and measure the memory that this takes.

        Args:
            model: the model that reads.
            ids: (B, T) int64, the prompt, on the device whose memory is measured.

        Returns:
            A dictionary of bytes with the keys "peak_growth_bytes", see `peak_growth_bytes`, and
            "held_bytes", which the cache holds afterwards.

        Raises:
            OutOfMemoryError: the prompt does not fit.
        """
        caches: list[Cache] = []
        peak = peak_growth_bytes(lambda: caches.append(self._read(model, ids)), ids.device)
        return {"peak_growth_bytes": peak, "held_bytes": cache_bytes(caches[0])}

    @contextlib.contextmanager
    def prepared(self, model: PreTrainedModel) -> Iterator[None]:
        """Install in the model what this cache needs, and nothing else, for this block.

        What was installed in the model before is removed and not restored. Caches of other
        contenders stay valid, and must be used in blocks of their own.
        """
        uninstall(model)
        with contextlib.nullcontext() if self.policy is None else install(model):
            yield

    @torch.no_grad()
    def _read(self, model: PreTrainedModel, ids: Tensor) -> Cache:
        explained = out_of_memory_explained(lambda: self.label)
        with self.prepared(model), explained, self.prefill.installed(model):
            cache = self.make(model, ids.shape[1])
            model(ids, **passed(cache), logits_to_keep=1)
        return cache


class Decoder:
    """A cache that is filled with random states, as if a prompt had been read, and that generates
    tokens when it is called.

    Args:
        contender: makes the cache.
        model: the model that decodes.
        batch: how many rows the cache has.
        length: how many tokens the prompt has.

    Raises:
        OutOfMemoryError: the cache does not fit.
        UnsupportedModelError: the model's cache does not hold keys and values per head.
    """

    def __init__(
        self, contender: Contender, model: PreTrainedModel, batch: int, length: int
    ) -> None:
        self._contender, self._model = contender, model
        shape = (batch, length + 1)  # the prompt, and the first token after it
        self._ids = torch.zeros(shape, dtype=torch.int64, device=model.device)
        self._cache = fill_cache(contender, model, batch=batch, tokens=length)

    @property
    def held_bytes(self) -> int:
        """The number of bytes that the cache holds, including the room for more tokens."""
        return cache_bytes(self._cache)

    @property
    def read_bytes(self) -> int:
        """The number of bytes of the cache that are read for each generated token.

        For a compressed cache, the room for more tokens is not counted.
        """
        if isinstance(self._cache, CompressedCache):
            return self._cache.report().held_bytes
        return self.held_bytes

    @property
    def steps(self) -> str | None:
        """How the decode steps of a compressed cache were run, or None for another cache.

        The text is "one graph", or the reason why the steps were not captured.
        """
        if isinstance(self._cache, CompressedCache):
            return self._cache.report()["steps"]  # type: ignore[no-any-return]
        return None

    def __call__(self, tokens: int) -> float:
        """Generate the given number of tokens in every row, and return the milliseconds for each
        token of a row.

        The tokens stay in the cache, so the next call continues after them.
        """
        with self._contender.prepared(self._model):
            return measure_time(lambda: self._generate(tokens)).wall_ms / tokens

    def first_and_gaps(self, tokens: int, **options: Any) -> tuple[float, list[float]]:
        """Generate tokens, and return the time of the first three and of each token after them.

        The first tokens of a `generate` call prepare what all later steps use. The tokens stay in
        the cache.

        Args:
            tokens: how many tokens to generate. With three or fewer the list is empty.
            options: further arguments of `generate`.

        Returns:
            The milliseconds of the first three tokens together, and a list with the milliseconds of
            each later token.
        """
        times = [time.perf_counter()]

        def note(ids: Tensor, scores: Any, **_: Any) -> Tensor:
            synchronize()
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        with self._contender.prepared(self._model):
            self._generate(tokens, stopping_criteria=[note], **options)
        gaps = [1000 * (later - before) for before, later in itertools.pairwise(times)]
        return sum(gaps[:3]), gaps[3:]

    def _generate(self, tokens: int, **options: Any) -> None:
        self._ids = generate_tokens(self._model, self._ids, self._cache, tokens, **options)


def generate_tokens(model: Any, ids: Tensor, cache: Any, tokens: int, **options: Any) -> Tensor:
    """Generate exactly the given number of greedy tokens after a prompt.

    Args:
        model: the model.
        ids: the prompt, (B, T) int64.
        cache: the cache of this prompt; it grows in place.
        tokens: how many tokens to generate.
        options: further arguments of `generate`.

    Returns:
        (B, T + tokens) int64, the prompt and the new tokens.
    """
    result: Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **passed(cache),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return result


def compressed_contender(label: str, policy: Policy, *, codes: KVCodes | None = None) -> Contender:
    """Return a contender that uses a compressed cache with the given policy.

    `codes` says how keys and values are stored; None stores them unquantized.
    """

    def make(model: PreTrainedModel, prompt_tokens: int) -> Cache:
        del prompt_tokens
        return CompressedCache(model, policy, quantize=codes)

    return Contender(label=label, make=make, policy=policy)


def transformers_contender(name: str) -> Contender:
    """Return a contender that uses one of the caches in transformers.

    Raises:
        InvalidArgumentError: `name` is not a key of `FULL_CACHES`.
    """
    if name not in FULL_CACHES:
        problem = f"expected one of {', '.join(FULL_CACHES)}, but got {name!r}"
        raise wrong("baseline", problem, nearest(name, FULL_CACHES, "Use one of these values"))
    return Contender(label=name, make=FULL_CACHES[name])


FULL_CACHES: dict[str, Callable[[PreTrainedModel, int], Cache]] = {
    "transformers": lambda model, _: DynamicCache(config=model.config),
    "transformers-static": lambda model, prompt_tokens: StaticCache(
        config=model.config, max_cache_len=prompt_tokens + ROOM_TOKENS
    ),
    "transformers-int4": lambda model, _: QuantizedCache(
        backend="quanto", config=model.config, nbits=4
    ),
}
"""The caches of transformers, by the name that `snapkv bench --baseline` takes."""


@torch.no_grad()
def fill_cache(contender: Contender, model: PreTrainedModel, *, batch: int, tokens: int) -> Cache:
    """Create a cache and fill it with random keys and values for the given number of tokens.

    The policy of a compressed cache then selects which of them stay. The time of a decode step
    depends on how many tokens are stored and not on their values. At most one layer holds the whole
    prompt at a time.

    Args:
        contender: makes the cache.
        model: the model, which is not run.
        batch: how many rows the cache has.
        tokens: how many tokens the prompt of each row has.

    Raises:
        UnsupportedModelError: the model's cache does not hold keys and values per head.
    """
    cache = contender.make(model, tokens)
    if isinstance(cache, CompressedCache):
        cache.expect_prompt(tokens)
    for layer in cache.layers:
        layer.update(
            _random_states(model, batch, tokens, "key"), _random_states(model, batch, tokens, "key")
        )
        if isinstance(layer, CompressedLayer):
            _end_prompt(cache, layer, model, tokens)
    return cache


def _end_prompt(
    cache: CompressedCache, layer: CompressedLayer, model: PreTrainedModel, tokens: int
) -> None:
    """Let the policy select what to keep in one layer, as the wrapped attention does after a
    prompt, and evict the rest.

    Args:
        cache: the cache.
        layer: one of its layers, which stores the whole prompt; it is changed in place.
        model: the model of the cache.
        tokens: the length of the prompt. The queries that vote are random.
    """
    queries = _random_states(
        model, layer.keys.shape[0], min(layer.policy.query_tokens, tokens), "query"
    )
    output = layer.identity.output_projection
    prompt = PromptLayer(
        queries=queries,
        keys=layer.keys,
        values=layer.values,
        score_options=ScoreOptions(scaling=queries.shape[-1] ** -0.5),
        layer_idx=layer.identity.layer_idx,
        depth=layer.identity.depth,
        num_layers=layer.identity.num_layers,
        rotation=layer.identity.rotation,
        output_weight=None if output is None else output_weight(output, layer.keys.dtype),
        token_cost=partial(layer.token_cost, layer.keys.shape[1]),
    )
    cache.prompt_state.chooser.offer(layer, prompt)


def _random_states(model: PreTrainedModel, batch: int, tokens: int, kind: str) -> Any:
    """Return a tensor with random queries or keys for one layer of the model.

    Args:
        model: the model, from which sizes, device and dtype are taken.
        batch: the number B of rows.
        tokens: the number N of tokens.
        kind: "query" or "key".

    Returns:
        (B, Hq, N, D) for queries, or (B, Hkv, N, D) for keys.

    Raises:
        UnsupportedModelError: the model has latent attention.
    """
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None) is not None:
        raise wrong(
            "model",
            "expected a model whose cache holds keys and values per head, but got "
            f"{type(model).__name__} with latent attention",
            "Measure how it reads prompts, with snapkv bench prefill or memory",
            UnsupportedModelError,
        )
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    if kind == "key":
        heads = getattr(text, "num_key_value_heads", None) or heads
    return torch.randn(batch, heads, tokens, head_dim, device=model.device, dtype=model.dtype)
