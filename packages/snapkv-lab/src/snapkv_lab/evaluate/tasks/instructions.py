"""Several instructions before a long text, each of which a program can check.

Eviction may drop one of several instructions while the others stay. Every sample has three
instructions before the text: a code word to copy, a word to begin with, and a mark to end with. One
of them is checked, without a judge and in any language.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.haystack import CHARACTERS_PER_TOKEN, HaystackTask, token_ids
from snapkv_lab.evaluate.sample import Sample

_HEADER = "Instructions for your answer:\n"
_LINES = {
    "code": "- The code word is {}.\n",
    "begin": "- Begin your answer with the word {}.\n",
    "end": "- End your answer with the mark {}.\n",
}
_FREE = (
    "\n\nFollow the instructions for your answer that stand before the text: begin as they say, "
    "write the code word, and end as they say."
)
_CLOZE = "\n\nRepeat the instructions for your answer."
_WORDS = ("falcon", "pelican", "walrus", "badger", "otter", "heron", "marten", "beaver")
_OVERHEAD_TOKENS = 150  # instructions, question, chat template and answer

_CHECKS: dict[str, Callable[[str, str], bool]] = {
    "code": lambda answer, wanted: wanted in answer,
    "begin": lambda answer, wanted: answer.startswith(wanted),
    "end": lambda answer, wanted: answer.rstrip(".").endswith(wanted),
}


@dataclass(frozen=True, kw_only=True)
class Instructions(HaystackTask):
    """Three instructions before a long text; whether an answer follows each of them.

    Args:
        lengths: tokens of the whole prompt, about.
        samples_each: samples of every length and instruction.
        cloze: ask to repeat the instructions and begin the one that is checked, which small models
            need; otherwise the answer has to follow all of them.
        protect: keep the instructions, whatever their votes.
        seed: random seed for words, marks and the place where the text begins.
    """

    name: ClassVar[str] = "instructions"
    metric: ClassVar[str] = "followed"
    axes: ClassVar[tuple[str, ...]] = ("length", "instruction")

    lengths: tuple[int, ...] = (1024, 2048)
    samples_each: int = 5
    cloze: bool = False
    protect: bool = field(default=False, metadata={"flag": "--protect-instructions"})
    haystack: str | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        """Check the settings, and read the haystack now, so that a missing folder is refused early.

        A warning about each file of the folder that is not read is written to standard error.

        Raises:
            InvalidArgumentError: a number is too small or too large, or `lengths` is empty. A
                length must be at least 300.
            InvalidTypeError: a number is not an integer.
            DocumentError: the haystack is missing or holds no text.
        """
        self.require(samples_each=1, lengths=2 * _OVERHEAD_TOKENS)
        self.text  # noqa: B018 # is read here

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        for length, index in itertools.product(self.lengths, range(self.samples_each)):
            draw = random.Random(f"{self.seed}/{length}/{index}")
            code, begin = draw.sample(_WORDS, 2)
            wanted = {"code": code, "begin": begin, "end": f"#{draw.randrange(100, 1000)}"}
            text = self._text(tokenizer, length - _OVERHEAD_TOKENS, draw)
            for rule in _LINES:
                yield self._sample(f"{length}/{rule}/{index}", length, rule, wanted, text)

    def score(self, sample: Sample, prediction: str) -> float:
        """Return 1 if the answer follows the instruction that the sample checks, and 0 if not.

        With `cloze`, return 1 if the answer begins with the word that the instruction names. Upper
        and lower case are not distinguished, and quotation marks around the answer are ignored.
        """
        check = _CHECKS["begin" if self.cloze else str(sample.cell["instruction"])]
        return float(check(prediction.strip().strip('"').lower(), sample.references[0]))

    def _sample(
        self, name: str, length: int, rule: str, wanted: dict[str, str], text: str
    ) -> Sample:
        """Return the sample that checks one of the three instructions.

        Args:
            name: the name of the sample.
            length: the length of the cell in tokens.
            rule: the instruction that is checked, a key of `_LINES`.
            wanted: the words and the mark of all three instructions.
            text: the text after the instructions.
        """
        block = _HEADER + "".join(line.format(wanted[key]) for key, line in _LINES.items())
        tokens = 8 if self.cloze else 64
        return Sample(
            name=name,
            cell={"length": length, "instruction": rule},
            context=f"{block}\n{text}",
            question=_CLOZE if self.cloze else _FREE,
            answer_start=_LINES[rule].partition(" {}")[0] if self.cloze else "",
            references=(wanted[rule],),
            settings=GenerationSettings(max_new_tokens=tokens),
            details={"protect": [block.strip()]} if self.protect else {},
        )

    def _text(self, tokenizer: Any, tokens: int, draw: random.Random) -> str:
        """Return a part of the haystack with at most the given number of tokens, and usually with
        exactly this number.

        It begins at a random place. After the end of the haystack it continues at its beginning.
        """
        source, characters = self.text.text, tokens * CHARACTERS_PER_TOKEN
        start = draw.randrange(len(source))
        piece = (source[start:] + source * (1 + characters // len(source)))[:characters]
        ids = token_ids(tokenizer, piece)[:tokens]
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        return text
