"""Time per generated token after long prompts, and how many requests fit into the same memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from snapkv.errors import InvalidArgumentError, OutOfMemoryError
from snapkv.plan import out_of_memory_explained, weights_bytes
from snapkv.validation import require_int
from snapkv_lab.measure.contenders import ROOM_TOKENS, Contender, Decoder
from snapkv_lab.measure.timing import alternate, ratios, spent_on, spread
from snapkv_lab.rows import Row

_COPIED_BYTES = {"cuda": 2**31, "cpu": 2**28}
_COPIES = 10
MOST_REQUESTS = 256


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes, the best of several."""
    size = _COPIED_BYTES.get(device.type, 2**28)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [spent_on(lambda: target.copy_(source)).wall_ms for _ in range(_COPIES)]
    return 2 * size / (min(times) / 1000)


def least_ms_per_token(model: PreTrainedModel, cache_bytes: int, bytes_per_second: float) -> float:
    """The time to read every weight and that much of a cache once.

    Of the embedding only a row is read, unless the output projection shares its matrix.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding.weight is not head.weight:
        weights -= embedding.weight.nbytes
    return float(1000 * (weights + cache_bytes) / bytes_per_second)


def raced(
    attempts: Mapping[str, Callable[[], Callable[[], float]]], *, rounds: int, warmup_rounds: int
) -> Iterator[tuple[str, list[float], list[float]]]:
    """By name the times of what each attempt makes, in turns, and those of the first that fits.

    Without times are those that do not fit; they come first.
    """
    contenders = {}
    for name, attempt in attempts.items():
        try:
            with out_of_memory_explained(lambda: "full"):
                contenders[name] = attempt()
        except OutOfMemoryError:
            yield name, [], []
    runs = alternate(contenders, rounds=rounds, warmup_rounds=warmup_rounds) if contenders else {}
    for name, samples in runs.items():
        yield name, samples, next(iter(runs.values()))


@dataclass(frozen=True, kw_only=True)
class DecodeBench:
    """How long a token takes after a long prompt.

    Ratios are against the first contender. One round more than `rounds` warms up. `lengths` are
    prompt tokens, `batches` rows, `tokens` are generated in every round; `bytes_per_second` is what
    the device copies, for the share of that bandwidth.
    """

    model: PreTrainedModel
    contenders: Sequence[Contender]
    lengths: Sequence[int]
    batches: Sequence[int] = (1,)
    tokens: int = 16
    rounds: int = 5
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
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

        def attempt(contender: Contender) -> Callable[[], float]:
            decoder = contender.decoder(self.model, batch, length)
            decoder(1)
            decoders[contender.label] = decoder
            return partial(decoder, self.tokens)

        attempts = {each.label: partial(attempt, each) for each in self.contenders}
        for name, samples, base in raced(attempts, rounds=self.rounds, warmup_rounds=1):
            row = {"bench": "decode", "cache": name, "batch": batch, "length": length}
            if not samples:
                yield row | {"status": "out of memory"}
                continue
            held = {"status": "ok", "filled": True, "held_bytes": decoders[name].held_bytes}
            yield row | held | self._times(samples, base, batch, decoders[name])

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


@dataclass(frozen=True, kw_only=True)
class ThroughputBench:
    """Tokens per second at the largest batch whose caches fit with the weights.

    `memory_bytes` are for both together; a batch is never larger than `MOST_REQUESTS`.
    """

    model: PreTrainedModel
    contenders: Sequence[Contender]
    lengths: Sequence[int]
    memory_bytes: int
    tokens: int = 16
    rounds: int = 3

    def rows(self) -> Iterator[Row]:
        """One row per length and cache."""
        for length in self.lengths:
            for contender in self.contenders:
                yield self._row(contender, length)

    def _row(self, contender: Contender, length: int) -> Row:
        named: Row = {"bench": "throughput", "cache": contender.label, "length": length}
        named["memory_bytes"] = self.memory_bytes
        requests = self._requests(contender, length)
        if requests < 1:
            return named | {"status": "out of memory", "batch": 0}
        bench = DecodeBench(
            model=self.model,
            contenders=[contender],
            lengths=[length],
            batches=[requests],
            tokens=self.tokens,
            rounds=self.rounds,
        )
        (row,) = bench.rows()
        limit = "most_requests" if requests == MOST_REQUESTS else "memory"
        return row | named | {"limited_by": limit}

    def _requests(self, contender: Contender, length: int) -> int:
        """How many requests' caches fit with the weights."""
        try:
            with out_of_memory_explained(lambda: contender.label):
                one = contender.decoder(self.model, 1, length).held_bytes
        except OutOfMemoryError:
            return 0
        room = self.memory_bytes - weights_bytes(self.model)
        return max(0, min(room // one, MOST_REQUESTS))
