"""What the front end makes of an engine's answers about documents, with one that is made up."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from snapkv.errors import SnapKVError
from snapkv_vllm import ServingSettings
from snapkv_vllm.documents.engine import ServerEngine
from snapkv_vllm.documents.prefix import CachedPrefix
from snapkv_vllm.documents.sharing import Sharing
from snapkv_vllm.names import ASKED, status_of

ROOM_SAID = {"block_tokens": 4, "bytes_per_token": 10, "most_tokens": 1000, "budget": 8}
KEPT = [[7]]
SAVED = (CachedPrefix.laid_out(range(20), [[16]], 4), Path("/kept/one"), "5")


class Client:
    """Of an engine of 100 positions, which answers what it is given, as do its workers."""

    model_config = SimpleNamespace(max_model_len=100)

    def __init__(self, adopted=None, worker=""):
        self.said = {"room": ROOM_SAID, "adopt": adopted}
        self.worker, self.asked, self.calls = worker, [], []
        self.engine_core = SimpleNamespace(call_utility_async=self.call_utility)

    async def call_utility(self, name, part, method, given):
        assert (name, part) == (ASKED, "_documents")
        self.asked.append(method)
        await asyncio.sleep(0)
        said = self.said.get(method)
        return next(said) if method == "holds" else said

    async def generate(self, prompt, sampling, name):
        yield None

    async def collective_rpc(self, method, args):
        self.calls.append((method, *args))
        if isinstance(self.worker, Exception):
            raise self.worker
        return [self.worker]


def made(client):
    engine = ServerEngine(client, ServingSettings(budget=64, sharing=Sharing(library="/kept")))
    engine._model = {"class": "Small"}
    return engine


@pytest.mark.parametrize(
    ("tokens", "budget", "found"),
    [
        (98, 1000, 960),
        (90, None, 80),
        (99, 1000, "at most 98 tokens, with room to ask and answer after them, got 99"),
        (95, None, "positions left to repeat it at"),
        (5, None, 40),
        (13, 4, "at least 14 tokens"),
        (3, None, "at least the 4 tokens of a block"),
    ],
)
def test_a_document_that_the_engine_could_not_read_is_refused(tokens, budget, found):
    instruction = 5 if tokens > 13 else 7
    planned = made(Client()).planned(range(tokens), budget, instruction_tokens=instruction)
    if isinstance(found, int):
        assert 10 * asyncio.run(planned).kept_tokens == found
    else:
        with pytest.raises(SnapKVError, match=found):
            asyncio.run(planned)


def test_workers_are_told_where_and_what():
    client = Client(KEPT)
    engine = made(client)
    asyncio.run(engine.adopt("a", *SAVED))
    most = 2 * 10_000 + (16 << 20)
    assert client.calls == [
        ("snapkv_fill_document", "/kept/one", [[7]], {"class": "Small"}, "5", most),
    ]
    assert client.asked == ["room", "adopt"]


@pytest.mark.parametrize(
    ("adopted", "worker", "status", "words"),
    [
        (None, "", 507, "free blocks for 16 tokens"),
        (KEPT, "path: of another model", 400, "of another model"),
        (KEPT, RuntimeError("out of\nmemory"), 500, "out of; see the server's log"),
    ],
)
def test_what_is_not_filled_is_dropped(adopted, worker, status, words):
    client = Client(adopted, worker)
    with pytest.raises(SnapKVError, match=words) as refused:
        asyncio.run(made(client).adopt("a", *SAVED))
    assert status_of(refused.value) == status
    assert client.asked[-1] == "drop"


def test_a_document_is_dropped_whose_client_goes_away_while_it_gets_its_blocks():
    async def goes_away(client):
        adopting = asyncio.create_task(made(client).adopt("a", *SAVED))
        while "adopt" not in client.asked:
            await asyncio.sleep(0)
        adopting.cancel()
        await asyncio.gather(adopting, return_exceptions=True)

    client = Client(KEPT)
    asyncio.run(goes_away(client))
    assert (client.asked, client.calls) == (["room", "adopt", "drop"], [])


@pytest.mark.parametrize(("held", "read"), [([True], 1), ([False, True], 2), ([False] * 3, 3)])
def test_a_document_that_lost_its_blocks_is_read_again(held, read):
    """And refused when it has lost them three times."""
    client = Client()
    client.said["holds"] = iter(held)
    reading = made(client).register("a", SAVED[0], (7,))
    if held[-1]:
        asyncio.run(reading)
    else:
        with pytest.raises(SnapKVError, match="blocks for its 20 tokens while it is read") as lost:
            asyncio.run(reading)
        assert status_of(lost.value) == 507
    assert client.asked == ["holds"] * read


def test_a_dead_engine_says_so_itself():
    from vllm.v1.engine.exceptions import EngineDeadError

    with pytest.raises(EngineDeadError):
        asyncio.run(made(Client(KEPT, EngineDeadError())).adopt("a", *SAVED))
