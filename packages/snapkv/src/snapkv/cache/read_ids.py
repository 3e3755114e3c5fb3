"""Which token ids a cache has read, so that it goes on with no other text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from snapkv.errors import CacheMismatchError

_NAME = "read_ids."


@dataclass(frozen=True)
class ReadIds:
    """Parts of the text, in their order: the column of the first token, and (B, N) ids.

    What lies between was told by nobody: embeddings, and ids of plain ``model(...)`` calls.
    """

    parts: tuple[tuple[int, Tensor], ...] = ()

    def up_to(self, columns: int) -> Self:
        """Without what comes after so many columns."""
        cut = ((start, ids[:, : columns - start]) for start, ids in self.parts if start < columns)
        return type(self)(tuple(cut))

    def followed_by(self, start: int, ids: Tensor) -> Self:
        """With ids from that column on, instead of what stood there."""
        return type(self)((*self.up_to(start).parts, (start, ids)))

    def from_the_first(self) -> Tensor:
        """(B, N) ids of the first N columns, up to the first that nobody told."""
        known: list[Tensor] = []
        for start, ids in self.parts:
            if start != sum(part.shape[1] for part in known):
                break
            known.append(ids.cpu())
        return torch.cat(known, dim=1) if known else torch.empty(1, 0, dtype=torch.int64)

    def select_rows(self, rows: Tensor) -> Self:
        """The rows in another order; some may go, some come twice."""
        return type(self)(tuple((start, ids[rows.to(ids.device)]) for start, ids in self.parts))

    def on_host(self) -> Self:
        return type(self)(tuple((start, ids.int().cpu()) for start, ids in self.parts))

    def state(self) -> dict[str, Tensor]:
        """What a file holds of it."""
        return {f"{_NAME}{start}": ids.int() for start, ids in self.parts}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], rows: int) -> Self:
        """Out of the tensors of a file, which may hold none."""
        found = {name: ids for name, ids in tensors.items() if name.startswith(_NAME)}
        if any(ids.dtype != torch.int32 or ids.shape[:-1] != (rows,) for ids in found.values()):
            raise ValueError(f"ids of other than {rows} rows")
        parts = ((int(name.removeprefix(_NAME)), ids) for name, ids in found.items())
        return cls(tuple(sorted(parts, key=lambda part: part[0])))

    def require(self, start: int, ids: Tensor, seen: int, visible: Tensor | None) -> None:
        """Refuse (B, N) ids from that column on that are not those of the first `seen` columns.

        Of a batch that beams will multiply, each row is compared with all of its own. What a (B, T)
        mask hides is compared with nothing.
        """
        for first, known in self.parts:
            begin = max(first, start)
            end = min(first + known.shape[1], start + ids.shape[1], seen)
            if begin >= end or len(known) % len(ids):
                continue  # another number of rows is refused by itself
            read = known[:, begin - first : end - first].to(ids.device)
            given = _as_rows(ids[:, begin - start : end - start], len(known))
            differs = read != given
            if visible is not None and visible.shape == (len(ids), start + ids.shape[1]):
                differs &= _as_rows(visible[:, begin:end].bool().to(ids.device), len(known))
            if bool(differs.any()):
                place = int(differs.any(dim=0).nonzero()[0])
                row = int(differs[:, place].nonzero()[0])
                raise CacheMismatchError(
                    f"input_ids: expected the {seen:,} tokens that the cache has read, and what is "
                    f"new after them, got {int(given[row, place])} instead of "
                    f"{int(read[row, place])} at token {begin + place:,} of row {row}; pass the "
                    "whole conversation as it was read, or call cache.reset() before another one"
                )


def _as_rows(states: Tensor, rows: int) -> Tensor:
    """(rows, N): as many of each row, one after the other."""
    return states.repeat_interleave(rows // len(states), dim=0)
