"""The token ids that a cache has read, which show whether a later call continues the same text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from snapkv.errors import CacheMismatchError, wrong

_NAME = "read_ids."


@dataclass(frozen=True)
class ReadIds:
    """The known token ids of the text that a cache has read.

    Attributes:
        parts: the known parts of the text in ascending order, each as the column of its first token
            and (B, N) ids. The ids between the parts are not known: these tokens were read as
            embeddings or by plain ``model(...)`` calls.
    """

    parts: tuple[tuple[int, Tensor], ...] = ()

    def truncate(self, columns: int) -> Self:
        """Return the ids of the first `columns` columns."""
        cut = ((start, ids[:, : columns - start]) for start, ids in self.parts if start < columns)
        return type(self)(tuple(cut))

    def replace_from(self, start: int, ids: Tensor) -> Self:
        """Return the ids with `ids` in place of everything from the column `start` on.

        Args:
            start: the column of the first of the new ids.
            ids: (B, N) integers.
        """
        return type(self)((*self.truncate(start).parts, (start, ids)))

    def known_from_start(self) -> Tensor:
        """Return the ids of all columns before the first unknown one.

        Returns:
            (B, N) integers on the CPU; (1, 0) if the first column is unknown.
        """
        known: list[Tensor] = []
        for start, ids in self.parts:
            if start != sum(part.shape[1] for part in known):
                break
            known.append(ids.cpu())
        return torch.cat(known, dim=1) if known else torch.empty(1, 0, dtype=torch.int64)

    def select_rows(self, rows: Tensor) -> Self:
        """Return the ids with the batch rows in a new order.

        Args:
            rows: (new B,) integers, the old row for every new one.
        """
        return type(self)(tuple((start, ids[rows.to(ids.device)]) for start, ids in self.parts))

    def on_host(self) -> Self:
        """Return a copy of the ids as int32 tensors on the CPU."""
        return type(self)(tuple((start, ids.int().cpu()) for start, ids in self.parts))

    def state(self) -> dict[str, Tensor]:
        """Return the int32 tensors that are saved in a file, by name."""
        return {f"{_NAME}{start}": ids.int() for start, ids in self.parts}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], rows: int) -> Self:
        """Restore the ids from the tensors of a file, or no ids if the file has none.

        Args:
            tensors: all tensors of the file, by name.
            rows: how many rows the batch has.

        Raises:
            ValueError: some ids have another type or another number of rows.
        """
        found = {name: ids for name, ids in tensors.items() if name.startswith(_NAME)}
        if any(ids.dtype != torch.int32 or ids.shape[:-1] != (rows,) for ids in found.values()):
            raise ValueError(f"expected token ids with {rows} rows")
        parts = ((int(name.removeprefix(_NAME)), ids) for name, ids in found.items())
        return cls(tuple(sorted(parts, key=lambda part: part[0])))

    def require(self, start: int, ids: Tensor, seen: int, visible: Tensor | None) -> None:
        """Raise if a text differs from the one that was read, where both are known.

        Args:
            start: the column of the first of the `ids`.
            ids: (B, N) integers, the text to continue. If the cache has several rows for each of
                them, as for beams, each row is compared with all of its own.
            seen: how many columns were read; later ones are not compared.
            visible: (B, start + N), the attention mask, or None. Hidden tokens are not compared.

        Raises:
            CacheMismatchError: a token differs.
        """
        for first, known in self.parts:
            begin = max(first, start)
            end = min(first + known.shape[1], start + ids.shape[1], seen)
            if begin >= end or len(known) % len(ids):
                continue  # a wrong number of rows is refused elsewhere
            read = known[:, begin - first : end - first].to(ids.device)
            given = _as_rows(ids[:, begin - start : end - start], len(known))
            differs = read != given
            if visible is not None and visible.shape == (len(ids), start + ids.shape[1]):
                differs &= _as_rows(visible[:, begin:end].bool().to(ids.device), len(known))
            if bool(differs.any()):
                place = int(differs.any(dim=0).nonzero()[0])
                row = int(differs[:, place].nonzero()[0])
                raise wrong(
                    "input_ids",
                    f"the text differs from the {seen:,} tokens that the cache has read, but got "
                    f"{int(given[row, place])} instead of {int(read[row, place])} at token "
                    f"{begin + place:,} of row {row}",
                    "Pass the whole conversation as it was read, or call cache.reset() before "
                    "another one",
                    CacheMismatchError,
                )


def _as_rows(states: Tensor, rows: int) -> Tensor:
    """Repeat each row of `states` until there are `rows` rows; copies of a row are consecutive.

    Args:
        states: (B, N), where B divides `rows`.
        rows: the number of rows of the result.

    Returns:
        (rows, N).
    """
    return states.repeat_interleave(rows // len(states), dim=0)
