"""One question about a long text, and how it becomes a prompt."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from snapkv.app.prompts import Prompt, chat_prompt
from snapkv.app.settings import GenerationSettings
from snapkv.lab.evaluate.turns import around_turn

if TYPE_CHECKING:
    from snapkv.app.protection import Protection

Template = Literal["tokenizer", "none", "longbench"]
Setting = Literal["visible", "hidden"]

Cell = dict[str, str | int | float]
"""What results are grouped by, such as ``{"length": 4096, "depth": 50}``."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One question about a long text, and what a right answer holds.

    Attributes:
        name: unique within a task; a run is resumed by it.
        cell: what results are grouped by.
        context: the long text, instructions before it included.
        question: what stands behind it, blank lines between them included.
        plain_question: what stands there instead where no chat template is applied, such as
            "Question: ... Answer:"; empty for the same text.
        answer_start: text that the answer begins with; the model continues it.
        references: right answers; what of them must be found is the task's business.
        settings: how the answer is generated.
        chat: whether it may be wrapped in a chat template.
        details: what else the task needs for the score; and under "protect" texts of the prompt
            that stay whatever their votes.
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
    def protection(self) -> "Protection":
        """What of the prompt stays whatever its votes."""
        from snapkv.app.protection import Protection  # imports torch

        return Protection(texts=tuple(self.details.get("protect", ())))

    def prompt(self, tokenizer: Any, template: Template, setting: Setting) -> Prompt:
        """The text that the model continues.

        Args:
            tokenizer: the model's.
            template: "tokenizer" wraps the text as a message where the tokenizer has a chat
                template; "none" leaves it as it is; "longbench" wraps it as the paper's LongBench
                run did, by the model's name.
            setting: "visible" compresses behind the question, as the paper does; "hidden" behind
                the context, before the question is known.
        """
        if template == "tokenizer" and self.chat and tokenizer.chat_template:
            question = self.question
            text = self.context + question
            prompt = chat_prompt(tokenizer, text, answer_start=self.answer_start)
        else:
            question = self.plain_question or self.question
            turn = around_turn(tokenizer) if template == "longbench" and self.chat else ("", "")
            text = turn[0] + self.context + question + turn[1]
            space = " " if self.answer_start and not text[-1:].isspace() else ""
            text += space + self.answer_start
            prompt = Prompt(text=text, answer_start=self.answer_start)
        return prompt if setting == "visible" else prompt.hiding(question)
