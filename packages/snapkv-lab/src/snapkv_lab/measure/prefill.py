"""The time and the memory that reading a prompt takes, with every cache in turn."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv.errors import OutOfMemoryError
from snapkv.validation import require_int
from snapkv_lab.measure.contenders import Contender
from snapkv_lab.measure.decode import time_in_turns
from snapkv_lab.measure.timing import pair_ratios, percentiles
from snapkv_lab.rows import Row


@dataclass(frozen=True, kw_only=True)
class PrefillBench:
    """Measures what reading a prompt costs: one warm-up, then `rounds` turns.

    Ratios are relative to the first contender.

    Attributes:
        model: the model that reads.
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

    def times(self) -> Iterator[Row]:
        """Yield one row per batch, length and cache: the time until the logits after the prompt."""
        for batch, length in self._cells():
            yield from self._timed(batch, length)

    def peaks(self) -> Iterator[Row]:
        """Yield one row per batch, length and cache: the bytes at the peak and after the prompt.

        If a cache does not fit, longer prompts are not tried with it.
        """
        full: set[tuple[str, int]] = set()
        self._load_weights()
        for batch, length in self._cells():
            for contender in self.contenders:
                row = self._row("memory", contender, batch, length)
                if (contender.label, batch) in full:
                    yield row | {"status": "out of memory"}
                    continue
                try:
                    peak = contender.peak(self.model, self._ids(batch, length))
                    yield row | {"status": "ok"} | peak
                except OutOfMemoryError:
                    full.add((contender.label, batch))
                    yield row | {"status": "out of memory"}

    @torch.no_grad()
    def _load_weights(self) -> None:
        """Use every weight once on a CPU, because mapped files are loaded into memory at
        first use.
        """
        if self.model.device.type != "cpu":
            return
        for parameter in self.model.parameters():
            parameter.reshape(-1).view(torch.uint8).sum()  # not every dtype can be summed
        with contextlib.suppress(OutOfMemoryError):  # the row of its cell reports it
            for contender in self.contenders:
                contender.reader(self.model, self._ids(1, 1))()

    def _cells(self) -> Iterator[tuple[int, int]]:
        for batch in self.batches:
            for length in sorted(self.lengths):
                yield batch, length

    def _timed(self, batch: int, length: int) -> Iterator[Row]:
        ids = self._ids(batch, length)

        def ready(contender: Contender) -> Callable[[], float]:
            read = contender.reader(self.model, ids)
            read()
            return read

        rows = {each.label: self._row("prefill", each, batch, length) for each in self.contenders}
        turns = time_in_turns(self.contenders, ready, rounds=self.rounds, warmup_rounds=0)
        for name, samples, base in turns:
            if samples:
                times = {
                    "ms": percentiles(samples, 2),
                    "ratio": percentiles(pair_ratios(samples, base), 4),
                }
                yield rows[name] | {"status": "ok"} | times
            else:
                yield rows[name] | {"status": "out of memory"}

    def _row(self, bench: str, contender: Contender, batch: int, length: int) -> Row:
        return {"bench": bench, "cache": contender.label, "batch": batch, "length": length}

    def _ids(self, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(vocabulary, (batch, length), generator=generator)
        return ids.to(self.model.device)
