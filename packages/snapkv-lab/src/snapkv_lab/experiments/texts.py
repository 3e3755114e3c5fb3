"""Texts of many kinds with questions about them, for experiments that compare methods.

A text carries many questions. It is read once with the full cache, and each question is read after
a copy of that cache. An answer consists of parts, each of which is right or wrong.
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
from snapkv.hf.cache_argument import passed
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
_QUOTED = 8  # tokens of a sentence that a question about a passage quotes


@dataclass(frozen=True, kw_only=True)
class TextQuestion:
    """A question about a text, with the right answer.

    The question is read with the text before the cache is compressed. A hidden question is read
    after that, between the text and the answer.

    Attributes:
        group: the kind of the question.
        answer_ids: the tokens of the right answer.
        parts: for each part of the answer, the indices of the tokens that must be right. It is
            empty if only the loss counts. The first token only belongs to a part if the question is
            hidden; otherwise it is predicted before any token is evicted, and is the same for all
            methods.
        question_ids: the tokens of the question.
        between_ids: the tokens of a hidden question.
    """

    group: str
    answer_ids: Sequence[int]
    parts: Sequence[Sequence[int]]
    question_ids: Sequence[int] = ()
    between_ids: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class QuestionedText:
    """A text with a list of questions about it.

    The name is unique in an experiment.
    """

    name: str
    ids: Sequence[int]
    cases: Sequence[TextQuestion]


class TextMaker:
    """An object that makes texts and questions for one tokenizer.

    Equal arguments give equal texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode = functools.partial(token_ids, tokenizer)
        self._essays = load_haystack().text
        self._prose = [self._essays, load_python_topics().text]

    def needles(self, tokens: int, index: int, *, tail: str = "") -> QuestionedText:
        """Make an essay with six needles of different kinds and a question about each.

        Args:
            tokens: the number of tokens of the text.
            index: the number of the text.
            tail: a text that follows every question.
        """
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
            cases.append(self._make_question(group, question, f" {value}"))
        return QuestionedText(name=name, ids=self._hide_needles(tokens, hidden, draw), cases=cases)

    def _hide_needles(
        self, tokens: int, needles: list[list[int]], draw: random.Random
    ) -> list[int]:
        """Return the token ids of a part of an essay with the needles between its sentences, in
        random order.

        Args:
            tokens: how many token ids are returned, those of the needles included.
            needles: the token ids of each needle.
            draw: the random generator.
        """
        own = draw.sample(needles, len(needles))
        hay = cut_stretch(self._tokenizer, self._essays, tokens - sum(map(len, own)), draw)
        places = sorted(draw.sample(self._sentence_ends(hay), len(own)), reverse=True)
        for place, needle in zip(places, own, strict=True):
            hay[place:place] = needle
        return hay

    def _sentence_ends(self, ids: Sequence[int]) -> list[int]:
        """Return the places behind all tokens that end with the mark of a sentence's end."""
        return [
            place + 1
            for place, token in enumerate(ids)
            if self._tokenizer.decode(token).endswith((".", "?", "!"))
        ]

    def lines(self, tokens: int, index: int, questions: int) -> QuestionedText:
        """Make a text of numbered lines, and questions about some of them.

        Args:
            tokens: the most tokens of the text and one question together.
            index: the number of the text.
            questions: how many questions are asked.
        """
        name = f"lines/{tokens}/{index}"
        shape = {"lengths": (tokens,), "positions": 1, "samples_each": 1, "examples": 3}
        task = Lines(**shape, cloze=True, seed=SEED + index)
        sample = next(iter(task.samples(self._tokenizer)))
        draw = random.Random(f"{SEED}/{name}")
        record = re.findall(r"line (\S+): REGISTER_CONTENT is <(\d+)>", sample.context)
        known = next(key for key, value in record if value == sample.references[0])
        free = [pair for pair in record if pair[0] not in sample.plain_question or pair[0] == known]
        question = sample.plain_question + sample.answer_start
        cases = [
            self._make_question("lines", question.replace(known, key), value)
            for key, value in draw.sample(free, questions)
        ]
        return QuestionedText(name=name, ids=self._encode(sample.context), cases=cases)

    def rag(self, documents: int, index: int, questions: int) -> QuestionedText:
        """Make a text of paragraphs from one article of SQuAD, with questions that they answer.

        Args:
            documents: the number of paragraphs.
            index: the number of the text.
            questions: the largest number of questions. There may be fewer and even none, because
                answers of a single token are left out.
        """
        name = f"rag/{documents}/{index}"
        draw = random.Random(f"{SEED}/{name}")
        chosen = draw.choice(_squad())
        passages = draw.sample([*chosen.gold, *chosen.near], documents)
        answered = [one for one in _squad() if one.gold[0] in passages]
        cases, context = [], ""
        for question in draw.sample(answered, min(questions, len(answered))):
            sample = phrase_sample("", {}, passages, question.text, question.answers)
            context = sample.context
            longest = max(question.answers, key=len)
            cases.append(self._make_question("rag", sample.plain_question, f" {longest}"))
        cases = [case for case in cases if len(case.answer_ids) > 1]
        return QuestionedText(name=name, ids=self._encode(context), cases=cases)

    def quotes(self, tokens: int, index: int, questions: int) -> QuestionedText:
        """Make a text with questions that quote the beginnings of sentences. The answers are the
        next tokens of the sentences.

        Args:
            tokens: the number of tokens of the text.
            index: the number of the text. Even ones are from essays, and odd ones from Python's
                manual.
            questions: how many questions are asked.
        """
        name = f"quotes/{tokens}/{index}"
        draw, source = random.Random(f"{SEED}/{name}"), self._prose[index % 2]
        document, shape = None, {"tokens": tokens, "questions": questions, "answer_tokens": 8}
        while document is None:
            start = source.index(". ", draw.randrange(len(source) - 16 * tokens)) + 2
            with contextlib.suppress(ValueError):  # a stretch with too few sentences
                document = quoted_document(self._tokenizer, source[start:], **shape)
        cases = [_case("quotations", one.question_ids, one.answer_ids) for one in document.quotes]
        return QuestionedText(name=name, ids=document.ids, cases=cases)

    def passages(self, tokens: int, answer_tokens: int, index: int) -> QuestionedText:
        """Make a text with a question that quotes the beginning of a sentence in its middle. The
        answer is what the text says next, over several sentences.

        Args:
            tokens: the number of tokens of the text, at least twice `answer_tokens`.
            answer_tokens: the number of tokens of the answer.
            index: the number of the text. Even ones are from essays, and odd ones from Python's
                manual.

        Raises:
            IndexError: no sentence begins in the second quarter of the text.
        """
        name = f"passages/{tokens}/{index}"
        draw = random.Random(f"{SEED}/{name}")
        ids = cut_stretch(self._tokenizer, self._prose[index % 2], tokens, draw)
        middle = range(tokens // 4, tokens // 2 - _QUOTED)
        begin = draw.choice([place for place in self._sentence_ends(ids) if place in middle])
        quoted, answer = ids[begin : begin + _QUOTED], ids[begin + _QUOTED :][:answer_tokens]
        question = [*self._encode('\n\nThe text above says: "'), *quoted]
        return QuestionedText(name=name, ids=ids, cases=[_case("passages", question, answer)])

    def prose(self, tokens: int, answer_tokens: int, index: int) -> QuestionedText:
        """Make a text and its continuation, for which only the loss is measured.

        Args:
            tokens: the number of tokens of the text.
            answer_tokens: the number of tokens of the continuation.
            index: the number of the text. Even ones are from essays, and odd ones from Python's
                manual.
        """
        name = f"prose/{tokens}/{index}"
        draw = random.Random(f"{SEED}/{name}")
        ids = cut_stretch(self._tokenizer, self._prose[index % 2], tokens + answer_tokens, draw)
        return self._make_continuation(name, ids, answer_tokens)

    def code(self, tokens: int, answer_tokens: int, index: int) -> QuestionedText:
        """Make a text of a part of a Python file, and its continuation, for which only the loss is
        measured.

        Args:
            tokens: the number of tokens of the text.
            answer_tokens: the number of tokens of the continuation.
            index: the number of the text.
        """
        name = f"code/{tokens}/{index}"
        draw = random.Random(f"{SEED}/{name}")
        library = sorted(Path(random.__file__).parent.glob("*.py"))
        files = [file for file in library if file.stat().st_size > 12 * tokens]
        lines = draw.choice(files).read_text("utf-8", errors="replace").splitlines(keepends=True)
        excess = sum(map(len, lines)) - 8 * (tokens + answer_tokens)
        begin, seen = draw.randrange(max(excess, 1)), 0
        while seen < begin:
            seen += len(lines.pop(0))
        ids = self._encode("".join(lines))[: tokens + answer_tokens]
        return self._make_continuation(name, ids, answer_tokens)

    def _make_continuation(self, name: str, ids: list[int], answer_tokens: int) -> QuestionedText:
        case = TextQuestion(group=name.partition("/")[0], answer_ids=ids[-answer_tokens:], parts=())
        return QuestionedText(name=name, ids=ids[:-answer_tokens], cases=[case])

    def _make_question(self, group: str, question: str, answer: str) -> TextQuestion:
        return _case(group, self._encode(question), self._encode(answer))


def _case(group: str, question_ids: Sequence[int], ids: Sequence[int]) -> TextQuestion:
    parts = [range(1, len(ids))]
    return TextQuestion(group=group, question_ids=question_ids, answer_ids=ids, parts=parts)


def make_texts(context: Any, first: int) -> Iterator[QuestionedText]:
    """Yield texts of all kinds in rounds, so that a stopped run has some of every kind.

    Another first index gives other texts than those that the pooling was chosen by. A round has six
    texts.

    Args:
        context: the run, with the model, `tokens` and `rounds`.
        first: the index of the first round.
    """
    make, size = TextMaker(context.loaded.tokenizer), context.tokens
    for index in range(first, first + context.rounds):
        yield make.needles(size, index)
        yield make.lines(size, index, questions=2)
        yield make.quotes(size, index, questions=2)
        yield make.rag(6, index, questions=2)
        yield make.prose(size, 32, index)
        yield make.code(size, 32, index)


def only_answerable(texts: Iterable[QuestionedText]) -> Iterator[QuestionedText]:
    """Yield only the texts that have at least one question with a right answer.

    Prose and code have only a loss, and are left out.
    """
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
"""The kinds of needles: what is hidden, and what the text calls it."""


@functools.cache
def _squad() -> list[Question]:
    return phrase_questions(load_corpus("squad").questions)


class ReadText:
    """A text that was read with the full cache, so that questions about it can be asked.

    Each question is read after a copy of the cache. The model must have full attention in every
    layer, as the demo model has.
    """

    def __init__(self, model: Any, context_ids: Sequence[int]) -> None:
        self._model, self._recorder = model, RecordingPolicy(recorded_queries=ALL_QUERIES)
        self._cache = CompressedCache(model, self._recorder)
        self.prompt = self._read(self._cache, context_ids)

    def with_question(self, question_ids: Sequence[int]) -> RecordedPrompt:
        """Read a question after a copy of the cache, and return text and question as one prompt.

        Without a question, return the prompt of the text alone.
        """
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
        logits = self._model(tokens, **passed(cache), logits_to_keep=1).logits
        layers = list(self._recorder.layers)
        return RecordedPrompt(model=self._model, layers=layers, last_logits=logits)


@dataclass(frozen=True)
class PromptCases:
    """A prompt that will be compressed, with the questions that follow it.

    Attributes:
        prompt: the prompt.
        ids: its tokens, (1, T) int64.
        cases: the questions.
    """

    prompt: RecordedPrompt
    ids: Tensor
    cases: Sequence[TextQuestion]
    _read_twice: dict[object, RecordedPrompt] = field(default_factory=dict)

    def read_for(self, policy: Policy, loaded: LoadedModel) -> RecordedPrompt:
        """Return the recorded prompt for a policy, read twice if the policy needs that.

        A second reading is made once for all policies that need the same records, and kept.
        """
        if not policy.needs_reconstruction_pass:
            return self.prompt
        if policy.needs not in self._read_twice:
            self._read_twice[policy.needs] = read_prompt_twice(
                loaded.model, loaded.tokenizer, self.ids[0].tolist(), policy
            )
        return self._read_twice[policy.needs]


def make_prompts(read: ReadText, text: QuestionedText, setting: str) -> Iterator[PromptCases]:
    """Yield the prompts that ask all questions about a text.

    If the setting is "hidden", there is one prompt, the text alone, with all questions. Otherwise
    there is one prompt for each question, the text with this question at its end.
    """
    if setting == "hidden":
        hidden = [
            replace(each, between_ids=each.question_ids, parts=[range(len(each.answer_ids))])
            for each in text.cases
        ]
        prompt = replace(read.prompt, question_tokens=0)
        yield PromptCases(prompt, torch.tensor([list(text.ids)]), hidden)
        return
    for case in text.cases:
        ids = torch.tensor([[*text.ids, *case.question_ids]])
        yield PromptCases(read.with_question(case.question_ids), ids, [case])


def score_answer(prompt: RecordedPrompt, cache: CompressedCache, case: TextQuestion) -> Row:
    """Compute the score of the right answer to a question with the given cache, which is used up.

    Returns:
        "right": for every part of the answer, 1 if each of its tokens was the most likely one, else
            0.
        "nll": negative log-likelihood (nats) per answer token after the first, or None if the
            answer has only one token.
    """
    is_right, losses = score_tokens(prompt, cache, case)
    return {
        "right": [int(is_right[list(part)].all()) for part in case.parts],
        "nll": round(float(losses[1:].mean()), 4) if len(losses) > 1 else None,
    }


@torch.inference_mode()
def score_tokens(
    prompt: RecordedPrompt, cache: CompressedCache, case: TextQuestion
) -> tuple[Tensor, Tensor]:
    """Feed the right answer to a question, and score each of its N tokens.

    Methods that evict at every step read the answer token by token. Other methods read the tokens
    between prompt and answer, and the answer, in one pass. The cache is used up.

    Returns:
        (N,) bool, whether each token was the most likely one, and (N,) float32, the negative
        log-likelihood of each token in nats.
    """
    answer, between = list(case.answer_ids), list(case.between_ids)
    fed = torch.tensor([between + answer[:-1]], device=prompt.last_logits.device)
    logits = prompt.last_logits
    if fed.shape[1]:
        parts: Sequence[Tensor] = [fed]
        if isinstance(cache.policy, EvictingPolicy):
            parts = [fed[:, : len(between)], *fed[:, len(between) :].split(1, dim=1)]
        after = torch.cat([_read(prompt.model, cache, each) for each in parts if each.numel()], 1)
        logits = after[:, len(between) - 1 :] if between else torch.cat([logits, after], dim=1)
    right = torch.tensor(answer, device=logits.device)
    losses = torch.nn.functional.cross_entropy(logits[0].float(), right, reduction="none")
    return logits[0].argmax(dim=-1) == right, losses


def _read(model: Any, cache: CompressedCache, ids: Tensor) -> Tensor:
    """Read tokens after those in the cache, which grows in place, and return the logits after each
    of them.

    Returns:
        (1, N, V), for N tokens and a vocabulary of V tokens.
    """
    cache.expect_tokens(ids)
    logits: Tensor = model(ids, **passed(cache)).logits
    return logits


def question_rows(
    read: ReadText,
    text: QuestionedText,
    setting: str,
    answers: Callable[[PromptCases], Iterable[list[Row]]],
) -> Iterator[Row]:
    """Yield a row for each question about a text, with the answers of all methods.

    If the full cache has no part of an answer right, the question says nothing about other methods,
    and the field "answers" of its row is empty. A question with only a loss always counts.

    Args:
        read: the text that was read.
        text: the text with its questions.
        setting: "hidden" or another name; hidden questions are asked after the compression.
        answers: yields for each method a list with a row for every case of a prompt.
    """
    numbers = itertools.count()
    for source in make_prompts(read, text, setting):
        prompt = source.prompt
        full = [score_answer(prompt, prompt.compressed(FullCache()), case) for case in source.cases]
        is_known = [any(each["right"]) or not each["right"] for each in full]
        answers_by_way = list(answers(source)) if any(is_known) else []
        for place, case in enumerate(source.cases):
            yield {
                "setting": setting,
                "text": text.name,
                "question": next(numbers),
                "group": case.group,
                "full": full[place],
                "answers": [rows[place] for rows in answers_by_way] if is_known[place] else [],
            }


def list_answers(rows: Iterable[Row]) -> list[Row]:
    """Return a list of copies of all answers in the rows, each with its row as the field "of".

    Rows without answers are skipped.
    """
    return [{**answer, "of": row} for row in rows for answer in row.get("answers", ())]


class Count(NamedTuple):
    """The number of right answers and the number of all answers."""

    right: int
    of: int

    @property
    def share(self) -> float:
        """The fraction of answers that are right; 0 if there are no answers."""
        return self.right / self.of if self.of else 0.0

    def interval(self) -> tuple[float, float]:
        """Return the Wilson score interval at the 95 percent level.

        It is 0 to 1 without answers.
        """
        if not self.of:
            return 0.0, 1.0
        z = 1.96
        centre = self.share + z * z / (2 * self.of)
        spread = self.share * (1 - self.share) / self.of + z * z / (4 * self.of**2)
        scale = 1 + z * z / self.of
        low, high = (centre + sign * z * spread**0.5 for sign in (-1, 1))
        return max(low / scale, 0.0), min(high / scale, 1.0)

    def __str__(self) -> str:
        """Return the count as text, such as "0.50 of 10 (0.24 to 0.76)"."""
        low, high = self.interval()
        return f"{self.share:.2f} of {self.of} ({low:.2f} to {high:.2f})"


def count_right(answers: Iterable[Row]) -> Count:
    """Count the right parts of answers, out of those that the full cache has right.

    The answers must be those of `list_answers`.
    """
    counted = [
        own
        for row in answers
        for own, full in zip(row["right"], row["of"]["full"]["right"], strict=True)
        if full
    ]
    return Count(sum(counted), len(counted))


def mean_loss_above(answers: Iterable[Row]) -> float:
    """Return the mean difference between the loss of an answer and that of the full cache.

    It is in nats per token. Answers of a single token have no loss and are left out; at least one
    other is needed. The answers must be those of `list_answers`.
    """
    pairs = ((row["nll"], row["of"]["full"]["nll"]) for row in answers)
    return fmean(own - full for own, full in pairs if full is not None)
