"""Whether other questions look at other parts of the same document (Fig. 4, Sec. 4.2.1)."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_at_least
from snapkv_lab.evaluate.store import Record
from snapkv_lab.study.base import Part, ReadingStudy, Table, grouped, mean_rows, over_layers

if TYPE_CHECKING:
    from torch import Tensor

    from snapkv.app.models import LoadedModel
    from snapkv.policies import PromptLayer
    from snapkv_lab.study.reading import AnsweredPrompt


@dataclass(frozen=True, kw_only=True)
class Instructions(ReadingStudy):
    """Whether other questions look at other parts of the same document.

    All questions are asked about every document. A question and its answer vote together, each
    query head keeps the best part of the document, and every two questions are compared: which
    part of the one's positions are the other's too. What agreement there could be is told by
    halves: the votes of every other token of one question with those of the tokens between them,
    of the same question and of another.

    Args:
        keep_ratio: the part of the document that is kept.
        answer_length: tokens of every answer.
    """

    name: ClassVar[str] = "instructions"
    by: ClassVar[tuple[str, ...]] = ("compared", "questions", "layer")
    numbers: ClassVar[tuple[str, ...]] = ("overlap", "overlap_of_halves")

    keep_ratio: float = 0.05
    answer_length: int = 64

    def __post_init__(self) -> None:
        """Check that there is something to compare."""
        super().__post_init__()
        require_at_least("answer_length", self.answer_length, 1)
        if len(self.questions) < 2:
            raise InvalidArgumentError(
                f"question: expected at least two to compare, got {len(self.questions)}; ask more"
            )
        if not 0 < self.keep_ratio < 1 or int(self.keep_ratio * self.document_tokens) < 1:
            raise InvalidArgumentError(
                f"keep_ratio: expected a part of {self.document_tokens:,} positions that is at "
                f"least one, got {self.keep_ratio}; pass 0.05"
            )

    @property
    def answer_tokens(self) -> int:
        """The length that is asked for."""
        return self.answer_length

    def parts(self, texts: Sequence[tuple[str, str]]) -> Iterator[Part]:
        """A document with all questions."""
        for name, text in texts:
            samples = tuple(self.sample(name, text, question) for question in self.questions)
            yield Part(name=name, variant="all", samples=samples)

    def look(
        self, loaded: "LoadedModel", part: Part, readings: Sequence["AnsweredPrompt"]
    ) -> list[Record]:
        """A row per pair of questions and layer."""
        from snapkv.app.observing import observed
        from snapkv_lab.study.votes import overlap

        document = common_tokens([reading.ids[0].tolist() for reading in readings])
        votes = [
            observed(
                loaded,
                reading.ids,
                reading.tokens - document,
                lambda layer: self._votes(layer, document),
            ).seen
            for reading in readings
        ]
        pairs = list(itertools.combinations_with_replacement(range(len(readings)), 2))
        return [
            {
                "compared": "one question" if one == other else "different questions",
                "questions": f"{one + 1} and {other + 1}",
                "layer": layer,
                "overlap": overlap(votes[one][layer][0], votes[other][layer][0]),
                "overlap_of_halves": overlap(votes[one][layer][1], votes[other][layer][2]),
            }
            for layer in votes[0]
            for one, other in pairs
        ]

    def _votes(self, layer: "PromptLayer", document: int) -> "Tensor":
        """(3, Hq, document) bool: selected by all voters, by every other one, and by the rest."""
        import torch

        from snapkv_lab.study.votes import attention_of_halves, best

        halves = attention_of_halves(layer, document, layer.keys.shape[2], document)
        keep_tokens = int(self.keep_ratio * document)
        return torch.stack([best(votes, keep_tokens) for votes in (halves.sum(dim=0), *halves)])

    def table(self, rows: Sequence[Record]) -> Table:
        """Overlaps over all layers, by pair."""
        return Table(
            title="overlap of selected positions: mean over layers (lowest to highest)",
            header=("questions", "overlap", "of halves"),
            lines=[
                (questions, over_layers(own, "overlap"), over_layers(own, "overlap_of_halves"))
                for (questions,), own in grouped(rows, ("questions",)).items()
            ],
        )

    def figure(self, rows: Sequence[Record]) -> Any:
        """Fig. 4, a curve over the layers for every pair, and the halves' means."""
        from snapkv_lab.study.figures import Panel, curves

        different = (row for row in rows if row["compared"] == "different questions")
        means = mean_rows(rows, ("compared", "layer"), ("overlap_of_halves",))
        return curves(
            [
                Panel(
                    title="Different questions",
                    x="layer",
                    y="overlap",
                    curves={
                        name: own for (name,), own in grouped(different, ("questions",)).items()
                    },
                ),
                Panel(
                    title="Every other token against the rest",
                    x="layer",
                    y="overlap_of_halves",
                    curves={name: own for (name,), own in grouped(means, ("compared",)).items()},
                ),
            ]
        )


def common_tokens(texts: Sequence[Sequence[int]]) -> int:
    """How many of their first tokens all texts share."""
    shortest = min(map(len, texts))
    together = zip(*texts, strict=False)
    return next((i for i, tokens in enumerate(together) if len(set(tokens)) > 1), shortest)
