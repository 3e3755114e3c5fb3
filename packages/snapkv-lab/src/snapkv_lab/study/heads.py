"""Which heads look up what is copied: the retrieval heads of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from snapkv_lab.evaluate.store import Record
from snapkv_lab.study.base import Table
from snapkv_lab.study.hidden import HiddenCopies

if TYPE_CHECKING:
    from torch import Tensor

    from snapkv.app.models import LoadedModel
    from snapkv.policies import PromptLayer
    from snapkv_lab.study.copying import Copy

SHARES = (0.1, 0.25, 0.5, 0.75)
"""Parts of the heads of which the table says what they hold."""

SCORES_FILE = "heads.json"
"""In the study's folder: what `DuoAttention` takes as its pattern."""


@dataclass(frozen=True, kw_only=True)
class Heads(HiddenCopies):
    """Which heads retrieve: the attention from a copy to the token that is copied next.

    Something is hidden in a text and said again at its end. Every token of the copy has a token
    that comes next, and that one stands in the text already. The score of a query head is the mean
    attention that it pays there (after Wu et al., arXiv 2404.15574); that of a KV head is the
    highest of its query heads, since one of them that looks things up needs all keys. No training,
    one reading of each prompt. The scores are kept for this model, and `duo-attention` goes by them
    from then on; the folder has them as `heads.json`.

    Args:
        remember: keep what was found for later runs.
    """

    name: ClassVar[str] = "heads"

    remember: bool = True

    def looked_at(self, loaded: "LoadedModel", copy: "Copy") -> Record:
        """A score for every KV head of every layer of full attention."""
        from snapkv.app.observing import observed

        def look(layer: "PromptLayer") -> list[float]:
            scores: list[float] = copied_attention(layer, copy).tolist()
            return scores

        seen = observed(loaded, copy.ids, len(copy.answer), look).seen
        return {
            "heads": [
                {"layer": layer, "head": head, "score": score}
                for layer, scores in sorted(seen.items())
                for head, score in enumerate(scores)
            ]
        }

    def files(self, rows: Sequence[Record]) -> dict[str, Record]:
        """The scores."""
        return {SCORES_FILE: {"scores": scores_of(rows)}}

    def closing(self, loaded: "LoadedModel", folder: Path, rows: Sequence[Record]) -> str:
        """Keep the scores for later runs; what was done, and what to type."""
        from snapkv.hf.known_heads import remember_head_scores

        typed = "--policy duo-attention"
        if not self.remember:
            return f"{typed} --set pattern={folder / SCORES_FILE} goes by these scores"
        path = remember_head_scores(
            loaded.model, scores_of(rows), {"settings": self.settings(loaded)["study"]}
        )
        return f"{typed} goes by these scores from now on: stored in {path}"

    def summary(self, records: Sequence[Record]) -> list[Record]:
        """Rows of heads, with the mean of their scores over prompts, and of shares of the heads."""
        heads = [
            {"of": "head", "layer": every[0]["layer"], "head": every[0]["head"]}
            | {"score": float(f"{fmean(each['score'] for each in every):.4g}")}
            for every in zip(*(record["heads"] for record in records), strict=True)
        ]
        ranked = sorted((row["score"] for row in heads), reverse=True)
        total = sum(ranked)
        rows = []
        for share in SHARES:
            kept = ranked[: round(share * len(ranked))]
            rows.append(
                {
                    "of": "share",
                    "keep_heads": share,
                    "heads": len(kept),
                    "lowest": kept[-1] if kept else 0.0,
                    "held": sum(kept) / total if total else 0.0,
                }
            )
        return [*heads, *rows]

    def table(self, rows: Sequence[Record]) -> Table:
        """A line for each share: how many heads, and what they hold of all that was looked up."""
        shares = [row for row in rows if row["of"] == "share"]
        heads = sum(row["of"] == "head" for row in rows)
        return Table(
            title=f"attention from a copy to the token that is copied next, {heads} KV heads",
            header=("keep_heads", "heads", "lowest score", "part of all scores"),
            lines=[
                (
                    f"{row['keep_heads']}",
                    f"{row['heads']}",
                    f"{row['lowest']:.2g}",
                    f"{row['held']:.1%}",
                )
                for row in shares
            ],
        )

    def figure(self, rows: Sequence[Record]) -> Any:
        """The scores from the highest to the lowest."""
        from snapkv_lab.study.figures import Panel, curves

        heads = sorted((row for row in rows if row["of"] == "head"), key=lambda row: -row["score"])
        ranked = [{"rank": rank, **row} for rank, row in enumerate(heads, start=1)]
        return curves(
            [Panel(title="Scores of KV heads", x="rank", y="score", curves={"heads": ranked})]
        )


def copied_attention(layer: "PromptLayer", copy: "Copy") -> "Tensor":
    """How much attention every KV head pays from a copy to the token that is copied next.

    Returns:
        (heads of the cache,) float32: the mean over the copied tokens, the highest of the query
        heads that share a KV head.
    """
    import torch

    from snapkv import ops
    from snapkv_lab.study.votes import between

    start = len(copy.prompt) - 1  # its query asks for the first token that is copied
    part = between(layer, start, start + len(copy.answer))
    weights = ops.attention_weights(part.queries, part.keys, part.score_options)[0]
    places = copy.places.to(weights.device)
    paid = weights[:, torch.arange(len(places), device=weights.device), places].mean(dim=-1)
    reduced: Tensor = ops.reduce_group(paid[None, :, None], layer.num_kv_heads, "max")[0, :, 0]
    return reduced


def scores_of(rows: Sequence[Record]) -> tuple[tuple[float, ...], ...]:
    """The scores of rows of heads, a row for each layer."""
    layers: dict[int, list[float]] = {}
    for row in rows:
        if row["of"] == "head":
            layers.setdefault(row["layer"], []).append(row["score"])
    return tuple(map(tuple, layers.values()))
