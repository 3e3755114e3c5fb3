"""RULER (Hsieh et al. 2024): thirteen tasks with generated prompts of a given length.

Every sample is drawn from the seed, the task, the length and the sample's number. Texts, counts,
answer lengths and scores are those of the official suite, with its later correction of "assgined"
in vt. Some other versions differ, and so do their numbers: in lm-eval 0.4.13 the worked example of
cwe never reaches the prompt, vt keeps the misspelling, and a question with several accepted answers
gets their mean score instead of the best one.

Three things differ from the official suite. A haystack grows in the smallest possible steps, not by
500 words or 10 documents. If a length has no room for all documents that HotpotQA gives to a
question, distractors are left out first, and a question whose own documents do not fit is skipped;
the official generator never ends there. And fwe keeps to the length with its answer, as all other
tasks do. With a chat template, the answer's start follows it directly, without a space.
"""

import functools
import itertools
import math
import random
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from snapkv.errors import wrong
from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.corpora import CorpusName, Passage, load_corpus
from snapkv_lab.evaluate.haystack import (
    HaystackTask,
    draw_distinct,
    draw_number,
    draw_uuid,
    draw_word_key,
    load_words,
)
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.task import fit_sample, require_known_names

Kind = Literal["words", "numbers", "uuids"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The sentences that are repeated where the text should say nothing."""

_DEPTHS = [round(100 * i / 39) for i in range(40)]  # percent of the sentences
_DIGITS = 7
_HOPS = 4  # the assignments of vt after the first
_EXAMPLE_NOISES = 10  # the result of fitting vt's example to 500 tokens, as officially done
_COMMON = 10  # how many words cwe asks for
_SHORT = 4096  # cwe repeats words less often below this length
_TASK = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)
_PATIENCE = 20


@dataclass(frozen=True, kw_only=True)
class PuzzleRequest:
    """A request for a puzzle, which describes its length and its random seed.

    Attributes:
        length: the tokens of prompt and answer.
        index: the number of the puzzle.
        seed: the random seed.
        essay: the words of the essay.
    """

    length: int
    index: int
    seed: str
    essay: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Puzzle:
    """The parts of a prompt, with the texts that a right answer contains."""

    context: str
    question: str
    answer_start: str
    references: tuple[str, ...]

    def after_example(self, example: "Puzzle", answer: str, gap: str) -> "Puzzle":
        """Return a copy of the puzzle, with a solved example before its context.

        Args:
            example: the example.
            answer: the solution of the example, as the prompt shows it.
            gap: the text between the solved example and the puzzle.
        """
        solved = f"{example.context}{example.question} {example.answer_start}{answer}{gap}"
        return Puzzle(**vars(self) | {"context": solved + self.context})


@dataclass(frozen=True, kw_only=True)
class Generator:
    """An object that makes the puzzles of one task.

    A puzzle has any number of parts from `least` to `most()`. Where possible, a puzzle of another
    size has the same answer. An answer has at most `new_tokens` tokens. Its score is the share of
    references that it contains, or with `any_reference`, whether it contains one.
    """

    draw: Callable[[PuzzleRequest, int, random.Random], Puzzle]
    new_tokens: int
    least: int = 1
    most: Callable[[], int] = lambda: 10_000_000
    any_reference: bool = False

    def puzzle(self, wanted: PuzzleRequest, parts: int) -> Puzzle:
        """Return the puzzle for a request. Equal arguments always give the same puzzle.

        Args:
            wanted: the request.
            parts: the size of the puzzle, from `least` to `most()`. The unit depends on the task:
                sentences, words or documents.

        Raises:
            InvalidArgumentError: the request is for more questions than the data set has.
        """
        return self.draw(wanted, parts, random.Random(wanted.seed))


def _needles(
    *,
    haystack: Literal["noise", "essay", "needles"],
    key: Kind = "words",
    value: Kind = "numbers",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Generator:
    """Return the generator of a task that hides values in a long text.

    Each value is hidden with a key that is asked for.

    Args:
        haystack: what they are hidden in: repeated noise, an essay, or other needles.
        key: the kind of the keys.
        value: the kind of the values.
        keys: how many keys are hidden; at least `queries` are.
        values: how many values each key has.
        queries: how many keys are asked for.
    """
    keys = max(keys, queries)

    def needle(name: str, hidden: str) -> str:
        return f"One of the special magic {value} for {name} is: {hidden}."

    def puzzle(wanted: PuzzleRequest, parts: int, draw: random.Random) -> Puzzle:
        names = draw_distinct(lambda: _draw_text(key, draw), keys)
        hidden = {name: draw_distinct(lambda: _draw_text(value, draw), values) for name in names}
        chosen_names = draw.sample(names, queries)
        needles = [needle(name, each) for name in names for each in hidden[name]]
        draw.shuffle(needles)
        if haystack == "essay":
            text = _in_essay(wanted, parts, needles, draw)
        else:
            others = [NOISE] * parts
            if haystack == "needles":
                more = draw_distinct(lambda: _draw_text(key, draw), parts, besides=names)
                others = [needle(name, _draw_text(value, draw)) for name in more]
            places = sorted(draw.sample(range(len(others)), len(needles)), reverse=True)
            text = "\n".join(_insert(others, needles, places))
        return _phrase_needles(
            value, text, chosen_names, tuple(each for name in chosen_names for each in hidden[name])
        )

    return Generator(draw=puzzle, new_tokens=128, least=keys * values)


def _phrase_needles(
    value: Kind, text: str, names: list[str], references: tuple[str, ...]
) -> Puzzle:
    """Return the puzzle about hidden values, in the words of the official suite.

    Args:
        value: the kind of the hidden values.
        text: the text with the needles in it.
        names: the keys that are asked for, at least one.
        references: all values of these keys. If there is only one, the words are in the singular.
    """
    keys = names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
    if len(references) == 1:
        kind, article, verb, ask = value.removesuffix("s"), "A", "is", "is"
    else:
        kind, article, verb, ask = str(value), "Some", "are", "are all"
    sought = f"the special magic {kind} for {keys} mentioned in the provided text"
    return Puzzle(
        context=f"{article} special magic {kind} {verb} hidden within the following text. Make "
        f"sure to memorize it. I will quiz you about the {kind} afterwards.\n{text}",
        question=f"\nWhat {ask} {sought}?",
        answer_start=f"T{sought[1:]} {verb}",
        references=references,
    )


def _draw_text(kind: Kind, draw: random.Random) -> str:
    if kind == "numbers":
        return draw_number(draw, _DIGITS)
    return draw_word_key(draw) if kind == "words" else draw_uuid(draw)


def _in_essay(wanted: PuzzleRequest, count: int, needles: list[str], draw: random.Random) -> str:
    """Return a part of the essay with the needles between its sentences, at places drawn at random.

    The text is also split after abbreviations, since the splits only say where a needle can be put.

    Args:
        wanted: the request, which has the words of the essay.
        count: how many words the part has without the needles. The essay is repeated if necessary.
        needles: the sentences to insert, at most 40.
        draw: the random generator.
    """
    times, rest = divmod(count, len(wanted.essay))
    text = " ".join([*wanted.essay * times, *wanted.essay[:rest]])
    sentences = re.split(r"(?<=[.!?])\s+|(?<=[.!?][\"')\]])\s+", text.strip())
    depths = sorted(draw.sample(_DEPTHS, len(needles)), reverse=True)
    return " ".join(_insert(sentences, needles, [int(len(sentences) * d / 100) for d in depths]))


def _insert(texts: list[str], needles: list[str], places: list[int]) -> list[str]:
    """Insert each needle into the list of texts at the given place.

    The places must be in descending order. Changes `texts` in place, and returns it.
    """
    for place, needle in zip(places, needles, strict=True):
        texts.insert(place, needle)
    return texts


def _variable_tracing(_: PuzzleRequest, parts: int, draw: random.Random) -> Puzzle:
    """Return the puzzle of the task vt: a chain of variable assignments that is hidden in noise. A
    solved example with shorter names comes first.

    Args:
        _: the request, which is not used.
        parts: how often the noise is repeated, at least 5 times.
        draw: the random generator.
    """
    example = _chain(draw, _EXAMPLE_NOISES, letters=3)
    puzzle = _chain(draw, parts, letters=5)
    return puzzle.after_example(example, f" {' '.join(example.references)}", "\n\n\n\n")


def _chain(draw: random.Random, noises: int, *, letters: int) -> Puzzle:
    """Return a puzzle with one chain of assignments, hidden between repetitions of `NOISE`.

    All variables of the chain are the answer.

    Args:
        draw: the random generator.
        noises: how often the noise is repeated, at least 5 times.
        letters: the number of letters in the name of a variable.
    """
    names = draw_distinct(
        lambda: "".join(draw.choices(string.ascii_uppercase, k=letters)), _HOPS + 1
    )
    value = draw.randrange(10_000, 99_999)
    steps = [f"VAR {names[0]} = {value}"]
    steps += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
    lines = [f"{NOISE}\n"] * noises
    places = sorted(draw.sample(range(noises), len(steps)))
    for earlier, (place, step) in enumerate(zip(places, steps, strict=True)):
        lines.insert(place + earlier, step)
    return Puzzle(
        context="Memorize and track the chain(s) of variable assignment hidden in the "
        f"following text.\n\n{' '.join(lines)}",
        question=f"\nQuestion: Find all variables that are assigned the value {value} in the "
        "text above.",
        answer_start="Answer: According to the chain(s) of variable assignment in the text "
        f"above, {len(names)} variables are assigned the value {value}, they are: ",
        references=tuple(names),
    )


def _common_words(wanted: PuzzleRequest, parts: int, draw: random.Random) -> Puzzle:
    """Return the puzzle of the task cwe: a list in which ten words are more common than all others.
    The prompt begins with a worked example, with its answers directly after the colon, as in the
    official suite.

    Args:
        wanted: the request. Below a length of 4,096 tokens, words are repeated less often.
        parts: how many different words the list has, at least 10.
        draw: the random generator.
    """
    is_short = wanted.length < _SHORT
    example = _make_word_list(draw, 20, 3, 1) if is_short else _make_word_list(draw, 40, 10, 3)
    puzzle = _make_word_list(draw, parts, 6, 1) if is_short else _make_word_list(draw, parts, 30, 3)
    return puzzle.after_example(example, _number_words(example.references), "\n")


def _make_word_list(draw: random.Random, count: int, often: int, seldom: int) -> Puzzle:
    """Return a puzzle with a numbered list of different words in random order, ten of which are
    more common than the others and are the answer.

    Args:
        draw: the random generator.
        count: how many different words the list has, at least 10.
        often: how many times each of the ten words appears.
        seldom: how many times each of the other words appears.
    """
    chosen = draw.sample(load_words("noun", "adjective", "verb"), count)
    common, others = chosen[:_COMMON], chosen[_COMMON:]
    entries = common * often + others * seldom
    draw.shuffle(entries)
    return Puzzle(
        context="Below is a numbered list of words. In these words, some appear more often than "
        f"others. Memorize the ones that appear most often.\n{_number_words(entries)}",
        question="\nQuestion: What are the 10 most common words in the above list?",
        answer_start="Answer: The top 10 words that appear most often in the list are:",
        references=tuple(common),
    )


def _number_words(entries: Iterable[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))


def _frequent_words(wanted: PuzzleRequest, parts: int, draw: random.Random) -> Puzzle:
    """Return the puzzle of the task fwe: a text in which the frequency of a word falls with the
    square of its rank. Dots are the most frequent, and the three words to find follow.

    Args:
        wanted: the request. The number of different words is its length divided by 50, which must
            be at least 4.
        parts: about how many words the text has.
        draw: the random generator.
    """
    coded = draw_distinct(
        lambda: "".join(draw.choices(string.ascii_lowercase, k=6)), wanted.length // 50
    )
    vocabulary = ["...", *coded[1:]]
    total = math.pi**2 / 6  # the sum of 1/1 + 1/4 + 1/9 + ...
    text = [
        word
        for rank, word in enumerate(vocabulary, 1)
        for _ in range(int(parts / (total * rank**2)))
    ]
    draw.shuffle(text)
    return Puzzle(
        context="Read the following coded text and track the frequency of each coded word. "
        f"Find the three most frequently appeared coded words. {' '.join(text)}",
        question="\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?",
        answer_start="Answer: According to the coded text above, the three most frequently "
        "appeared words are:",
        references=tuple(vocabulary[1:4]),
    )


def _question_answering(dataset: CorpusName) -> Generator:
    """Return the generator of a task with questions about documents, which is one of the tasks qa.
    The questions are in the order of their file.

    The text before a question has the documents that answer it and as many others as the puzzle has
    parts, all in random order. The others are drawn from those that were collected for the
    question, and from the rest only if these are too few.
    """

    def puzzle(wanted: PuzzleRequest, parts: int, draw: random.Random) -> Puzzle:
        """Return the puzzle with the question number `wanted.index` of the data set.

        Raises:
            InvalidArgumentError: more questions are wanted than the data set has.
        """
        questions = load_corpus(dataset).questions
        if wanted.index >= len(questions):
            problem = f"{dataset} has only {len(questions)} questions, and not all of them fit"
            raise wrong("samples_each", problem, "Use a smaller value")
        question, documents, places = questions[wanted.index], _documents(dataset), _places(dataset)
        own, near = ([places[one] for one in some] for some in (question.gold, question.near))
        if dataset == "hotpotqa":  # the official suite draws from them in this order
            own, near = sorted(own), sorted(near)
        chosen = own + _others(own, near, len(documents), parts, draw)
        draw.shuffle(chosen)
        text = "\n\n".join(
            f"Document {number}:\n{_document_text(dataset, documents[place])}"
            for number, place in enumerate(chosen, 1)
        )
        return Puzzle(
            context=f"{_TASK}The following are given documents.\n\n{text}",
            question=f"\n\n{_TASK}Question: {question.raw_text}",
            answer_start="Answer:",
            references=question.answers,
        )

    def most() -> int:
        return len(_documents(dataset))

    return Generator(draw=puzzle, new_tokens=32, least=0, most=most, any_reference=True)


def _others(
    own: list[int], near: list[int], documents: int, count: int, draw: random.Random
) -> list[int]:
    """Draw documents that do not answer the question, and return their indices.

    Args:
        own: the indices of the documents that answer the question.
        near: the indices of the documents that were collected for the question. They are drawn
            first, and others only if `count` is larger than their number.
        documents: the number of all documents.
        count: how many are wanted; there are fewer if the data set has not enough.
        draw: the random generator.
    """
    first = draw.sample(near, min(count, len(near)))
    taken = {*own, *near}
    missing = count - len(first)
    candidates = draw.sample(range(documents), min(missing + len(taken), documents))
    return first + [place for place in candidates if place not in taken][:missing]


@functools.cache
def _documents(dataset: CorpusName) -> Sequence[Passage]:
    return sorted(load_corpus(dataset).passages, key=partial(_document_text, dataset))


@functools.cache
def _places(dataset: CorpusName) -> dict[Passage, int]:
    return {document: place for place, document in enumerate(_documents(dataset))}


def _document_text(dataset: CorpusName, document: Passage) -> str:
    return document.text if dataset == "squad" else f"{document.title}\n{document.text}"


GENERATORS: dict[str, Generator] = {
    "niah_single_1": _needles(haystack="noise"),
    "niah_single_2": _needles(haystack="essay"),
    "niah_single_3": _needles(haystack="essay", value="uuids"),
    "niah_multikey_1": _needles(haystack="essay", keys=4),
    "niah_multikey_2": _needles(haystack="needles"),
    "niah_multikey_3": _needles(haystack="needles", key="uuids", value="uuids"),
    "niah_multivalue": _needles(haystack="essay", values=4),
    "niah_multiquery": _needles(haystack="essay", queries=4),
    # One part more than there are assignments, as in the official suite.
    "vt": Generator(draw=_variable_tracing, new_tokens=30, least=_HOPS + 2),
    "cwe": Generator(
        draw=_common_words,
        new_tokens=120,
        least=_COMMON + 1,
        most=lambda: len(load_words("noun", "adjective", "verb")),
    ),
    # From 80 words on, the fourth word always appears more often than the fifth.
    "fwe": Generator(draw=_frequent_words, new_tokens=50, least=80),
    "qa_1": _question_answering("squad"),
    "qa_2": _question_answering("hotpotqa"),
}
"""The tasks by their official names, in the official order."""


@dataclass(frozen=True, kw_only=True)
class Ruler(HaystackTask):
    """The thirteen tasks of RULER: needles, variables, common words and real questions.

    Args:
        tasks: which of the thirteen.
        lengths: tokens of prompt and answer together, never more; officially 4k to 128k.
        samples_each: samples of every task and length; officially 500.
        seed: random seed for all that is drawn.
    """

    name: ClassVar[str] = "ruler"
    metric: ClassVar[str] = "string match"
    axes: ClassVar[tuple[str, ...]] = ("task", "length")

    tasks: tuple[str, ...] = tuple(GENERATORS)
    lengths: tuple[int, ...] = (4096,)
    samples_each: int = 100
    haystack: str | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidArgumentError: a number is out of range, or a task is not known.
            InvalidTypeError: a number is not an integer.
        """
        self.require(samples_each=1, lengths=1)
        require_known_names("tasks", self.tasks, GENERATORS)

    def samples(self, tokenizer: Any) -> Iterator[Sample]:
        essay = tuple(self.text.text.split())
        for length, task in itertools.product(self.lengths, self.tasks):
            yield from self._cell(tokenizer, task, length, essay)

    def score(self, sample: Sample, prediction: str) -> float:
        """Return the score of an answer, which is a number between 0 and 1.

        It is the share of the references that the answer contains. For the tasks qa, it is 1 if
        the answer contains any of them. Upper and lower case are not distinguished.
        """
        predicted = prediction.lower()
        matches = [reference.lower() in predicted for reference in sample.references]
        if GENERATORS[str(sample.cell["task"])].any_reference:
            return float(any(matches))
        return sum(matches) / len(matches)

    def _cell(
        self, tokenizer: Any, task: str, length: int, essay: tuple[str, ...]
    ) -> Iterator[Sample]:
        """Yield `samples_each` samples for one task and one length. Samples that do not fit into
        the length are skipped and replaced by the next ones.

        Args:
            tokenizer: counts the tokens.
            task: a key of `GENERATORS`.
            length: the most tokens of prompt and answer together.
            essay: the words of the haystack.

        Raises:
            InvalidArgumentError: more than 20 samples more were skipped than yielded, or the data
                set has too few questions.
        """
        generator, hint, count = GENERATORS[task], None, 0
        for index in itertools.count():
            name = f"{task}/{length}/{index}"
            wanted = PuzzleRequest(
                length=length, index=index, seed=f"{self.seed}/{name}", essay=essay
            )
            build = partial(_sample, task, name, wanted)
            least, most = generator.least, generator.most()
            fitted = fit_sample(build, tokenizer, length, least=least, most=most, hint=hint)
            if fitted is not None:
                sample, hint = fitted
                yield sample
                count += 1
                if count == self.samples_each:
                    return
            elif index + 1 - count > _PATIENCE + count:
                problem = f"the length is too small for a sample of {task}, but got {length} tokens"
                raise wrong("lengths", problem, "Use a larger length, or remove this task")


def _sample(task: str, name: str, wanted: PuzzleRequest, parts: int) -> Sample:
    generator = GENERATORS[task]
    return Sample(
        name=name,
        cell={"task": task, "length": wanted.length},
        settings=GenerationSettings(max_new_tokens=generator.new_tokens),
        **vars(generator.puzzle(wanted, parts)),
    )
