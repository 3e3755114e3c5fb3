"""The base of benches: contenders take turns for every batch size and prompt length."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from snapkv.errors import OutOfMemoryError
from snapkv.hf.device_memory import out_of_memory_explained
from snapkv.validation import require_int
from snapkv_lab.measure.contenders import Contender
from snapkv_lab.measure.timing import pair_ratios, percentiles, run_alternating
from snapkv_lab.rows import Row

Timed = Callable[[], float]
"""Does a piece of work, and returns its milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The base class of benchmarks that compare caches for different batch sizes and lengths.

    Ratios are relative to the first contender.

    Attributes:
        model: the model that reads and decodes.
        contenders: the caches to compare.
        lengths: prompt tokens.
        batches: rows per batch.
        rounds: how many rounds are measured.
    """

    model: PreTrainedModel
    contenders: Sequence[Contender]
    lengths: Sequence[int]
    batches: Sequence[int] = (1,)
    rounds: int = 5

    def __post_init__(self) -> None:
        require_int("rounds", self.rounds, minimum=2)

    def _row(self, bench: str, contender: Contender, batch: int, length: int) -> Row:
        return {"bench": bench, "cache": contender.label, "batch": batch, "length": length}

    def _race(
        self,
        fields_of: Callable[[Contender], Row],
        ready: Callable[[Contender], Timed],
        finish: Callable[[str, list[float], Any], Row],
        *,
        warmup_rounds: int,
    ) -> Iterator[Row]:
        """Prepare every contender, let those that fit into memory take turns, and yield a row for
        each.

        The row of a contender that does not fit has the status "out of memory" and comes before the
        others, whose status is "ok". If memory runs out in a later round, the error ends the
        iteration.

        Args:
            fields_of: returns the fields that a contender's row begins with.
            ready: prepares a contender, and returns its work. Running out of memory here means that
                the contender does not fit.
            finish: returns the further fields of a row, from the contender's label, its times in
                milliseconds, and the percentiles of their ratios to the first contender that fits.
            warmup_rounds: how many rounds run before those that are measured.
        """
        work: dict[str, Timed] = {}
        for each in self.contenders:
            try:
                with out_of_memory_explained(lambda: "full"):
                    work[each.label] = ready(each)
            except OutOfMemoryError:
                yield fields_of(each) | {"status": "out of memory"}
        runs = run_alternating(work, rounds=self.rounds, warmup_rounds=warmup_rounds)
        first = next(iter(runs.values()), [])
        for each in self.contenders:
            if (samples := runs.get(each.label)) is not None:
                ratio = percentiles(pair_ratios(samples, first), 4)
                yield fields_of(each) | {"status": "ok"} | finish(each.label, samples, ratio)
