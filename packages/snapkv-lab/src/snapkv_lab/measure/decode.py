"""Time per generated token behind prompts of several lengths, every cache in turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from snapkv.errors import InvalidArgumentError, OutOfMemoryError
from snapkv.plan import out_of_memory_explained
from snapkv.validation import require_int
from snapkv_lab.measure.bandwidth import least_ms_per_token
from snapkv_lab.measure.contenders import ROOM_TOKENS, Contender, Decoder
from snapkv_lab.measure.timing import alternate, ratios, spread

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """How long a token takes behind a long prompt."""

    model: PreTrainedModel
    contenders: Sequence[Contender]
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
                    decoder = contender.behind(self.model, batch, length)
                    decoder(1)
            except OutOfMemoryError:
                yield self._row(contender.label, batch, length) | {"status": "out of memory"}
            else:
                decoders[contender.label] = decoder
        runs = alternate(
            {name: partial(decoder, self.tokens) for name, decoder in decoders.items()},
            rounds=self.rounds,
            warmup_rounds=1,
        )
        for name, samples in runs.items():
            yield (
                self._row(name, batch, length)
                | {"status": "ok", "filled": True, "held_bytes": decoders[name].held_bytes}
                | self._times(samples, next(iter(runs.values())), batch, decoders[name])
            )

    def _row(self, name: str, batch: int, length: int) -> Row:
        return {"bench": "decode", "cache": name, "batch": batch, "length": length}

    def _times(self, samples: list[float], base: list[float], batch: int, decoder: Decoder) -> Row:
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
