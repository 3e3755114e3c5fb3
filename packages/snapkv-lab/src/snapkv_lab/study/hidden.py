"""Studies of prompts at whose end something in them is said again."""

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapkv.errors import OutputError
from snapkv.validation import require_at_least, require_choice
from snapkv_lab.evaluate.store import Progress, Record, Store
from snapkv_lab.study.base import Findings, Study
from snapkv_lab.study.material import LEAST_TOKENS, cut, long_texts

if TYPE_CHECKING:
    from snapkv.app.models import LoadedModel
    from snapkv_lab.study.copying import Copy

KINDS = ("digits", "words", "tokens")

_OVERHEAD_TOKENS = 64
"""Room for what is said around the copy."""


@dataclass(frozen=True, kw_only=True)
class HiddenCopies(Study):
    """A study that hides things in texts, and looks at every layer while they are said again.

    Args:
        documents: files, a text each; none for essays or Python's documentation.
        kinds: what is hidden: digits, words, tokens, with commas.
        items: how many of them.
        samples: texts of each kind, with the hidden things at other depths.
        document_tokens: length that texts are cut to; shorter where one of them has no more, or
            the model no positions.
        seed: of what is hidden.
    """

    documents: tuple[str, ...] = ()
    kinds: tuple[str, ...] = KINDS
    items: int = 12
    samples: int = 3
    document_tokens: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings that all studies of copies have."""
        for name in ("items", "samples"):
            require_at_least(name, getattr(self, name), 1)
        require_at_least("document_tokens", self.document_tokens, LEAST_TOKENS)
        require_at_least("kinds", len(self.kinds), 1)
        for kind in self.kinds:
            require_choice("kinds", kind, KINDS)

    @abstractmethod
    def looked_at(self, loaded: "LoadedModel", copy: "Copy") -> Record:
        """What one prompt gives."""

    @abstractmethod
    def summary(self, records: Sequence[Record]) -> list[Record]:
        """Rows of all prompts."""

    @abstractmethod
    def files(self, rows: Sequence[Record]) -> dict[str, Record]:
        """What follows for the model: what to write into the folder, by the files' names."""

    def closing(self, loaded: "LoadedModel", folder: Path, rows: Sequence[Record]) -> str:
        """What is done with it, in a line; nothing here."""
        del loaded, folder, rows
        return ""

    def into(
        self, loaded: "LoadedModel", folder: Path, on_progress: Progress | None = None
    ) -> Findings:
        """Read what the folder does not hold yet, and conclude from all of it."""
        texts, warnings = long_texts(self.documents, count=self.samples)
        found = cut(loaded.tokenizer, texts, self._text_tokens(loaded))
        block = self.settings(loaded) | {"document_tokens_read": found.tokens}
        parts = [(kind, number) for kind in self.kinds for number in range(self.samples)]
        with Store(folder, block) as store:
            for done, (kind, number) in enumerate(parts):
                if on_progress:
                    on_progress(f"{kind}, {number + 1}", done, len(parts))
                if (str(number), self.name, kind) not in store:
                    _, text = found.texts[number % len(found.texts)]
                    record = {"sample": str(number), "method": self.name, "question": kind}
                    copy = self._copy(loaded, text, kind, number)
                    store.add(record | self.looked_at(loaded, copy))
            if on_progress:
                on_progress("done", len(parts), len(parts))
            rows = self.summary(store.records)
            unwritten = store.summarise(rows) or _write(folder, loaded, self.files(rows))
        return Findings(
            folder=folder,
            run=block,
            rows=rows,
            warnings=warnings,
            notices=self._notices(found.tokens),
            closing=self.closing(loaded, folder, rows),
            unwritten=unwritten,
        )

    def _text_tokens(self, loaded: "LoadedModel") -> int:
        if loaded.max_tokens is None:
            return self.document_tokens
        room = loaded.max_tokens - _OVERHEAD_TOKENS - 4 * self.items  # a word is a few tokens
        return max(LEAST_TOKENS, min(self.document_tokens, room))

    def _notices(self, tokens: int) -> tuple[str, ...]:
        if tokens >= self.document_tokens:
            return ()
        return (f"texts are cut to {tokens:,} tokens instead of {self.document_tokens:,}",)

    def _copy(self, loaded: "LoadedModel", text: str, kind: str, number: int) -> "Copy":
        from snapkv_lab.study.copying import hidden_copy

        return hidden_copy(
            loaded.tokenizer,
            loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            kind=kind,
            items=self.items,
            depth=(number + 0.5) / self.samples,
            seed=f"{self.seed}/{kind}/{number}",
        )


def _write(folder: Path, loaded: "LoadedModel", files: dict[str, Record]) -> OutputError | None:
    """What follows beside what tells the model from others; why not, where it cannot be."""
    from snapkv.cache.saving.writing import replace_file
    from snapkv.hf.identity import identity_of

    identity = identity_of(loaded.model)
    try:
        for name, found in files.items():
            text = json.dumps({"model": identity} | found, indent=1)
            replace_file(folder / name, text + "\n")
    except OutputError as error:
        return error
    return None
