"""Records of tensors that have a row for every row of the batch, and declare their axes.

What happens to rows, slots and tokens happens to every field, by its declaration: nobody keeps a
list of names.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from torch import Tensor


def per_row(
    *,
    slot_axis: int | None = None,
    token_axis: int | None = None,
    measured: bool = False,
) -> Any:
    """A field that is None, or a tensor whose first axis has the batch's rows.

    Args:
        slot_axis: axis with one place for every stored slot, or for the first of them.
        token_axis: axis with one place for every one of the last tokens that were seen.
        measured: whether it is only measured for a report, and no part of what is held.
    """
    axes = {"slot_axis": slot_axis, "token_axis": token_axis, "measured": measured}
    return field(default=None, metadata={"per_row": axes})


@dataclass(frozen=True, kw_only=True)
class RowRecord:
    """An immutable record; fields made by `per_row` follow the rows, the others stay."""

    def select_rows(self, rows: Tensor) -> Self:
        """The rows in another order."""
        return self._each(lambda tensor, _: tensor.index_select(0, rows.to(tensor.device)))

    def without_first(self, slots: int) -> Self:
        """Without the first slots, of which nobody has any."""
        return self._each(lambda tensor, axes: _from(tensor, axes["slot_axis"], slots))

    def cropped(self, tokens: int, slots: int) -> Self:
        """Without the last tokens; so many slots are left."""

        def crop(tensor: Tensor, axes: dict[str, Any]) -> Tensor:
            if axes["slot_axis"] is not None:
                tensor = _up_to(tensor, axes["slot_axis"], slots)
            if axes["token_axis"] is not None:
                left = tensor.shape[axes["token_axis"]] - tokens
                tensor = _up_to(tensor, axes["token_axis"], left)
            return tensor

        return self._each(crop)

    @property
    def nbytes(self) -> int:
        """Bytes of all fields but those that are measured, counted on the tensors."""
        return sum(value.nbytes for value, axes in self._found().values() if not axes["measured"])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by the names of their fields."""
        return {name: value for name, (value, _) in self._found().items()}

    def state(self) -> dict[str, Any]:
        """What a file has to say to make it again, by the fields' names."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Self:
        """The record whose `state` that is."""
        if missing := {part.name for part in fields(cls)} - state.keys():
            raise ValueError(f"without {', '.join(sorted(missing))}")
        return cls(**state)

    def _each(self, change: Callable[[Tensor, dict[str, Any]], Tensor]) -> Self:
        changed = {name: change(value, axes) for name, (value, axes) in self._found().items()}
        return replace(self, **changed) if changed else self

    def _found(self) -> dict[str, tuple[Tensor, dict[str, Any]]]:
        """The fields that follow the rows and are not None, with what they declare."""
        return {
            part.name: (value, part.metadata["per_row"])
            for part in fields(self)
            if "per_row" in part.metadata and (value := getattr(self, part.name)) is not None
        }


def _from(tensor: Tensor, axis: int | None, start: int) -> Tensor:
    return tensor if axis is None else tensor.narrow(axis, start, tensor.shape[axis] - start)


def _up_to(tensor: Tensor, axis: int, end: int) -> Tensor:
    length = max(0, min(end, tensor.shape[axis]))
    return tensor.narrow(axis, 0, length)
