"""Whether the vote works as well with the question before the document (Fig. 5, Sec. 4.2.2)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snapkv_lab.evaluate.store import Record
from snapkv_lab.study.base import Part
from snapkv_lab.study.hit_rate import HitRate

if TYPE_CHECKING:
    from snapkv.app.models import LoadedModel
    from snapkv_lab.study.reading import AnsweredPrompt


@dataclass(frozen=True, kw_only=True)
class Position(HitRate):
    """Whether the vote works as well with the question before the document.

    The hit rates of `hit-rate`, for the same question about the same document at the end of the
    prompt and at its beginning. At the beginning, the window that votes has no word of it.

    Args:
        generation_windows: parts of the answer; their rates are averaged.
    """

    name: ClassVar[str] = "position"
    compared: ClassVar[str] = "question"
    by: ClassVar[tuple[str, ...]] = ("selection", "question", "layer")

    generation_windows: int = 2

    def parts(self, texts: Sequence[tuple[str, str]]) -> Iterator[Part]:
        """Each document twice."""
        for part in super().parts(texts):
            yield part
            (last,) = part.samples
            question = last.question.strip()
            first = self.sample(part.name, last.context, question, first=True)
            yield Part(name=part.name, variant="first", samples=(first,))

    def look(
        self, loaded: "LoadedModel", part: Part, readings: Sequence["AnsweredPrompt"]
    ) -> list[Record]:
        """The rows of `hit-rate`, with the question's place."""
        return [{"question": part.variant, **row} for row in super().look(loaded, part, readings)]
