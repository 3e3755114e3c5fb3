"""Several questions about one text, asked one after the other in one conversation.

The tokens that a method evicts for one question may be needed for the next one. The task follows
SCBench (Li et al., 2024, arXiv 2412.10319, the multi-turn mode): a text is read and compressed
once, and the questions are asked one after the other, each after the model's own previous answers.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.haystack import draw_distinct, draw_number, draw_word_key
from snapkv_lab.evaluate.sample import Cell, Conversation, Sample
from snapkv_lab.evaluate.task import Task, fit_samples

_MOST_LINES = 100_000


@dataclass(frozen=True, kw_only=True)
class Turns(Task):
    """Numbers of a long list, asked for one after the other in one conversation (SCBench).

    It is the task Retr.KV with words instead of UUIDs as names, which small models can find.

    Args:
        lengths: tokens of the text, the first question and its answer together, never more.
        questions: how many are asked about every text.
        samples_each: texts of every length.
        seed: random seed for the texts and the questions.
        cloze: begin every answer with the name, as it stands in the list; small models need it.
    """

    name: ClassVar[str] = "turns"
    metric: ClassVar[str] = "accuracy"
    axes: ClassVar[tuple[str, ...]] = ("turn", "length")
    has_turns: ClassVar[bool] = True
    digits: ClassVar[int] = 5

    lengths: tuple[int, ...] = (1024, 4096)
    questions: int = 5
    samples_each: int = 10
    seed: int = 42
    cloze: bool = False

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidArgumentError: a number is out of range, or there is no length.
            InvalidTypeError: a number is not an integer.
        """
        self.require(questions=1, samples_each=1, lengths=1)

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Yield all conversations of the task.

        Raises:
            InvalidArgumentError: a length has no room for `questions` lines and a question.
        """
        for length in self.lengths:
            names = (f"{length}/{index}" for index in range(self.samples_each))
            yield from fit_samples(
                (partial(self._conversation, name, length) for name in names),
                tokenizer,
                length,
                least=self.questions,
                most=_MOST_LINES,
                what=f"a question, its answer and {self.questions} lines",
            )

    def score(self, sample: Sample, prediction: str) -> float:
        """Return 1 if the first number in the answer is right, and 0 if it is not."""
        return float(re.findall(r"\d+", prediction)[:1] == [sample.references[0]])

    def _conversation(self, name: str, length: int, count: int) -> Conversation:
        """Return a conversation about a list with the given number of lines. Equal arguments give
        equal conversations.

        Args:
            name: the name of the conversation, which also decides what is drawn.
            length: the length that the cells say; it does not change the number of lines.
            count: the number of lines, at least `questions`.

        Raises:
            InvalidArgumentError: there are not enough different names for so many lines.
        """
        draw = random.Random(f"{self.seed}/{name}")
        keys = draw_distinct(lambda: draw_word_key(draw), count)
        numbers = {key: draw_number(draw, self.digits) for key in keys}
        lines = "\n".join(f"{key}: {value}" for key, value in numbers.items())
        first, *later = (
            self._turn(f"{name}/{turn}", {"turn": turn, "length": length}, key, numbers[key])
            for turn, key in enumerate(draw.sample(keys, self.questions), 1)
        )
        context = f"Names, and the number of each:\n\n{lines}"
        return Conversation(**vars(first) | {"context": context}, later=tuple(later))

    def _turn(self, name: str, cell: Cell, key: str, value: str) -> Sample:
        """Return a single question of a conversation. Its context is empty.

        Args:
            name: the name of the sample.
            cell: the group to which the sample belongs.
            key: the name in the list that is asked for.
            value: the number of this name, which is the right answer.
        """
        cloze = "\n\nThe number of one of the names:\n\n"
        question = f"What is the number of {key}?"
        return Sample(
            name=name,
            cell=cell,
            context="",
            question=cloze if self.cloze else f"\n\n{question} Answer with the number.",
            plain_question=cloze if self.cloze else f"\n\nQuestion: {question}\nAnswer:",
            answer_start=f"{key}:" if self.cloze else "",
            references=(value,),
            settings=GenerationSettings(
                max_new_tokens=self.digits + 3 if self.cloze else 32, stop_strings=("\n",)
            ),
        )
