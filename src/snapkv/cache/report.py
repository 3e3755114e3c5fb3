"""What a cache holds, in tokens and bytes, measured on its tensors."""

from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor


class CacheReport(dict[str, Any]):
    """A dictionary that prints as a table; ``json.dumps(report)`` works as it is.

    Keys:
        seen_tokens: tokens per row the cache has seen.
        kept_tokens: tokens per row, head and layer that the compressed layers store, the mean.
        held_bytes: bytes of the stored keys and values of all layers.
        index_bytes: bytes of what is held beside them: the kept positions, and what a method that
            evicts while generating notes (H2O's sums, the queries Scissorhands looks back at).
        full_bytes: bytes transformers' own cache would hold after the same tokens.
        layers: one dictionary per layer with `layer`, `kind`, `seen_tokens`, `kept_tokens`,
            `held_bytes` and `full_bytes`. `kind` is "compressed", or the name of transformers'
            own layer where the layer is not full attention and stays as it is.
    """

    @property
    def seen_tokens(self) -> int:
        """Tokens per row the cache has seen."""
        return int(self["seen_tokens"])

    @property
    def kept_tokens(self) -> float:
        """Tokens per row, head and compressed layer that are stored, the mean."""
        return float(self["kept_tokens"])

    @property
    def held_bytes(self) -> int:
        """Bytes of the stored keys and values."""
        return int(self["held_bytes"])

    @property
    def full_bytes(self) -> int:
        """Bytes transformers' own cache would hold."""
        return int(self["full_bytes"])

    def __str__(self) -> str:
        table = Table(title=_title(self))
        for column in ("layer", "kind", "seen", "kept", "held", "full"):
            table.add_column(column, justify="left" if column == "kind" else "right")
        for first, last, row in _runs(self["layers"]):
            table.add_row(
                str(first) if first == last else f"{first}-{last}",
                row["kind"],
                f"{row['seen_tokens']:,}",
                f"{row['kept_tokens']:,}",
                format_bytes(row["held_bytes"]),
                format_bytes(row["full_bytes"]),
            )
        output = StringIO()
        Console(file=output, width=100).print(table)
        return output.getvalue().rstrip()


def _title(report: CacheReport) -> str:
    share = report.held_bytes / report.full_bytes if report.full_bytes else 1.0
    return (
        f"{report.seen_tokens:,} tokens seen, {report.kept_tokens:,.0f} kept: "
        f"{format_bytes(report.held_bytes)} of {format_bytes(report.full_bytes)} ({share:.1%})"
    )


def _runs(layers: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Neighbouring layers that hold the same, as (first, last, values of one)."""
    runs: list[tuple[int, int, dict[str, Any]]] = []
    for row in layers:
        if runs and {**runs[-1][2], "layer": None} == {**row, "layer": None}:
            runs[-1] = (runs[-1][0], row["layer"], runs[-1][2])
        else:
            runs.append((row["layer"], row["layer"], row))
    return runs


_HELD_BY_LAYERS = ("keys", "values", "conv_states", "recurrent_states")


def tensor_bytes(layer: Any) -> int:
    """Bytes of what one of transformers' own cache layers holds."""
    return sum(_bytes(getattr(layer, name, None)) for name in _HELD_BY_LAYERS)


def _bytes(held: Any) -> int:
    """Bytes of a tensor, or of all tensors of a dictionary or list; of None, none."""
    if isinstance(held, Tensor):
        return held.numel() * held.element_size()
    if isinstance(held, dict):
        held = list(held.values())
    return sum(_bytes(part) for part in held) if isinstance(held, list | tuple) else 0


def format_bytes(count: float) -> str:
    """Bytes with a binary unit, such as "22.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
