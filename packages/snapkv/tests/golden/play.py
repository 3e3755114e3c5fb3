"""Run a case: read a prompt, generate an answer, and apply an operation to the cache."""

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from snapkv import CompressedCache, Document
from snapkv.hf.cache_argument import cache_among
from snapkv.kvzip import read_context, read_twice
from snapkv.prefill import layer_by_layer
from snapkv_lab.medusa import Medusa, MedusaHeads
from tests.golden.cases import POLICIES, STORAGES, TURNS, Case
from tests.golden.models import drawn_ids

PROMPT, PADS, PIECE, ANSWER = 70, 23, 20, 8


@dataclass(frozen=True)
class Stage:
    """The observable state of a cache at one moment.

    Attributes:
        name: the name of the moment.
        tokens: (B, N), the tokens that were generated since the last stage.
        logits: (B, V) float32, of the last forward pass.
        positions: per compressed layer, (B, heads, kept).
        report: the result of `cache.report()`.
    """

    name: str
    tokens: list[list[int]]
    logits: Tensor
    positions: dict[int, Tensor]
    report: dict[str, Any]

    @classmethod
    def of(cls, cache: Any, name: str, tokens: Tensor, logits: Tensor) -> "Stage":
        """The cache as it is now."""
        return cls(
            name=name,
            tokens=tokens.tolist(),
            logits=logits.float(),
            positions={layer: cache.kept_positions(layer) for layer in cache.compressed_layers},
            report=dict(cache.report()),
        )


class Talk:
    """A conversation: a cache and the ids that it has read, turn by turn.

    Args:
        model: the model that answers.
        case: the case to run.
        folder: a folder for files.
    """

    def __init__(self, model: PreTrainedModel, case: Case, folder: Path) -> None:
        self.model, self.case, self.folder = model, case, folder
        self.rows = 1 if case.rows == "one" else 2
        self.cache = self._new_cache()
        self.forget()

    def _new_cache(self) -> Any:
        options = {**STORAGES[self.case.storage], **TURNS[self.case.turns]}
        if options.get("recall") == "folder":
            options["recall"] = self.folder / "recall"
        return CompressedCache(self.model, POLICIES[self.case.policy](), **options)

    def forget(self) -> None:
        """Start the conversation again with no tokens."""
        self.ids = torch.empty(self.rows, 0, dtype=torch.int64)
        self.mask = torch.empty(self.rows, 0, dtype=torch.int64)

    def ask(self, tokens: int, seed: int) -> None:
        """Read the next prompt; the first row of a batch has a shorter first prompt."""
        ids = drawn_ids(self.rows, tokens, seed)
        mask = torch.ones_like(ids)
        if self.rows == 2 and not self.mask.shape[1]:
            mask[0, : min(PADS, tokens // 3)] = 0
        self._hear(ids * mask, mask)

    def _hear(self, ids: Tensor, mask: Tensor | None = None) -> None:
        mask = torch.ones_like(ids) if mask is None else mask
        self.ids, self.mask = torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1)

    def answer(self, name: str, new_tokens: int = ANSWER, **options: Any) -> Stage:
        """Generate, greedily."""
        if self.case.reading == "told":
            return self._answer_by_hand(name, new_tokens)
        if self.case.reading == "pieces":
            options["prefill_chunk_size"] = PIECE
        with self._read_as_asked():
            output = self.model.generate(
                self.ids,
                attention_mask=self.mask,
                past_key_values=self.cache,
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
                **options,
            )
        new = output.sequences[:, self.ids.shape[1] :]
        if len(new) == self.rows:
            self._hear(new)
        return self.stage(name, new, output.logits[-1])

    def draft(self, name: str, decoding: Any) -> Stage:
        """Generate with a drafting method of the library, then read the last token."""
        piece = {"prefill_chunk_size": PIECE} if self.case.reading == "pieces" else {}
        with self._read_as_asked():
            output = self.model.generate(
                self.ids,
                attention_mask=self.mask,
                past_key_values=self.cache,
                max_new_tokens=ANSWER,
                do_sample=False,
                pad_token_id=0,
                custom_generate=decoding,
                **piece,
            )
        new = output[:, self.ids.shape[1] :]
        self._hear(new)
        return self.stage(name, new, self.read(self.ids.shape[1]))

    def _read_as_asked(self) -> contextlib.AbstractContextManager[None]:
        if self.case.reading == "layerwise":
            return layer_by_layer(self.model, chunk_tokens=PIECE)
        return contextlib.nullcontext()

    def _answer_by_hand(self, name: str, new_tokens: int) -> Stage:
        """Read the prompt in announced pieces and generate token by token in plain calls."""
        end, seen = self.ids.shape[1], self.cache.get_seq_length()
        self.cache.expect_prompt(end)
        for stop in (*range(seen + PIECE, end, PIECE), end):
            logits = self.read(stop)
        said = []
        for _ in range(new_tokens):
            said.append(logits.argmax(-1, keepdim=True))
            self._hear(said[-1])
            logits = self.read(self.ids.shape[1])
        return self.stage(name, torch.cat(said, 1), logits)

    def read(self, stop: int) -> Tensor:
        """Read all unread tokens up to `stop` in one plain call and return the last logits."""
        seen, mask = self.cache.get_seq_length(), self.mask[:, :stop]
        ids = self.ids[:, seen:stop]
        self.cache.expect_tokens(ids)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, seen:]
        output = self.model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache
        )
        return output.logits[:, -1]

    def feed(self, name: str, tokens: int, seed: int) -> Stage:
        """Read more text after an answer, one token at a time."""
        for token in drawn_ids(self.rows, tokens, seed).split(1, dim=1):
            self._hear(token)
            logits = self.read(self.ids.shape[1])
        return self.stage(name, torch.empty(self.rows, 0), logits)

    def stage(self, name: str, tokens: Tensor, logits: Tensor) -> Stage:
        """The cache as it is now."""
        return Stage.of(self.cache, name, tokens, logits)


@torch.no_grad()
def stages(model: PreTrainedModel, case: Case) -> Iterator[Stage]:
    """Run a case and yield its stages in order; errors of the library are raised."""
    with tempfile.TemporaryDirectory() as folder:
        if case.then == "document":
            yield from _document(model, case, Path(folder))
            return
        talk = Talk(model, case, Path(folder))
        talk.ask(PROMPT, 1)
        if case.reading == "twice":
            yield _read_twice(talk)
            talk.ask(9, 5)
        yield from _THEN[case.then](talk)


def _read_twice(talk: Talk) -> Stage:
    """Read a prompt with KVzip, into a prepared cache if the case has options."""
    policy = POLICIES[talk.case.policy]()
    if talk.case.storage == "dynamic" and talk.case.turns == "append":
        talk.cache = read_context(talk.model, talk.ids, policy, instruction_ids=(5, 6))
    else:
        read_twice(talk.model, talk.ids, talk.cache, instruction_ids=(5, 6))
    return talk.stage("read twice", torch.empty(1, 0), torch.zeros(1, 1))


def _answer(talk: Talk) -> Iterator[Stage]:
    yield talk.answer("answer", 2 * ANSWER)
    yield talk.feed("text", 3, 2)


def _turns(talk: Talk) -> Iterator[Stage]:
    yield talk.answer("first answer")
    talk.ask(12, 2)
    yield talk.answer("second answer", 4)
    talk.ask(5, 3)
    yield talk.answer("third answer", 4)


def _long(talk: Talk) -> Iterator[Stage]:
    """Read a prompt that fills many blocks of codes."""
    talk.ask(4 * PROMPT, 2)
    yield from _turns(talk)


def _lookup(talk: Talk) -> Iterator[Stage]:
    yield talk.answer("answer by lookup", 2 * ANSWER, prompt_lookup_num_tokens=3)
    talk.ask(9, 2)
    yield talk.answer("second answer", 4)


def _medusa(talk: Talk) -> Iterator[Stage]:
    yield talk.draft("answer of heads", Medusa(MedusaHeads.untrained(talk.model, 2)))
    talk.ask(9, 2)
    yield talk.draft("second answer", Medusa(MedusaHeads.untrained(talk.model, 2)))


def _beams(talk: Talk) -> Iterator[Stage]:
    yield talk.answer("best of beams", num_beams=3)


def _rows(talk: Talk) -> Iterator[Stage]:
    """Repeat rows, reorder them and select some."""
    yield talk.answer("answer", 4)
    talk.ask(6, 4)
    talk.answer("second answer", 2)
    order = torch.arange(2 * talk.rows).flip(0)
    talk.cache.batch_repeat_interleave(2)
    _take_rows(talk, torch.arange(talk.rows).repeat_interleave(2))
    yield talk.feed("doubled", 2, 2)
    talk.cache.reorder_cache(order)
    _take_rows(talk, order)
    yield talk.feed("turned round", 2, 3)
    talk.cache.batch_select_indices(order[1:])
    _take_rows(talk, order[1:])
    yield talk.feed("chosen", 2, 4)


def _take_rows(talk: Talk, rows: Tensor) -> None:
    talk.ids, talk.mask, talk.rows = talk.ids[rows], talk.mask[rows], len(rows)


def _crop(talk: Talk) -> Iterator[Stage]:
    yield talk.answer("answer")
    talk.ask(6, 5)
    yield talk.answer("second answer", 4)
    for tokens, name in ((2, "cropped"), (4, "cropped into the turn"), (12, "cropped further")):
        _take_back(talk, tokens)
        yield talk.feed(name, 3, 2 + tokens)


def _take_back(talk: Talk, tokens: int) -> None:
    """Crop the cache; the last token of the conversation may not have been read yet."""
    talk.cache.crop(-tokens)
    seen = talk.cache.get_seq_length()
    talk.ids, talk.mask = talk.ids[:, :seen], talk.mask[:, :seen]


def _reset(talk: Talk) -> Iterator[Stage]:
    """Reset for a prompt that fits the budget, then for a long one, with other row counts."""
    yield talk.answer("answer")
    for tokens, name in ((18, "answer to a short prompt"), (PROMPT - 9, "answer to a long one")):
        talk.cache.reset()
        yield talk.stage("emptied", torch.empty(talk.rows, 0), torch.zeros(1, 1))
        talk.rows = 3 - talk.rows
        talk.forget()
        talk.ask(tokens, 2)
        yield talk.answer(name)
    talk.ask(7, 3)
    yield talk.answer("second answer", 3)


def _save(talk: Talk) -> Iterator[Stage]:
    yield talk.answer("answer")
    talk.ask(6, 5)
    yield talk.answer("second answer", 3)
    talk.cache.save(talk.folder / "saved.safetensors")
    talk.cache, _ = load(talk.folder / "saved.safetensors", talk.model, talk.case)
    yield talk.feed("loaded", 3, 2)
    talk.ask(6, 3)
    yield talk.answer("third answer", 3)


def load(path: Path, model: PreTrainedModel, case: Case) -> Any:
    """Return the cache of a file and the tensors that were saved with it."""
    # Files of the first release have how many token ids a policy was made with, not which.
    given = {"policy": POLICIES["fastgen"]()} if case.policy == "fastgen" else {}
    return CompressedCache.load_with(path, model, **given)


def _copy(talk: Talk) -> Iterator[Stage]:
    yield talk.answer("answer", 4)
    branch = copy.copy(talk)
    branch.cache = copy.deepcopy(talk.cache)
    branch.ask(8, 2)
    yield branch.answer("a branch's answer", 4)
    talk.ask(6, 3)
    yield talk.answer("second answer", 4)
    yield branch.feed("the branch goes on", 2, 4)


def _document(model: PreTrainedModel, case: Case, folder: Path) -> Iterator[Stage]:
    """Ask a document single questions and a batch, before and after saving it."""
    options = dict(TURNS[case.turns])
    if options.get("recall") == "folder":
        options["recall"] = folder / "recall"
    pieces = {"chunk_tokens": PIECE} if case.reading == "pieces" else {}
    policy = POLICIES[case.policy]()
    document = Document(model, drawn_ids(1, PROMPT, 1), policy, **options, **pieces)
    questions = [drawn_ids(1, tokens, tokens)[0] for tokens in (7, 11)]
    yield asked(model, document, "one question", questions[:1])
    yield asked(model, document, "two questions of a length", [questions[0], questions[0] + 1])
    document.save(folder / "document.safetensors")
    loaded = Document.load(folder / "document.safetensors", model)
    yield asked(model, loaded, "another of the loaded", questions[1:])
    yield asked(model, document, "two questions", questions)


def asked(model: PreTrainedModel, document: Any, name: str, questions: list[Tensor]) -> Stage:
    inputs = document.inputs(questions)
    output = model.generate(
        **inputs,
        max_new_tokens=ANSWER,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = output.sequences[:, inputs["input_ids"].shape[1] :]
    return Stage.of(cache_among(inputs), name, new, output.logits[-1])


_THEN: dict[str, Callable[[Talk], Iterator[Stage]]] = {
    "answer": _answer,
    "turns": _turns,
    "long": _long,
    "lookup": _lookup,
    "medusa": _medusa,
    "beams": _beams,
    "rows": _rows,
    "crop": _crop,
    "reset": _reset,
    "save": _save,
    "copy": _copy,
}
