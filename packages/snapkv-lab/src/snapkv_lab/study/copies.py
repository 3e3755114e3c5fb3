"""Studies of prompts at whose end something in them is said again."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_at_least, require_choice, require_fraction
from snapkv_lab.evaluate.store import Record, Store
from snapkv_lab.report.tables import Table
from snapkv_lab.study.base import DocumentStudy, Plan, Step, grouped, named, rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from snapkv.app.models import LoadedModel
    from snapkv.policies import PromptLayer, SnapKV
    from snapkv_lab.study.copying import Copy

KINDS = ("digits", "words", "tokens")

_OVERHEAD_TOKENS = 64
"""Room for what is said around the copy."""


@dataclass(frozen=True, kw_only=True)
class HiddenCopies(DocumentStudy):
    """A study that hides things in texts, and looks at every layer while they are said again.

    Args:
        documents: files, a text each; none for essays or Python's documentation.
        kinds: what is hidden: digits, words, tokens, with commas.
        items: how many of them.
        samples: texts of each kind, with the hidden things at other depths.
        document_tokens: length that texts are cut to; shorter where one of them has no more, or
            the model no positions.
        seed: of what is hidden.
    """

    kinds: tuple[str, ...] = KINDS
    items: int = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least("items", self.items, 1)
        require_at_least("kinds", len(self.kinds), 1)
        for kind in self.kinds:
            require_choice("kinds", kind, KINDS)

    @abstractmethod
    def looked_at(self, loaded: "LoadedModel", copy: "Copy") -> Record:
        """What one prompt gives."""

    def plan(self, loaded: "LoadedModel", texts: Sequence[tuple[str, str]]) -> Plan:
        """Every kind in every sample."""
        beside = _OVERHEAD_TOKENS + 4 * self.items  # a word is a few tokens
        found, notices = self.cut(loaded, texts, beside)

        def read(kind: str, number: int) -> Record:
            _, text = found.texts[number % len(found.texts)]
            return self.looked_at(loaded, self._copy(loaded, text, kind, number))

        def steps(store: Store) -> Iterable[Step]:
            del store
            count = len(self.kinds) * self.samples
            for place, (kind, number) in enumerate(product(self.kinds, range(self.samples))):
                yield Step(str(number), kind, place, count, partial(read, kind, number))

        return Plan(steps, {"document_tokens_read": found.tokens}, notices)

    def _copy(self, loaded: "LoadedModel", text: str, kind: str, number: int) -> "Copy":
        from snapkv_lab.study.copying import hidden_copy

        return hidden_copy(
            loaded.tokenizer,
            loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            kind=kind,
            items=self.items,
            depth=(number + 0.5) / self.samples,
            seed=f"{self.seed}/{kind}/{number}",
        )


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

    def files(self, loaded: "LoadedModel", rows: Sequence[Record]) -> dict[str, Record]:
        del loaded
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
        heads = [
            {"of": "head", "layer": every[0]["layer"], "head": every[0]["head"]}
            | {"score": float(f"{fmean(each['score'] for each in every):.4g}")}
            for every in zip(*(record["heads"] for record in records), strict=True)
        ]
        ranked = sorted((row["score"] for row in heads), reverse=True)
        rows = []
        for share in SHARES:
            kept = ranked[: round(share * len(ranked))]
            lowest = kept[-1] if kept else 0.0
            held = sum(kept) / sum(ranked) if sum(ranked) else 0.0
            own = {"of": "share", "keep_heads": share, "heads": len(kept)}
            rows.append(own | {"lowest": lowest, "held": held})
        return [*heads, *rows]

    def table(self, rows: Sequence[Record]) -> Table:
        heads = len(rows_of(rows, "head"))
        return Table(
            title=f"attention from a copy to the token that is copied next, {heads} KV heads",
            headings=("keep_heads", "heads", "lowest score", "part of all scores"),
            rows=[
                (str(row["keep_heads"]), str(row["heads"]), f"{row['lowest']:.2g}", share)
                for row in rows_of(rows, "share")
                for share in [f"{row['held']:.1%}"]
            ],
            left=4,
        )

    def figure(self, rows: Sequence[Record]) -> Any:
        from snapkv_lab.study.figures import Panel, curves

        heads = sorted(rows_of(rows, "head"), key=lambda row: -row["score"])
        ranked = {"heads": [{"rank": rank, **row} for rank, row in enumerate(heads, start=1)]}
        return curves(Panel("Scores of KV heads", "rank", "score", ranked))


def copied_attention(layer: "PromptLayer", copy: "Copy") -> "Tensor":
    """How much attention every KV head pays from a copy to the token that is copied next.

    Returns:
        (heads of the cache,) float32: the mean over the copied tokens, the highest of the query
        heads that share a KV head.
    """
    import torch

    from snapkv import ops
    from snapkv_lab.study.measures import between

    start = len(copy.prompt) - 1  # its query asks for the first token that is copied
    part = between(layer, start, start + len(copy.answer))
    weights = ops.attention_weights(part.queries, part.keys, part.score_options)[0]
    places = copy.places.to(weights.device)
    paid = weights[:, torch.arange(len(places), device=weights.device), places].mean(dim=-1)
    reduced: Tensor = ops.reduce_group(paid[None, :, None], layer.num_kv_heads, "max")[0, :, 0]
    return reduced


def scores_of(rows: Sequence[Record]) -> tuple[tuple[float, ...], ...]:
    """The scores of rows of heads, a row for each layer."""
    layers = grouped(rows_of(rows, "head"), "layer").values()
    return tuple(tuple(row["score"] for row in own) for own in layers)


REACH = 64
"""How far from the token that is copied next votes are looked at, to either side."""

WIDEST = 32
"""How far a pair may reach to either side."""

DECAYS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.88, 0.9, 0.92, 0.94, 0.96, 0.98)
SINKS = 4
"""First tokens, which nearly every head votes for whatever the prompt says."""

_NEARLY = 0.01
"""Of the decays that keep as many needed tokens, but for this share, the smallest is taken."""


@dataclass(frozen=True, kw_only=True)
class Induction(HiddenCopies):
    """Where votes fall beside the tokens that are copied next.

    Something is hidden in a text, and the prompt ends where a copy of it begins. The last tokens
    vote; then the copy is read, and a hidden token is needed by a query head where a token of the
    copy pays it more attention than the threshold. In heads that need some, the study counts the
    votes by their distance from the token that is copied next. It derives the narrowest pair
    (before, behind) within which enough of the needed tokens have one of the head's best votes, and
    the decay with which fading keeps most of them at a budget. The folder has both, with what tells
    the model from others, as `pooling.json`.

    Args:
        window_size: tokens at the end of the prompt that vote.
        budget: tokens that are kept per head where a decay is tried, window included.
        best_votes: how many positions of a head count as voted for.
        needed_share: of the needed tokens that the pair shall reach.
        threshold: attention from the copy that makes a token needed.
    """

    name: ClassVar[str] = "induction"

    window_size: int = 16
    budget: int = 128
    best_votes: int = 8
    needed_share: float = 0.9
    threshold: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window_size", "best_votes"):
            require_at_least(name, getattr(self, name), 1)
        for name in ("needed_share", "threshold"):
            require_fraction(name, getattr(self, name), "0.9")
        if self.budget <= self.window_size + SINKS:
            raise InvalidArgumentError(
                f"budget: expected more than window_size={self.window_size} and {SINKS} first "
                f"tokens, got {self.budget}; raise it"
            )

    def looked_at(self, loaded: "LoadedModel", copy: "Copy") -> Record:
        from snapkv.app.observing import observed

        seen = observed(
            loaded,
            copy.ids,
            self.window_size + len(copy.answer) - 1,
            lambda layer: self.look(layer, copy),
        ).seen
        reaches: Counter[tuple[int, int]] = Counter()
        kept: Counter[str] = Counter()
        for found in seen.values():
            reaches.update(found["reaches"])
            kept.update(found["kept"])
        return {
            "heads": [
                {"layer": layer, "head": head, **of_head}
                for layer, found in seen.items()
                for head, of_head in enumerate(found["heads"])
            ],
            "reaches": [[*pair, count] for pair, count in sorted(reaches.items())],
            "kept": dict(kept),
        }

    def look(self, layer: "PromptLayer", copy: "Copy") -> Record:
        """One layer: of every query head where its votes fall, and what copying needs of it.

        Returns:
            heads: needed tokens, votes by distance and the base rate, a record each; reaches:
            needed tokens by how far they stand before and behind the nearest best vote; kept:
            needed tokens that each pooling keeps, and under "needed" all.
        """
        from snapkv_lab.study import measures

        prompt, places = len(copy.prompt), copy.places.to(layer.keys.device)
        needed = self._needed(layer, copy)
        part = measures.between(layer, prompt - self.window_size, prompt)
        own = self._policy().votes(part)[0]
        own = own.repeat_interleave(needed.shape[0] // own.shape[0], dim=0)
        around = measures.votes_around(own, copy.start, REACH)
        base = measures.base_share(own, copy.start, REACH, SINKS)
        beyond = own.clone()
        beyond[:, :SINKS] = 0.0
        best = measures.best(beyond, min(self.best_votes, own.shape[-1]))
        pairs = zip(
            *(
                found[needed].tolist()
                for found in measures.distances_to_voted(best, places, WIDEST)
            ),
            strict=True,
        )
        return {
            "heads": [
                {"needed": int(count), "base": float(rate), "votes": _short(shares)}
                for count, rate, shares in zip(needed.sum(-1), base, around.tolist(), strict=True)
            ],
            "reaches": Counter(pairs),
            "kept": {"needed": int(needed.sum())}
            | {
                label: int((measures.selected(policy, part, prompt)[:, places] & needed).sum())
                for label, policy in self._poolings()
            },
        }

    def _needed(self, layer: "PromptLayer", copy: "Copy") -> Any:
        """(H, N) bool: which hidden tokens the copy attends to."""
        from snapkv import ops
        from snapkv_lab.study.measures import between

        start, stop = len(copy.prompt) - 1, len(copy.prompt) + len(copy.answer) - 1
        part = between(layer, start, stop)
        weights = ops.attention_weights(part.queries, part.keys, part.score_options)
        return weights[0][..., copy.places.to(weights.device)].amax(dim=1) > self.threshold

    def _policy(self, **pooling: Any) -> "SnapKV":
        from snapkv.policies import SnapKV

        return SnapKV(self.budget, window_size=self.window_size, sink_tokens=SINKS, **pooling)

    def _poolings(self) -> Iterator[tuple[str, "SnapKV"]]:
        yield "centred", self._policy()
        for decay in DECAYS:
            yield str(decay), self._policy(pooling="fading", decay=decay)

    def summary(self, records: Sequence[Record]) -> list[Record]:
        rows = []
        for (kind,), own in grouped(records, "question").items():
            rows += _of_distances(kind, own)
        heads = [head for record in records for head in record["heads"]]
        by_head = grouped(heads, "layer", "head").items()
        rows += [_of_head(layer, head, own) for (layer, head), own in by_head]
        kept: Counter[str] = Counter()
        for record in records:
            kept.update(record["kept"])
        needed = kept.pop("needed", 0)
        rows += [
            {"of": "decay", "decay": decay, "kept": kept[str(decay)] / needed}
            for decay in (DECAYS if needed else ())
        ]
        return [*rows, self._derived(records, kept, needed)]

    def _derived(self, records: Sequence[Record], kept: Counter[str], needed: int) -> Record:
        import torch

        from snapkv_lab.study.measures import smallest_pair

        counts = torch.zeros(WIDEST + 2, WIDEST + 2, dtype=torch.int64)
        for before, behind, count in (reach for record in records for reach in record["reaches"]):
            counts[before, behind] += count
        pair = smallest_pair(counts, self.needed_share)
        enough = max(kept[str(decay)] for decay in DECAYS) - _NEARLY * needed
        decay = next(decay for decay in DECAYS if kept[str(decay)] >= enough) if needed else None
        return {
            "of": "derived",
            "kernel_size": list(pair[:2]) if pair else None,
            "reached": pair[2] if pair else None,
            "decay": decay,
            "kept": kept[str(decay)] / needed if needed else None,
            "kept_centred": kept["centred"] / needed if needed else None,
            "needed": needed,
            "needed_near_votes": (int(counts.sum() - counts[-1, -1]) / needed) if needed else None,
        }

    def files(self, loaded: "LoadedModel", rows: Sequence[Record]) -> dict[str, Record]:
        del loaded
        names = ("kernel_size", "reached", "decay", "kept", "needed")
        return {"pooling.json": {"pooling": {name: rows[-1][name] for name in names}}}

    def table(self, rows: Sequence[Record]) -> Table:
        by_kind = named(rows_of(rows, "distance"), "kind")
        return Table(
            title=f"votes above the base rate within {REACH} tokens of the one that is copied "
            f"next, in heads that need it; {said(rows[-1], self.budget)}",
            headings=("copied", "before it", "on it", "behind it", "10%", "50%", "90%", "highest"),
            rows=[(kind, *_line(own)) for kind, own in by_kind.items()],
            left=8,
        )

    def figure(self, rows: Sequence[Record]) -> Any:
        from snapkv_lab.study.figures import Panel, curves

        by_kind = named(rows_of(rows, "distance"), "kind")
        title = "Votes by distance from the token copied next"
        return curves(
            Panel(title, "distance", "votes_of_highest", by_kind),
            Panel("The same, summed from the left", "distance", "votes_up_to", by_kind),
        )


def said(derived: Record, budget: int) -> str:
    """What the row of the derived pooling means, with what to type."""
    if not derived["needed"]:
        return "no head attends to what is copied, so nothing follows for pooling"
    pair, parts = derived["kernel_size"], []
    if pair is not None:
        parts.append(
            f"--kernel-size {pair[0]}+{pair[1]} reaches {derived['reached']:.0%} of what copying "
            f"attends to near a vote ({derived['needed_near_votes']:.0%} of all)"
        )
    parts.append(
        f"--pooling fading --decay {derived['decay']} keeps {derived['kept']:.0%} of all at a "
        f"budget of {budget}, the centred 7 {derived['kept_centred']:.0%}"
    )
    return "; ".join(parts)


def _of_distances(kind: str, records: Iterable[Record]) -> list[Record]:
    """Votes by distance, mean over heads of all records that need something."""
    heads = [head for record in records for head in record["heads"] if head["needed"]]
    if not heads:
        return []
    means = [fmean(shares) for shares in zip(*(head["votes"] for head in heads), strict=True)]
    base = fmean(head["base"] for head in heads)
    highest, total = max(means), sum(means)
    return [
        {
            "of": "distance",
            "kind": kind,
            "distance": distance,
            "votes": share,
            "base": base,
            "votes_of_highest": share / highest if highest else None,
            "votes_up_to": summed / total if total else None,
        }
        for distance, (share, summed) in enumerate(
            zip(means, accumulate(means), strict=True), start=-REACH
        )
    ]


def _of_head(layer: int, head: int, records: Sequence[Record]) -> Record:
    """One query head, mean over prompts: its votes near the copy, by side."""
    sides = slice(REACH), slice(REACH, REACH + 1), slice(REACH + 1, None)
    before, at, behind = (fmean(sum(record["votes"][side]) for record in records) for side in sides)
    return {
        "of": "head",
        "layer": layer,
        "head": head,
        "needed": fmean(record["needed"] for record in records),
        "before": before,
        "at": at,
        "behind": behind,
        "base": fmean(record["base"] for record in records),
    }


def _line(rows: Sequence[Record]) -> tuple[str, ...]:
    """What lies on each side, at which distances so many per cent end, how high the highest is."""
    from snapkv_lab.study.measures import quantile

    above = {row["distance"]: max(0.0, row["votes"] - row["base"]) for row in rows}
    near, base = sum(above.values()), rows[0]["base"]
    if not near or not base:
        return ("-",) * 7
    before = sum(share for distance, share in above.items() if distance < 0)
    sides = before, above[0], near - before - above[0]
    ends = (quantile(list(above.values()), list(above), part) for part in (0.1, 0.5, 0.9))
    highest = max(row["votes"] for row in rows) / base
    return (
        *(f"{side / near:.0%}" for side in sides),
        *("-" if end is None else f"{end:+d}" for end in ends),
        f"{highest:.0f} x base",
    )


def _short(shares: Iterable[float]) -> list[float]:
    return [float(f"{share:.4g}") for share in shares]
