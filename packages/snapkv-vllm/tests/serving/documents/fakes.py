"""An engine and a tokenizer that can be checked by hand."""

import asyncio

from snapkv.cache.saving.files import read_sealed, write_sealed
from snapkv.errors import CacheFileError, InvalidArgumentError, OutOfMemoryError, OutputError
from snapkv_vllm.documents.engine import Answer, Kept, Saved
from snapkv_vllm.documents.room import Room

BEGIN, END, DOUBLE = 1, 2, 3
ROLES = {"system": 11, "user": 12, "assistant": 13}


class CharacterPrompts:
    """A token per character; two line breaks in a row are one token.

    Chats are the role's token, a line break, the content and `END` for each message, then the
    token of the assistant's role. Texts begin with `BEGIN` where special tokens are asked for.
    """

    def __init__(self, *, adapters=(), ends=False):
        self.adapters = adapters
        self.ends = ends

    def is_base_model(self, name):
        return name not in self.adapters

    async def tokenize(self, prompt, *, special_tokens):
        if isinstance(prompt, list):
            return prompt
        end = [END] if self.ends else []
        return [BEGIN, *characters(prompt), *end] if special_tokens else characters(prompt)

    async def render(self, body):
        ids = [ROLES["system"]] * bool(body.get("tools"))
        for message in body["messages"]:
            if not isinstance(message, dict) or message.get("role") not in ROLES:
                return None
            ids += [ROLES[message["role"]], *characters("\n" + str(message["content"])), END]
        return [*ids, ROLES["assistant"]]


def characters(text):
    pieces = text.split("\n\n")
    ids = [ord(one) for one in pieces[0]]
    for piece in pieces[1:]:
        ids += [DOUBLE, *map(ord, piece)]
    return ids


class FakeEngine:
    """Ten bytes per kept token; keeps a budget of 8 by default. `reading` holds a reading up."""

    def __init__(self, most_bytes=1000):
        self.most_bytes = most_bytes
        self.held = {}
        self.reading = asyncio.Event()
        self.reading.set()
        self.refusal = None
        self.longest = 100_000
        self.full_disk = False

    async def room(self):
        return Room(block_tokens=1, bytes_per_token=10, most_tokens=self.most_bytes // 10, budget=8)

    async def bytes_of(self, tokens, *, budget, instruction_tokens):
        assert instruction_tokens
        if tokens > self.longest:
            raise InvalidArgumentError("document: expected a shorter one")
        return (await self.room()).bytes_of(tokens, budget)

    async def register(self, document_id, token_ids, *, budget, instruction_ids):
        assert instruction_ids
        await self.reading.wait()
        if self.refusal is not None:
            raise self.refusal
        size = (await self.room()).bytes_of(len(token_ids), budget)
        if size + sum(one.bytes for one in self.held.values()) > self.most_bytes:
            raise OutOfMemoryError("document: expected room for it")
        self.held[document_id] = Kept(kept_tokens=size // 10, bytes=size)
        return self.held[document_id]

    async def answer(self, prompt, document_id, most_tokens):
        """Says the prompt's last tokens backwards; a document forgets how the third one was."""
        await self.reading.wait()
        ids = list(reversed(prompt[-most_tokens:]))
        if document_id is not None:
            assert document_id in self.held
            ids[2:3] = [0] * len(ids[2:3])
        return Answer(token_ids=tuple(ids), text=" ".join(map(str, ids)))

    async def drop(self, document_id):
        self.held.pop(document_id, None)  # as the engine, which knows nothing of others

    async def look_at(self, path):
        if not path.is_file():
            raise CacheFileError("path: expected a cache that was saved before")
        _, notes, seal = read_sealed(path)
        return Saved(path=path, seal=seal, token_ids=tuple(notes["ids"]), kept_tokens=notes["kept"])

    async def adopt(self, document_id, saved):
        await self.reading.wait()
        if self.refusal is not None:
            raise self.refusal
        kept = saved.kept_tokens
        self.held[document_id] = Kept(kept_tokens=kept, bytes=10 * kept)
        return self.held[document_id]

    async def save(self, kept, token_ids, path):
        if self.full_disk:
            raise OutputError("output: expected room on the disk")
        write_sealed(path, {}, {"ids": list(token_ids), "kept": kept.kept_tokens})


class Counted:
    """What was counted, last."""

    def __init__(self):
        self.now = (0, 0)
        self.not_read = []
        self.reasons = []

    def standing(self, documents, document_bytes):
        self.now = (documents, document_bytes)

    def asked(self, tokens_not_read):
        self.not_read.append(tokens_not_read)

    def dropped(self, reason):
        self.reasons.append(reason)
