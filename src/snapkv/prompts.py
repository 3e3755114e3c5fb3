"""From documents and a question to the text the model continues."""

from dataclasses import dataclass
from typing import Any

from snapkv.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The text that a model continues.

    Attributes:
        text: all of it, `answer_start` included.
        answer_start: the end of `text` that belongs to the answer.
        has_special_tokens: whether `text` was made by a chat template, which writes the special
            tokens itself.
    """

    text: str
    answer_start: str = ""
    has_special_tokens: bool = False

    def token_ids(self, tokenizer: Any) -> Any:
        """The prompt as token ids, (1, T) int64."""
        encoded = tokenizer(
            self.text,
            add_special_tokens=not self.has_special_tokens,
            return_tensors="pt",
            verbose=False,  # the length is checked against the model, with a better message
        )
        return encoded["input_ids"]


def question_prompt(
    tokenizer: Any, document: str, question: str, *, answer_start: str = ""
) -> Prompt:
    """The document first and the question last, where it can vote on the document.

    With a chat template both are one message of the user, and the model's turn begins with
    `answer_start`. Without one, the model continues "Question: ... Answer: ...".
    """
    if tokenizer.chat_template:
        return chat_prompt(tokenizer, f"{document}\n\n{question}", answer_start=answer_start)
    text = f"{document}\n\nQuestion: {question}\nAnswer:"
    if answer_start:
        text += f" {answer_start}"
    return Prompt(text=text, answer_start=answer_start)


def text_prompt(tokenizer: Any, text: str, *, answer_start: str = "") -> Prompt:
    """The text itself, to be continued."""
    del tokenizer
    return Prompt(text=text + answer_start, answer_start=answer_start)


def chat_prompt(tokenizer: Any, text: str, *, answer_start: str = "") -> Prompt:
    """One message of the user, up to the point where the model's turn begins.

    Raises:
        InvalidArgumentError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise InvalidArgumentError(
            "chat: expected a model with a chat template, got one without; leave chat out"
        )
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return Prompt(text=turn + answer_start, answer_start=answer_start, has_special_tokens=True)
