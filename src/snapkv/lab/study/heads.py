"""Which heads look up what is copied: the retrieval heads of a model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from snapkv.errors import OutputError
from snapkv.lab.evaluate.store import Progress, Record, Store
from snapkv.lab.study.base import Findings, Study, Table
from snapkv.lab.study.induction import KINDS
from snapkv.lab.study.material import LEAST_TOKENS, cut, long_texts
from snapkv.validation import require_at_least, require_choice

if TYPE_CHECKING:
    from torch import Tensor

    from snapkv.app.models import LoadedModel
    from snapkv.lab.study.copying import Copy
    from snapkv.policies import PromptLayer

SHARES = (0.1, 0.25, 0.5, 0.75)
"""Parts of the heads of which the table says what they hold."""

SCORES_FILE = "heads.json"
"""In the study's folder: what `DuoAttention` takes as its pattern."""

_OVERHEAD_TOKENS = 64
"""Room for what is said around the copy."""


@dataclass(frozen=True, kw_only=True)
class Heads(Study):
    """Which heads retrieve: the attention from a copy to the token that is copied next.

    Something is hidden in a text and said again at its end. Every token of the copy has a token
    that comes next, and that one stands in the text already. The score of a query head is the mean
    attention that it pays there (after Wu et al., arXiv 2404.15574); that of a KV head is the
    highest of its query heads, since one of them that looks things up needs all keys. No training,
    one reading of each prompt. The scores are kept for this model, and `duo-attention` goes by them
    from then on; the folder has them as `heads.json`.

    Args:
        documents: files, a text each; none for essays or Python's documentation.
        kinds: what is hidden: digits, words, tokens, with commas.
        items: how many of them.
        samples: texts of each kind, with the hidden things at other depths.
        document_tokens: length that texts are cut to; shorter where one of them has no more, or
            the model no positions.
        remember: keep what was found for later runs.
        seed: of what is hidden.
    """

    name: ClassVar[str] = "heads"

    documents: tuple[str, ...] = ()
    kinds: tuple[str, ...] = KINDS
    items: int = 12
    samples: int = 3
    document_tokens: int = 1024
    remember: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("items", "samples"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("document_tokens", self.document_tokens, LEAST_TOKENS)
        require_at_least("kinds", len(self.kinds), 1)
        for kind in self.kinds:
            require_choice("kinds", kind, KINDS)

    def into(
        self, loaded: "LoadedModel", folder: Path, on_progress: Progress | None = None
    ) -> Findings:
        """Read what the folder does not hold yet, score the heads by all of it, and keep that."""
        texts, warnings = long_texts(self.documents, count=self.samples)
        found = cut(loaded.tokenizer, texts, self._text_tokens(loaded))
        block = self.settings(loaded) | {"document_tokens_read": found.tokens}
        parts = [(kind, number) for kind in self.kinds for number in range(self.samples)]
        with Store(folder, block) as store:
            for done, (kind, number) in enumerate(parts):
                if on_progress:
                    on_progress(f"{kind}, {number + 1}", done, len(parts))
                if (str(number), self.name, kind) not in store:
                    _, text = found.texts[number % len(found.texts)]
                    copy = self._copy(loaded, text, kind, number)
                    record = {"sample": str(number), "method": self.name, "question": kind}
                    store.add(record | {"heads": looked_at(loaded, copy)})
            if on_progress:
                on_progress("done", len(parts), len(parts))
            rows = summary(store.records)
            unwritten = store.summarise(rows) or _write(folder, loaded, scores_of(rows))
        return Findings(
            folder=folder,
            run=block,
            rows=rows,
            warnings=warnings,
            notices=self._notices(found.tokens),
            closing=self._kept(loaded, folder, rows),
            unwritten=unwritten,
        )

    def _text_tokens(self, loaded: "LoadedModel") -> int:
        if loaded.max_tokens is None:
            return self.document_tokens
        room = loaded.max_tokens - _OVERHEAD_TOKENS - 4 * self.items  # a word is a few tokens
        return max(LEAST_TOKENS, min(self.document_tokens, room))

    def _notices(self, tokens: int) -> tuple[str, ...]:
        if tokens >= self.document_tokens:
            return ()
        return (f"texts are cut to {tokens:,} tokens instead of {self.document_tokens:,}",)

    def _copy(self, loaded: "LoadedModel", text: str, kind: str, number: int) -> "Copy":
        from snapkv.lab.study.copying import hidden_copy

        return hidden_copy(
            loaded.tokenizer,
            loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            kind=kind,
            items=self.items,
            depth=(number + 0.5) / self.samples,
            seed=f"{self.seed}/{kind}/{number}",
        )

    def _kept(self, loaded: "LoadedModel", folder: Path, rows: Sequence[Record]) -> str:
        """Keep the scores for later runs; what was done, and what to type."""
        from snapkv.hf.known_heads import remember_head_scores

        typed = "--policy duo-attention"
        if not self.remember:
            return f"{typed} --set pattern={folder / SCORES_FILE} goes by these scores"
        path = remember_head_scores(
            loaded.model, scores_of(rows), {"settings": self.settings(loaded)["study"]}
        )
        return f"{typed} goes by these scores from now on: stored in {path}"

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
        from snapkv.lab.study.figures import Panel, curves

        heads = sorted((row for row in rows if row["of"] == "head"), key=lambda row: -row["score"])
        ranked = [{"rank": rank, **row} for rank, row in enumerate(heads, start=1)]
        return curves(
            [Panel(title="Scores of KV heads", x="rank", y="score", curves={"heads": ranked})]
        )


def looked_at(loaded: "LoadedModel", copy: "Copy") -> list[Record]:
    """What one prompt gives: a score for every KV head of every layer of full attention."""
    from snapkv.lab.study.reading import observed

    seen = observed(
        loaded, copy.ids, len(copy.answer), lambda layer: copied_attention(layer, copy).tolist()
    ).seen
    return [
        {"layer": layer, "head": head, "score": score}
        for layer, scores in sorted(seen.items())
        for head, score in enumerate(scores)
    ]


def copied_attention(layer: "PromptLayer", copy: "Copy") -> "Tensor":
    """How much attention every KV head pays from a copy to the token that is copied next.

    Args:
        layer: what attention saw of prompt and copy.
        copy: what was read.

    Returns:
        (heads of the cache,) float32: the mean over the copied tokens, the highest of the query
        heads that share a KV head.
    """
    import torch

    from snapkv import ops
    from snapkv.lab.study.votes import between

    start = len(copy.prompt) - 1  # its query asks for the first token that is copied
    part = between(layer, start, start + len(copy.answer))
    weights = ops.attention_weights(part.queries, part.keys, part.score_options)[0]
    places = copy.places.to(weights.device)
    paid = weights[:, torch.arange(len(places), device=weights.device), places].mean(dim=-1)
    reduced: Tensor = ops.reduce_group(paid[None, :, None], layer.num_kv_heads, "max")[0, :, 0]
    return reduced


def summary(records: Sequence[Record]) -> list[Record]:
    """Rows of heads, with the mean of their scores over prompts, and of shares of the heads."""
    heads = [
        {"of": "head", "layer": first["layer"], "head": first["head"], "score": _mean(every)}
        for first, *others in zip(*(record["heads"] for record in records), strict=True)
        for every in [[first, *others]]
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


def scores_of(rows: Sequence[Record]) -> tuple[tuple[float, ...], ...]:
    """The scores of rows of heads, a row for each layer."""
    layers: dict[int, list[float]] = {}
    for row in rows:
        if row["of"] == "head":
            layers.setdefault(row["layer"], []).append(row["score"])
    return tuple(map(tuple, layers.values()))


def _mean(every: Sequence[Record]) -> float:
    return float(f"{fmean(each['score'] for each in every):.4g}")


def _write(
    folder: Path, loaded: "LoadedModel", scores: tuple[tuple[float, ...], ...]
) -> OutputError | None:
    """The scores beside what tells the model from others; why not, where it cannot be."""
    from snapkv.cache.saving.writing import replace_file
    from snapkv.hf.identity import identity_of

    text = json.dumps({"model": identity_of(loaded.model), "scores": scores}, indent=1)
    try:
        replace_file(folder / SCORES_FILE, text + "\n")
    except OutputError as error:
        return error
    return None
