"""Which positions each window of the prompt attends to most, against the answer (Fig. 2 and 3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_at_least
from snapkv_lab.evaluate.store import Record
from snapkv_lab.study.base import Part, ReadingStudy, Table, grouped, over_layers

if TYPE_CHECKING:
    from snapkv.app.models import LoadedModel
    from snapkv.policies import PromptLayer
    from snapkv_lab.study.reading import AnsweredPrompt


@dataclass(frozen=True, kw_only=True)
class Overlap(ReadingStudy):
    """Which positions each window of the prompt attends to most, against the answer.

    The end of the prompt and the answer are cut into windows. The attention that a window pays the
    prompt is averaged over its tokens, and each query head's best positions are the window's; the
    overlap of two windows is the part of the one's positions that are the other's too. Windows
    of the prompt are compared with the whole answer (Fig. 2), those of the answer with the last
    window of the prompt (Fig. 3).

    Candidates are all positions before the last window. An early window cannot attend to what
    comes after it; a second number therefore has only the positions before the first window for
    candidates, which every window sees.

    Args:
        keep_ratio: the part of the candidates that a window keeps.
        window_tokens: tokens of a window, in prompt and answer.
        prompt_windows: windows of the prompt, the last one at its end.
        generation_windows: windows of the answer.
    """

    name: ClassVar[str] = "overlap"
    by: ClassVar[tuple[str, ...]] = ("of", "window", "layer")
    numbers: ClassVar[tuple[str, ...]] = ("overlap", "overlap_of_common")

    keep_ratio: float = 0.05
    window_tokens: int = 128
    prompt_windows: int = 20
    generation_windows: int = 4

    def __post_init__(self) -> None:
        """Check that the windows fit into the prompt."""
        super().__post_init__()
        for name in ("window_tokens", "prompt_windows", "generation_windows"):
            require_at_least(name, getattr(self, name), 1)
        before = self.document_tokens - self.prompt_windows * self.window_tokens
        if not 0 < self.keep_ratio < 1 or int(self.keep_ratio * before) < 1:
            raise InvalidArgumentError(
                f"keep_ratio: expected a part of the {max(before, 0):,} positions before "
                f"{self.prompt_windows} windows of {self.window_tokens} that is at least one "
                f"position, got {self.keep_ratio}; raise document_tokens, or lower prompt_windows"
            )

    @property
    def answer_tokens(self) -> int:
        """All windows of the answer."""
        return self.generation_windows * self.window_tokens

    def look(
        self, loaded: "LoadedModel", part: Part, readings: Sequence["AnsweredPrompt"]
    ) -> list[Record]:
        """A row per window and layer."""
        from snapkv.app.observing import observed

        (reading,) = readings
        found = observed(
            loaded,
            reading.ids,
            self.prompt_windows * self.window_tokens + self.answer_tokens,
            lambda layer: self.overlaps(layer, reading.prompt_tokens),
        ).seen
        return [
            {"of": of, "window": window, "layer": layer, **overlaps}
            for layer, rows in found.items()
            for (of, window), overlaps in rows.items()
        ]

    def overlaps(
        self, layer: "PromptLayer", prompt_tokens: int
    ) -> dict[tuple[str, int], dict[str, float]]:
        """Overlaps in one layer, by what the window is of and its number.

        Windows of the prompt count from ``-prompt_windows`` to -1, those of the answer from 1.
        """
        import torch

        from snapkv_lab.study.votes import best, mean_attention, overlap

        size, T = self.window_tokens, prompt_tokens
        starts = {
            **{("prompt", i): T + i * size for i in range(-self.prompt_windows, 0)},
            **{("answer", i + 1): T + i * size for i in range(self.generation_windows)},
        }
        candidates = {
            "overlap": T - size,
            "overlap_of_common": T - self.prompt_windows * size,
        }
        attention = {
            window: mean_attention(layer, start, start + size, T - size)
            for window, start in starts.items()
        }
        answer = [a for (of, _), a in attention.items() if of == "answer"]
        whole = torch.stack(answer).mean(dim=0)
        rows: dict[tuple[str, int], dict[str, float]] = {window: {} for window in starts}
        for name, tokens in candidates.items():
            keep_tokens = int(self.keep_ratio * tokens)
            ours = {w: best(a[:, :tokens], keep_tokens) for w, a in attention.items()}
            against = {"prompt": best(whole[:, :tokens], keep_tokens), "answer": ours["prompt", -1]}
            for window in starts:
                rows[window][name] = overlap(against[window[0]], ours[window])
        return rows

    def table(self, rows: Sequence[Record]) -> Table:
        """Overlaps over all layers, by window."""
        return Table(
            title="overlap of windows of the prompt with the answer, and of windows of the answer "
            "with the prompt's last: mean over layers (lowest to highest)",
            header=("window", "overlap", "of common candidates"),
            lines=[
                (
                    f"{of} {window}",
                    over_layers(own, "overlap"),
                    over_layers(own, "overlap_of_common"),
                )
                for (of, window), own in grouped(rows, ("of", "window")).items()
            ],
        )

    def figure(self, rows: Sequence[Record]) -> Any:
        """Fig. 2, a curve per layer over the prompt's windows, and Fig. 3, over the layers."""
        from snapkv_lab.study.figures import Panel, curves

        layers = {f"layer {layer}": own for (layer,), own in _of("prompt", rows, "layer").items()}
        windows = {
            f"answer {window}": own for (window,), own in _of("answer", rows, "window").items()
        }
        return curves(
            [
                Panel(
                    title="Windows of the prompt against the answer",
                    x="window",
                    y="overlap",
                    curves=layers,
                ),
                Panel(
                    title="The same, of positions that all windows see",
                    x="window",
                    y="overlap_of_common",
                    curves=layers,
                ),
                Panel(
                    title="The prompt's last window against the answer",
                    x="layer",
                    y="overlap",
                    curves=windows,
                ),
            ]
        )


def _of(of: str, rows: Sequence[Record], by: str) -> dict[tuple[Any, ...], list[Record]]:
    return grouped((row for row in rows if row["of"] == of), (by,))
