"""The time and the memory that reading a prompt takes, with every cache in turn."""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from snapkv.errors import OutOfMemoryError
from snapkv_lab.measure.bench import Bench, Timed
from snapkv_lab.measure.contenders import Contender
from snapkv_lab.measure.timing import percentiles
from snapkv_lab.rows import Row


@dataclass(frozen=True, kw_only=True)
class PrefillBench(Bench):
    """A benchmark of the time and the memory that are needed to read a prompt.

    One warm-up is added to `rounds`.
    """

    def times(self) -> Iterator[Row]:
        """Yield a row with the time to read the prompt, for each batch size, length and cache.
        Lengths are in ascending order.

        A row has "ms", the percentiles of the milliseconds, and "ratio", those relative to the
        first cache. A cache that does not fit has a row with the status "out of memory".
        """
        for batch, length in itertools.product(self.batches, sorted(self.lengths)):
            yield from self._race(
                partial(self._row, "prefill", batch=batch, length=length),
                partial(self._reader, self._ids(batch, length)),
                lambda _, samples, ratio: {"ms": percentiles(samples, 2), "ratio": ratio},
                warmup_rounds=0,
            )

    def peaks(self) -> Iterator[Row]:
        """Yield a row with "peak_growth_bytes" and "held_bytes", for each batch size, length and
        cache.

        A cache that does not fit has a row with the status "out of memory". Longer prompts of the
        same batch size are then not tried with it, and get the same status.
        """
        full: set[tuple[str, int]] = set()
        self._load_weights()
        for batch, length in itertools.product(self.batches, sorted(self.lengths)):
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
        """Use every weight once, because mapped files are loaded into memory at first use, which
        would count as growth. Nothing happens if the model is not on a CPU.
        """
        if self.model.device.type != "cpu":
            return
        for parameter in self.model.parameters():
            parameter.reshape(-1).view(torch.uint8).sum()  # not every dtype can be summed
        with contextlib.suppress(OutOfMemoryError):  # the row of its cell reports it
            for contender in self.contenders:
                contender.reader(self.model, self._ids(1, 1))()

    def _reader(self, ids: Tensor, contender: Contender) -> Timed:
        read = contender.reader(self.model, ids)
        read()  # warms up
        return read

    def _ids(self, batch: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        ids = torch.randint(vocabulary, (batch, length), generator=generator)
        return ids.to(self.model.device)
