"""Blocks of documents, lent, given back and dropped, against a worker that remembers every slot."""

import random

import pytest

from snapkv_vllm.documents.protocol import BUDGET, DOCUMENT, INSTRUCTION, REGISTER
from snapkv_vllm.documents.sharing import Sharing
from tests.serving.vllm.test_accounting import (
    PAGE,
    TOKEN_BYTES,
    engine_config,
    require_promise,
    simulation,
)

MOST_TOKENS = 28


@pytest.fixture(scope="module")
def config(folder):
    sharing = Sharing(most_bytes=MOST_TOKENS * TOKEN_BYTES, chunk_tokens=9)
    return engine_config(folder, 72, sharing=sharing)


class Server:
    """Sends requests to a scheduler as a front end would.

    Args:
        running: the simulation.
        draw: makes them up.
    """

    def __init__(self, running, draw):
        self.running, self.draw = running, draw
        self.reading, self.texts = {}, {}
        self.number = self.refused = 0

    @property
    def scheduler(self):
        return self.running.scheduler

    def ids(self, tokens):
        return [self.draw.randrange(1, 90) for _ in range(tokens)]

    def send(self, ids, generate, extra_args):
        self.number += 1
        name = f"r{self.number}"
        self.running.send(name, ids, generate, extra_args)
        return name

    def register(self):
        text = self.ids(self.draw.randrange(PAGE, 41))
        own = {BUDGET: self.draw.choice([7, 8, 12]), INSTRUCTION: [7] * self.draw.randrange(3)}
        document = str(self.number)
        name = self.send([*text, 1], 1, own | {REGISTER: document})
        if document in self.scheduler._documents._held:
            self.reading[name] = document, text
        else:  # those that were dropped and are in use leave no room
            self.refused += 1
            del self.running.expected[name]

    def ask(self):
        document, text = self.draw.choice([*self.texts.items(), ("", [])])
        ids = text + self.ids(self.draw.randrange(1, 12))
        self.send(ids, self.draw.randrange(1, 20), {DOCUMENT: document} if text else {})

    def drop(self):
        document = self.draw.choice(sorted(self.texts))
        del self.texts[document]
        self.scheduler._documents.drop(document)

    def step(self):
        self.running.step()
        require_promise(self.scheduler)
        held = self.scheduler._documents._held
        for name in [name for name in self.reading if name not in self.scheduler.requests]:
            document, text = self.reading.pop(name)
            assert document in held or name not in self.running.expected or self.running.ahead
            if document in held:
                self.texts[document] = text

    def finish(self):
        while self.scheduler.requests:
            self.step()
        self.running.finish()
        self.step()


@pytest.mark.parametrize("ahead", [0, 1], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("caching", [False, True], ids=["plain", "prefix-caching"])
@pytest.mark.parametrize("seed", range(3))
def test_every_request_finds_its_documents_tokens_and_every_block_comes_back(
    config, caching, ahead, seed
):
    """Documents are registered, used, dropped in use, aborted while they are read, preempted."""
    draw = random.Random(seed)
    running = simulation(config, caching=caching, ahead=ahead)
    server, pool = Server(running, draw), running.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    for _ in range(80):
        if not server.reading and len(server.texts) < 2 and draw.random() < 0.5:
            server.register()
        if server.texts and draw.random() < 0.1:
            server.drop()
        server.ask()
        for _ in range(draw.randrange(6)):
            server.step()
        if draw.random() < 0.15:
            running.abort(draw)
    server.finish()
    assert running.worker.compressed["document"] > 1
    assert server.refused < 6
    assert running.preempted > 0
    while server.texts:
        server.drop()
    assert pool.get_num_free_blocks() == free
    documents = running.scheduler._documents
    assert not any((documents._held, documents._used_by, documents._registering))
    assert not running.scheduler._plans
