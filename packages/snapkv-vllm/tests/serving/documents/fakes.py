"""An engine and a tokenizer that can be checked by hand."""

import asyncio

from snapkv.cache.saving.files import read_sealed, seal_of, write_sealed
from snapkv.errors import CacheFileError, InvalidArgumentError, LibraryError
from snapkv.library.records import Record
from snapkv_vllm.documents.prefix import CachedPrefix
from snapkv_vllm.documents.prompts import Prompts
from snapkv_vllm.documents.protocol import DocumentLimits
from snapkv_vllm.documents.shared import SharedDocuments
from snapkv_vllm.names import NO_ROOM, RefusedError

BEGIN, END, DOUBLE = 1, 2, 3
ROLES = {"system": 11, "user": 12, "assistant": 13}


class CharacterPrompts(Prompts):
    """A token per character; two line breaks in a row are one token.

    Chats are the role's token, a line break, the content and `END` for each message, then the
    token of the assistant's role. Texts begin with `BEGIN` where special tokens are asked for.
    """

    def __init__(self, *, ends=False):
        self.ends = ends

    @property
    def tokenizer(self):
        return None

    def is_base_model(self, name):
        return name != "law"

    async def tokenize(self, prompt, *, special_tokens):
        if isinstance(prompt, list):
            return prompt
        end = [END] if self.ends else []
        return [BEGIN, *characters(prompt), *end] if special_tokens else characters(prompt)

    async def render(self, messages):
        ids = []
        for message in messages:
            if message["role"] not in ROLES:
                raise RefusedError("messages: expected messages as chats have them")
            ids += [ROLES[message["role"]], *characters("\n" + str(message["content"])), END]
        return None, [*ids, ROLES["assistant"]]


def characters(text):
    pieces = text.split("\n\n")
    ids = [ord(one) for one in pieces[0]]
    for piece in pieces[1:]:
        ids += [DOUBLE, *map(ord, piece)]
    return ids


class FakeLibrary:
    """Documents of which an engine keeps so many tokens each, in files of `FakeEngine`."""

    prefix_ids = (BEGIN,)

    def __init__(self, folder):
        self.folder, self.of_name = folder, {}
        self.is_others = False

    def write(self, name, ids, kept):
        write_sealed(self.folder / name, {}, {"ids": ids, "kept": kept})
        seal, size = seal_of(self.folder / name), dict.fromkeys(("size", "bytes"), kept)
        told = {"text": name, "sha256": "", "chunks": (), "tokens": len(ids), "seal": seal}
        self.of_name[name] = Record(name=name, cache=name, **told, **size)

    def cache_file(self, record):
        return self.folder / record.cache

    def find(self, name):
        return self.of_name.get(name)

    def records(self):
        return list(self.of_name.values())

    def require_read_by(self, model, tokenizer):
        if self.is_others:
            raise LibraryError("model: expected another one")


class FakeEngine:
    """Ten bytes per kept token; keeps a budget of 8 by default. `reading` holds a reading up."""

    def __init__(self, most_bytes=1000):
        self.most_bytes, self.longest = most_bytes, 100_000
        self.held = {}  # bytes by document
        self.reading = asyncio.Event()
        self.reading.set()
        self.refusal = None

    async def room(self):
        return DocumentLimits(
            block_tokens=1, bytes_per_token=10, most_tokens=self.most_bytes // 10, budget=8
        )

    async def planned(self, token_ids, budget, *, instruction_tokens):
        assert instruction_tokens
        if len(token_ids) > self.longest:
            raise InvalidArgumentError("document: expected a shorter one")
        kept = (await self.room()).kept_tokens(len(token_ids), budget)
        return CachedPrefix(token_ids=token_ids, kept_tokens=kept, reused_tokens=kept)

    async def _hold(self, document_id, kept_tokens):
        await self.reading.wait()
        if self.refusal is not None:
            raise self.refusal
        if 10 * kept_tokens + sum(self.held.values()) > self.most_bytes:
            raise RefusedError("document: expected room for it", NO_ROOM)
        self.held[document_id] = 10 * kept_tokens

    async def register(self, document_id, prefix, instruction_ids):
        assert instruction_ids
        await self._hold(document_id, prefix.kept_tokens)

    async def adopt(self, document_id, prefix, path, seal):
        await self._hold(document_id, prefix.kept_tokens)

    async def drop(self, document_id):
        self.held.pop(document_id, None)  # as the engine, which knows nothing of others

    async def identity(self):
        return {"class": "Small", "dtype": "float32"}

    async def look_at(self, path, seal):
        _, notes, found = read_sealed(path)
        if found != seal:
            raise CacheFileError("path: expected the file that was recorded")
        return CachedPrefix.laid_out(notes["ids"], [[notes["kept"]]], 1)


class World:
    """A server's documents with everything that they stand on, and what was counted."""

    def __init__(self, most_bytes=1000, library=None):
        self.engine = FakeEngine(most_bytes)
        self.now, self.reasons = {}, []
        self.documents = SharedDocuments(self.engine, CharacterPrompts(), self, library)

    def set(self, name, value):
        self.now[name] = value

    def count(self, name, *, reason):
        assert name == "documents_dropped"
        self.reasons.append(reason)

    def names(self, tenant=""):
        return [one.name for one in self.documents.catalogue.all_of(tenant)]

    def require_in_step(self):
        held = sum(self.engine.held.values())
        assert self.documents.catalogue.bytes == held <= self.engine.most_bytes
        assert self.now == {"documents": len(self.documents.catalogue), "document_bytes": held}
