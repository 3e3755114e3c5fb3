"""How many layers have to read every token, before the others may read only some."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, ClassVar

from snapkv.app.prefills import Exact, Prefill, Selective
from snapkv.errors import InvalidArgumentError
from snapkv.validation import SMALL_WINDOW, require_at_least, require_budget, require_ratio
from snapkv_lab.drawing import Panel, curves
from snapkv_lab.evaluate.haystack import encode
from snapkv_lab.evaluate.store import Store
from snapkv_lab.report.tables import Table
from snapkv_lab.rows import Row, of
from snapkv_lab.study.base import DocumentStudy, Step, StudyPlan
from snapkv_lab.study.material import LEAST_TOKENS, cut

if TYPE_CHECKING:
    from snapkv.app.models import LoadedModel
    from snapkv.policies import PromptLayer
    from snapkv_lab.study.copying import Copy

_VOTES = "votes"  # the question of records that say what each layer's votes let go on
_LENGTHS = 4  # how many there are, each half of the one before
_OVERHEAD_TOKENS = 64  # room for what is said around the number


@dataclass(frozen=True, kw_only=True)
class EarlyLayer(DocumentStudy):
    """How many layers have to read every token before the others may read only some.

    A number is hidden among others in a text, and the prompt ends where the model should repeat it.
    Prompts have different lengths, down to an eighth. First every prompt is read exactly, and each
    layer's votes choose the tokens to go on with, at half the share, to leave a margin. The lowest
    layers that choose the whole number in every prompt are tried: prompts are read exactly and
    selectively in turn, and then the number. The result is the first layer from which on the loss
    stays within the tolerance and no number is lost that exact prefill finds. It is stored for this
    model, and `selective` starts there from then on.

    Args:
        documents: files, one text each; by default essays or Python's documentation.
        layers: layers to try, with commas; by default the lowest that choose the number, up to
            three quarters of the depth.
        tries: how many of them at most.
        keep_ratio: share of the prompt that goes on to later layers, without a minimum of
            tokens.
        tolerance: how far the loss may be above that of exact prefill, nats per token.
        samples: prompts, each with the number at another depth.
        document_tokens: length that every fourth text is cut to, the others to a half, a quarter
            and an eighth; less if a text or the model's positions are too short.
        digits: of the number.
        rivals: further numbers in the text, in the same sentence about other things.
        budget: tokens kept per head and layer, window included.
        remember: store the result for later runs.
        seed: random seed of the numbers.
    """

    name: ClassVar[str] = "early-layer"

    layers: tuple[int, ...] = ()
    tries: int = 3
    keep_ratio: float = 0.15
    tolerance: float = 0.05
    samples: int = 6
    document_tokens: int = 7168
    digits: int = 6
    rivals: int = 8
    budget: int = 256
    remember: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("digits", "tries"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("rivals", self.rivals, 0)
        require_ratio("keep_ratio", self.keep_ratio)
        require_budget(self.budget, None, SMALL_WINDOW)
        for layer in self.layers:
            require_at_least("layers", layer, 1)
        if not self.tolerance >= 0:
            raise InvalidArgumentError(
                f"tolerance: expected at least 0 nats per token, got {self.tolerance}; pass for "
                "instance 0.05"
            )

    def plan(self, loaded: "LoadedModel", texts: Sequence[tuple[str, str]]) -> StudyPlan:
        count = self._layer_count(loaded)
        tokens = self.document_tokens
        if loaded.max_tokens is not None:
            beside = (1 + self.rivals) * (_OVERHEAD_TOKENS + 4 * self.digits)
            tokens = max(LEAST_TOKENS, min(tokens, loaded.max_tokens - beside))
        found = cut(loaded.tokenizer, texts, tokens)
        notices = found.shorter_than(self.document_tokens, "texts")
        copies = [self._copy(loaded, found.texts, number) for number in range(self.samples)]

        def each(question: str, read: Callable[[int], Row]) -> Iterator[Step]:
            for number in range(len(copies)):
                yield Step(str(number), question, number, len(copies), partial(read, number))

        def steps(store: Store) -> Iterable[Step]:
            yield from each(_VOTES, lambda number: self._look(loaded, copies[number], number))
            for layer in self._tried(store.records, count):
                read = partial(self._read, loaded, copies, layer)
                yield from each(f"layer {layer}", read)
                if self._row(store.records, layer)["enough"]:
                    return

        return StudyPlan(steps, {"document_tokens_read": found.tokens}, notices)

    def _layer_count(self, loaded: "LoadedModel") -> int:
        from snapkv.prefill.decoder import decoder_layers

        count = len(decoder_layers(loaded.model))
        wrong = [layer for layer in self.layers if layer >= count]
        if wrong or count < 2:
            raise InvalidArgumentError(
                f"layers: expected layers from 1 to {count - 1}, of the {count} that the model "
                f"has, got {wrong[0] if wrong else 'a model of one'}; leave it out for those whose "
                "votes find the number"
            )
        return count

    def _copy(self, loaded: "LoadedModel", texts: Sequence[tuple[str, str]], number: int) -> "Copy":
        from snapkv_lab.study.copying import hidden_copy, with_rivals

        _, text = texts[number % len(texts)]
        ids = encode(loaded.tokenizer, text)
        ids = ids[: max(LEAST_TOKENS, len(ids) >> number % _LENGTHS)]
        seed, digits, tokenizer = f"{self.seed}/{number}", self.digits, loaded.tokenizer
        depth = (number + 0.5) / self.samples
        ids = with_rivals(tokenizer, ids, count=self.rivals, digits=digits, seed=f"{seed}/rivals")
        return hidden_copy(tokenizer, ids, digits=digits, depth=depth, seed=seed)

    def _look(self, loaded: "LoadedModel", copy: "Copy", number: int) -> Row:
        """Read a prompt exactly, and look at what each layer's votes let go on."""
        import torch

        from snapkv.app.observing import observed

        if not number:  # warms up, or refuses a model that cannot be read selectively
            self.answered(loaded, copy, self.selective(1))
        look = partial(self.share_that_goes_on, copy)
        seen = observed(loaded, torch.tensor([copy.prompt]), SMALL_WINDOW, look)
        return {"goes_on": [(layer + 1, share) for layer, share in seen.items()]}

    def _read(
        self, loaded: "LoadedModel", copies: Sequence["Copy"], layer: int, number: int
    ) -> Row:
        """Read a prompt exactly and from a layer on, the one first and then the other."""
        ways: dict[str, Prefill] = {"exact": Exact(), "selective": self.selective(layer)}
        names = list(ways)[:: -1 if number % 2 else 1]
        found = {name: self.answered(loaded, copies[number], ways[name]) for name in names}
        return {"layer": layer, **found}

    def share_that_goes_on(self, copy: "Copy", layer: "PromptLayer") -> float:
        """Which part of a hidden number the votes of one layer let go on, at half the share."""
        from snapkv.prefill.selective import tokens_that_go_on

        chosen = tokens_that_go_on(layer, keep_ratio=self.keep_ratio / 2)
        if chosen is None:
            return 1.0
        places = set(chosen.keep_indices[0, 0].tolist())
        return fmean(place in places for place in copy.places)

    def answered(self, loaded: "LoadedModel", copy: "Copy", way: Prefill) -> Row:
        """What reading the prompt that way, and the number after it, gives and takes."""
        import torch

        from snapkv.app.likelihood import log_likelihoods
        from snapkv.policies import default_policy
        from snapkv_lab.measure.timing import spent_on

        device = loaded.model.device
        prompt, answer = (torch.tensor([ids], device=device) for ids in (copy.prompt, copy.answer))
        policy = default_policy(self.budget).policy  # layers hold other tokens than each other
        got: list[tuple[float, bool]] = []
        with way.installed(loaded.model):
            spent = spent_on(lambda: got.extend(log_likelihoods(loaded, prompt, [answer], policy)))
        ((chance, right),) = got
        return {"loss": -chance / len(copy.answer), "right": right, "ms": spent.wall_ms}

    def selective(self, layer: int) -> Selective:
        return Selective(layer=layer, keep_ratio=self.keep_ratio, least_tokens=0)

    def _tried(self, records: Sequence[Row], count: int) -> list[int]:
        """The layers to read from, in order."""
        if self.layers:
            return sorted(set(self.layers))
        whole = [row["layer"] for row in _of_votes(records, count) if row["goes_on"] == 1]
        return [layer for layer in whole if layer <= max(1, 3 * count // 4)][: self.tries]

    def summary(self, records: Sequence[Row]) -> list[Row]:
        tried = {record["layer"] for record in records if record["question"] != _VOTES}
        rows = [self._row(records, layer) for layer in sorted(tried)]
        found = next((row["layer"] for row in rows if row["enough"]), None)
        last = max(layer for layer, _ in records[0]["goes_on"])
        votes = _of_votes(records, last)
        return [*votes, *rows, {"of": "found", "layer": found}]

    def _row(self, records: Sequence[Row], layer: int) -> Row:
        """One layer that was tried, against exact reading."""
        own = [record for record in records if record.get("layer") == layer]
        selective, exact = ([record[way] for record in own] for way in ("selective", "exact"))
        loss, exact_loss = (fmean(one["loss"] for one in way) for way in (selective, exact))
        pairs = zip(selective, exact, strict=True)
        lost = sum(two["right"] and not one["right"] for one, two in pairs)
        exact_right = fmean(one["right"] for one in exact)
        return {
            "of": "reading",
            "layer": layer,
            "prompts": len(own),
            "right": fmean(one["right"] for one in selective),
            "exact_right": exact_right,
            "lost": lost,
            "loss": loss,
            "exact_loss": exact_loss,
            "token_probability": math.exp(-loss),
            "time": median(one["ms"] for one in selective) / median(one["ms"] for one in exact),
            "enough": exact_right > 0 and not lost and loss <= exact_loss + self.tolerance,
        }

    def closing(self, loaded: "LoadedModel", folder: Path, rows: Sequence[Row]) -> str:
        """Keep the layer for later runs, if one was found; what was done, in a line."""
        from snapkv.prefill.early_layer import default_early_layer, remember_early_layer

        del folder
        layer = rows[-1]["layer"]
        if layer is None:
            return (
                f"{_why_none(rows)}; nothing is stored, and selective reading begins after "
                f"{default_early_layer(loaded.model)} layers as before"
            )
        if not self.remember:
            return f"{layer} layers are enough; that is not stored"
        measured = {"settings": self.settings(loaded)["study"], "rows": rows}
        path = remember_early_layer(loaded.model, layer, measured)
        return f"selective reading begins after {layer} layers from now on: stored in {path}"

    def table(self, rows: Sequence[Row]) -> Table:
        votes = of(rows, of="votes")
        tried = {row["layer"]: row for row in of(rows, of="reading")}
        first, last = (len(votes) + 1) // 4, max([*tried, 3 * (len(votes) + 1) // 4])
        return Table(
            title=f"{self.keep_ratio:.0%} of the tokens go on after some layers, the number at "
            f"half of that; budget {self.budget}, loss in nats per token",
            headings=("layers", "number goes on", "right", "exactly", "loss", "exactly", "time"),
            rows=[
                _line(row, tried.get(row["layer"]))
                for row in votes
                if row["layer"] in tried or first <= row["layer"] <= last
            ],
            left=7,
        )

    def figure(self, rows: Sequence[Row]) -> Any:
        votes = {"votes of the layer": of(rows, of="votes")}
        tried = {"selective": of(rows, of="reading")}
        return curves(
            Panel("Part of the number that goes on", "layer", "goes_on", votes),
            Panel("Numbers found", "layer", "right", tried),
            Panel("Time, of that of exact reading", "layer", "time", tried),
        )


def _of_votes(records: Sequence[Row], count: int) -> list[Row]:
    """How much of the numbers goes on after each number of layers, the mean over prompts."""
    shares = [dict(record["goes_on"]) for record in records if record["question"] == _VOTES]
    return [
        {"of": "votes", "layer": layer, "goes_on": fmean(each[layer] for each in shares)}
        for layer in range(1, count)
    ]


def _why_none(rows: Sequence[Row]) -> str:
    tried = of(rows, of="reading")
    if not tried:
        return "no layer's votes let every number go on"
    if not any(row["exact_right"] for row in tried):
        return "exact reading finds no number, so nothing can be compared"
    return "reading from none of these layers on is as good as exact reading"


def _line(votes: Row, tried: Row | None) -> tuple[str, ...]:
    own = (str(votes["layer"]), f"{votes['goes_on']:.2f}")
    if tried is None:
        return (*own, *"-----")
    right = (f"{tried[name]:.2f}" for name in ("right", "exact_right"))
    loss = (f"{tried[name]:.3f}" for name in ("loss", "exact_loss"))
    return (*own, *right, *loss, f"{tried['time']:.2f}")
