"""Store documents that a model has read, for any number of later questions."""

import contextlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from snapkv.cache.saving.records import digest_of
from snapkv.errors import (
    CacheFileError,
    InvalidArgumentError,
    InvalidTypeError,
    LibraryError,
    OutOfMemoryError,
    OutputError,
    SnapKVError,
    wrong,
)
from snapkv.validation import DEFAULT_RECOMPUTE, format_bytes, nearest, path_of, require_int
from snapkv_app.library.about import About, question_ids
from snapkv_app.library.bound import SizeLimit
from snapkv_app.library.folder import Fault, Folder
from snapkv_app.library.index import DocumentEntry, Index, fault_of
from snapkv_app.library.records import Record, Text, each_once
from snapkv_app.library.searching import Hit, Passages

if TYPE_CHECKING:  # imports torch, which listing documents does not need
    from torch import Tensor
    from transformers import PreTrainedModel

    from snapkv.policies import Policy
    from snapkv.storage.bits import Quantize
    from snapkv_app.library.about import LibraryBits
    from snapkv_app.library.joining import Part
    from snapkv_app.library.reader import Reader

ProgressSink = Callable[[str, int, int], None]
"""Called with the name of the next document, the number done, and the total."""

NoticeSink = Callable[[str], None]
"""Called with a line of text about a damaged file, or about a policy that cannot evict tokens."""


What = Literal["read", "changed", "mended", "skipped", "failed", "dropped", "evicted"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of adding one document.

    Attributes:
        name: the name of the document.
        what: "read" if the document is new, "changed" if it had another text, "mended" if its file
            was damaged, "skipped" if it is unchanged, "failed" if it cannot be read, "dropped" if
            its source file was deleted, and "evicted" if it was removed for a new document,
            because of the limit.
    """

    name: str
    what: What
    tokens: int = 0  # of the document; 0 if it failed
    bytes: int = 0  # of the file with its cache
    seconds: float = 0.0  # the time of reading and writing the document
    reason: str = ""  # the error, if it failed


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=3)


class Library:
    """A folder of documents that the same model has read.

    ::

        library = Library("contracts.library")
        library.add(model, tokenizer, [("lease", lease_text), ("loan", loan_text)])
        hits = library.search("Who may terminate the lease?")
        inputs = library.inputs(model, tokenizer, "Who may terminate the lease?", hits)
        model.generate(**inputs, max_new_tokens=64)

    A document exists as soon as its file is complete. If `add` is killed, the next call continues
    after the last complete document. Other processes may ask questions while one adds documents.

    Args:
        folder: the folder of the library, which `add` creates.
        on_notice: called with a line about every damaged file, and about a policy that cannot evict
            tokens; by default it is a warning.

    Raises:
        InvalidArgumentError: the name of the folder is empty or contains a NUL byte.
        InvalidTypeError: `folder` is not a path.
        LibraryError: the folder exists, but is not a library or cannot be read.
    """

    def __init__(self, folder: str | Path, *, on_notice: NoticeSink = _warn) -> None:
        if not str(folder).strip():
            raise wrong(
                "library",
                "expected the name of a folder, but got an empty name",
                "Use the name of a folder",
            )
        self.path = path_of("library", folder)
        self._folder = Folder(self.path)
        self._folder.about()
        self._on_notice = on_notice
        self._passages = Passages(self._folder, on_notice)

    @property
    def about(self) -> About | None:
        """The description of how documents are read; None before the first document is stored.

        Raises:
            LibraryError: the folder has become something else than a library, or cannot be read.
        """
        return self._folder.about()

    @property
    def documents(self) -> list[Record]:
        """The records of all documents as they are now, in a new list that is sorted by name.

        Damaged records are left out, and `on_notice` is called for each. Empty without a library.
        """
        records, faults = self._folder.records()
        for fault in faults:
            self._on_notice(fault.as_notice())
        return list(records.values())

    def required(self) -> About:
        """Return the description of how documents are read, as `about`, but never None.

        Raises:
            LibraryError: there is no library yet. The message says whether another process is
                reading its first document, or was stopped before the end of that document.
            OutputError: there is no library yet, and the file system cannot lock files.
        """
        about = self._folder.about()
        if about is None:
            self._folder.require_unlocked()
            if self._folder.was_begun:
                raise wrong(
                    "library",
                    f"no document in the folder {str(self.path)!r} was read completely",
                    "Run the same command snapkv library add again, or delete the folder",
                    LibraryError,
                )
            raise wrong(
                "library",
                f"there is no library in the folder {str(self.path)!r}",
                "Run snapkv library add FILES --to FOLDER to create a library",
                LibraryError,
            )
        return about

    def require_unlocked(self) -> None:
        """Raise if documents cannot be added now, which is checked before a model is loaded.

        Raises:
            LibraryError: another process is changing the library.
            OutputError: the file system cannot lock files.
        """
        self._folder.require_unlocked()

    def add(
        self,
        model: "PreTrainedModel",
        tokenizer: Any,
        documents: Iterable[Text | tuple[str, str]],
        policy: "Policy | None" = None,
        *,
        bits: "LibraryBits | None" = None,
        model_name: str | None = None,
        on_progress: ProgressSink | None = None,
    ) -> list[Outcome]:
        """Read documents and store them, except those that the library already has unchanged.

        If a document cannot be read or does not fit below the limit, its outcome is "failed", and
        the others are still read. The first `add` creates the folder.

        Args:
            model: a decoder-only model of transformers.
            tokenizer: its tokenizer. If it has a chat template, documents are read after the first
                tokens of the template.
            documents: `Text` objects, or pairs of a name and a text. Different texts must have
                different sources, or different names if they have no source.
            policy: selects the tokens to keep, before any question is known. By default it is the
                policy of the library, and a new library keeps all tokens. With `KVzip`, and `AdaKV`
                around it, the model reads a document twice.
            bits: the bits of stored keys and values, see `CompressedCache.save`, or "none" for the
                dtype of the model. By default they are those of the library, and "int4" for a new
                one.
            model_name: the name of the model in error messages.
            on_progress: called before every document.

        Returns:
            The outcome of every document, in order, followed by one outcome "evicted" for each
            document that was evicted because of a limit, see `limit`. A document that is repeated
            with the same text has one outcome.

        Raises:
            LibraryError: the model, the tokenizer, the policy or the bits are not those of this
                library, another process is changing it, or this Python's SQLite has no full-text
                search.
            InvalidArgumentError: a text is empty, two different texts have the same name, or `bits`
                is not a known name.
            InvalidTypeError: a document is neither a `Text` nor a pair of texts.
            UnsupportedModelError: the model cannot be compressed correctly.
            OutputError: a file cannot be written; the documents before it are stored.
        """
        texts = each_once(documents)
        with self._changing():
            reader = self._reader_to_add(model, tokenizer, policy, bits, model_name)
            is_new = self.about is None
            names = {} if is_new else self._passages.query(lambda index: _names(index, texts))
            limit, outcomes = self._size_limit({text.key for text in texts}), []
            for done, text in enumerate(texts):
                if on_progress:
                    on_progress(text.name, done, len(texts))
                outcomes.append(self._add(reader, text, names, limit))
        return [*outcomes, *(Outcome(name=entry.name, what="evicted") for entry in limit.evicted)]

    def limit(self, max_bytes: int | None, *, evict: bool = False) -> list[DocumentEntry]:
        """Limit the total size of all files of keys and values.

        If a new document exceeds the limit, the least recently used documents are evicted. A
        document that no question has used counts as used when it was written. Neither the most
        recently used document nor those of the same `add` are evicted. If a new document does not
        fit beside them, adding it fails.

        Args:
            max_bytes: the limit; None removes it.
            evict: whether to evict documents now if the library is larger than the limit.

        Returns:
            The documents that were evicted, the least recently used first.

        Raises:
            InvalidArgumentError: the library is larger than the limit and `evict` is False, or the
                most recently used document alone is larger.
            InvalidTypeError: `max_bytes` is not an integer.
            LibraryError: there is no library, another process is changing it, or this Python's
                SQLite has no full-text search.
            OutputError: a file cannot be written.
        """
        if max_bytes is not None:
            max_bytes = require_int("max_bytes", max_bytes, minimum=0, maximum=None)
        self.required()
        with self._changing():
            entries = self._passages.query(lambda index: index.entries())
            most_bytes = math.inf if max_bytes is None else max_bytes
            going = SizeLimit(self._folder, entries, most_bytes).too_many()
            if going and not evict:
                stored = format_bytes(sum(entry.bytes for entry in entries))
                raise wrong(
                    "max_bytes",
                    f"the library has a size of {stored}, so a limit of "
                    f"{format_bytes(most_bytes)} would evict {len(going)} of the {len(entries)} "
                    "documents",
                    "Set evict=True (or use the option --evict) to allow this",
                )
            self._folder.begin(replace(self.required(), max_bytes=max_bytes))
            self._folder.remove(entry.key for entry in going)
        return going

    def remove(self, names: Iterable[str]) -> list[Record]:
        """Remove documents and their files from the library.

        Args:
            names: names of documents, or paths of the files from which they were read. All
                documents with such a name or path are removed.

        Returns:
            The records of the removed documents.

        Raises:
            InvalidTypeError: `names` is a single text.
            LibraryError: no document has one of the names, in which case nothing is removed; there
                is no library; another process is changing it; or this Python's SQLite has no
                full-text search.
            OutputError: a file cannot be removed or written; the documents before it are gone.
        """
        if isinstance(names, str):
            raise wrong(
                "names",
                f"expected a list of names, but got {names!r}",
                f"For example, pass [{names!r}]",
                InvalidTypeError,
            )
        self.required()
        with self._changing():
            entries = [entry for name in names for entry in self._entries_of(name)]
            return self._folder.remove(dict.fromkeys(entry.key for entry in entries))

    def _size_limit(self, stay: set[str]) -> SizeLimit:
        """Return the limit of the library, which must not evict the documents with keys `stay`.

        If the library has no limit, nothing is ever evicted.

        Raises:
            LibraryError: this Python's SQLite has no full-text search.
        """
        most_bytes = None if self.about is None else self.about.max_bytes
        if most_bytes is None:
            return SizeLimit(self._folder, (), math.inf)
        entries = self._passages.query(lambda index: index.entries())
        return SizeLimit(self._folder, entries, most_bytes, stay)

    def below(self, place: str) -> list[DocumentEntry]:
        """Return the documents that were read from the file `place`, or from files below it.

        Sources are absolute paths, so `place` must be one, too. Empty if there is no library yet.

        Raises:
            LibraryError: the folder cannot be read, or this Python's SQLite has no full-text
                search.
        """
        if self._folder.about() is None:
            return []
        return self._passages.query(lambda index: index.below(place))

    def _entries_of(self, name: str) -> list[DocumentEntry]:
        """Return the documents that have a name, or that were read from the file with that path.

        Raises:
            LibraryError: there is no such document, or this Python's SQLite has no full-text
                search.
        """

        def look_up(index: Index) -> list[DocumentEntry]:
            own = [*index.named(name), *index.read_from(name, os.path.abspath(name))]
            if own:
                return own
            names = [entry.name for entry in index.entries()]
            remedy = nearest(
                name, names, "Run snapkv library list to see the names of all documents"
            )
            raise wrong(
                "name",
                f"the library does not have a document with the name {name!r}",
                remedy,
                LibraryError,
            )

        return self._passages.query(look_up)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock of the library within this block, and then update the index.

        The index is updated for the documents that the block has changed, even if the block raises.
        The folder is created if necessary.

        Raises:
            LibraryError: another process holds the lock.
            OutputError: the folder cannot be written.
        """
        with self._folder.changing() as changed:
            try:
                yield
            finally:
                if changed:
                    self._passages.follow(changed)

    def verify(self) -> list[Fault]:
        """Read every byte of all files, and return the damaged records, cache files and index.

        Nothing is changed. The list is empty if all files are undamaged.

        Raises:
            LibraryError: there is no library.
        """
        self.required()
        records, faults = self._folder.records()
        checked = (self._folder.fault_of(record, checked=True) for record in records.values())
        found = [*checked, fault_of(self._folder)]
        return [*faults, *(fault for fault in found if fault is not None)]

    def search(self, question: str, documents: int = 3) -> list[Hit]:
        """Find the documents whose passages match a question best, by BM25.

        Args:
            question: the question.
            documents: the largest number of documents to return.

        Returns:
            The documents, the best first, each with its best passage. The list is empty if no
            document contains a word of the question.

        Raises:
            InvalidArgumentError: `documents` is less than 1.
            InvalidTypeError: `documents` is not an integer.
            LibraryError: there is no library, or this Python's SQLite has no full-text search.
        """
        documents = require_int("documents", documents, minimum=1)
        self.required()
        return self._passages.find_documents(question, documents)

    def record(self, hit: Hit) -> Record:
        """Return the record of a document that was found, with its text.

        Raises:
            LibraryError: the document was removed, or its record was damaged, after the search.
        """
        record = self._folder.record(hit.key)
        if record is None:
            raise _gone(hit)
        return record

    def inputs(
        self,
        model: "PreTrainedModel",
        tokenizer: Any,
        question: str,
        hits: Sequence[Hit],
        *,
        policy: "Policy | None" = None,
        recompute: float = DEFAULT_RECOMPUTE,
        answer_start: str = "",
        quantize: "Quantize | None" = None,
    ) -> dict[str, Any]:
        """Build the arguments of `model.generate` for a question about documents of this library.

        If the file of a document is damaged, the document is read again from its text, and the file
        is replaced if the folder can be written. The documents count as used now, see `limit`.

        Args:
            model: the model that has read the documents.
            tokenizer: its tokenizer.
            question: the question.
            hits: the documents that `search` has found, in the order of the prompt.
            policy: selects the tokens to keep for the question; `snapkv.default_policy()` by
                default. A notice says if it cannot evict any.
            recompute: the fraction of tokens that the second layer recomputes; later layers
                recompute fewer. 0 recomputes none, 1 reads all tokens in all layers.
            answer_start: the text with which the answer begins.
            quantize: the format of stored keys and values: "int8", "int4", "K8V4" or a
                `KVCodes`; None for the dtype of the model.

        Returns:
            `input_ids` and `attention_mask`, (1, T) int64 on the device of the model, and
            a cache that has read everything except the question. Its key is `cache`, or
            `past_key_values` before transformers 5.24.

        Raises:
            LibraryError: the model or the tokenizer is not that of the library, `hits` is empty, or
                a document was removed after the search.
            InvalidArgumentError: `recompute` is out of range, or the policy or an option is
                impossible with the tokens that these documents store.
            PromptTooLongError: the documents have more tokens than the model has positions.
            UnsupportedModelError: the keys of the model cannot be rotated to other positions.
            OutOfMemoryError: the device is full.
        """
        import torch

        from snapkv.hf.cache_argument import passed
        from snapkv.hf.placement import device_of
        from snapkv.policies import FullCache
        from snapkv_app.library.blending import blend
        from snapkv_app.library.joining import joined_ids

        parts = self.parts(model, tokenizer, hits)
        cache = blend(model, parts, policy, recompute=recompute, quantize=quantize)
        if not (cache.prompt_state.is_coming or policy is None or isinstance(policy, FullCache)):
            self._on_notice(
                f"policy: {policy.name} evicts no tokens of these documents, because their heads "
                "or layers have kept different numbers of tokens since they were added. Pass "
                "recompute=1, or add the documents without evicting tokens"
            )
        asked = torch.tensor([question_ids(tokenizer, question, answer_start)])
        cache.expect_question(asked.shape[1])
        ids = torch.cat([joined_ids(parts), asked.to(device_of(model))], dim=1)
        mask = torch.ones_like(ids)
        return {"input_ids": ids, "attention_mask": mask, **passed(cache)}

    def token_ids(
        self,
        model: "PreTrainedModel",
        tokenizer: Any,
        question: str,
        hits: Sequence[Hit],
        *,
        answer_start: str = "",
    ) -> "Tensor":
        """Return the `input_ids` of `inputs` alone, for reading the documents in full.

        The arguments are those of `inputs`. No cache is loaded, the documents do not count as used,
        and the number of tokens is not compared with the positions of the model.

        Returns:
            (1, T) int64, on the device of the model.

        Raises:
            LibraryError: the model or the tokenizer is not that of the library, `hits` is empty, or
                a document was removed after the search.
            InvalidArgumentError: the tokenizer turns ordinary words of the question into control
                tokens.
        """
        import torch

        from snapkv.hf.placement import device_of

        _require_some(hits)
        reader = self._reader(model, tokenizer)
        read = [reader.own_ids(self.record(hit)) for hit in hits]
        asked = question_ids(tokenizer, question, answer_start)
        ids = [reader.about.prefix_ids, *read, asked]
        return torch.tensor([[token for part in ids for token in part]], device=device_of(model))

    def parts(self, model: "PreTrainedModel", tokenizer: Any, hits: Sequence[Hit]) -> "list[Part]":
        """Load documents with their caches, for `blending.blend`, in the order of `hits`.

        A document with a damaged file is read again, and its file is replaced if the folder can be
        written. The documents count as used now, see `limit`.

        Raises:
            LibraryError: the model or the tokenizer is not that of the library, `hits` is empty, or
                a document was removed after the search.
            InvalidArgumentError: a document is read again, and the policy cannot compress it.
            OutOfMemoryError: the device is full.
        """
        _require_some(hits)
        reader = self._reader(model, tokenizer)
        return [self._load_part(reader, hit) for hit in hits]

    def _reader_to_add(
        self,
        model: "PreTrainedModel",
        tokenizer: Any,
        policy: "Policy | None",
        bits: "LibraryBits | None",
        model_name: str | None,
    ) -> "Reader":
        """Create a reader for this library; if it is new, the arguments make its description.

        Nothing is written yet. In an existing library, None for `policy` or `bits` agrees with what
        it has.

        Raises:
            InvalidArgumentError: `bits` is not a known name.
            LibraryError: the model, tokenizer, policy or bits are not those of the library.
            UnsupportedModelError: the model cannot be compressed correctly.
        """
        from snapkv.hf.known_gates import with_known
        from snapkv_app.library.reader import Reader

        policy = None if policy is None else with_known(model, policy)
        about = self._folder.about()
        if about is not None:
            about.require_same_keeping(policy, bits)
            return self._reader(model, tokenizer, model_name)
        about = About.of(model, tokenizer, policy, bits, model_name)
        reader = Reader(model, tokenizer, about)
        reader.empty_cache()  # raises if the model cannot be compressed
        return reader

    def _reader(
        self, model: "PreTrainedModel", tokenizer: Any, model_name: str | None = None
    ) -> "Reader":
        """Create a reader that reads documents in the way of this library.

        Raises:
            LibraryError: there is no library, or the model or the tokenizer differs.
        """
        from snapkv_app.library.reader import Reader

        about = self.required()
        about.require_same(About.of(model, tokenizer, None, None, model_name))
        return Reader(model, tokenizer, about)

    def _add(
        self,
        reader: "Reader",
        text: Text,
        names: dict[str, set[str]],
        limit: SizeLimit,
    ) -> Outcome:
        """Read and store a document, unless the library already has it unchanged.

        Args:
            reader: reads the document.
            text: the document.
            names: the keys of the documents with each name. If another document has the same name,
                the document gets the name of its source file. Changed in place.
            limit: selects the documents to evict, which are removed.

        Returns:
            The outcome. It is "failed" if the document cannot be read, does not fit below the limit
            or into the memory, or would replace a file that no library has written.

        Raises:
            OutputError: a file cannot be written.
        """
        known = self._folder.record(text.key)
        what: What = "read"
        if known is not None and known.sha256 != digest_of(text.text):
            what = "changed"
        elif known is not None:
            if self._folder.fault_of(known, checked=False) is None:
                return _outcome("skipped", known)
            what = "mended"
        start = time.perf_counter()
        taken = names.get(text.name, set()) - {text.key}
        named = replace(text, name=text.source if taken and text.source else text.name)
        try:
            record = self._store(reader, named, reader.read(named), known, limit)
        except (InvalidArgumentError, OutOfMemoryError) as error:
            return Outcome(name=text.name, what="failed", reason=str(error))
        evicted = limit.admit(DocumentEntry(record.key, record.name, None, record.bytes))
        self._folder.remove(entry.key for entry in evicted)
        if known is not None:
            names.get(known.name, set()).discard(text.key)
        names.setdefault(record.name, set()).add(text.key)
        return _outcome(what, record, time.perf_counter() - start)

    def _store(
        self,
        reader: "Reader",
        text: Text,
        part: "Part",
        before: Record | None,
        limit: SizeLimit | None = None,
    ) -> Record:
        """Write the cache and the record of a document, and begin the library if it is new.

        The caller must hold the lock.

        Args:
            reader: writes the cache, and has the description for a new library.
            text: the document.
            part: the document after reading it.
            before: the record that is replaced; None for a new document.
            limit: raises if the document does not fit; None for no limit.

        Raises:
            InvalidArgumentError: the document does not fit below the limit.
            LibraryError: a file that no library has written has the name of the record.
            OutputError: a file cannot be written.
        """

        def save(file: Path) -> None:
            reader.save(part, file)
            if limit is not None:
                limit.too_many(file.stat().st_size, text.key)

        if self.about is None:
            self._folder.begin(reader.about)
        tokens = part.input_ids.shape[1] - part.prefix_tokens
        return self._folder.write(text, tokens, save, before)

    def _load_part(self, reader: "Reader", hit: Hit) -> "Part":
        """Load a document with its cache, or read it again if its file is damaged.

        If another process has replaced the document meanwhile, the new one is loaded. The document
        counts as used now.

        Raises:
            LibraryError: the document was removed.
            InvalidArgumentError: the document is read again, and the policy cannot compress it.
            OutOfMemoryError: the device is full.
        """
        record = self._folder.record(hit.key)
        if record is not None:
            self._folder.record_use(hit.key)
        while record is not None:
            fault = self._folder.fault_of(record, checked=False)
            if fault is None:
                path = self._folder.cache_file(record)
                try:
                    return reader.load(path)
                except CacheFileError as error:
                    fault = Fault(name=record.name, path=path, reason=str(error))
            now = self._folder.record(hit.key)
            if now == record:
                return self._read_again(reader, record, fault)
            record = now
        raise _gone(hit)

    def _read_again(self, reader: "Reader", record: Record, fault: Fault) -> "Part":
        """Read a document with a damaged file again, and replace the file if that is possible.

        The damage is reported, and so is the reason if the file cannot be replaced.

        Raises:
            InvalidArgumentError: the policy cannot compress the document.
            OutOfMemoryError: the device is full.
        """
        self._on_notice(
            f"library: {record.name!r} is read again, because its cache is damaged: {fault.reason}"
        )
        part = reader.read(record)
        try:
            with self._folder.changing():
                if self._folder.record(record.key) == record:
                    self._store(reader, record, part, record)
        except (LibraryError, OutputError) as error:
            self._on_notice(
                f"library: the damaged cache of {record.name!r} cannot be replaced: {error}"
            )
        return part


def _names(index: Index, texts: Iterable[Text]) -> dict[str, set[str]]:
    """Return the keys of the stored documents with the name of each text, by this name.

    The set of keys is empty if no document has the name.
    """
    return {text.name: {entry.key for entry in index.named(text.name)} for text in texts}


def _outcome(what: What, record: Record, seconds: float = 0.0) -> Outcome:
    return Outcome(
        name=record.name, what=what, tokens=record.tokens, bytes=record.bytes, seconds=seconds
    )


def _require_some(hits: Sequence[Hit]) -> None:
    """Raise if a search has found no document.

    Raises:
        LibraryError: `hits` is empty.
    """
    if not hits:
        raise wrong(
            "hits",
            "expected at least one document, but got none",
            "Use words that occur in the documents of the library",
            LibraryError,
        )


def _gone(hit: Hit) -> SnapKVError:
    """Build the `LibraryError` for a document that was removed after the search."""
    return wrong(
        "library",
        f"the document {hit.name!r} has been removed, or its record has been damaged, since the "
        "search",
        "Search for the question again",
        LibraryError,
    )
