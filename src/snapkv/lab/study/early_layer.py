"""How many layers have to read every token, before the others may read only some."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, ClassVar

from snapkv.errors import InvalidArgumentError
from snapkv.lab.evaluate.store import Progress, Record, Store
from snapkv.lab.study.base import Findings, Study, Table, grouped
from snapkv.lab.study.material import LEAST_TOKENS, cut, long_texts
from snapkv.validation import SMALL_WINDOW, require_at_least, require_budget, require_ratio

if TYPE_CHECKING:
    from snapkv.app.models import LoadedModel
    from snapkv.lab.study.copying import Copy

EXACT = "exact"


@dataclass(frozen=True, kw_only=True)
class EarlyLayer(Study):
    """How many layers have to read every token, before the others may read only some.

    A number is hidden in a text, and the prompt ends where it is to be said again. The prompt is
    read exactly, and selectively from each candidate layer on; then the number is read, and the
    study looks at its loss, whether each of its tokens was the likeliest, and the time. The first
    layer is taken from which on, there and at the next candidate, the loss stays within the
    tolerance and no number is lost that exact reading finds. It is kept for this model, and is
    where `selective` and `gemfilter` begin from then on.

    Args:
        documents: files, a text each; none for essays or Python's documentation.
        layers: candidates, with commas; none for every other one from a quarter of the depth to
            three quarters.
        keep_ratio: share of the prompt that goes on from there; of it alone, however few tokens
            that are.
        tolerance: by how much the loss may be above that of exact reading, nats per token.
        samples: prompts, with the number at another depth each.
        document_tokens: length that texts are cut to; shorter where one of them has no more.
        items: digits of the number.
        budget: tokens kept per head and layer, window included.
        remember: keep what was found for later runs.
        seed: of the numbers.
    """

    name: ClassVar[str] = "early-layer"

    documents: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    keep_ratio: float = 0.15
    tolerance: float = 0.05
    samples: int = 6
    document_tokens: int = 1024
    items: int = 6
    budget: int = 256
    remember: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("samples", "items"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("document_tokens", self.document_tokens, LEAST_TOKENS)
        require_ratio("keep_ratio", self.keep_ratio)
        require_budget(self.budget, None, SMALL_WINDOW)
        for layer in self.layers:
            require_at_least("layers", layer, 1)
        if not self.tolerance >= 0:
            raise InvalidArgumentError(
                f"tolerance: expected at least 0 nats per token, got {self.tolerance}; pass for "
                "instance 0.05"
            )

    def into(
        self, loaded: "LoadedModel", folder: Path, on_progress: Progress | None = None
    ) -> Findings:
        """Read what the folder does not hold yet, choose a layer by all of it, and remember it."""
        candidates = self._candidates(loaded)
        texts, warnings = long_texts(self.documents, count=self.samples)
        found = cut(loaded.tokenizer, texts, self.document_tokens)
        block = self.settings(loaded) | {
            "document_tokens_read": found.tokens,
            "candidates": candidates,
        }
        with Store(folder, block) as store:
            for number in range(self.samples):
                if on_progress:
                    on_progress(f"prompt {number + 1}", number, self.samples)
                if (str(number), self.name, "") not in store:
                    _, text = found.texts[number % len(found.texts)]
                    record = {"sample": str(number), "method": self.name, "question": ""}
                    store.add(record | self._read(loaded, text, number, candidates))
            if on_progress:
                on_progress("done", self.samples, self.samples)
            rows = self.summary(store.records)
            unwritten = store.summarise(rows)
        return Findings(
            folder=folder,
            run=block,
            rows=rows,
            warnings=warnings,
            closing=self._kept(loaded, rows),
            unwritten=unwritten,
        )

    def _candidates(self, loaded: "LoadedModel") -> list[int]:
        from snapkv.prefill.decoder import decoder_layers

        count = len(decoder_layers(loaded.model))
        wrong = [layer for layer in self.layers if layer >= count]
        if wrong or count < 2:
            raise InvalidArgumentError(
                f"layers: expected layers from 1 to {count - 1}, as many as the model has but one, "
                f"got {wrong or 'a model of one layer'}; leave it out for those that are usual"
            )
        usual = range(max(1, count // 4), max(1, 3 * count // 4) + 1, 2)
        return sorted(set(self.layers)) or [layer for layer in usual if layer < count]

    def _read(
        self, loaded: "LoadedModel", text: str, number: int, candidates: Sequence[int]
    ) -> Record:
        """One prompt, read in every way; another one comes first each time."""
        copy = self._copy(loaded, text, number)
        ways: list[int | None] = [None, *candidates]
        if not number:
            self._answered(loaded, copy, candidates[-1])  # warms up, and refuses what cannot work
        first = number % len(ways)
        readings = [self._answered(loaded, copy, way) for way in ways[first:] + ways[:first]]
        return {"prompt_tokens": len(copy.prompt), "readings": readings}

    def _copy(self, loaded: "LoadedModel", text: str, number: int) -> "Copy":
        from snapkv.lab.study.copying import hidden_copy

        return hidden_copy(
            loaded.tokenizer,
            loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            kind="digits",
            items=self.items,
            depth=(number + 0.5) / self.samples,
            seed=f"{self.seed}/{number}",
        )

    def _answered(self, loaded: "LoadedModel", copy: "Copy", layer: int | None) -> Record:
        """What reading the prompt so, and the number behind it, gives and takes."""
        import torch

        from snapkv.lab.evaluate.likelihood import log_likelihood
        from snapkv.lab.measure.timing import spent_on
        from snapkv.policies import default_policy

        prompt, answer = (
            torch.tensor([ids], device=loaded.model.device) for ids in (copy.prompt, copy.answer)
        )
        found: list[tuple[float, bool]] = []
        with self._way(loaded, layer):
            spent = spent_on(
                lambda: found.append(
                    log_likelihood(loaded, prompt, answer, default_policy(self.budget))
                )
            )
        ((chance, right),) = found
        loss = -chance / len(copy.answer)
        return {"layer": layer, "loss": loss, "right": right, "ms": spent.wall_ms}

    def _way(
        self, loaded: "LoadedModel", layer: int | None
    ) -> contextlib.AbstractContextManager[None]:
        from snapkv.prefill import selective

        if layer is None:
            return contextlib.nullcontext()
        return selective(loaded.model, layer=layer, keep_ratio=self.keep_ratio, least_tokens=0)

    def summary(self, records: Sequence[Record]) -> list[Record]:
        """A row of the exact reading, one of each candidate, and what follows."""
        readings = [
            reading | {"sample": record["sample"]}
            for record in records
            for reading in record["readings"]
        ]
        by_layer = {layer: own for (layer,), own in grouped(readings, ("layer",)).items()}
        exact = by_layer.pop(None)
        rows = [self._row(own, exact) for _, own in sorted(by_layer.items())]
        found = self._row(exact, exact) | {"of": EXACT}
        return [found, *rows, {"of": "found", "layer": _first_that_stays(rows)}]

    def _row(self, own: Sequence[Record], exact: Sequence[Record]) -> Record:
        found = {reading["sample"] for reading in exact if reading["right"]}
        right = {reading["sample"] for reading in own if reading["right"]}
        loss, of_exact = (fmean(each["loss"] for each in of) for of in (own, exact))
        return {
            "of": "selective",
            "layer": own[0]["layer"],
            "prompts": len(own),
            "right": len(right) / len(own),
            "lost": len(found - right),
            "loss": loss,
            "token_probability": math.exp(-loss),
            "time": median(each["ms"] for each in own) / median(each["ms"] for each in exact),
            "enough": bool(found) and found <= right and loss <= of_exact + self.tolerance,
        }

    def _kept(self, loaded: "LoadedModel", rows: Sequence[Record]) -> str:
        """The layer kept for later runs, if one was found; what was done, as a sentence."""
        from snapkv.prefill.early_layer import default_early_layer, remember_early_layer

        layer = rows[-1]["layer"]
        if layer is None:
            why = "none of them" if rows[0]["right"] else "exact reading finds no number, so none"
            return (
                f"{why} stays with exact reading; nothing is stored, and selective reading goes on "
                f"beginning at layer {default_early_layer(loaded.model)}"
            )
        if not self.remember:
            return f"layer {layer} is the first that stays with exact reading; it is not stored"
        measured = {"settings": self.settings(loaded)["study"], "rows": list(rows[:-1])}
        path = remember_early_layer(loaded.model, layer, measured)
        return f"layer {layer} is where selective reading begins from now on, stored in {path}"

    def table(self, rows: Sequence[Record]) -> Table:
        """A line for each way of reading."""
        return Table(
            title=f"reading with {self.keep_ratio:.0%} of the tokens from a layer on, "
            f"{rows[0]['prompts']} prompts, budget {self.budget}",
            header=("read by all layers until", "right", "lost", "loss", "time"),
            lines=[_line(row) for row in rows[:-1]],
        )

    def figure(self, rows: Sequence[Record]) -> Any:
        """Numbers found, the probability of their tokens, and the time, by layer."""
        from snapkv.lab.study.figures import Panel, curves

        exact, own = rows[0], list(rows[1:-1])
        of_exact = [exact | {"layer": row["layer"]} for row in own]
        titles = {
            "right": "Numbers found",
            "token_probability": "Probability of the number's tokens",
            "time": "Time, of that of exact reading",
        }
        return curves(
            Panel(title=title, x="layer", y=y, curves={"selective": own, EXACT: of_exact})
            for y, title in titles.items()
        )


def _first_that_stays(rows: Sequence[Record]) -> int | None:
    """The first layer that is enough, as is the next candidate, if there is one."""
    for row, behind in zip(rows, [*rows[1:], None], strict=True):
        if row["enough"] and (behind is None or behind["enough"]):
            layer: int = row["layer"]
            return layer
    return None


def _line(row: Record) -> tuple[str, ...]:
    return (
        "the end, exact" if row["of"] == EXACT else f"{row['layer']}",
        f"{row['right']:.2f}",
        "-" if row["of"] == EXACT else str(row["lost"]),
        f"{row['loss']:.3f}",
        f"{row['time']:.2f}",
    )
