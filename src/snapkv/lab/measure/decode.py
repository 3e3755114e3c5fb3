"""Time per generated token behind prompts of several lengths, every cache in turn."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from snapkv.errors import InvalidArgumentError, OutOfMemoryError
from snapkv.hf.cache import CompressedCache
from snapkv.lab.measure.bandwidth import least_ms_per_token
from snapkv.lab.measure.contenders import ROOM_TOKENS, Contender, filled
from snapkv.lab.measure.held_bytes import cache_bytes
from snapkv.lab.measure.kvpress import Kvpress, forget
from snapkv.lab.measure.timing import alternate, ratios, spent_on, spread
from snapkv.plan import out_of_memory_explained
from snapkv.validation import require_int

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """How long a token takes behind a long prompt.

    Args:
        model: the model.
        contenders: the caches; ratios are against the first.
        lengths: prompt tokens.
        batches: rows.
        tokens: generated in every round.
        rounds: turns of every cache that count; one before them warms up.
        bytes_per_second: what the device copies, for the share of that bandwidth; None leaves it
            out.

    Raises:
        InvalidArgumentError: tokens and rounds need more room than caches of a fixed size have.
    """

    model: PreTrainedModel
    contenders: Sequence[Contender | Kvpress]
    lengths: Sequence[int]
    batches: Sequence[int] = (1,)
    tokens: int = 16
    rounds: int = 5
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        """Check the sizes."""
        require_int("rounds", self.rounds, minimum=2)
        require_int("tokens", self.tokens, minimum=1)
        if self.tokens * (self.rounds + 1) > ROOM_TOKENS:
            raise InvalidArgumentError(
                f"tokens and rounds: expected at most {ROOM_TOKENS} tokens in all rounds and the "
                f"one before them, got {self.tokens * (self.rounds + 1)}; lower one of them"
            )

    def rows(self) -> Iterator[Row]:
        """One row per batch, length and cache; a cache that does not fit has a row that says so."""
        for batch in self.batches:
            for length in self.lengths:
                yield from self._cell(batch, length)

    def _cell(self, batch: int, length: int) -> Iterator[Row]:
        decoders: dict[str, Decoder] = {}
        for contender in self.contenders:
            try:
                with out_of_memory_explained(lambda: "full"):
                    decoder = decoder_behind(contender, self.model, batch, length)
                    decoder(1)
            except OutOfMemoryError:
                yield self._row(contender.label, batch, length) | {"status": "out of memory"}
            else:
                decoders[contender.label] = decoder
        runs = alternate(
            {name: _round(decoder, self.tokens) for name, decoder in decoders.items()},
            rounds=self.rounds,
            warmup_rounds=1,
        )
        for name, samples in runs.items():
            yield (
                self._row(name, batch, length)
                | {"status": "ok", "filled": True, "held_bytes": decoders[name].held_bytes}
                | self._times(samples, next(iter(runs.values())), batch, decoders[name])
            )
        forget(self.contenders)

    def _row(self, name: str, batch: int, length: int) -> Row:
        return {"bench": "decode", "cache": name, "batch": batch, "length": length}

    def _times(
        self, samples: list[float], base: list[float], batch: int, decoder: "Decoder"
    ) -> Row:
        ms = spread(samples, 3)
        times: Row = {
            "ms_per_token": ms,
            "ratio": spread(ratios(samples, base), 4),
            "tokens_per_second": round(1000 * batch / ms["p50"], 2),
        }
        if self.bytes_per_second is not None:
            least = least_ms_per_token(self.model, decoder.read_bytes, self.bytes_per_second)
            times |= {"least_ms": round(least, 3), "of_ceiling": round(least / ms["p50"], 4)}
        return times


class Decoder(Protocol):
    """A cache behind a prompt, and what is generated behind it."""

    @property
    def held_bytes(self) -> int:
        """Bytes that the cache holds, room for tokens to come included."""

    @property
    def read_bytes(self) -> int:
        """Bytes of what attention reads for a token."""

    def __call__(self, tokens: int) -> float:
        """Generate greedily; ms per token."""


def decoder_behind(
    contender: Contender | Kvpress, model: PreTrainedModel, batch: int, length: int
) -> Decoder:
    """A contender's cache behind a prompt that was never read."""
    if isinstance(contender, Kvpress):
        return contender.filled(batch, length)
    return _Decoder(contender, model, batch, length)


def _round(decoder: Decoder, tokens: int) -> Callable[[], float]:
    return lambda: decoder(tokens)


class _Decoder:
    """Decodes in this process, through `model.generate`."""

    def __init__(
        self, contender: Contender, model: PreTrainedModel, batch: int, length: int
    ) -> None:
        self._contender, self._model = contender, model
        self._batch, self._seen = batch, length
        self._cache = filled(contender, model, batch=batch, tokens=length)

    @property
    def held_bytes(self) -> int:
        return cache_bytes(self._cache)

    @property
    def read_bytes(self) -> int:
        if isinstance(self._cache, CompressedCache):
            return self._cache.report().held_bytes
        return cache_bytes(self._cache)

    def __call__(self, tokens: int) -> float:
        shape = (self._batch, self._seen + 1)
        ids = torch.zeros(shape, dtype=torch.int64, device=self._model.device)
        self._seen += tokens

        def generate() -> None:
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self._cache,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )

        with self._contender.at_work(self._model):
            return spent_on(generate).wall_ms / tokens
