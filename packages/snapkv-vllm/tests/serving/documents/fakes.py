"""An engine and a tokenizer that can be checked by hand."""

import asyncio
from types import SimpleNamespace

from snapkv.cache.saving.files import read_sealed, seal_of, write_sealed
from snapkv.errors import CacheFileError, InvalidArgumentError, LibraryError
from snapkv_vllm.documents.engine import Kept, Saved
from snapkv_vllm.documents.library import OfLibrary
from snapkv_vllm.documents.plans import Places
from snapkv_vllm.documents.prompts import Prompts
from snapkv_vllm.documents.protocol import Room
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

    def __init__(self, folder):
        self.folder, self.kept = folder, {}
        self.is_others = False

    def write(self, name, ids, kept):
        self.kept[name] = kept
        write_sealed(self.folder / name, {}, {"ids": ids, "kept": kept})

    def find(self, name):
        if name not in self.kept:
            return None
        path = self.folder / name
        return OfLibrary(path=path, seal=seal_of(path), prefix_ids=(BEGIN,))

    def records(self):
        return [SimpleNamespace(name=name, tokens=kept) for name, kept in self.kept.items()]

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
        return Room(block_tokens=1, bytes_per_token=10, most_tokens=self.most_bytes // 10, budget=8)

    async def bytes_of(self, tokens, *, budget, instruction_tokens):
        assert instruction_tokens
        if tokens > self.longest:
            raise InvalidArgumentError("document: expected a shorter one")
        return 10 * (await self.room()).kept_tokens(tokens, budget)

    async def _hold(self, document_id, kept_tokens):
        await self.reading.wait()
        if self.refusal is not None:
            raise self.refusal
        if 10 * kept_tokens + sum(self.held.values()) > self.most_bytes:
            raise RefusedError("document: expected room for it", NO_ROOM)
        self.held[document_id] = 10 * kept_tokens
        return Kept(kept_tokens=kept_tokens)

    async def register(self, document_id, token_ids, *, budget, instruction_ids):
        assert instruction_ids
        return await self._hold(
            document_id, (await self.room()).kept_tokens(len(token_ids), budget)
        )

    async def adopt(self, document_id, saved):
        return await self._hold(document_id, saved.places.held_tokens)

    async def drop(self, document_id):
        self.held.pop(document_id, None)  # as the engine, which knows nothing of others

    async def identity(self):
        return {"class": "Small", "dtype": "float32"}

    async def look_at(self, path):
        if not path.is_file():
            raise CacheFileError("path: expected a cache that was saved before")
        _, notes, seal = read_sealed(path)
        places = Places.of([[notes["kept"]]], 1)
        return Saved(path=path, seal=seal, token_ids=tuple(notes["ids"]), places=places)


class World:
    """A server's documents with everything that they stand on, and what was counted."""

    def __init__(self, most_bytes=1000, library=None):
        self.engine = FakeEngine(most_bytes)
        self.now, self.not_read, self.reasons = (0, 0), [], []
        self.documents = SharedDocuments(self.engine, CharacterPrompts(), self, library)

    def standing(self, documents, document_bytes):
        self.now = (documents, document_bytes)

    def asked(self, tokens_not_read):
        self.not_read.append(tokens_not_read)

    def dropped(self, reason):
        self.reasons.append(reason)

    def names(self, tenant=""):
        return [one.name for one in self.documents.catalogue.of(tenant)]

    def require_in_step(self):
        held = sum(self.engine.held.values())
        assert self.documents.catalogue.bytes == held <= self.engine.most_bytes
        assert self.now == (len(self.documents.catalogue), held)
