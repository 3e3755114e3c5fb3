"""Questions about a long text, and how they become prompts."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from snapkv.errors import InvalidArgumentError
from snapkv_app.prompts import Prompt, chat_prompt, next_turn
from snapkv_app.settings import GenerationSettings

if TYPE_CHECKING:
    from snapkv_app.protection import Protection

Template = Literal["tokenizer", "none", "longbench"]
"""The tokenizer's chat template where it has one, none, or the paper's LongBench run's."""

Setting = Literal["visible", "hidden"]
"""Whether the prompt is compressed after its question, as in the paper, or after its context."""

SETTINGS: dict[str, tuple[Setting, ...]] = {
    "visible": ("visible",),
    "hidden": ("hidden",),
    "both": ("visible", "hidden"),
}
"""By the word of a command's option."""

Cell = dict[str, str | int | float]
"""What results are grouped by, such as ``{"length": 4096, "depth": 50}``."""

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
    """One question about a long text, and what a right answer holds."""

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
        """Itself, and the questions that follow in the same cache."""
        return (self,)

    @property
    def protection(self) -> "Protection":
        """What of the prompt stays whatever its votes."""
        from snapkv_app.protection import Protection  # imports torch

        return Protection(texts=tuple(self.details.get("protect", ())))

    def is_chat(self, tokenizer: Any, template: Template) -> bool:
        """Whether the tokenizer's chat template makes its prompt."""
        return template == "tokenizer" and self.chat and bool(tokenizer.chat_template)

    def prompt(self, tokenizer: Any, template: Template, setting: Setting) -> Prompt:
        """The text that the model continues."""
        if self.is_chat(tokenizer, template):
            question, text = self.question, self.context + self.question
            prompt = chat_prompt(tokenizer, text, question, answer_start=self.answer_start)
        else:
            question = self.plain_question or self.question
            text = self._plain(self.context + question, tokenizer, template)
            prompt = Prompt(text=text, question=question, answer_start=self.answer_start)
        return prompt if setting == "visible" else prompt.hiding_question()

    def later_turn(self, tokenizer: Any, template: Template) -> Prompt:
        """What stands between an answer and the answer to this one, of the same conversation."""
        if self.is_chat(tokenizer, template):
            turn, rest = next_turn(tokenizer, self.question), self.answer_start
        else:
            question = self.plain_question or self.question
            turn = Prompt.written("", question=question)
            rest = self._plain(question, tokenizer, template)
        return replace(turn.followed_by(tokenizer, rest), answer_start=self.answer_start)

    def _plain(self, text: str, tokenizer: Any, template: Template) -> str:
        """A turn without a chat template, and the beginning of the answer after it."""
        if template == "longbench" and self.chat:
            before, behind = turn_markers(tokenizer)
            text = before + text + behind
        space = " " if self.answer_start and not text[-1:].isspace() else ""
        return text + space + self.answer_start


@dataclass(frozen=True, kw_only=True)
class Conversation(Sample):
    """A question about a long text, and `later` ones without a context, one after the other."""

    later: tuple[Sample, ...]

    @property
    def turns(self) -> tuple[Sample, ...]:
        return (self, *self.later)


def turn_markers(tokenizer: Any) -> tuple[str, str]:
    """What stood before and after a prompt in the paper's LongBench run, by the model's name.

    Not the tokenizers' templates: Mistral and Mixtral got the bare text, Llama 2 and LWM the
    brackets without a system message, Vicuna and LongChat the conversation they were trained on.
    """
    name = PurePath(tokenizer.name_or_path).name.lower()
    for family, around in _AROUND.items():
        if family in name:
            return around
    raise InvalidArgumentError(
        f"template: expected a model named like {', '.join(_AROUND)} for longbench, got {name!r}; "
        "use the template tokenizer or none"
    )


def data_hash(samples: Iterable[Sample]) -> str:
    """What the samples hold, as "sha256:..."."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps(asdict(sample), sort_keys=True).encode())
    return f"sha256:{digest.hexdigest()[:16]}"
