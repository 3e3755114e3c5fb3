"""The time per generated token after long prompts, and how many requests fit into equal memory."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from snapkv.errors import OutOfMemoryError, wrong
from snapkv.hf.device_memory import out_of_memory_explained
from snapkv.validation import require_int
from snapkv_app.plan.advice import weights_bytes
from snapkv_lab.measure.bench import Bench, Timed
from snapkv_lab.measure.contenders import ROOM_TOKENS, Contender, Decoder
from snapkv_lab.measure.timing import measure_time, percentiles
from snapkv_lab.rows import Row

_COPIED_BYTES = {"cuda": 2**31, "cpu": 2**28}
_COPIES = 10
MOST_REQUESTS = 256


def copy_bandwidth(device: torch.device) -> float:
    """Return how many bytes per second the device reads and writes, both counted together.

    It is the best of several large copies, which take 4 GiB on a GPU and 512 MiB elsewhere.
    """
    size = _COPIED_BYTES.get(device.type, 2**28)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = [measure_time(lambda: target.copy_(source)).wall_ms for _ in range(_COPIES)]
    return 2 * size / (min(times) / 1000)


def least_ms_per_token(model: PreTrainedModel, cache_bytes: int, bytes_per_second: float) -> float:
    """Return how many milliseconds a token takes at least, because all weights and `cache_bytes` of
    the cache must be read once for it.

    Only one row of the embedding is read, unless the output projection shares its matrix.

    Args:
        model: the model.
        cache_bytes: how many bytes of the cache are read.
        bytes_per_second: how fast the device reads.
    """
    weights = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding.weight is not head.weight:
        weights -= embedding.weight.nbytes
    return float(1000 * (weights + cache_bytes) / bytes_per_second)


@dataclass(frozen=True, kw_only=True)
class DecodeBench(Bench):
    """A benchmark of the time that is needed to generate a token after a long prompt.

    One warm-up round is added to `rounds`.

    Attributes:
        tokens: how many tokens are generated in every round.
        bytes_per_second: how fast the device copies; rows then have the share of this bandwidth.
    """

    tokens: int = 16
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidArgumentError: a number is out of range, or the rounds need more than
                `ROOM_TOKENS` tokens.
            InvalidTypeError: a number is not an integer.
        """
        super().__post_init__()
        require_int("tokens", self.tokens, minimum=1)
        if self.tokens * (self.rounds + 1) > ROOM_TOKENS:
            raise wrong(
                "tokens and rounds",
                f"expected at most {ROOM_TOKENS} tokens in all rounds, warm-up included, but got "
                f"{self.tokens * (self.rounds + 1)}",
                "Lower one of them",
            )

    def rows(self) -> Iterator[Row]:
        """Yield one row per batch, length and cache. Its status says if the cache does not fit."""
        for batch, length in itertools.product(self.batches, self.lengths):
            yield from self._cell(batch, length)

    def _cell(self, batch: int, length: int) -> Iterator[Row]:
        """Yield a row for each contender at one batch size and length. Contenders that do not fit
        come first.

        Returns:
            Rows with the keys "bench", "cache", "batch", "length" and "status". Those with the
            status "ok" also have "filled", "held_bytes", "ms_per_token", "ratio" and
            "tokens_per_second"; and with a known bandwidth, "least_ms" and "of_ceiling", the share
            of it that is used.
        """
        decoders: dict[str, Decoder] = {}

        def ready(contender: Contender) -> Timed:
            decoder = decoders[contender.label] = Decoder(contender, self.model, batch, length)
            decoder(1)
            return partial(decoder, self.tokens)

        def finish(name: str, samples: list[float], ratio: Row) -> Row:
            ms, decoder = percentiles(samples, 3), decoders[name]
            row: Row = {"filled": True, "held_bytes": decoder.held_bytes}
            row |= {"ms_per_token": ms, "ratio": ratio}
            row["tokens_per_second"] = round(1000 * batch / ms["p50"], 2)
            if self.bytes_per_second is not None:
                least = least_ms_per_token(self.model, decoder.read_bytes, self.bytes_per_second)
                row |= {"least_ms": round(least, 3), "of_ceiling": round(least / ms["p50"], 4)}
            return row

        fields_of = partial(self._row, "decode", batch=batch, length=length)
        yield from self._race(fields_of, ready, finish, warmup_rounds=1)


def throughput(
    model: PreTrainedModel,
    contenders: Iterable[Contender],
    lengths: Iterable[int],
    *,
    memory_bytes: int,
    tokens: int,
    rounds: int,
) -> Iterator[Row]:
    """Yield the tokens per second at the largest batch that fits, per length and cache.

    Args:
        model: the model that decodes.
        contenders: the caches to compare.
        lengths: prompt tokens.
        memory_bytes: what weights and caches may take together.
        tokens: how many tokens are generated in every round.
        rounds: how many rounds are measured.

    Yields:
        One row per length and cache. A batch is never larger than `MOST_REQUESTS`. If not even one
        row fits, the batch is 0 and the status is "out of memory".
    """
    free_bytes = memory_bytes - weights_bytes(model)
    for length, contender in itertools.product(lengths, contenders):
        fields: Row = {"bench": "throughput", "cache": contender.label, "length": length}
        fields["memory_bytes"] = memory_bytes
        requests = 0
        with contextlib.suppress(OutOfMemoryError), out_of_memory_explained(lambda: "one"):
            one = Decoder(contender, model, 1, length).held_bytes
            requests = min(free_bytes // one, MOST_REQUESTS)
        if requests < 1:
            yield fields | {"status": "out of memory", "batch": 0}
            continue
        limit = "most_requests" if requests == MOST_REQUESTS else "memory"
        shape: Row = {
            "lengths": [length],
            "batches": [requests],
            "tokens": tokens,
            "rounds": rounds,
        }
        for row in DecodeBench(model=model, contenders=[contender], **shape).rows():
            yield row | fields | {"limited_by": limit}
