"""Build the text that the model continues from documents and a question."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from snapkv.errors import wrong
from snapkv_app.control_words import quoted, tokenized, unquoted

_ANSWER = "the-answer-so-far"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text that a model continues, and what is known about the parts of the text.

    If its question is hidden, the text has two parts: the cache is compressed after the first
    `context_characters`, and the rest is read afterwards and does not vote.
    """

    text: str
    answer_start: str = ""  # the end of `text` that belongs to the answer
    has_special_tokens: bool = False  # written by a chat template
    context_characters: int | None = None  # None: compressed at the end of the text
    question: str = ""  # the last question; empty if it is unknown
    system_characters: int = 0  # of the system message at the beginning of a chat
    cuts: tuple[int, ...] = ()  # positions within control words of the content, see `unquoted`

    @classmethod
    def written(cls, text: str, **fields: Any) -> Self:
        """Build a prompt from the text that a chat template has written with `quoted` content.

        Args:
            text: the text.
            fields: further fields of the prompt.
        """
        plain, cuts = unquoted(text)
        return cls(text=plain, cuts=cuts, has_special_tokens=True, **fields)

    def followed_by(self, tokenizer: Any, content: str) -> Self:
        """Return a copy of the prompt with `content` appended, whose control words are plain text.

        The other fields stay, so `answer_start` does not include the content.
        """
        text, cuts = unquoted(quoted(tokenizer, content))
        begin = len(self.text)
        places = (*self.cuts, *(begin + cut for cut in cuts))
        return replace(self, text=self.text + text, cuts=places)

    def token_ids(self, tokenizer: Any) -> Any:
        """Return the tokens of the text, (1, T) int64, on the CPU.

        Raises:
            InvalidArgumentError: the tokenizer turns ordinary words into control tokens.
        """
        import torch  # commands that read no prompt do without it

        return torch.tensor([self.encoded(tokenizer)[0]])

    def context_tokens(self, tokenizer: Any) -> int | None:
        """Return the number of tokens before the hidden question; None if no question is hidden.

        A token that extends over the end of the context belongs to the question.

        Raises:
            InvalidArgumentError: there is no token before or after the end of the context, or the
                tokenizer turns ordinary words into control tokens.
        """
        if self.context_characters is None:
            return None
        ids, _ = self.encoded(tokenizer)
        context, _ = self.encoded(tokenizer, end=self.context_characters)
        tokens = _common_length(ids, context)
        if tokens == 0:
            raise wrong(
                "context",
                "the prompt does not have any tokens before the hidden question",
                "Add a document, or let the question vote",
            )
        if tokens == len(ids):
            raise wrong(
                "question",
                "the prompt does not have any tokens after the context, from which the question "
                "is hidden",
                "Add a question, or remove context_characters",
            )
        return tokens

    def question_tokens(self, tokenizer: Any) -> int | None:
        """Return the number of tokens from the beginning of the question to the end of the prompt.

        None if there is no question or the text does not contain it. Only the text from the
        question on is tokenized, so the number may differ a little from that in the whole prompt.

        Raises:
            InvalidArgumentError: the tokenizer turns ordinary words into control tokens.
        """
        place = self._question_place()
        if place < 0:
            return None
        cuts = [cut - place for cut in self._cuts(tokenizer) if cut > place]
        return len(tokenized(tokenizer, self.text[place:], cuts)[0])

    def _question_place(self) -> int:
        """Return the position of the last occurrence of the question before `answer_start`.

        -1 if there is no question or the text does not contain it.
        """
        question = self.question.strip()
        return self.text.removesuffix(self.answer_start).rfind(question) if question else -1

    def hiding_question(self) -> "Prompt":
        """Return a copy of the prompt that is compressed before its question.

        Raises:
            InvalidArgumentError: there is no question, or the text does not contain it, because the
                chat template has rewritten it.
        """
        place = self._question_place()
        if place < 0:
            raise wrong(
                "question",
                "the question cannot be hidden, because the chat template has changed "
                f"{self.question[:40]!r}",
                "Use the template none, or let the question vote as well",
            )
        return replace(self, context_characters=place)

    def offsets(self, tokenizer: Any, argument: str, remedy: str) -> list[tuple[int, int]]:
        """Return where each token of the prompt begins and ends in the text.

        Args:
            tokenizer: the tokenizer of the model.
            argument: the argument that an error names.
            remedy: the remedy that an error names.

        Returns:
            For every token, the position of its first character and that of the first one after it;
            (0, 0) for special tokens around the text.

        Raises:
            InvalidArgumentError: the tokenizer reports no offsets, or turns ordinary words into
                control tokens.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise wrong(
                argument,
                "expected a tokenizer that reports the offsets of its tokens, but got "
                f"{type(tokenizer).__name__}",
                remedy,
            )
        return self.encoded(tokenizer, offsets=True)[1]

    def encoded(
        self, tokenizer: Any, *, end: int | None = None, offsets: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenize the text, or its first `end` characters.

        If no chat template has written the text, the special tokens around it are its only control
        tokens.

        Args:
            tokenizer: the tokenizer of the model.
            end: the number of leading characters; None for the whole text.
            offsets: whether to return offsets, too, which needs a fast tokenizer.

        Returns:
            The tokens, and their offsets in the text; empty instead of offsets if `offsets` is
            False.

        Raises:
            InvalidArgumentError: the tokenizer turns ordinary words into control tokens.
        """
        return tokenized(
            tokenizer,
            self.text[:end],
            self._cuts(tokenizer),
            special_tokens=not self.has_special_tokens,
            offsets=offsets,
        )

    def _cuts(self, tokenizer: Any) -> Sequence[int]:
        """Return the ascending positions of characters at which control words must be cut.

        Without a chat template, all control words of the text are cut.
        """
        if self.has_special_tokens:
            return self.cuts
        return unquoted(quoted(tokenizer, self.text))[1]


def require_unicode(argument: str, text: str) -> None:
    """Raise if a text contains bytes that are not UTF-8, which Python reads as surrogates.

    Raises:
        InvalidArgumentError: the text contains such bytes; the message begins with `argument`.
    """
    if surrogate := re.search(r"[\ud800-\udfff]", text):
        raise wrong(
            argument,
            f"expected Unicode text, but got {text[surrogate.start() :][:40]!r}, which begins "
            "with a byte that is not UTF-8",
            "Encode the text in UTF-8",
        )


def require_question(question: str) -> None:
    """Raise if the question has no visible character or is not valid Unicode.

    Raises:
        InvalidArgumentError: the question has no visible character or is not valid Unicode.
    """
    if not question.strip():
        raise wrong(
            "question",
            "expected a question, but got an empty text",
            "Write a question",
        )
    require_unicode("question", question)


def question_prompt(
    tokenizer: Any, document: str, question: str, *, answer_start: str = ""
) -> Prompt:
    """Build a prompt with a question after the document.

    With a chat template, both are one message of the user, and the model's turn begins with
    `answer_start`. Without one, the model continues "Question: ... Answer: ...".
    """
    if tokenizer.chat_template:
        both = f"{document}\n\n{question}"
        return chat_prompt(tokenizer, both, question, answer_start=answer_start)
    text = f"{document}\n\nQuestion: {question}\nAnswer:"
    text += f" {answer_start}" if answer_start else ""
    return Prompt(text=text, answer_start=answer_start, question=question)


def text_prompt(tokenizer: Any, text: str, *, answer_start: str = "") -> Prompt:
    """Build a prompt that consists of `text` and `answer_start`, without a chat template.

    `tokenizer` is not used; all functions that build prompts have it as their first argument.
    """
    del tokenizer
    return Prompt(text=text + answer_start, answer_start=answer_start)


def chat_prompt(tokenizer: Any, text: str, question: str = "", *, answer_start: str = "") -> Prompt:
    """Build a prompt with one message of the user, after which the model's turn begins.

    Args:
        tokenizer: a tokenizer with a chat template.
        text: the message of the user.
        question: the question in the message; empty if there is none.
        answer_start: the text with which the model's turn begins.

    Raises:
        InvalidArgumentError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise wrong(
            "chat",
            "the model does not have a chat template",
            "Remove the option chat",
        )
    turns = [{"role": "user", "content": quoted(tokenizer, text)}]
    turn = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    own = len(system_message(tokenizer))
    told = {"answer_start": answer_start, "question": question, "system_characters": own}
    return Prompt.written(turn, **told).followed_by(tokenizer, answer_start)


def next_turn(tokenizer: Any, question: str) -> Prompt:
    """Build the text between the end of an answer and the beginning of the next one.

    With a chat template, it begins with the end of the earlier message and contains the question as
    a message of the user. Without one, it is "Question: ... Answer:".

    Raises:
        InvalidArgumentError: the chat template does not repeat earlier answers.
    """
    asked = quoted(tokenizer, question)
    if not tokenizer.chat_template:
        return Prompt.written(f"\n\nQuestion: {asked}\nAnswer:", question=question)
    turns = [
        {"role": "user", "content": "What?"},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": asked},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    _, found, behind = text.partition(_ANSWER)
    if not found:
        raise wrong(
            "chat",
            "the chat template of the model does not contain the earlier answers",
            "Start a new conversation for every question",
        )
    return Prompt.written(behind, question=question)


def system_message(tokenizer: Any) -> str:
    """Return the system message that a chat template writes before the first message by itself.

    The caller must pass a tokenizer with a chat template. The result contains the template's words
    around the message. It is empty if there is none, if the template rewrites messages, or if the
    tokenizer reports no offsets.
    """
    turns = [{"role": role, "content": _ANSWER} for role in ("user", "assistant", "user")]
    parts = tokenizer.apply_chat_template(turns, tokenize=False).split(_ANSWER)
    if len(parts) < 3 or not getattr(tokenizer, "is_fast", False):
        return ""  # a template that rewrites messages, or a tokenizer without offsets
    first = tokenizer(parts[0], add_special_tokens=False, return_offsets_mapping=True)
    ids, later = first["input_ids"], tokenizer(parts[-2], add_special_tokens=False)["input_ids"]
    own = ids[: len(ids) - _common_length(reversed(ids), reversed(later))]
    if not tokenizer.decode(own, skip_special_tokens=True).strip():
        return ""
    message: str = parts[0][: first["offset_mapping"][len(own) - 1][1]]
    return message


def _common_length(some: Iterable[int], others: Iterable[int]) -> int:
    """Count the leading elements that two sequences have in common."""
    pairs = zip(some, others, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
