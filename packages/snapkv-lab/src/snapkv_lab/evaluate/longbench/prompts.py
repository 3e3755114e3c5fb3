"""LongBench's prompts, read out of the installed lm-eval and proven to be the published ones.

The task files of lm-eval 0.4.13 hold 10 of the 16 prompts as they were published. The other six
lost an empty line or what they end with, which is put back here. Whatever the release, a prompt is
only used if its hash is that of the published one.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import yaml

from snapkv.errors import MissingDependencyError
from snapkv.packages import INSTALL, package_file
from snapkv_lab.evaluate.longbench.sets import DataSet


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """A set's prompt: what stands before a document and behind it.

    Attributes:
        before: instructions before the document.
        behind: what follows it, with ``{input}`` where the question stands, if it stands anywhere.
    """

    before: str
    behind: str

    def context(self, document: str) -> str:
        """The prompt up to the document's end."""
        return self.before + document

    def question(self, asked: str) -> str:
        """The prompt behind the document."""
        return self.behind.replace("{input}", asked)


def prompt_format(data_set: DataSet) -> PromptFormat:
    """The published prompt of a set.

    Raises:
        MissingDependencyError: lm-eval is not installed, or has another prompt.
    """
    found = _lm_eval_prompt(data_set.name)
    for text in (found, _repaired(data_set.name, found)):
        if hashlib.sha256(text.encode()).hexdigest() == data_set.prompt_sha256:
            before, _, behind = text.partition("{context}")
            return PromptFormat(before=before, behind=behind)
    raise MissingDependencyError(
        f"data: expected the published prompt of {data_set.name} in the installed lm-eval, got "
        f"another one; run {INSTALL['lm_eval']}"
    )


def _repaired(name: str, text: str) -> str:
    """What lm-eval 0.4.13 lost of a prompt, put back."""
    if name in ("triviaqa", "samsum"):
        return text.replace("{context}\n{input}", "{context}\n\n{input}")
    if name in ("passage_count", "passage_retrieval_en"):
        return text + " "
    if name in ("lcc", "repobench-p"):
        return text + "\n"
    return text


def _lm_eval_prompt(name: str) -> str:
    """The prompt in the task's file, with the published names of its places."""
    path = package_file("lm_eval", "tasks", "longbench", f"{name}.yaml")
    task: dict[str, Any] = yaml.load(path.read_text("utf-8"), _PlainLoader)
    text = str(task.get("doc_to_text"))
    return text.replace("{{context}}", "{context}").replace("{{question}}", "{input}")


class _PlainLoader(yaml.SafeLoader):
    """A safe loader that leaves lm-eval's `!function` the name that it is."""


_PlainLoader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))
