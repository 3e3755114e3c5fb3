"""How many requests fit into the same memory, and how fast they decode together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from snapkv.errors import OutOfMemoryError
from snapkv.plan import out_of_memory_explained, weights_bytes
from snapkv_lab.measure.contenders import Contender
from snapkv_lab.measure.decode import DecodeBench

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ThroughputBench:
    """Tokens per second at the largest batch whose caches fit into the same memory."""

    model: PreTrainedModel
    contenders: Sequence[Contender]
    lengths: Sequence[int]
    memory_bytes: int
    most_requests: int = 256
    tokens: int = 16
    rounds: int = 3

    def rows(self) -> Iterator[Row]:
        """One row per length and cache."""
        for length in self.lengths:
            for contender in self.contenders:
                yield self._row(contender, length)

    def _row(self, contender: Contender, length: int) -> Row:
        named = {
            "bench": "throughput",
            "cache": contender.label,
            "length": length,
            "memory_bytes": self.memory_bytes,
        }
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
        limit = "most_requests" if requests == self.most_requests else "memory"
        return row | named | {"limited_by": limit}

    def _requests(self, contender: Contender, length: int) -> int:
        """How many requests' caches fit beside the weights."""
        try:
            with out_of_memory_explained(lambda: contender.label):
                one = contender.behind(self.model, 1, length).held_bytes
        except OutOfMemoryError:
            return 0
        room = self.memory_bytes - weights_bytes(self.model)
        return max(0, min(room // one, self.most_requests))
