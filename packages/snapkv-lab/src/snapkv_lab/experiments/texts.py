"""Texts of many kinds with questions about them, for what compares methods.

A text carries many questions, so that it is read once, with the full cache, and each question is
read after a branch of it. An answer is made of parts, each of which is right or wrong by itself.
"""

import contextlib
import copy
import functools
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snapkv import CompressedCache, FullCache
from snapkv.policies import EvictingPolicy, Policy
from snapkv.policies.base import ALL_QUERIES
from snapkv_app.models import LoadedModel
from snapkv_app.observing import RecordedPrompt, RecordingPolicy
from snapkv_lab.evaluate.corpora import Question, load_corpus
from snapkv_lab.evaluate.haystack import (
    CITIES,
    draw_number,
    draw_uuid,
    load_haystack,
    load_python_topics,
    load_words,
    token_ids,
)
from snapkv_lab.evaluate.tasks.lines import Lines
from snapkv_lab.evaluate.tasks.rag import phrase_questions, phrase_sample
from snapkv_lab.experiments.prompts import cut_stretch, quoted_document, read_prompt_twice
from snapkv_lab.rows import Row

SEED = 7


@dataclass(frozen=True, kw_only=True)
class TextQuestion:
    """One question about a text, and its right answer.

    The question is read with the text, before it is compressed, or where it is hidden after it,
    between text and answer. `parts` are the places of the tokens that must be right, for each part
    of the answer; none where only the loss is looked at. The first token is among them only where
    the question is hidden: else it is predicted before anything is dropped, the same for all.
    """

    group: str
    answer_ids: Sequence[int]
    parts: Sequence[Sequence[int]]
    question_ids: Sequence[int] = ()
    between_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class QuestionedText:
    """A text and the questions about it, with a name that is unique in a study."""

    name: str
    ids: Sequence[int]
    cases: Sequence[TextQuestion]


class TextMaker:
    """Makes texts for one tokenizer, always the same ones."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode = functools.partial(token_ids, tokenizer)
        self._essays = load_haystack().text
        self._prose = [self._essays, load_python_topics().text]

    def needles(self, tokens: int, index: int, *, tail: str = "") -> QuestionedText:
        """Six needles of different kinds in an essay, each asked for; with a tail, if any."""
        name = f"{'tails' if tail else 'needles'}/{tokens}/{index}"
        draw = random.Random(f"{SEED}/{name}")
        cities = draw.sample(CITIES, len(_KINDS))
        values = [make(draw) for make, _ in _KINDS.values()]
        hidden, cases = [], []
        for (group, (_, what)), city, value in zip(_KINDS.items(), cities, values, strict=True):
            start = f"special magic {what} for {city}"
            hidden.append(self._encode(f" The {start} is {value}."))
            answer = f" {tail}\nAnswer: It is" if tail else f"\nAnswer: The {start} is"
            question = f"\n\nQuestion: What is the {start}?{answer}"
            cases.append(self._asked(group, question, f" {value}"))
        return QuestionedText(name=name, ids=self._hidden_in(tokens, hidden, draw), cases=cases)

    def _hidden_in(self, tokens: int, needles: list[list[int]], draw: random.Random) -> list[int]:
        """A stretch of an essay with needles after sentences, in an order that is drawn."""
        own = draw.sample(needles, len(needles))
        hay = cut_stretch(self._tokenizer, self._essays, tokens - sum(map(len, own)), draw)
        ends = [
            place + 1
            for place, token in enumerate(hay)
            if self._tokenizer.decode(token).endswith((".", "?", "!"))
        ]
        places = sorted(draw.sample(ends, len(own)), reverse=True)
        for place, needle in zip(places, own, strict=True):
            hay[place:place] = needle
        return hay

    def lines(self, tokens: int, index: int, questions: int) -> QuestionedText:
        name = f"lines/{tokens}/{index}"
        shape = {"lengths": (tokens,), "positions": 1, "samples_each": 1, "examples": 3}
        task = Lines(**shape, cloze=True, seed=SEED + index)
        sample = next(iter(task.samples(self._tokenizer)))
        draw = random.Random(f"{SEED}/{name}")
        record = re.findall(r"line (\S+): REGISTER_CONTENT is <(\d+)>", sample.context)
        asked = next(key for key, value in record if value == sample.references[0])
        free = [pair for pair in record if pair[0] not in sample.plain_question or pair[0] == asked]
        question = sample.plain_question + sample.answer_start
        cases = [
            self._asked("lines", question.replace(asked, key), value)
            for key, value in draw.sample(free, questions)
        ]
        return QuestionedText(name=name, ids=self._encode(sample.context), cases=cases)

    def rag(self, documents: int, index: int, questions: int) -> QuestionedText:
        """Paragraphs of one article of SQuAD, and questions that they answer."""
        name = f"rag/{documents}/{index}"
        draw = random.Random(f"{SEED}/{name}")
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
        return QuestionedText(name=name, ids=self._encode(context), cases=cases)

    def quotes(self, tokens: int, index: int, questions: int) -> QuestionedText:
        """A natural text; sentences of it are begun and to be continued."""
        name = f"quotes/{tokens}/{index}"
        draw, source = random.Random(f"{SEED}/{name}"), self._prose[index % 2]
        document, shape = None, {"tokens": tokens, "questions": questions, "answer_tokens": 8}
        while document is None:
            start = source.index(". ", draw.randrange(len(source) - 16 * tokens)) + 2
            with contextlib.suppress(ValueError):  # a stretch with too few sentences
                document = quoted_document(self._tokenizer, source[start:], **shape)
        cases = [_case("quotations", one.question_ids, one.answer_ids) for one in document.quotes]
        return QuestionedText(name=name, ids=document.ids, cases=cases)

    def prose(self, tokens: int, answer_tokens: int, index: int) -> QuestionedText:
        """A natural text that goes on, for its loss; essays and Python's manual in turn."""
        name = f"prose/{tokens}/{index}"
        draw = random.Random(f"{SEED}/{name}")
        ids = cut_stretch(self._tokenizer, self._prose[index % 2], tokens + answer_tokens, draw)
        return self._going_on(name, ids, answer_tokens)

    def code(self, tokens: int, answer_tokens: int, index: int) -> QuestionedText:
        """A file of Python's standard library that goes on, for its loss."""
        name = f"code/{tokens}/{index}"
        draw = random.Random(f"{SEED}/{name}")
        library = sorted(Path(random.__file__).parent.glob("*.py"))
        files = [file for file in library if file.stat().st_size > 12 * tokens]
        lines = draw.choice(files).read_text("utf-8", errors="replace").splitlines(keepends=True)
        room = sum(map(len, lines)) - 8 * (tokens + answer_tokens)
        begin, seen = draw.randrange(max(room, 1)), 0
        while seen < begin:
            seen += len(lines.pop(0))
        ids = self._encode("".join(lines))[: tokens + answer_tokens]
        return self._going_on(name, ids, answer_tokens)

    def _going_on(self, name: str, ids: list[int], answer_tokens: int) -> QuestionedText:
        case = TextQuestion(group=name.partition("/")[0], answer_ids=ids[-answer_tokens:], parts=())
        return QuestionedText(name=name, ids=ids[:-answer_tokens], cases=[case])

    def _asked(self, group: str, question: str, answer: str) -> TextQuestion:
        return _case(group, self._encode(question), self._encode(answer))


def _case(group: str, asked: Sequence[int], ids: Sequence[int]) -> TextQuestion:
    parts = [range(1, len(ids))]
    return TextQuestion(group=group, question_ids=asked, answer_ids=ids, parts=parts)


def make_texts(given: Any, first: int) -> Iterator[QuestionedText]:
    """Round after round, so that a run that is stopped has some of every kind.

    Others than those that the pooling was chosen by, and than those from another first index;
    `given` is what the run asks for: its model, `tokens` and `rounds`.
    """
    make, size = TextMaker(given.loaded.tokenizer), given.tokens
    for index in range(first, first + given.rounds):
        yield make.needles(size, index)
        yield make.lines(size, index, questions=2)
        yield make.quotes(size, index, questions=2)
        yield make.rag(6, index, questions=2)
        yield make.prose(size, 32, index)
        yield make.code(size, 32, index)


def only_answerable(texts: Iterable[QuestionedText]) -> Iterator[QuestionedText]:
    """Those with answers that can be right; of prose and code there is only a loss."""
    return (text for text in texts if any(case.parts for case in text.cases))


def _phrase(draw: random.Random) -> str:
    adjectives, nouns = load_words("adjective"), load_words("noun")
    return " ".join(draw.choice(kind) for kind in (adjectives, nouns, adjectives, nouns))


_KINDS = {
    "4 digits": (lambda draw: draw_number(draw, 4), "number"),
    "7 digits": (lambda draw: draw_number(draw, 7), "code"),
    "12 digits": (lambda draw: draw_number(draw, 12), "serial number"),
    "phrase": (_phrase, "phrase"),
    "uuid": (draw_uuid, "uuid"),
    "two parts": (
        lambda draw: f"{draw_number(draw, 4)} and {draw.choice(load_words('noun'))}",
        "pair",
    ),
}
"""Kinds of needles: what is hidden, and what it is called in the text."""


@functools.cache
def _squad() -> list[Question]:
    return phrase_questions(load_corpus("squad").questions)


class ReadText:
    """A text that a model has read with the full cache; questions are read after branches of it.

    The model must have full attention in every layer, as the demo model has.
    """

    def __init__(self, model: Any, context_ids: Sequence[int]) -> None:
        self._model, self._recorder = model, RecordingPolicy(recorded_queries=ALL_QUERIES)
        self._cache = CompressedCache(model, self._recorder)
        self.prompt = self._read(self._cache, context_ids)

    def asked(self, question_ids: Sequence[int]) -> RecordedPrompt:
        """The text and a question after it as one prompt."""
        if not question_ids:
            return self.prompt
        read = self._read(copy.copy(self._cache), question_ids)
        layers = [
            replace(new, queries=torch.cat([old.queries, new.queries], dim=2))
            for old, new in zip(self.prompt.layers, read.layers, strict=True)
        ]
        return replace(read, layers=layers, question_tokens=len(question_ids))

    @torch.inference_mode()
    def _read(self, cache: CompressedCache, ids: Sequence[int]) -> RecordedPrompt:
        tokens = torch.tensor([list(ids)], device=self._model.device)
        self._recorder.layers.clear()
        cache.expect_prompt(cache.get_seq_length() + len(ids))
        cache.expect_tokens(tokens)
        logits = self._model(tokens, past_key_values=cache, logits_to_keep=1).logits
        layers = list(self._recorder.layers)
        return RecordedPrompt(model=self._model, layers=layers, last_logits=logits)


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt to compress, its tokens, (1, T) int64, and the cases whose answers follow it."""

    prompt: RecordedPrompt
    ids: Tensor
    cases: Sequence[TextQuestion]
    _read_twice: dict[object, RecordedPrompt] = field(default_factory=dict)

    def read_for(self, policy: Policy, loaded: LoadedModel) -> RecordedPrompt:
        """Return the prompt as the policy wants it read; a second reading is made only once."""
        if not policy.needs_reconstruction_pass:
            return self.prompt
        if policy.needs not in self._read_twice:
            self._read_twice[policy.needs] = read_prompt_twice(
                loaded.model, loaded.tokenizer, self.ids[0].tolist(), policy
            )
        return self._read_twice[policy.needs]


def asked_prompts(read: ReadText, text: QuestionedText, setting: str) -> Iterator[AskedPrompt]:
    """Each question after its text, or all of them hidden until the text is compressed."""
    if setting == "hidden":
        hidden = [
            replace(each, between_ids=each.question_ids, parts=[range(len(each.answer_ids))])
            for each in text.cases
        ]
        prompt = replace(read.prompt, question_tokens=0)
        yield AskedPrompt(prompt, torch.tensor([list(text.ids)]), hidden)
        return
    for case in text.cases:
        ids = torch.tensor([[*text.ids, *case.question_ids]])
        yield AskedPrompt(read.asked(case.question_ids), ids, [case])


@torch.inference_mode()
def score_answer(prompt: RecordedPrompt, cache: CompressedCache, case: TextQuestion) -> Row:
    """The right answer of a case fed to a cache after a prompt.

    "right": for every part of the answer whether each of its tokens was the most likely one, 0 or
    1. "nll": negative log-likelihood (nats) per answer token after the first; None where there is
    one token only. What stands between prompt and answer is read in the same pass, but for methods
    that evict at every step: they read the answer token by token.
    """
    answer, between = list(case.answer_ids), list(case.between_ids)
    fed = torch.tensor([between + answer[:-1]], device=prompt.last_logits.device)
    logits = prompt.last_logits
    if fed.shape[1]:
        parts: Sequence[Tensor] = [fed]
        if isinstance(cache.policy, EvictingPolicy):
            parts = [fed[:, : len(between)], *fed[:, len(between) :].split(1, dim=1)]
        behind = torch.cat([_read(prompt.model, cache, each) for each in parts if each.numel()], 1)
        logits = behind[:, len(between) - 1 :] if between else torch.cat([logits, behind], dim=1)
    wanted = torch.tensor(answer, device=logits.device)
    is_right = logits[0].argmax(dim=-1) == wanted
    losses = torch.nn.functional.cross_entropy(logits[0].float(), wanted, reduction="none")
    return {
        "right": [int(is_right[list(part)].all()) for part in case.parts],
        "nll": round(float(losses[1:].mean()), 4) if len(answer) > 1 else None,
    }


def _read(model: Any, cache: CompressedCache, ids: Tensor) -> Tensor:
    """Logits (1, N, V) after each of the tokens, which are read in one pass."""
    cache.expect_tokens(ids)
    logits: Tensor = model(ids, past_key_values=cache).logits
    return logits


def question_rows(
    read: ReadText,
    text: QuestionedText,
    setting: str,
    answers: Callable[[AskedPrompt], Iterable[list[Row]]],
) -> Iterator[Row]:
    """The row of every question about a text: what the full cache answers, and what others do.

    `answers` gives a list for each of them, with a row for every case. Questions of which the full
    cache has no part right tell nothing apart: others are not asked.
    """
    numbers = itertools.count()
    for asked in asked_prompts(read, text, setting):
        prompt = asked.prompt
        full = [score_answer(prompt, prompt.compressed(FullCache()), case) for case in asked.cases]
        known = [any(each["right"]) or not each["right"] for each in full]
        found = list(answers(asked)) if any(known) else []
        for place, case in enumerate(asked.cases):
            yield {
                "setting": setting,
                "text": text.name,
                "question": next(numbers),
                "group": case.group,
                "full": full[place],
                "answers": [rows[place] for rows in found] if known[place] else [],
            }


def list_answers(rows: Iterable[Row]) -> list[Row]:
    """Every answer of the rows of `questions`, with its row, "of"."""
    return [{**found, "of": row} for row in rows for found in row.get("answers", ())]


class Count(NamedTuple):
    """How many of how many."""

    right: int
    of: int

    @property
    def share(self) -> float:
        return self.right / self.of if self.of else 0.0

    def interval(self) -> tuple[float, float]:
        """Wilson's interval at 95 percent; all there is for none."""
        if not self.of:
            return 0.0, 1.0
        z = 1.96
        centre = self.share + z * z / (2 * self.of)
        spread = self.share * (1 - self.share) / self.of + z * z / (4 * self.of**2)
        scale = 1 + z * z / self.of
        low, high = (centre + sign * z * spread**0.5 for sign in (-1, 1))
        return max(low / scale, 0.0), min(high / scale, 1.0)

    def __str__(self) -> str:
        """Such as "0.50 of 10 (0.24 to 0.76)"."""
        low, high = self.interval()
        return f"{self.share:.2f} of {self.of} ({low:.2f} to {high:.2f})"


def count_right(answers: Iterable[Row]) -> Count:
    """Parts of answers that are right, of those that the full cache has right."""
    known = [
        own
        for row in answers
        for own, full in zip(row["right"], row["of"]["full"]["right"], strict=True)
        if full
    ]
    return Count(sum(known), len(known))


def mean_loss_above(answers: Iterable[Row]) -> float:
    pairs = ((row["nll"], row["of"]["full"]["nll"]) for row in answers)
    return fmean(own - full for own, full in pairs if full is not None)
