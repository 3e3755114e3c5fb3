"""Functions of a package, asked for by what they do, several in one conversation.

After RepoQA (Liu et al., 2024, arXiv 2406.06025), as SCBench asks it in turns (Li et al., 2024,
arXiv 2412.10319): the model has read the code, gets a description of one function that does not say
its name, and has to write that function again. An answer is right if, of all functions, it is most
like the right one, and if that likeness, the BLEU of the words between white space, is at least 0.8
(the threshold of SCBench's scores).

What is ours: the code is of an installed package, in as many functions as fit, without comments;
descriptions are the functions' own docstrings, where RepoQA has a language model describe ten
functions of each repository; an answer is likened to every function of the text and not to those
ten alone; BLEU is not smoothed, which changes no verdict at this threshold.
"""

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from snapkv.app.settings import GenerationSettings
from snapkv.errors import InvalidArgumentError
from snapkv_lab.evaluate.bleu import bleu
from snapkv_lab.evaluate.described_functions import STANDARD_LIBRARY, DescribedFunction, drawn
from snapkv_lab.evaluate.sample import Conversation, Sample
from snapkv_lab.evaluate.tasks.conversations import ConversationTask

_HEADER = "Functions of a Python package, file by file:"
_QUESTION = (
    "\n\nOne of the functions is described like this: {}\nWrite that function again, exactly as it "
    "stands there, and nothing else."
)
_PLAIN = "\n\nDescription of one of the functions: {}\nThe function:\n\n"
_LEAST_LIKENESS = 0.8
_SPARE_TOKENS = 48  # for what models say before a function, and around it


@dataclass(frozen=True, kw_only=True)
class Functions(ConversationTask):
    """Functions of a package, asked for by what they do in one conversation (RepoQA, SCBench).

    Args:
        package: whose functions: an installed one as it is imported, or stdlib for the modules that
            come with Python.
        cloze: begin every answer with the function's name; small models need it.
    """

    name: ClassVar[str] = "functions"
    parts: ClassVar[str] = "functions"
    most_parts: ClassVar[int] = 2_000

    package: str = STANDARD_LIBRARY
    cloze: bool = False

    def score(self, sample: Sample, prediction: str) -> float:
        """Whether the answer is most like the right function of all, and alike enough."""
        said = written_function(sample.answer_start + prediction).split()
        right = bleu(said, sample.references[0].split())
        others = (bleu(said, code.split()) for code in sample.details["others"])
        return float(right >= _LEAST_LIKENESS and right > max(others, default=0.0))

    def conversation(self, tokenizer: Any, name: str, length: int, count: int) -> Conversation:
        """A text of up to `count` functions, and the questions about them.

        Raises:
            InvalidArgumentError: there is no such package, or it has fewer functions than there
                are questions.
        """
        draw = random.Random(f"{self.seed}/{name}")
        there = list(itertools.islice(drawn(self.package, draw), count))
        if len(there) < self.questions:
            raise InvalidArgumentError(
                f"package: expected one with at least {self.questions} functions of a few lines "
                f"that a docstring describes, got {self.package} with {len(there)}; name another, "
                "or ask fewer questions"
            )
        asked = random.Random(f"{self.seed}/{name}/asked").sample(there, self.questions)
        first, *later = (
            self._turn(tokenizer, f"{name}/{turn}", {"turn": turn, "length": length}, one, there)
            for turn, one in enumerate(asked, 1)
        )
        text = {"context": _text(there)}
        return Conversation(**first | text, later=tuple(Sample(**turn) for turn in later))

    def _turn(
        self,
        tokenizer: Any,
        name: str,
        cell: dict[str, Any],
        asked: DescribedFunction,
        there: Sequence[DescribedFunction],
    ) -> dict[str, Any]:
        """What a question's sample is made of; the text stands before the first one alone."""
        tokens = len(tokenizer(asked.code, add_special_tokens=False)["input_ids"])
        return {
            "name": name,
            "cell": cell,
            "context": "",
            "question": _QUESTION.format(asked.description),
            "plain_question": _PLAIN.format(asked.description),
            "answer_start": f"def {asked.name}" if self.cloze else "",
            "references": (asked.code,),
            "details": {"others": tuple(one.code for one in there if one is not asked)},
            "settings": GenerationSettings(
                max_new_tokens=tokens + _SPARE_TOKENS,
                stop_strings=("\n\n",) if self.cloze else (),
            ),
        }


def _text(functions: Sequence[DescribedFunction]) -> str:
    """The functions with blank lines between them, each file's behind its name."""
    parts = [_HEADER]
    for file, own in itertools.groupby(functions, key=lambda one: one.file):
        parts += [f"# {file}", *(one.code for one in own)]
    return "\n\n".join(parts)


def written_function(answer: str) -> str:
    """The first function that an answer writes, in its first block of code where it has one.

    Without any it is all of the block, or of the answer.
    """
    fenced = re.search(r"^```\w*[ \t]*\n(.*?)(?:^```|\Z)", answer, re.S | re.M)
    code = fenced[1] if fenced else answer
    found = re.search(r"^def .*(?:\n(?:[ \t].*|[ \t]*(?=\n)|\).*))*", code, re.M)
    return found[0].strip() if found else code
