"""Several questions about one text, in one conversation.

What a method drops for one question may be what the next one needs. After SCBench (Li et al., 2024,
arXiv 2412.10319, the multi-turn mode and its Retr.KV): a long list of names and their numbers is
read and compressed once, and one number after the other is asked for behind the answers before.
Here the answers in the conversation are the model's own, and names are words instead of UUIDs,
which small models can find again.
"""

import itertools
import random
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from snapkv.app.settings import GenerationSettings
from snapkv_lab.evaluate.sample import Conversation, Sample
from snapkv_lab.evaluate.tasks.conversations import ConversationTask
from snapkv_lab.evaluate.words import distinct, number, word_key

_HEADER = "Names, and the number of each:\n\n"
_CLOZE = "\n\nThe number of one of the names:\n\n"
_QUESTION = "\n\nWhat is the number of {}? Answer with the number."
_PLAIN = "\n\nQuestion: What is the number of {}?\nAnswer:"
_DIGITS = 5


@dataclass(frozen=True, kw_only=True)
class Turns(ConversationTask):
    """Numbers of a long list, asked for one after the other in one conversation (SCBench).

    Args:
        cloze: begin every answer with the name, as it stands in the list; small models need it.
    """

    name: ClassVar[str] = "turns"
    parts: ClassVar[str] = "lines"
    most_parts: ClassVar[int] = 100_000

    cloze: bool = False

    def score(self, sample: Sample, prediction: str) -> float:
        """Whether the first number of the answer is that of the name."""
        numbers = re.findall(r"\d+", prediction)
        return float(numbers[:1] == [sample.references[0]])

    def conversation(self, tokenizer: Any, name: str, length: int, count: int) -> Conversation:
        """A list of `count` lines, and the questions about it."""
        del tokenizer
        draw = random.Random(f"{self.seed}/{name}")
        keys = distinct(lambda: word_key(draw), count)
        numbers = {key: number(draw, _DIGITS) for key in keys}
        first, *later = (
            self._turn(f"{name}/{turn}", {"turn": turn, "length": length}, key, numbers[key])
            for turn, key in enumerate(draw.sample(keys, self.questions), 1)
        )
        context = _HEADER + "\n".join(itertools.starmap("{}: {}".format, numbers.items()))
        return Conversation(**first | {"context": context}, later=tuple(Sample(**t) for t in later))

    def _turn(self, name: str, cell: dict[str, Any], key: str, value: str) -> dict[str, Any]:
        """What a question's sample is made of; the text stands before the first one alone."""
        return {
            "name": name,
            "cell": cell,
            "context": "",
            "question": _CLOZE if self.cloze else _QUESTION.format(key),
            "plain_question": _CLOZE if self.cloze else _PLAIN.format(key),
            "answer_start": f"{key}:" if self.cloze else "",
            "references": (value,),
            "settings": GenerationSettings(
                max_new_tokens=_DIGITS + 3 if self.cloze else 32, stop_strings=("\n",)
            ),
        }
