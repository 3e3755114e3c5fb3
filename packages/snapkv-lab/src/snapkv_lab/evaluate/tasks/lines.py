"""LongEval-Lines: one of many numbered lines, asked for by its name.

The record is that of the public test (LongChat, 2023): every line has a number and a name that
consists of an adjective and a noun, and the prompt ends with the question for the number of one
line. As in the paper's ablation of pooling (Fig. 8), the number has five digits and the position of
the line varies. Names are drawn until all differ, which the public generator does not check.

Examples and cloze are not in the public test. The smallest models need both, without a chat
template. The examples are other lines of the record, repeated after the question as they are
written in it. The cloze begins the asked line in the same way.
"""

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.haystack import draw_distinct, draw_number, draw_word_key
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.task import Task, even_percents, fit_samples

_HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' "
    "and contains a '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each "
    "line index, memorize its corresponding <REGISTER_CONTENT>. At the end of the record, I will "
    "ask you to retrieve the corresponding <REGISTER_CONTENT> of a certain line index. Now the "
    "record start:\n\n"
)
_QUESTION = (
    "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {name}? I need the "
    "number."
)
_LINE = "line {name}: REGISTER_CONTENT is <"
_END = ">\n"
_DIGITS = 5
_MOST_LINES = 100_000


@dataclass(frozen=True, kw_only=True)
class Lines(Task):
    """The number of one named line among many (LongEval-Lines), at every length and position.

    Args:
        lengths: tokens of prompt and answer together, never more, a few less.
        positions: how many places of the asked line from the first (0) to the last (100 percent).
        samples_each: samples of every length and position.
        examples: other lines repeated after the question as a pattern; small models need three.
        cloze: begin the asked line for the model, up to its number.
        seed: random seed for names, numbers and examples.
    """

    name: ClassVar[str] = "lines"
    metric: ClassVar[str] = "accuracy"
    axes: ClassVar[tuple[str, ...]] = ("length", "position")

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    positions: int = 5
    samples_each: int = 5
    examples: int = 0
    cloze: bool = False
    seed: int = 42

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidArgumentError: a number is out of range, or there is no length.
            InvalidTypeError: a number is not an integer.
        """
        self.require(positions=1, samples_each=1, examples=0, lengths=1)

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        for length in self.lengths:
            places = itertools.product(even_percents(self.positions), range(self.samples_each))
            yield from fit_samples(
                (partial(self._record, length, *place) for place in places),
                tokenizer,
                length,
                least=self.examples + 1,
                most=_MOST_LINES,
                what=f"the question, the answer and {self.examples + 1} lines",
            )

    def score(self, sample: Sample, prediction: str) -> float:
        """Return 1 if the last whole number of the answer is the number of the line, and 0 if it is
        another one or the answer has no number.
        """
        numbers = re.findall(r"\d+", prediction)
        return float(bool(numbers) and int(numbers[-1]) == int(sample.references[0]))

    def _record(self, length: int, position: int, index: int, count: int) -> Sample:
        """Return a sample whose record has `count` lines. Equal arguments give equal samples.

        Args:
            length: the length that the sample's name and cell say; it does not change the number of
                lines.
            position: the place of the asked line, in percent.
            index: the number of the sample in its cell.
            count: the number of lines, more than `examples`.

        Raises:
            InvalidArgumentError: there are not enough different names for so many lines.
        """
        name = f"{length}/{position}/{index}"
        draw = random.Random(f"{self.seed}/{name}")
        target = round((count - 1) * position / 100)
        keys = draw_distinct(lambda: draw_word_key(draw), count)
        values = [draw_number(draw, _DIGITS) for _ in keys]
        others = draw.sample([i for i in range(count) if i != target], self.examples)
        lines = [_LINE.format(name=key) + value for key, value in zip(keys, values, strict=True)]
        shown_examples = "".join(f"\n{lines[i]}>" for i in others)
        question = _QUESTION.format(name=keys[target]) + shown_examples
        return Sample(
            name=name,
            cell={"length": length, "position": position},
            context=_HEADER + "".join(f"{line}{_END}" for line in lines),
            question=question,
            plain_question=f"{question}\n" if shown_examples or self.cloze else question,
            answer_start=_LINE.format(name=keys[target]) if self.cloze else "",
            references=(values[target],),
            settings=self._settings,
        )

    @property
    def _settings(self) -> GenerationSettings:
        """The settings for generating the answer.

        They allow the published 100 tokens, or fewer if the prompt shows how an answer ends.
        """
        if self.cloze:
            return GenerationSettings(max_new_tokens=_DIGITS + 3, stop_strings=(">",))
        return GenerationSettings(max_new_tokens=100, stop_strings=(_END,) if self.examples else ())
