"""The texts and questions of the study of pooling: what is read, what is asked, what is right.

A text carries many questions, so that it is read once. Of a needle text every needle is asked for,
of a record several lines, of documents several questions. An answer is made of parts, each of which
is right or wrong by itself.
"""

import contextlib
import functools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from snapkv_lab.evaluate.corpora import Question, load_corpus
from snapkv_lab.evaluate.haystack import identifier, load_haystack, number, python_topics, words
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.tasks.lines import Lines
from snapkv_lab.evaluate.tasks.rag import phrase_questions, phrase_sample
from snapkv_lab.evaluate.tasks.ruler import GENERATORS, Ruler
from snapkv_lab.experiments.magic_number import CITIES, stretch
from snapkv_lab.experiments.quotes import quoted_document

SEED = 7

Setting = Literal["visible", "hidden", "second"]
"""When a text is compressed: behind the question, before it, or behind another question."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question about a text.

    Attributes:
        group: what results are grouped by.
        setting: behind what the text is compressed.
        question_ids: read with the text, before it is compressed; none where the question is
            hidden, and the first of two questions where it is the second.
        between_ids: read behind the compressed text, before the answer.
        answer_ids: the right answer.
        parts: for each part of the answer the places of the tokens that must be right; none where
            only the loss is looked at. The first token of an answer is among them only where the
            question is read from the compressed cache: else it is predicted before anything is
            dropped, and is the same for all.
    """

    group: str
    setting: Setting
    question_ids: Sequence[int]
    answer_ids: Sequence[int]
    parts: Sequence[Sequence[int]]
    between_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text and the questions about it, with a name that is unique in the study."""

    name: str
    ids: Sequence[int]
    cases: Sequence[Case]


class Maker:
    """Makes texts for one tokenizer, always the same ones."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._essays = load_haystack().text
        self._prose = {"essays": self._essays, "Python's manual": python_topics().text}

    # Needles.

    def needles(self, tokens: int, index: int, *, turns: bool) -> Text:
        """Six needles of different kinds in an essay, each asked for.

        Args:
            tokens: of the text.
            index: which one.
            turns: whether one of them is also asked for with the question hidden, and one behind
                another question.
        """
        draw = random.Random(f"{SEED}/needles/{tokens}/{index}")
        cities = draw.sample(CITIES, len(_KINDS))
        values = [make(draw) for make, _ in _KINDS.values()]
        names = [name for _, name in _KINDS.values()]
        hidden = [
            self._encode(f" The special magic {name} for {city} is {value}.")
            for name, city, value in zip(names, cities, values, strict=True)
        ]
        questions = [
            f"\n\nQuestion: What is the special magic {name} for {city}?"
            f"\nAnswer: The special magic {name} for {city} is"
            for name, city in zip(names, cities, strict=True)
        ]
        ids = self._hidden_in(tokens, hidden, draw)
        cases = [
            self._asked(group, question, f" {value}")
            for group, question, value in zip(_KINDS, questions, values, strict=True)
        ]
        if turns:
            first, second = draw.sample(range(len(cases)), 2)
            cases += [_hiding(cases[first]), self._second(cases[second], cases[first])]
        return Text(name=f"needles/{tokens}/{index}", ids=ids, cases=cases)

    def _hidden_in(self, tokens: int, needles: list[list[int]], draw: random.Random) -> list[int]:
        """A stretch of an essay with needles behind sentences, in an order that is drawn."""
        own = draw.sample(needles, len(needles))
        hay = stretch(self._tokenizer, self._essays, tokens - sum(map(len, own)), draw)
        ends = [
            place + 1
            for place, token in enumerate(hay)
            if self._tokenizer.decode(token).endswith((".", "?", "!"))
        ]
        places = sorted(draw.sample(ends, len(own)), reverse=True)
        for place, needle in zip(places, own, strict=True):
            hay[place:place] = needle
        return hay

    # Records, documents, quotations.

    def lines(self, tokens: int, index: int, questions: int) -> Text:
        """A record of lines, some of which are asked for."""
        task = Lines(
            lengths=(tokens,), positions=1, samples_each=1, examples=3, cloze=True,
            seed=SEED + index,
        )  # fmt: skip
        sample = next(iter(task.samples(self._tokenizer)))
        draw = random.Random(f"{SEED}/lines/{tokens}/{index}")
        record = re.findall(r"line (\S+): REGISTER_CONTENT is <(\d+)>", sample.context)
        asked = next(key for key, value in record if value == sample.references[0])
        free = [pair for pair in record if pair[0] not in sample.plain_question or pair[0] == asked]
        cases = [
            self._asked(
                "lines", (sample.plain_question + sample.answer_start).replace(asked, key), value
            )
            for key, value in draw.sample(free, questions)
        ]
        return Text(name=f"lines/{tokens}/{index}", ids=self._encode(sample.context), cases=cases)

    def rag(self, documents: int, index: int, questions: int) -> Text:
        """Paragraphs of one article of SQuAD, and questions that they answer."""
        draw = random.Random(f"{SEED}/rag/{documents}/{index}")
        asked = draw.choice(_squad())
        passages = draw.sample([*asked.gold, *asked.near], documents)
        answered = [one for one in _squad() if one.gold[0] in passages]
        cases, context = [], ""
        for question in draw.sample(answered, min(questions, len(answered))):
            sample = phrase_sample("", {}, passages, question.text, question.answers)
            context = sample.context
            longest = max(question.answers, key=len)
            cases.append(self._asked("rag", sample.plain_question, f" {longest}"))
        cases = [case for case in cases if len(case.answer_ids) > 1]
        return Text(name=f"rag/{documents}/{index}", ids=self._encode(context), cases=cases)

    def quotes(self, tokens: int, index: int, questions: int) -> Text:
        """A natural text; sentences of it are begun and to be continued."""
        draw = random.Random(f"{SEED}/quotes/{tokens}/{index}")
        source = list(self._prose.values())[index % 2]
        document = None
        while document is None:
            start = source.index(". ", draw.randrange(len(source) - 16 * tokens)) + 2
            with contextlib.suppress(ValueError):  # a stretch with too few sentences
                document = quoted_document(
                    self._tokenizer,
                    source[start:],
                    tokens=tokens,
                    questions=questions,
                    answer_tokens=8,
                )
        cases = [
            Case(
                group="quotations",
                setting="visible",
                question_ids=quote.question_ids,
                answer_ids=quote.answer_ids,
                parts=[range(1, len(quote.answer_ids))],
            )
            for quote in document.quotes
        ]
        return Text(name=f"quotes/{tokens}/{index}", ids=document.ids, cases=cases)

    # RULER.

    def ruler(self, task: str, tokens: int, count: int) -> Iterator[Text]:
        """Samples of one task; of several values each is a part, right from its second token on.

        Their order is the order of the references: which one comes first is not to be known.
        """
        made = Ruler(tasks=(task,), lengths=(tokens,), samples_each=count, seed=SEED)
        for sample in made.samples(self._tokenizer):
            question = f"{sample.question} {sample.answer_start}"
            case = self._ruler_case(task, question.rstrip(), sample)
            if len(case.answer_ids) > 1:
                ids = self._encode(sample.context)
                yield Text(name=f"ruler/{sample.name}", ids=ids, cases=[case])

    def _ruler_case(self, task: str, question: str, sample: Sample) -> Case:
        references = sample.references
        colon = ":" if task.startswith("niah") else ""  # as the needles have it
        if GENERATORS[task].any_reference or len(references) == 1:
            return self._asked(f"RULER {task}", question, f"{colon} {max(references, key=len)}")
        mark = {"vt": "", "cwe": ""}.get(task, ",")
        answer: list[int] = []
        parts = []
        for place, reference in enumerate(references):
            begin = f" {place + 1}. " if task == "cwe" else f"{mark if place else colon} "
            value = self._encode(begin + reference)
            parts.append(range(len(answer) + self._begun(value, begin), len(answer) + len(value)))
            answer += value
        return Case(
            group=f"RULER {task}",
            setting="visible",
            question_ids=self._encode(question),
            answer_ids=answer,
            parts=[part for part in parts if part],
        )

    def _begun(self, ids: list[int], begin: str) -> int:
        """How many of the tokens hold what stands before a value, and the value's beginning."""
        return next(
            count
            for count in range(1, len(ids) + 1)
            if len(self._tokenizer.decode(ids[:count])) > len(begin)
        )

    # Loss alone.

    def prose(self, tokens: int, answer_tokens: int, index: int) -> Text:
        """A natural text that goes on; essays and Python's manual in turn."""
        draw = random.Random(f"{SEED}/prose/{tokens}/{index}")
        source = list(self._prose.values())[index % 2]
        ids = stretch(self._tokenizer, source, tokens + answer_tokens, draw)
        return self._going_on("prose", f"prose/{tokens}/{index}", ids, answer_tokens)

    def code(self, tokens: int, answer_tokens: int, index: int) -> Text:
        """A file of Python's standard library that goes on."""
        draw = random.Random(f"{SEED}/code/{tokens}/{index}")
        files = [file for file in _library() if file.stat().st_size > 12 * tokens]
        lines = draw.choice(files).read_text("utf-8", errors="replace").splitlines(keepends=True)
        room = sum(map(len, lines)) - 8 * (tokens + answer_tokens)
        begin, seen = draw.randrange(max(room, 1)), 0
        while seen < begin:
            seen += len(lines.pop(0))
        ids = self._encode("".join(lines))[: tokens + answer_tokens]
        return self._going_on("code", f"code/{tokens}/{index}", ids, answer_tokens)

    def _going_on(self, group: str, name: str, ids: list[int], answer_tokens: int) -> Text:
        read, answer = ids[:-answer_tokens], ids[-answer_tokens:]
        case = Case(group=group, setting="visible", question_ids=(), answer_ids=answer, parts=())
        return Text(name=name, ids=read, cases=[case])

    # Questions.

    def _asked(self, group: str, question: str, answer: str) -> Case:
        ids = self._encode(answer)
        return Case(
            group=group,
            setting="visible",
            question_ids=self._encode(question),
            answer_ids=ids,
            parts=[range(1, len(ids))],
        )

    def _second(self, first: Case, case: Case) -> Case:
        """The same question behind another one and its answer."""
        return Case(
            group="needles, second question",
            setting="second",
            question_ids=first.question_ids,
            between_ids=[*first.answer_ids, *self._encode("."), *case.question_ids],
            answer_ids=case.answer_ids,
            parts=[range(len(case.answer_ids))],
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids


def _hiding(case: Case) -> Case:
    """The same question, read behind the compressed text."""
    return Case(
        group="needles, hidden question",
        setting="hidden",
        question_ids=(),
        between_ids=case.question_ids,
        answer_ids=case.answer_ids,
        parts=[range(len(case.answer_ids))],
    )


def _phrase(draw: random.Random) -> str:
    adjectives, nouns = words("adjective"), words("noun")
    return " ".join(draw.choice(kind) for kind in (adjectives, nouns, adjectives, nouns))


_KINDS = {
    "4 digits": (lambda draw: number(draw, 4), "number"),
    "7 digits": (lambda draw: number(draw, 7), "code"),
    "12 digits": (lambda draw: number(draw, 12), "serial number"),
    "phrase": (_phrase, "phrase"),
    "uuid": (identifier, "uuid"),
    "two parts": (
        lambda draw: f"{number(draw, 4)} and {draw.choice(words('noun'))}", "pair"
    ),
}  # fmt: skip
"""Kinds of needles: what is hidden, and what it is called in the text."""


@functools.cache
def _squad() -> list[Question]:
    return phrase_questions(load_corpus("squad").questions)


def _library() -> list[Path]:
    return sorted(Path(random.__file__).parent.glob("*.py"))
