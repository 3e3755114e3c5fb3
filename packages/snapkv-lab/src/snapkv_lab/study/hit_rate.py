"""How much of what an answer attends to strongly had been voted for (Eq. 4-8, Sec. 4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_at_least
from snapkv_lab.evaluate.store import Record
from snapkv_lab.study.base import Part, ReadingStudy, Table, grouped, over_layers, weighted

if TYPE_CHECKING:
    from torch import Tensor

    from snapkv.app.models import LoadedModel
    from snapkv.policies import PromptLayer, SnapKV
    from snapkv_lab.study.reading import AnsweredPrompt

SELECTIONS = ("vote", "sinks and recent")
"""The window's vote, and as many of the first and the last positions, which need no vote."""


@dataclass(frozen=True, kw_only=True)
class HitRate(ReadingStudy):
    """How much of what an answer attends to strongly had been voted for.

    The last tokens of the prompt vote, and each query head keeps the best part of the prefix. A
    position of the prefix is important to a generated token and a head where that pays it more
    attention than the threshold; the hit rate is the part of the important positions that was
    kept. The sums of Eq. 8 are over the heads of a layer and the tokens of a generation window.
    Beside it stands the rate without the first tokens, which nearly every head attends to
    whatever the prompt says, and both rates of the first and the last tokens of the prefix.

    Args:
        keep_ratio: the part of the prefix that is kept, p in the paper.
        threshold: attention that makes a position important, theta in the paper.
        window_size: tokens at the end of the prompt that vote.
        kernel_size: width of the pooling; 1, as in the paper's study, for none.
        group_reduce: how heads that share keys vote together; none as in the paper's study.
        sink_tokens: first tokens that are left out of the second rate.
        generation_windows: parts of the answer to look at one by one.
        generation_tokens: tokens of each part.
    """

    name: ClassVar[str] = "hit-rate"
    compared: ClassVar[str] = "window"
    by: ClassVar[tuple[str, ...]] = ("selection", "window", "layer")
    numbers: ClassVar[tuple[str, ...]] = (
        "hit_rate",
        "hit_rate_beyond_sinks",
        "important",
        "important_beyond_sinks",
    )

    keep_ratio: float = 0.05
    threshold: float = 0.05
    window_size: int = 32
    kernel_size: int = 1
    group_reduce: Literal["none", "mean", "max", "sum"] = "none"
    sink_tokens: int = 4
    generation_windows: int = 4
    generation_tokens: int = 128

    def __post_init__(self) -> None:
        """Check every setting; those of the vote are checked by the vote."""
        super().__post_init__()
        for name in ("generation_windows", "generation_tokens"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("sink_tokens", self.sink_tokens, 0)
        if not 0 < self.threshold < 1:
            raise InvalidArgumentError(
                f"threshold: expected attention between 0 and 1, got {self.threshold}; pass 0.05"
            )
        self._vote()
        if int(self.keep_ratio * (self.document_tokens - self.window_size)) <= self.sink_tokens:
            raise InvalidArgumentError(
                f"keep_ratio: expected to keep more than sink_tokens={self.sink_tokens} positions "
                f"of a document of {self.document_tokens} tokens, got {self.keep_ratio}; raise "
                "keep_ratio or document_tokens"
            )

    @property
    def answer_tokens(self) -> int:
        """All windows of the answer."""
        return self.generation_windows * self.generation_tokens

    def look(
        self, loaded: "LoadedModel", part: Part, readings: Sequence["AnsweredPrompt"]
    ) -> list[Record]:
        """A row per selection, window of the answer and layer."""
        from snapkv.app.observing import observed

        (reading,) = readings
        found = observed(
            loaded,
            reading.ids,
            self.window_size + self.answer_tokens,
            lambda layer: self.rates(layer, reading.prompt_tokens),
        ).seen
        return [
            {"selection": selection, "window": window, "layer": layer, **rates}
            for layer, rows in found.items()
            for (selection, window), rates in rows.items()
        ]

    def rates(
        self, layer: "PromptLayer", prompt_tokens: int
    ) -> dict[tuple[str, int], dict[str, float | None]]:
        """Hit rates in one layer, by selection and window of the answer, which count from 1."""
        from snapkv_lab.study.votes import important_and_hit

        masks = self._selected(layer, prompt_tokens)
        rows = {}
        for window in range(self.generation_windows):
            start = prompt_tokens + window * self.generation_tokens
            stop = start + self.generation_tokens
            important, hit = important_and_hit(
                layer, masks, start=start, stop=stop, threshold=self.threshold
            )
            queries = self.generation_tokens * layer.queries.shape[1]
            for number, selection in enumerate(SELECTIONS):
                rows[selection, window + 1] = {
                    "hit_rate": _rate(hit[number], important),
                    "hit_rate_beyond_sinks": _rate(
                        hit[number, self.sink_tokens :], important[self.sink_tokens :]
                    ),
                    "important": int(important.sum()) / queries,
                    "important_beyond_sinks": int(important[self.sink_tokens :].sum()) / queries,
                }
        return rows

    def _selected(self, layer: "PromptLayer", prompt_tokens: int) -> "Tensor":
        """(2, Hq, prefix) bool: what each of `SELECTIONS` keeps of the prefix."""
        import torch

        from snapkv_lab.study.votes import between, selected

        prefix = prompt_tokens - self.window_size
        voted = selected(self._vote(), between(layer, prefix, prompt_tokens), prefix)
        recent = torch.arange(prefix, device=voted.device) >= (
            prefix - int(voted[0].sum()) + self.sink_tokens
        )
        recent[: self.sink_tokens] = True
        return torch.stack([voted, recent.expand_as(voted)])

    def _vote(self) -> "SnapKV":
        from snapkv.policies import SnapKV

        return SnapKV(
            keep_ratio=self.keep_ratio,
            window_size=self.window_size,
            kernel_size=self.kernel_size,
            group_reduce=self.group_reduce,
        )

    def table(self, rows: Sequence[Record]) -> Table:
        """Rates over all layers, by what was kept and what is compared.

        In layers with few important positions a rate means little, and weighs little in the
        weighted mean.
        """
        beyond = f"beyond the first {self.sink_tokens}"
        rates = ("hit_rate", "important"), ("hit_rate_beyond_sinks", "important_beyond_sinks")
        return Table(
            title="hit rate: mean over layers (lowest to highest), and mean weighted by the number "
            "of important positions in a layer",
            header=("kept", self.compared, "hit rate", "weighted", beyond, "weighted"),
            lines=[
                (
                    selection,
                    str(value),
                    *(
                        text
                        for rate, count in rates
                        for text in (over_layers(own, rate), weighted(own, rate, count))
                    ),
                )
                for (selection, value), own in grouped(rows, ("selection", self.compared)).items()
            ],
        )

    def figure(self, rows: Sequence[Record]) -> Any:
        """A curve of either rate over the layers, a colour for each of what is compared."""
        from snapkv_lab.study.figures import Panel, curves

        of_vote, of_recent = (self._series(rows, selection) for selection in SELECTIONS)
        titles = {
            "hit_rate": "All important positions",
            "hit_rate_beyond_sinks": f"Without the first {self.sink_tokens} tokens",
        }
        return curves(
            Panel(title=title, x="layer", y=y, curves=of_vote, dotted=of_recent)
            for y, title in titles.items()
        )

    def _series(self, rows: Sequence[Record], selection: str) -> dict[str, list[Record]]:
        own = (row for row in rows if row["selection"] == selection)
        return {
            f"{selection}, {self.compared} {value}": line
            for (value,), line in grouped(own, (self.compared,)).items()
        }


def _rate(hit: "Tensor", important: "Tensor") -> float | None:
    """Eq. 8; None where nothing is important."""
    total = int(important.sum())
    return int(hit.sum()) / total if total else None
