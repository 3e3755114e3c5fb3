"""The report of how many tokens and bytes a cache holds, measured on its tensors."""

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
        policy: the name of the method.
        seen_tokens: how many tokens per row the cache has seen.
        dropped_tokens: how many tokens per row `drop` has removed from the compressed layers, on
            average. Other layers keep what they have of these tokens.
        chosen_at: how many tokens per row had been seen when the layers last chose what to keep; 0
            before the end of the first prompt.
        kept_tokens: how many tokens the compressed layers store per row, head and layer, as a mean.
        later_tokens: how many of the `kept_tokens` came after the last compression, such as those
            of the answer.
        held_bytes: bytes of the stored keys and values of all layers. Memory that is allocated for
            later tokens does not count. At the first token after the prompt, it is allocated for 64
            tokens.
        index_bytes: bytes of everything else: the kept positions, and what a method that evicts
            while generating remembers, such as the sums of H2O or the queries of Scissorhands.
        host_bytes: bytes of the keys and values that `recall` has offloaded.
        full_bytes: bytes that the cache of transformers would hold after the same tokens.
        growing_layers: how many layers grow with the context. These layers are compressed.
        growing_share: the share of `full_bytes` that belongs to the growing layers, from 0 to 1.
            The rest belongs to sliding windows and recurrent states, which are not compressed. 1
            while the cache is empty.
        growing_held_share: the share of the growing layers' bytes in the full cache that is stored
            now. A budget of "12%" is such a share. 1 while the cache is empty.
        lost_votes: the share of the observation window's votes on the prefix that went to evicted
            tokens, as a mean over rows, heads and layers. It is 0 if nothing was evicted, and None
            if it is not known: for methods without votes, and after several evictions.
        lost_vote_peak: the highest vote that an evicted position had, or was raised to by a
            position before it, as a share of the window's attention and as a mean over rows, heads
            and layers; 0 and None as for `lost_votes`.
        bits: how many layers store their keys and values in each number of bits, the most frequent
            number first. The bits are such as "16", or "8/4" for keys and values. It is empty
            before the first token.
        steps: how `generate` has decoded if it was to replay recorded steps: "one graph"; or, for
            example, "4 graphs" if passes of four lengths were recorded to verify drafts; or
            "eager: " followed by what cannot be recorded. None otherwise.
        layers: one dictionary for each layer of the model, with `layer`, `kind`, `seen_tokens`,
            `kept_tokens`, `held_bytes` and `full_bytes`, and for compressed layers `lost_votes`.
            `kind` is "compressed", or the class name of a transformers cache layer that is not
            compressed, because it does not use full attention.
    """

    @classmethod
    def of(cls, policy: str, layers: Sequence[Any], steps: str | None = None) -> "CacheReport":
        """Measure the layers of a cache.

        Args:
            policy: the name of the method.
            layers: all layers of the cache.
            steps: how `generate` has decoded, see the key `steps`.
        """
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
            dropped_tokens=_whole_number(compressed[0].slots.mean_dropped_tokens),
            chosen_at=compressed[0].slots.chosen_at,
            kept_tokens=_whole_number(mean),
            later_tokens=_later_tokens(compressed[0]),
            held_bytes=sum(row["held_bytes"] for row in rows),
            index_bytes=sum(map(_index_bytes, compressed)),
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
        """The number of tokens kept from the last prompt, without the tokens after it."""
        return self.kept_tokens - int(self["later_tokens"])

    @property
    def summary(self) -> str:
        """A line that says how many tokens were seen and kept, and how many bytes they take."""
        share = self.held_bytes / self.full_bytes if self.full_bytes else 1.0
        later = self["later_tokens"]
        after = f" of {self.seen_tokens - later:,} and {later:,} after" if later else ""
        return (
            f"{self.seen_tokens:,} tokens seen, {self.chosen_tokens:,.0f} kept{after}: "
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
            growing = f"{self['growing_layers']} of {len(self['layers'])} layers"
            title += (
                f"; {growing} grow with the context and hold {self['growing_held_share']:.1%} of "
                f"theirs, which is {grow:.1%} of the full cache"
            )
        steps = [f"decoding steps: {self['steps']}"] if self.get("steps") else []
        return "\n".join([title, *table, *steps])


def _bar(part: float, whole: float) -> str:
    """Return the HTML of a bar that is filled by the share of `part` in `whole`."""
    percent = 100 * part / whole if whole else 0
    outer = "display:inline-block;width:100px;background:#ddd"
    inner = f"width:{percent:.0f}%;height:0.7em;background:#27c"
    return f'<span style="{outer}"><div style="{inner}"></div></span>'


def bits_text(layers: Mapping[str, int]) -> str:
    """Describe in how many bits the layers of a cache store their keys and values.

    The result is a phrase such as "in 4 bits (28 of 30 layers, else 8/4 or 8)".

    Args:
        layers: how many layers use each number of bits, the most frequent number first.
    """
    most, *others = layers
    if not others:
        return f"in {most} bits"
    where = f"{layers[most]} of {sum(layers.values())} layers"
    return f"in {most} bits ({where}, else {' or '.join(others)})"


def _later_tokens(layer: CompressedLayer) -> int:
    """Count the stored tokens of a layer that came after the last compression."""
    slots = layer.slots
    if not slots.chosen_at:
        return 0
    if slots.kept is None:
        return layer.seen_tokens - slots.chosen_at
    return layer.store.slots - slots.chosen_slots


def _layer_report(layer_idx: int, layer: Any) -> dict[str, Any]:
    """Return the entry of one layer in the list `layers` of a report."""
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
    """Count how many layers store each number of bits, the most frequent number first."""
    held = Counter(layer.store.bits for layer in layers if layer.is_initialized)
    return dict(held.most_common())


def _lost(layer: CompressedLayer, field: str) -> float | None:
    """Return the average of a measure of lost votes over all rows and heads of a layer.

    Args:
        layer: the layer.
        field: the name of the measure, `lost_mass` or `lost_peak`.

    Returns:
        The average; 0 if nothing was evicted, and None if it is not known.
    """
    lost = getattr(layer.state, field)
    if lost is None:
        return 0.0 if layer.slots.kept is None else None
    return round(float(lost.mean()), 6)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of `values`, or None if there are none or one of them is None."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _full_bytes(layer: CompressedLayer) -> int:
    """Return the bytes that the layer would hold if it stored every token in every KV head."""
    keys, values = layer.keys, layer.values
    if keys is None:
        return 0
    per_token = keys.element_size() * (keys.shape[-1] + values.shape[-1])
    return int(keys.shape[0] * layer.store.num_kv_heads * layer.seen_tokens * per_token)


def _index_bytes(layer: CompressedLayer) -> int:
    """Return the bytes of everything in a layer except the keys and values."""
    return layer.slots.nbytes + layer.state.nbytes + layer.queries.nbytes + layer.store.index_bytes


def _whole_number(tokens: float) -> float:
    return int(tokens) if tokens == int(tokens) else tokens


def token_bytes(layer: Any) -> int:
    """Return the bytes of the keys and values in a cache layer of transformers."""
    return sum(_bytes(getattr(layer, name, None)) for name in ("keys", "values"))


def tensor_bytes(layer: Any) -> int:
    """Return the bytes of the keys, values and states in a cache layer of transformers."""
    states = ("conv_states", "recurrent_states")
    return token_bytes(layer) + sum(_bytes(getattr(layer, name, None)) for name in states)


def _bytes(held: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in a dictionary, list or tuple."""
    if isinstance(held, Tensor):
        return held.nbytes
    if isinstance(held, dict):
        held = list(held.values())
    return sum(_bytes(part) for part in held) if isinstance(held, list | tuple) else 0


def _runs(layers: list[dict[str, Any]]) -> list[tuple[int, int, dict[str, Any]]]:
    """Group consecutive layers with equal values, so that each group is one row of the table.

    Returns:
        For each group the index of the first and of the last layer, and the values of one layer.
    """
    runs: list[tuple[int, int, dict[str, Any]]] = []
    for row in layers:
        ignored = {"layer": None, "lost_votes": None}  # the table does not show them
        if runs and runs[-1][2] | ignored == row | ignored:
            runs[-1] = (runs[-1][0], row["layer"], runs[-1][2])
        else:
            runs.append((row["layer"], row["layer"], row))
    return runs
