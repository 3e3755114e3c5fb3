"""What a cache holds, in tokens and bytes, measured on its tensors."""

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.storage.uncompressed import AbsentLayer
from snapkv.validation import format_bytes


class CacheReport(dict[str, Any]):
    """A dictionary that prints as a table; ``json.dumps(report)`` works as it is.

    Keys:
        seen_tokens: tokens per row the cache has seen.
        dropped_tokens: tokens per row that `drop` has taken out of the compressed layers, the mean;
            other layers keep what they have of them.
        chosen_at: tokens per row seen when the layers last chose what to keep; 0 before a prompt
            has ended.
        kept_tokens: tokens per row, head and layer that the compressed layers store, the mean.
        later_tokens: those of them that came after the last compression, such as the answer's.
        held_bytes: bytes of the stored keys and values of all layers. Room for tokens to come does
            not count: for 64 when it is made, at the first token after the prompt.
        index_bytes: bytes of everything else: the kept positions, and what a method that
            evicts while generating notes (H2O's sums, the queries Scissorhands looks back at).
        host_bytes: bytes of the keys and values that `recall` has put off the device.
        full_bytes: bytes transformers' own cache would hold after the same tokens.
        growing_layers: how many layers grow with the context; these are compressed.
        growing_share: what their keys and values are of `full_bytes`, from 0 to 1; the rest is
            windows and states, which stay as they are. 1 while the cache is empty.
        growing_held_share: how much of their bytes in the full cache they hold, which is what a
            budget of "12%" is a share of. 1 while the cache is empty.
        lost_votes: the part of the window's votes on the prefix that fell on what was dropped, mean
            over rows, heads and layers; 0 where nothing was dropped, None where it is not known:
            methods without votes, and what was dropped in more than one step.
        lost_vote_peak: the highest vote that a dropped position had, or was lifted to by one before
            it, as a share of the window's attention, mean over rows, heads and layers; 0 and None
            as above.
        bits: of a number that is kept of a prompt, such as "16", or "8/4" of keys and values, each
            with how many layers it holds, most first; none before the first token.
        steps: how `generate` decoded where it was to replay a recorded step: "one graph", or
            "eager: " and what cannot be recorded; None elsewhere.
        layers: one dictionary per layer that the model has, with `layer`, `kind`, `seen_tokens`,
            `kept_tokens`, `held_bytes` and `full_bytes`; compressed ones with `lost_votes`, too.
            `kind` is "compressed", or the name of transformers' own layer where the layer is not
            full attention and stays as it is.
    """

    @classmethod
    def of(cls, policy: str, layers: Sequence[Any], steps: str | None = None) -> "CacheReport":
        """Measure the layers of a cache whose method has that name."""
        rows = [
            _layer_report(index, layer)
            for index, layer in enumerate(layers)
            if not isinstance(layer, AbsentLayer)
        ]
        compressed = [layer for layer in layers if isinstance(layer, CompressedLayer)]
        mean = sum(layer.store.mean_tokens for layer in compressed) / len(compressed)
        full_bytes = sum(row["full_bytes"] for row in rows)
        grown, held = sum(map(_full_bytes, compressed)), sum(each.held_bytes for each in compressed)
        return cls(
            policy=policy,
            seen_tokens=compressed[0].seen_tokens,
            dropped_tokens=_whole_number(compressed[0].slots.mean_removed),
            chosen_at=compressed[0].slots.chosen_at,
            kept_tokens=_whole_number(mean),
            later_tokens=_later_tokens(compressed[0]),
            held_bytes=sum(row["held_bytes"] for row in rows),
            index_bytes=sum(layer.index_bytes for layer in compressed),
            host_bytes=sum(layer.offloaded.held_bytes for layer in compressed),
            full_bytes=full_bytes,
            growing_layers=len(compressed),
            growing_share=grown / full_bytes if full_bytes else 1.0,
            growing_held_share=held / grown if grown else 1.0,
            lost_votes=_mean([row["lost_votes"] for row in rows if "lost_votes" in row]),
            bits=_bits(compressed),
            lost_vote_peak=_mean([_lost(layer, "lost_peak") for layer in compressed]),
            steps=steps,
            layers=rows,
        )

    @property
    def seen_tokens(self) -> int:
        return int(self["seen_tokens"])

    @property
    def kept_tokens(self) -> float:
        return float(self["kept_tokens"])

    @property
    def held_bytes(self) -> int:
        return int(self["held_bytes"])

    @property
    def host_bytes(self) -> int:
        return int(self["host_bytes"])

    @property
    def full_bytes(self) -> int:
        return int(self["full_bytes"])

    @property
    def chosen_tokens(self) -> float:
        """What is kept of the tokens that were chosen from; the answer's do not count."""
        return self.kept_tokens - int(self["later_tokens"])

    @property
    def summary(self) -> str:
        """Tokens seen and kept, and bytes, in words."""
        share = self.held_bytes / self.full_bytes if self.full_bytes else 1.0
        later = self["later_tokens"]
        behind = f" of {self.seen_tokens - later:,} and {later:,} after" if later else ""
        return (
            f"{self.seen_tokens:,} tokens seen, {self.chosen_tokens:,.0f} kept{behind}: "
            f"{format_bytes(self.held_bytes)} of {format_bytes(self.full_bytes)} ({share:.1%})"
        )

    def _repr_html_(self) -> str:
        """Return the report as a table for a notebook, with a bar for the tokens that are kept."""
        heading = "<tr><th>layers<th>kind<th>tokens kept<th><th>bytes<th>of full</tr>"
        rows = [
            f"<tr><td>{first if first == last else f'{first}-{last}'}<td>{html.escape(row['kind'])}"
            f"<td>{row['kept_tokens']:,.0f} of {row['seen_tokens']:,}"
            f"<td>{_bar(row['kept_tokens'], row['seen_tokens'])}"
            f"<td>{format_bytes(row['held_bytes'])}<td>{format_bytes(row['full_bytes'])}</tr>"
            for first, last, row in _runs(self["layers"])
        ]
        return f"<p>{html.escape(self.summary)}</p><table>{heading}{''.join(rows)}</table>"

    def __str__(self) -> str:
        lines = [("layer", "kind", "seen", "kept", "held", "full")]
        for first, last, row in _runs(self["layers"]):
            layers = str(first) if first == last else f"{first}-{last}"
            later = self["later_tokens"] if row["kind"] == "compressed" else 0
            tokens = [f"{row['seen_tokens']:,}", f"{row['kept_tokens'] - later:,}"]
            sizes = [format_bytes(row[name]) for name in ("held_bytes", "full_bytes")]
            lines.append((layers, row["kind"], *tokens, *sizes))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(
                cell.ljust(width) if place == 1 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        title = self.summary
        if self["bits"]:
            title += f", {bits_text(self['bits'])}"
        if (grow := self["growing_share"]) < 1:
            all_of_them = f"{self['growing_layers']} of {len(self['layers'])} layers"
            title += (
                f"; {all_of_them} grow with the context and hold {self['growing_held_share']:.1%} "
                f"of theirs, which is {grow:.1%} of the full cache"
            )
        steps = [f"decoding steps: {self['steps']}"] if self.get("steps") else []
        return "\n".join([title, *table, *steps])


def _bar(part: float, whole: float) -> str:
    """Draw which share of `whole` the `part` is, 100 pixels wide, as HTML."""
    percent = 100 * part / whole if whole else 0
    outer = "display:inline-block;width:100px;background:#ddd"
    inner = f"width:{percent:.0f}%;height:0.7em;background:#27c"
    return f'<span style="{outer}"><div style="{inner}"></div></span>'


def bits_text(layers: Mapping[str, int]) -> str:
    """What `CacheReport` says of bits, in words: in 4 bits (28 of 30 layers, else 8/4 or 8)."""
    most, *others = layers
    if not others:
        return f"in {most} bits"
    where = f"{layers[most]} of {sum(layers.values())} layers"
    return f"in {most} bits ({where}, else {' or '.join(others)})"


def _later_tokens(layer: CompressedLayer) -> int:
    """How many of its stored tokens came after the last compression."""
    slots = layer.slots
    if not slots.chosen_at:
        return 0
    if slots.kept is None:
        return layer.seen_tokens - slots.chosen_at
    return layer.store.slots - slots.chosen_slots


def _layer_report(layer_idx: int, layer: Any) -> dict[str, Any]:
    """One row of `CacheReport.layers`."""
    if isinstance(layer, CompressedLayer):
        return {
            "layer": layer_idx,
            "kind": "compressed",
            "seen_tokens": layer.seen_tokens,
            "kept_tokens": _whole_number(layer.store.mean_tokens),
            "held_bytes": layer.held_bytes + _bytes(layer.other_states),
            "full_bytes": _full_bytes(layer) + _bytes(layer.other_states),
            "lost_votes": _lost(layer, "lost_mass"),
        }
    held = tensor_bytes(layer)
    stored = getattr(layer, "keys", None)
    return {
        "layer": layer_idx,
        "kind": type(layer).__name__,
        "seen_tokens": layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0,
        "kept_tokens": 0 if stored is None or stored.ndim < 4 else stored.shape[-2],
        "held_bytes": held,
        "full_bytes": held,
    }


def _bits(layers: Sequence[CompressedLayer]) -> dict[str, int]:
    held = Counter(layer.store.bits for layer in layers if layer.is_initialized)
    return dict(held.most_common())


def _lost(layer: CompressedLayer, note: str) -> float | None:
    """The mean of one of its notes of lost votes; 0 where nothing was dropped."""
    noted = getattr(layer.state, note)
    if noted is None:
        return 0.0 if layer.slots.is_whole else None
    return round(float(noted.mean()), 6)


def _mean(values: Sequence[float | None]) -> float | None:
    """None where any of them is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _full_bytes(layer: CompressedLayer) -> int:
    """Bytes of every seen token's key and value, stored once per KV head."""
    keys, values = layer.keys, layer.values
    if keys is None:
        return 0
    per_token = keys.element_size() * (keys.shape[-1] + values.shape[-1])
    return int(keys.shape[0] * layer.store.num_kv_heads * layer.seen_tokens * per_token)


def _whole_number(tokens: float) -> float:
    return int(tokens) if tokens == int(tokens) else tokens


def token_bytes(layer: Any) -> int:
    """Bytes that one of transformers' own cache layers holds of its tokens."""
    return sum(_bytes(getattr(layer, name, None)) for name in ("keys", "values"))


def tensor_bytes(layer: Any) -> int:
    """Bytes of what one of transformers' own cache layers holds."""
    states = ("conv_states", "recurrent_states")
    return token_bytes(layer) + sum(_bytes(getattr(layer, name, None)) for name in states)


def _bytes(held: Any) -> int:
    """Bytes of a tensor, or of all tensors of a dictionary or list; of None, none."""
    if isinstance(held, Tensor):
        return held.nbytes
    if isinstance(held, dict):
        held = list(held.values())
    return sum(_bytes(part) for part in held) if isinstance(held, list | tuple) else 0


def _runs(layers: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Neighbouring layers that hold the same, as (first, last, values of one)."""
    runs: list[tuple[int, int, dict[str, Any]]] = []
    for row in layers:
        own = {"layer": None, "lost_votes": None}  # which the table does not show
        if runs and runs[-1][2] | own == row | own:
            runs[-1] = (runs[-1][0], row["layer"], runs[-1][2])
        else:
            runs.append((row["layer"], row["layer"], row))
    return runs
