"""Records whose tensors have one row for every row of the batch.

Each field declares which of its axes has slots or tokens. So selecting rows, cropping and saving
work for every field, and no list of field names has to be kept up to date.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from torch import Tensor


def per_row(
    *,
    slot_axis: int | None = None,
    token_axis: int | None = None,
    is_counted: bool = True,
) -> Any:
    """Declare a field that is None or a tensor whose first axis has the rows of the batch.

    Args:
        slot_axis: the axis with one element for every stored slot, or for the first slots.
        token_axis: the axis with one element for each of the last tokens seen.
        is_counted: whether `nbytes` counts the field. Fields that are only measured for a report,
            or that count as keys and values, are not counted.
    """
    axes = {"slot_axis": slot_axis, "token_axis": token_axis, "is_counted": is_counted}
    return field(default=None, metadata={"per_row": axes})


@dataclass(frozen=True, kw_only=True)
class RowRecord:
    """An immutable record of tensors, whose fields made by `per_row` follow the batch rows."""

    def select_rows(self, rows: Tensor) -> Self:
        """Return the record with the batch rows in a new order.

        Args:
            rows: (new B,) integers, the old row for every new one.
        """
        return self._map_tensors(lambda tensor, _: tensor.index_select(0, rows.to(tensor.device)))

    def without_first(self, slots: int) -> Self:
        """Return the record without the first `slots` slots, which must be empty in every head."""
        return self._map_tensors(lambda tensor, axes: _drop_first(tensor, axes["slot_axis"], slots))

    def cropped(self, tokens: int, slots: int) -> Self:
        """Return a copy of the record without the last `tokens` tokens.

        Args:
            tokens: how many entries are cut off fields with one entry per token.
            slots: how many entries are left in fields with one entry per slot.
        """

        def crop(tensor: Tensor, axes: dict[str, Any]) -> Tensor:
            if axes["slot_axis"] is not None:
                tensor = _keep_first(tensor, axes["slot_axis"], slots)
            if axes["token_axis"] is not None:
                left = tensor.shape[axes["token_axis"]] - tokens
                tensor = _keep_first(tensor, axes["token_axis"], left)
            return tensor

        return self._map_tensors(crop)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, except those of fields with `is_counted=False`."""
        return sum(value.nbytes for value, axes in self._declared().values() if axes["is_counted"])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the fields that are not None, by the names of the fields."""
        return {name: value for name, (value, _) in self._declared().items()}

    def state(self) -> dict[str, Any]:
        """Return the value of every field by its name, from which `restored` makes the record."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Self:
        """Make a record from what `state` returned.

        Raises:
            ValueError: a field is missing.
        """
        if missing := {part.name for part in fields(cls)} - state.keys():
            raise ValueError(f"the fields {', '.join(sorted(missing))} are missing")
        return cls(**state)

    def _map_tensors(self, change: Callable[[Tensor, dict[str, Any]], Tensor]) -> Self:
        changed = {name: change(value, axes) for name, (value, axes) in self._declared().items()}
        return replace(self, **changed) if changed else self

    def _declared(self) -> dict[str, tuple[Tensor, dict[str, Any]]]:
        """Return every tensor and its declared axes, by the name of the field."""
        return {
            part.name: (value, part.metadata["per_row"])
            for part in fields(self)
            if "per_row" in part.metadata and (value := getattr(self, part.name)) is not None
        }


def _drop_first(tensor: Tensor, axis: int | None, count: int) -> Tensor:
    return tensor if axis is None else tensor.narrow(axis, count, tensor.shape[axis] - count)


def _keep_first(tensor: Tensor, axis: int, count: int) -> Tensor:
    length = max(0, min(count, tensor.shape[axis]))
    return tensor.narrow(axis, 0, length)
