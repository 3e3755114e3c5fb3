"""The samples of tasks: questions about a long text, and how they become prompts."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from snapkv.errors import wrong
from snapkv_app.prompts import Prompt, chat_prompt, next_turn
from snapkv_app.settings import GenerationSettings

if TYPE_CHECKING:
    from snapkv_app.protection import Protection

Template = Literal["tokenizer", "none", "longbench"]
"""The tokenizer's chat template if it has one, none, or that of the paper's LongBench run."""

Setting = Literal["visible", "hidden"]
"""Whether the prompt is compressed after its question, as in the paper, or after its context."""

SETTINGS: dict[str, tuple[Setting, ...]] = {
    "visible": ("visible",),
    "hidden": ("hidden",),
    "both": ("visible", "hidden"),
}
"""The settings by the word of the command's option."""

Cell = dict[str, str | int | float]
"""The fields that results are grouped by, such as ``{"length": 4096, "depth": 50}``."""

_INSTRUCTION = ("[INST]", "[/INST]")
_CONVERSATION = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. USER: ",
    " ASSISTANT:",
)
_AROUND = {
    "longchat": _CONVERSATION,
    "vicuna": _CONVERSATION,
    "llama2": _INSTRUCTION,
    "llama-2": _INSTRUCTION,
    "lwm": _INSTRUCTION,
    "mistral": ("", ""),
    "mixtral": ("", ""),
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question about a long text, and its right answers.

    Attributes:
        name: the name of the sample in the run.
        cell: the group that the sample belongs to.
        context: the text before the question.
        question: the question for a chat template.
        references: the right answers.
        settings: how the answer is generated.
        plain_question: the question without a chat template; empty for `question`.
        answer_start: the text that the answer begins with.
        chat: whether a chat template may be used.
        details: further data that the task needs for the score or the prompt.
    """

    name: str
    cell: Cell
    context: str
    question: str
    references: tuple[str, ...]
    settings: GenerationSettings
    plain_question: str = ""
    answer_start: str = ""
    chat: bool = True
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def turns(self) -> "tuple[Sample, ...]":
        """All questions of the conversation, starting with the sample itself."""
        return (self,)

    @property
    def protection(self) -> "Protection":
        """The texts that must always be kept, which `details` lists under "protect"."""
        from snapkv_app.protection import Protection  # imports torch

        return Protection(texts=tuple(self.details.get("protect", ())))

    def is_chat(self, tokenizer: Any, template: Template) -> bool:
        """Return whether the prompt is written by the tokenizer's chat template.

        It is if `template` is "tokenizer", the sample allows a chat template, and the tokenizer has
        one.
        """
        return template == "tokenizer" and self.chat and bool(tokenizer.chat_template)

    def prompt(self, tokenizer: Any, template: Template, setting: Setting) -> Prompt:
        """Return the prompt that the model continues: the context, the question, and the beginning
        of the answer.

        Args:
            tokenizer: the model's tokenizer.
            template: how the sample becomes a prompt. "tokenizer" gives plain text if the tokenizer
                has no chat template or the sample does not allow it.
            setting: "hidden" marks the prompt so that it is compressed before its question.

        Raises:
            InvalidArgumentError: the template is "longbench", the sample allows a template, and the
                model's name is not known to it.
        """
        if self.is_chat(tokenizer, template):
            question, text = self.question, self.context + self.question
            prompt = chat_prompt(tokenizer, text, question, answer_start=self.answer_start)
        else:
            question = self.plain_question or self.question
            text = self._plain(self.context + question, tokenizer, template)
            prompt = Prompt(text=text, question=question, answer_start=self.answer_start)
        return prompt if setting == "visible" else prompt.hiding_question()

    def later_turn(self, tokenizer: Any, template: Template) -> Prompt:
        """Return the text that a conversation adds between the model's previous answer and its
        answer to this question.

        The sample must be a later question of a conversation; its context is not used.

        Args:
            tokenizer: the model's tokenizer.
            template: how the turn is written, as in `prompt`.

        Raises:
            InvalidArgumentError: the template is "longbench", the sample allows a template, and the
                model's name is not known to it.
        """
        if self.is_chat(tokenizer, template):
            turn, rest = next_turn(tokenizer, self.question), self.answer_start
        else:
            question = self.plain_question or self.question
            turn = Prompt.written("", question=question)
            rest = self._plain(question, tokenizer, template)
        return replace(turn.followed_by(tokenizer, rest), answer_start=self.answer_start)

    def _plain(self, text: str, tokenizer: Any, template: Template) -> str:
        """Return the text of a turn without a chat template, followed by the beginning of the
        answer. With the template "longbench", the text is put between the markers of
        `turn_markers`.

        Raises:
            InvalidArgumentError: the template is "longbench", the sample allows a template, and the
                model's name is not known to it.
        """
        if template == "longbench" and self.chat:
            before, after = turn_markers(tokenizer)
            text = before + text + after
        space = " " if self.answer_start and not text[-1:].isspace() else ""
        return text + space + self.answer_start


@dataclass(frozen=True, kw_only=True)
class Conversation(Sample):
    """A sample with `later` questions about the same text, which are asked one after the other."""

    later: tuple[Sample, ...]

    @property
    def turns(self) -> tuple[Sample, ...]:
        return (self, *self.later)


def turn_markers(tokenizer: Any) -> tuple[str, str]:
    """Return the texts that stand before and after a prompt in the LongBench run of the paper. Both
    are empty for Mistral and Mixtral.

    The last part of the model's name decides. These are not the templates of the tokenizers:
    Mistral and Mixtral got the bare text, Llama 2 and LWM got brackets without a system message,
    and Vicuna and LongChat got the conversation they were trained on.

    Raises:
        InvalidArgumentError: the model's name contains no known family.
    """
    name = PurePath(tokenizer.name_or_path).name.lower()
    for family, around in _AROUND.items():
        if family in name:
            return around
    problem = f"expected a model named like {', '.join(_AROUND)} for longbench, but got {name!r}"
    raise wrong("template", problem, "Use the template tokenizer or none")


def data_hash(samples: Iterable[Sample]) -> str:
    """Return a hash of the contents of all samples and of their order.

    It is the text "sha256:" and 16 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps(asdict(sample), sort_keys=True).encode())
    return f"sha256:{digest.hexdigest()[:16]}"
