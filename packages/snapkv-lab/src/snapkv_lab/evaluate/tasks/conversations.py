"""What the tasks have in common that ask several questions about one text."""

import functools
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from snapkv.errors import InvalidArgumentError
from snapkv.validation import require_at_least, require_each_at_least
from snapkv_lab.evaluate.fitting import fitted
from snapkv_lab.evaluate.sample import Conversation, Sample
from snapkv_lab.evaluate.task import Task


@dataclass(frozen=True, kw_only=True)
class ConversationTask(Task):
    """Several questions about one text, asked one after the other in one conversation.

    Args:
        lengths: tokens of the text, the first question and its answer together, never more.
        questions: how many are asked about every text.
        samples_each: texts of every length.
        seed: of what the texts hold and what is asked for.

    Attributes:
        parts: what a text is made of.
        most_parts: how many of them a text has at most.
    """

    metric: ClassVar[str] = "accuracy"
    axes: ClassVar[tuple[str, ...]] = ("turn", "length")
    has_turns: ClassVar[bool] = True
    parts: ClassVar[str]
    most_parts: ClassVar[int]

    lengths: tuple[int, ...] = (1024, 4096)
    questions: int = 5
    samples_each: int = 10
    seed: int = 42

    def __post_init__(self) -> None:
        """Check the settings."""
        require_at_least("questions", self.questions, 1)
        require_at_least("samples_each", self.samples_each, 1)
        require_each_at_least("lengths", self.lengths, 1)

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Conversations of every length."""
        for length in self.lengths:
            hint = None
            for index in range(self.samples_each):
                name = f"{length}/{index}"
                found = fitted(
                    functools.partial(self.conversation, tokenizer, name, length),
                    tokenizer,
                    length,
                    least=self.questions,
                    most=self.most_parts,
                    hint=hint,
                )
                if found is None:
                    raise InvalidArgumentError(
                        f"lengths: expected room for a question, its answer and {self.questions} "
                        f"{self.parts}, got {length} tokens; pass a larger length, or fewer "
                        "questions"
                    )
                sample, hint = found
                yield sample

    @abstractmethod
    def conversation(self, tokenizer: Any, name: str, length: int, count: int) -> Conversation:
        """The questions about a text of `count` parts, always the same for the same arguments.

        Args:
            tokenizer: the model's.
            name: of the sample; what is drawn depends on it.
            length: for the cells of the turns.
            count: at least `questions`.
        """
