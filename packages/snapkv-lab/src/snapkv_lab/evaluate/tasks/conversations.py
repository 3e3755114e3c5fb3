"""Several questions about one text, asked one after the other in one conversation.

What a method drops for one question may be what the next one needs. After SCBench (Li et al., 2024,
arXiv 2412.10319, the multi-turn mode): a text is read and compressed once, and one question after
the other is asked behind the answers before, which are the model's own here.
"""

import ast
import functools
import itertools
import random
import re
import sysconfig
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from snapkv.app.settings import GenerationSettings
from snapkv.errors import InvalidArgumentError
from snapkv.packages import find_package_file
from snapkv_lab.evaluate.haystack import distinct, number, word_key
from snapkv_lab.evaluate.metrics import bleu
from snapkv_lab.evaluate.sample import Cell, Conversation, Sample, TranscriptConversation
from snapkv_lab.evaluate.task import Task, all_fitted


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
        self.require(questions=1, samples_each=1, lengths=1)

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        """Conversations of every length."""
        for length in self.lengths:
            names = (f"{length}/{index}" for index in range(self.samples_each))
            yield from all_fitted(
                (partial(self._conversation, tokenizer, name, length) for name in names),
                tokenizer,
                length,
                least=self.questions,
                most=self.most_parts,
                what=f"a question, its answer and {self.questions} {self.parts}",
            )

    def _conversation(self, tokenizer: Any, name: str, length: int, count: int) -> Conversation:
        """The questions about a text of `count` parts, always the same for the same arguments."""
        context, asked = self._drawn(name, count)
        first, *later = (
            self._turn(tokenizer, f"{name}/{turn}", {"turn": turn, "length": length}, one)
            for turn, one in enumerate(asked, 1)
        )
        return Conversation(**vars(first) | {"context": context}, later=tuple(later))

    @abstractmethod
    def _drawn(self, name: str, count: int) -> tuple[str, Sequence[Any]]:
        """A text of up to `count` parts, drawn by its name, and what is asked for."""

    @abstractmethod
    def _turn(self, tokenizer: Any, name: str, cell: Cell, asked: Any) -> Sample:
        """A question, without the text."""


@dataclass(frozen=True, kw_only=True)
class Turns(ConversationTask):
    """Numbers of a long list, asked for one after the other in one conversation (SCBench).

    Its Retr.KV with words for UUIDs as names, which small models can find again.

    Args:
        cloze: begin every answer with the name, as it stands in the list; small models need it.
    """

    name: ClassVar[str] = "turns"
    parts: ClassVar[str] = "lines"
    most_parts: ClassVar[int] = 100_000
    digits: ClassVar[int] = 5

    cloze: bool = False

    def score(self, sample: Sample, prediction: str) -> float:
        """Whether the first number of the answer is that of the name."""
        return float(re.findall(r"\d+", prediction)[:1] == [sample.references[0]])

    def _drawn(self, name: str, count: int) -> tuple[str, Sequence[Any]]:
        draw = random.Random(f"{self.seed}/{name}")
        keys = distinct(lambda: word_key(draw), count)
        numbers = {key: number(draw, self.digits) for key in keys}
        lines = "\n".join(f"{key}: {value}" for key, value in numbers.items())
        asked = [(key, numbers[key]) for key in draw.sample(keys, self.questions)]
        return f"Names, and the number of each:\n\n{lines}", asked

    def _turn(self, tokenizer: Any, name: str, cell: Cell, asked: Any) -> Sample:
        del tokenizer
        key, value = asked
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


@dataclass(frozen=True, kw_only=True)
class ToolResults(Turns):
    """Numbers that tools have found, asked for behind a transcript of all calls and results.

    A user asks for one team after the other, the assistant calls a tool, and its result is a list
    of names and numbers. The questions ask for names of different results.

    Args:
        cloze: begin every answer with the name, as it stands in a result; small models need it.
        lines: of a result.
    """

    name: ClassVar[str] = "tool-results"
    parts: ClassVar[str] = "tool results"
    most_parts: ClassVar[int] = 2_000

    lines: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(lines=1)

    def _conversation(self, tokenizer: Any, name: str, length: int, count: int) -> Conversation:
        messages, asked = self.session(name, count)
        first, *later = (
            self._turn(tokenizer, f"{name}/{turn}", {"turn": turn, "length": length}, one)
            for turn, one in enumerate(asked[: self.questions], 1)
        )
        told = vars(first) | {"details": {"messages": messages}}
        return TranscriptConversation(**told, later=tuple(later))

    def session(
        self, name: str, count: int
    ) -> tuple[tuple[dict[str, Any], ...], list[tuple[str, str]]]:
        """The messages of `count` calls, and of every result a name and its number, shuffled."""
        draw = random.Random(f"{self.seed}/{name}")
        keys = distinct(lambda: word_key(draw), count * self.lines)
        messages: list[dict[str, Any]] = []
        asked = []
        for team in range(1, count + 1):
            own = {key: number(draw, self.digits) for key in keys[: self.lines]}
            keys = keys[self.lines :]
            call = {"name": "look_up", "arguments": {"team": team}}
            result = "\n".join(f"{key}: {value}" for key, value in own.items())
            messages += [
                {"role": "user", "content": f"Look up the numbers of team {team}."},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": f"{team}", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": f"{team}", "content": result},
                {"role": "assistant", "content": f"I have looked up team {team}."},
            ]
            asked.append(draw.choice(list(own.items())))
        draw.shuffle(asked)
        return tuple(messages), asked


STANDARD_LIBRARY = "stdlib"
"""The name under which the modules that come with Python are one package."""


@dataclass(frozen=True, kw_only=True)
class Functions(ConversationTask):
    """Functions of a package, asked for by what they do in one conversation (RepoQA, SCBench).

    After RepoQA (Liu et al., 2024, arXiv 2406.06025), as SCBench asks it in turns: the model gets a
    description of one function that does not say its name, and has to write that function again. An
    answer is right if, of all functions, it is most like the right one, and if that likeness, the
    BLEU of the words between white space, is at least 0.8 (the threshold of SCBench's scores).

    Ours is: the code is of an installed package, in as many functions as fit, without comments;
    descriptions are the functions' own docstrings, where RepoQA has a language model describe ten
    functions of each repository; an answer is likened to every function of the text and not to
    those ten alone; BLEU is not smoothed, which changes no verdict at this threshold.

    Args:
        package: whose functions: an installed one as it is imported, or stdlib for the modules that
            come with Python.
        cloze: begin every answer with the function's name; small models need it.
    """

    name: ClassVar[str] = "functions"
    parts: ClassVar[str] = "functions"
    most_parts: ClassVar[int] = 2_000
    least_likeness: ClassVar[float] = 0.8
    spare_tokens: ClassVar[int] = 48  # for what models say before a function, and around it

    package: str = STANDARD_LIBRARY
    cloze: bool = False

    def score(self, sample: Sample, prediction: str) -> float:
        """Whether the answer is most like the right function of all, and alike enough."""
        said = written_function(sample.answer_start + prediction)
        right = bleu(said, sample.references[0])
        return float(
            right >= self.least_likeness
            and all(right > bleu(said, code) for code in sample.details["others"])
        )

    def _drawn(self, name: str, count: int) -> tuple[str, Sequence[Any]]:
        draw = random.Random(f"{self.seed}/{name}")
        there = list(itertools.islice(drawn_functions(self.package, draw), count))
        if len(there) < self.questions:
            raise InvalidArgumentError(
                f"package: expected one with at least {self.questions} functions of a few lines "
                f"that a docstring describes, got {self.package} with {len(there)}; name another, "
                "or ask fewer questions"
            )
        parts = ["Functions of a Python package, file by file:"]
        for file, own in itertools.groupby(there, key=lambda one: one.file):
            parts += [f"# {file}", *(one.code for one in own)]
        asked = random.Random(f"{self.seed}/{name}/asked").sample(there, self.questions)
        return "\n\n".join(parts), [(one, there) for one in asked]

    def _turn(self, tokenizer: Any, name: str, cell: Cell, asked: Any) -> Sample:
        one, there = asked
        tokens = len(tokenizer(one.code, add_special_tokens=False)["input_ids"])
        return Sample(
            name=name,
            cell=cell,
            context="",
            question=f"\n\nOne of the functions is described like this: {one.description}\nWrite "
            "that function again, exactly as it stands there, and nothing else.",
            plain_question=f"\n\nDescription of one of the functions: {one.description}\n"
            "The function:\n\n",
            answer_start=f"def {one.name}" if self.cloze else "",
            references=(one.code,),
            details={"others": tuple(other.code for other in there if other is not one)},
            settings=GenerationSettings(
                max_new_tokens=tokens + self.spare_tokens,
                stop_strings=("\n\n",) if self.cloze else (),
            ),
        )


def written_function(answer: str) -> str:
    """The first function that an answer writes, in its first block of code where it has one.

    Without any it is all of the block, or of the answer.
    """
    fenced = re.search(r"^```\w*[ \t]*\n(.*?)(?:^```|\Z)", answer, re.S | re.M)
    code = fenced[1] if fenced else answer
    found = re.search(r"^def .*(?:\n(?:[ \t].*|[ \t]*(?=\n)|\).*))*", code, re.M)
    return found[0].strip() if found else code


# Folders that hold other packages, tests or another program; and what is too long, or too short.
_NO_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_MOST_FILE_BYTES = 200_000
_DESCRIPTION_WORDS = range(6, 41)
_CODE_LINES = range(4, 31)
_MOST_CODE_CHARACTERS = 1500


@dataclass(frozen=True, kw_only=True)
class DescribedFunction:
    """A function, and what it does in words."""

    name: str
    code: str
    description: str
    file: str


def drawn_functions(package: str, draw: random.Random) -> Iterator[DescribedFunction]:
    """The functions of a package that docstrings describe, file by file in a drawn order.

    The package is read, not imported. No two have the same name, description or code; nested
    functions are left out, and so are those with decorators.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    if package != STANDARD_LIBRARY:
        found = find_package_file(package) if package.isidentifier() else None
        if found is None:
            raise InvalidArgumentError(
                f"package: expected {STANDARD_LIBRARY}, or the name by which an installed package "
                f"of several files is imported, got {package!r}; install it, or name another"
            )
        folder = found
    files, known = list(_files(folder)), set[str]()
    draw.shuffle(files)
    for file in files:
        for one in _functions(folder, file):
            own = {one.name, one.description, one.code}
            if not own & known:
                known |= own
                yield one


@functools.cache
def _files(folder: Path) -> tuple[str, ...]:
    """The files of a package that are short enough, in the order of their names."""
    files = (path for path in folder.rglob("*.py") if path.is_file())
    found = (path for path in files if path.stat().st_size <= _MOST_FILE_BYTES)
    names = (path.relative_to(folder) for path in found)
    return tuple(sorted(name.as_posix() for name in names if not _NO_SOURCE & {*name.parts}))


@functools.cache
def _functions(folder: Path, file: str) -> tuple[DescribedFunction, ...]:
    """What a file defines; nothing where it cannot be read, or is not Python of this version."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse((folder / file).read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):  # deep nesting, too
        return ()
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    scopes += (node for node in tree.body if isinstance(node, ast.ClassDef))
    made = (_described(node, file) for scope in scopes for node in scope.body)
    return tuple(found for found in made if found is not None)


def _described(node: ast.stmt, file: str) -> DescribedFunction | None:
    """A function with a docstring that can be asked for; None for anything else."""
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return None
    paragraph, _, _ = (ast.get_docstring(node) or "").partition("\n\n")
    words = paragraph.split()
    if len(words) not in _DESCRIPTION_WORDS or node.name.lower() in paragraph.lower():
        return None
    del node.body[0]
    lines = [line for line in ast.unparse(node).split("\n") if line.strip()]
    code = "\n".join(lines)
    if len(lines) not in _CODE_LINES or len(code) > _MOST_CODE_CHARACTERS:
        return None
    return DescribedFunction(name=node.name, code=code, description=" ".join(words), file=file)
