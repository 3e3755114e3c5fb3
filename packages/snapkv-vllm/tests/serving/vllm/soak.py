"""Random clients on servers with too small a pool: every answer is that of the request alone.

    make soak MINUTES=10

Prompts begin with openings that many share, so that with prefix caching most blocks have several
owners when what is kept of a prompt needs blocks of its own. Kinds of servers take turns, with new
seeds, until the time is up. What differs is printed and ends it.
"""

import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapkv_vllm import Limits
from snapkv_vllm.documents.sharing import Sharing
from snapkv_vllm.documents.words import BUDGET, DOCUMENT, DROP, INSTRUCTION, REGISTER
from tests.serving.vllm import conftest  # noqa: F401  sets the environment before vLLM is there
from tests.serving.vllm.engines import Engine, greedy, small_engine
from tests.serving.vllm.models import SmallModel, ids_of

PAGE = 32
CLIENTS = 24
BLOCKS = 100
OPENINGS = (0, 200, 384, 640)
LONGEST = 1024
DOCUMENT_TOKENS = 300
DOCUMENTS = ("first", "second")

SERVERS: Mapping[str, Mapping[str, Any]] = {
    "snapkv": {},
    "limits": {
        "limits": Limits(cap=320, chunk_tokens=64, decode_budget=400, evict_every=16),
    },
    "adakv": {"policy": "adakv"},
    "documents": {"sharing": Sharing(chunk_tokens=60)},
}


@dataclass(frozen=True)
class Asked:
    """A request: an opening or a document that others share, an ending of its own, settings."""

    opening: int
    document: str | None
    ending: int
    seed: int
    tokens: int
    settings: tuple[tuple[str, Any], ...]

    @classmethod
    def random(cls, draw: random.Random, server: str) -> "Asked":
        """For one kind of server."""
        document = draw.choice(DOCUMENTS) if server == "documents" and draw.random() < 0.4 else None
        own: dict[str, Any] = {"snapkv_budget": draw.choice([100, 160, 256, 288])}
        if server != "limits":
            own["snapkv_budget"] = draw.choice([0, *[own["snapkv_budget"]] * 5])
        elif draw.random() < 0.3:
            own["snapkv_cap"] = draw.choice([288, 300])
        if document is not None:
            own = {DOCUMENT: document}
        return cls(
            opening=0 if document else draw.choice(OPENINGS),
            document=document,
            ending=draw.randrange(1, 120),
            seed=draw.randrange(1000),
            tokens=draw.choice([1, 20, 60, 150]),
            settings=tuple(own.items()),
        )

    @property
    def ids(self) -> list[int]:
        """The prompt."""
        text = ids_of(self.opening)
        if self.document is not None:
            text = document_ids(self.document)
        return text + ids_of(self.ending, seed=self.seed)

    @property
    def sampling(self) -> Any:
        """Greedy, of exactly so many tokens."""
        return greedy(self.tokens, extra_args=dict(self.settings))


def document_ids(name: str) -> list[int]:
    return ids_of(DOCUMENT_TOKENS, seed=7000 + DOCUMENTS.index(name))


@dataclass
class Round:
    """What one kind of server has answered."""

    server: str
    wrong: list[Asked]
    answered: int = 0
    preempted: int = 0
    waits: int = 0

    def __str__(self) -> str:
        return (
            f"{self.server}: {self.answered} answers, {len(self.wrong)} unlike those of the "
            f"requests alone; {self.preempted} preempted, {self.waits} waited for room"
        )


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def model(folder: Path) -> SmallModel:
    """One that reads as much as the servers allow."""
    return SmallModel(folder, max_position_embeddings=LONGEST)


def soak(
    small: SmallModel,
    server: str,
    seed: int,
    requests: int,
    clients: int = CLIENTS,
    blocks: int = BLOCKS,
) -> Round:
    """Answer so many requests together, then each of them alone, and compare."""
    draw = random.Random(f"{server} {seed}")
    with small_engine(
        small,
        budget=256,
        parameters={"window_size": 8},
        max_model_len=LONGEST,
        max_num_seqs=clients,
        max_num_batched_tokens=400,
        kv_cache_memory_bytes=small.blocks_bytes(blocks + 1, PAGE),
        enable_prefix_caching=True,
        **SERVERS[server],
    ) as engine:
        if server == "documents":
            register(engine)
        before = engine.waits
        together = list(answered_together(engine, draw, server, requests, clients))
        found = Round(server, [], len(together), engine.preempted, engine.waits - before)
        alone: dict[Asked, list[int]] = {}
        for one, answer in together:
            if one not in alone:
                engine.llm.reset_prefix_cache()
                (alone[one],) = engine.answers([one.ids], one.sampling)
            if answer != alone[one]:
                found.wrong.append(one)
        if server == "documents":
            for name in DOCUMENTS:
                engine.outputs([[1]], greedy(1, extra_args={DROP: name}))
        engine.require_empty()
    return found


def register(engine: Engine) -> None:
    for name in DOCUMENTS:
        own = {REGISTER: name, INSTRUCTION: ids_of(5, seed=9), BUDGET: 96}
        engine.outputs([[*document_ids(name), 1]], greedy(1, extra_args=own))


def answered_together(
    engine: Engine, draw: random.Random, server: str, requests: int, clients: int
) -> Iterator[tuple[Asked, list[int]]]:
    """Requests and their answers, as many as clients under way; some are aborted."""
    under_way: dict[str, Asked] = {}
    while requests or under_way:
        while requests and len(under_way) < clients and draw.random() < 0.7:
            one = Asked.random(draw, server)
            (name,) = engine.start([one.ids], one.sampling)
            under_way[name] = one
            requests -= 1
        if under_way and draw.random() < 0.02:
            gone = draw.choice(sorted(under_way))
            engine.abort(gone)
            del under_way[gone]
        for output in engine.step():
            if output.finished:
                yield under_way.pop(output.request_id), list(output.outputs[0].token_ids)


def main(minutes: float) -> None:
    """One server after the other until the time is up, at least one."""
    until = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        small = model(Path(folder))
        for number in itertools.count():
            server = list(SERVERS)[number % len(SERVERS)]
            found = soak(small, server, number, requests=80)
            print(f"seed {number}, {found}", flush=True)
            if found.wrong:
                raise SystemExit("\n".join(map(str, found.wrong)))
            if time.monotonic() > until:
                return


if __name__ == "__main__":
    main(float(sys.argv[1]))
