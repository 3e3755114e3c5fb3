"""What the front end makes of answers about documents' files, with an engine that is made up."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from snapkv_vllm.documents.refused import RefusedError

from snapkv.errors import OutOfMemoryError
from snapkv_vllm import ServingSettings
from snapkv_vllm.documents.engine import Kept, Saved, ServerEngine
from snapkv_vllm.documents.sharing import Sharing
from snapkv_vllm.documents.words import ADOPT, DROP, ROOM

ROOM_SAID = {"block_tokens": 16, "bytes_per_token": 10, "most_tokens": 640, "budget": 32}
KEPT = {"tokens": 20, "kept_tokens": 16, "blocks": [[7]]}
SAVED = Saved(path=Path("/kept/one"), seal="5", token_ids=tuple(range(20)), kept_tokens=16)


class Client:
    """Answers errands with what it is given, and so do its workers."""

    def __init__(self, adopted=None, worker=None):
        self.said = {ROOM: ROOM_SAID, ADOPT: adopted}
        self.worker = worker
        self.errands = []
        self.calls = []

    async def generate(self, prompt, sampling, name):
        verb = next(iter(sampling.extra_args))
        self.errands.append(verb)
        yield SimpleNamespace(kv_transfer_params=self.said.get(verb))

    async def collective_rpc(self, method, args):
        self.calls.append((method, *args))
        if isinstance(self.worker, Exception):
            raise self.worker
        return [self.worker]


def made(client):
    engine = ServerEngine(client, ServingSettings(sharing=Sharing(folder="/kept")))
    engine._model = {"class": "Small"}
    return engine


def test_workers_are_told_where_and_what():
    client = Client(KEPT, {})
    engine = made(client)
    kept = asyncio.run(engine.adopt("a", SAVED))
    assert (kept.kept_tokens, kept.bytes, kept.blocks) == (16, 160, [[7]])
    asyncio.run(engine.save(kept, [1, 2], Path("/kept/two")))
    most = 2 * 6400 + (16 << 20)
    assert client.calls == [
        ("snapkv_fill_document", "/kept/one", [[7]], {"class": "Small"}, "5", most),
        ("snapkv_save_document", "/kept/two", [[7]], {"class": "Small"}, [1, 2]),
    ]
    assert client.errands == [ROOM, ADOPT]


@pytest.mark.parametrize(
    ("adopted", "worker", "kind", "status", "words"),
    [
        (None, {}, OutOfMemoryError, None, "free blocks for 16 tokens"),
        (KEPT, {"refused": "path: of another model"}, RefusedError, 400, "of another model"),
        (KEPT, RuntimeError("out of\nmemory"), RefusedError, 500, "out of; see the server's log"),
    ],
)
def test_what_is_not_filled_is_dropped(adopted, worker, kind, status, words):
    client = Client(adopted, worker)
    with pytest.raises(kind, match=words) as refused:
        asyncio.run(made(client).adopt("a", SAVED))
    assert getattr(refused.value, "status", None) == status
    assert client.errands[-1] == DROP


def test_a_file_that_cannot_be_written_is_a_507():
    kept = Kept(kept_tokens=16, bytes=160, blocks=[[7]])
    with pytest.raises(RefusedError, match="no room") as refused:
        asyncio.run(made(Client(None, {"refused": "no room"})).save(kept, [1], Path("/kept/one")))
    assert refused.value.status == 507


def test_an_engine_that_is_dead_says_so_itself():
    from vllm.v1.engine.exceptions import EngineDeadError

    with pytest.raises(EngineDeadError):
        asyncio.run(made(Client(KEPT, EngineDeadError())).adopt("a", SAVED))
