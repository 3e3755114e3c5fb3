"""Random clients on servers with too small a pool: every answer is that of the request alone.

    make soak MINUTES=10

Prompts begin with openings that many share, so that with prefix caching most blocks have several
owners when what is kept of a prompt needs blocks of its own. Kinds of servers take turns, with new
seeds, until the time is up. What differs is printed and ends it.
"""

import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from snapkv_vllm import Limits, Sessions
from snapkv_vllm.admission.spans import SPANS_FIELD
from tests.serving.vllm import conftest  # noqa: F401  sets the environment before vLLM is there
from tests.serving.vllm.engines import Engine, greedy, small_engine
from tests.serving.vllm.models import SmallModel, ids_of

PAGE = 32
TALK = 384  # tokens of a session, at most
SESSION = "snapkv_session"
CLIENTS = 24
BLOCKS = 100
OPENINGS = (0, 200, 384, 640)
LONGEST = 1024

SERVERS: Mapping[str, Mapping[str, Any]] = {
    "snapkv": {},
    "default": {"policy": "default"},
    "limits": {
        "limits": Limits(decode_budget=400, evict_every=16),
    },
    "adakv": {"policy": "adakv"},
    "sessions": {},  # with room for as many histories as there are clients, see `soak`
    "strangers": {"sessions": Sessions()},  # beside the same server without sessions
}


@dataclass(frozen=True)
class Asked:
    """A request: an opening that others share, an ending of its own, settings."""

    opening: int
    ending: int
    seed: int
    tokens: int
    settings: tuple[tuple[str, Any], ...]

    @classmethod
    def random(cls, draw: random.Random, server: str) -> "Asked":
        """For one kind of server."""
        own: dict[str, Any] = {"snapkv_budget": draw.choice([100, 160, 256, 288])}
        if server != "limits":
            own["snapkv_budget"] = draw.choice([0, *[own["snapkv_budget"]] * 5])
        if server == "default":
            own["snapkv_voters"] = draw.choice([4, 8, 24])
        opening, ending = draw.choice(OPENINGS), draw.randrange(1, 120)
        if server in ("snapkv", "adakv") and draw.random() < 0.3:
            own[SPANS_FIELD] = random_spans(draw, opening + ending)
        return cls(
            opening=opening,
            ending=ending,
            seed=draw.randrange(1000),
            tokens=draw.choice([1, 20, 60, 150]),
            settings=tuple(own.items()),
        )

    @property
    def ids(self) -> list[int]:
        """The prompt."""
        return ids_of(self.opening) + ids_of(self.ending, seed=self.seed)

    @property
    def sampling(self) -> Any:
        """Greedy, of exactly so many tokens."""
        return greedy(self.tokens, extra_args=dict(self.settings))


def random_spans(draw: random.Random, tokens: int) -> str:
    """A few spans that lie in a prompt, and not behind each other, as JSON."""
    cuts = sorted(draw.sample(range(tokens), min(tokens, 4)))
    pieces = zip(cuts[::2], cuts[1::2], strict=False)
    said = []
    for start, end in pieces:
        do = draw.choice(["drop", "protect"])
        said.append({"start": start, "end": end if do == "drop" else start + 1, "do": do})
    return json.dumps(said)


@dataclass
class Conversation:
    """A session of some turns, of which each brings a result that is dropped two turns later."""

    name: str
    turns: list[tuple[list[int], list[dict[str, Any]], int]]  # texts, spans, tokens of the answer
    budget: int
    answers: list[list[int]] = field(default_factory=list)

    @classmethod
    def random(cls, draw: random.Random, name: str) -> "Conversation":
        turns, at, results = [], 0, []
        for turn in range(draw.randrange(1, 4)):
            sizes = [draw.choice(one) for one in ((10, 50), (20, 40), (9, 15))]
            answer = draw.choice([1, 10, 20])
            results.append((at + sizes[0], at + sizes[0] + sizes[1]))
            said = [{"start": a, "end": b, "do": "drop"} for a, b in results[:-1]]
            said += [{"start": a, "end": b, "do": "protect"} for a, b in results[-1:]]
            opening = ids_of(sizes[0]) if not turn else ids_of(sizes[0], seed=draw.randrange(999))
            texts = opening + ids_of(sum(sizes[1:]), seed=draw.randrange(999))
            turns.append((texts, said, answer))
            at += sum(sizes) + answer
        return cls(name, turns, draw.choice([0, 64, 128]))

    def start(self, engine: Engine, name: str) -> str:
        """Ask its next turn in a session of this name."""
        pairs = zip(self.turns, [*self.answers, []], strict=False)
        ids = [one for (texts, _, _), answer in pairs for one in (*texts, *answer)]
        _, said, tokens = self.turns[len(self.answers)]
        own = {SESSION: name, "snapkv_budget": self.budget, SPANS_FIELD: said}
        (request,) = engine.start([ids], greedy(tokens, extra_args=own))
        return request


def conversations(
    engine: Engine, draw: random.Random, requests: int, clients: int
) -> list[Conversation]:
    """Some sessions, as many as clients under way; some are left in the middle of an answer."""
    waiting = [Conversation.random(draw, f"own/{number}") for number in range(requests // 2)]
    begun, under_way = [], dict[str, Conversation]()
    while waiting or under_way:
        while waiting and len(under_way) < clients and draw.random() < 0.7:
            begun.append(one := waiting.pop())
            under_way[one.start(engine, one.name)] = one
        if under_way and draw.random() < 0.02:
            gone = draw.choice(sorted(under_way))
            engine.abort(gone)
            one = under_way.pop(gone)
            del one.turns[len(one.answers) :]
        for output in engine.step():
            if output.finished:
                one = under_way.pop(output.request_id)
                one.answers.append(list(output.outputs[0].token_ids))
                if len(one.answers) < len(one.turns):
                    under_way[one.start(engine, one.name)] = one
    return begun


def alone(engine: Engine, one: Conversation) -> list[list[int]]:
    """What a session is answered when there is no other."""
    engine.llm.reset_prefix_cache()
    again = replace(one, answers=[])
    while len(again.answers) < len(one.answers):
        again.start(engine, "alone/1")
        while engine.scheduler.requests:
            for output in engine.step():
                if output.finished:
                    again.answers.append(list(output.outputs[0].token_ids))
    return again.answers


@dataclass
class Round:
    """What one kind of server has answered."""

    server: str
    wrong: list[Any]
    answered: int = 0
    preempted: int = 0
    waits: int = 0

    def __str__(self) -> str:
        return (
            f"{self.server}: {self.answered} answers, {len(self.wrong)} unlike those of the "
            f"requests alone; {self.preempted} preempted, {self.waits} waited for room"
        )


def sessions_soak(engine: Engine, draw: random.Random, requests: int, clients: int) -> Round:
    before = engine.waits
    begun = conversations(engine, draw, requests, clients)
    found = Round("sessions", [], sum(len(one.answers) for one in begun), engine.preempted)
    found.waits = engine.waits - before
    found.wrong += [one for one in begun if one.answers != alone(engine, one)]
    engine.llm.reset_prefix_cache()
    engine.require_empty()
    assert not engine.runner._compressor.positions._positions
    return found


def stranger(draw: random.Random, before: list[Any]) -> tuple[list[int], int, dict[str, Any]]:
    """One of two keys: a session of one token or a few, a turn tried again, or a long text."""
    if before and draw.random() < 0.3:
        return draw.choice(before)
    length, tokens = draw.choice([(1, 1), (1, 1), (40, 1), (100, 20), (700, 150)])
    own = {SESSION: f"{draw.choice(['mine', 'theirs'])}/{len(before)}"}
    own |= {"snapkv_budget": draw.choice([0, 0, 64])}
    before.append((ids_of(length, seed=draw.randrange(9999)), tokens, own))
    return before[-1]


def steps_of(engine: Engine, draw: random.Random, requests: int, *, with_sessions: bool) -> Any:
    """How many steps every request takes from its coming to its end, and when all have ended."""
    before: list[Any] = []
    came, took, step = dict[str, int](), list[int](), 0
    while requests or came:
        for _ in range(min(requests, draw.randrange(4))):
            ids, tokens, own = stranger(draw, before)
            own = {name: one for name, one in own.items() if with_sessions or name != SESSION}
            (name,) = engine.start([ids], greedy(tokens, extra_args=own))
            came[name], requests = step, requests - 1
        took += [step - came.pop(one.request_id) for one in engine.step() if one.finished]
        step += 1
    return took, step


def strangers_soak(small: SmallModel, own: dict[str, Any], seed: int, requests: int) -> Round:
    """Nobody waits longer beside the sessions of two keys than without any."""
    found = []
    for with_sessions in (True, False):
        options = {name: one for name, one in own.items() if with_sessions or name != "sessions"}
        with small_engine(small, **options) as engine:
            draw = random.Random(seed)
            found.append(steps_of(engine, draw, requests, with_sessions=with_sessions))
            assert engine.scheduler._metrics.get("standstills")._value.get() == 0
            engine.llm.reset_prefix_cache()
            engine.require_empty()
    (took, steps), (alone, steps_alone) = found
    said = f"steps of a request {fmean(took):.1f}, most {max(took)}, all {steps}; without sessions "
    print(f"{said}{fmean(alone):.1f}, most {max(alone)}, all {steps_alone}", flush=True)
    longer = max(took) > max(alone) or fmean(took) > fmean(alone)
    return Round("strangers", ["waited longer"] if longer else [], len(took))


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
    own = dict(SERVERS[server])
    if server == "sessions":  # whose histories have room for all that are under way
        clients, blocks = 4, 2 * blocks
        room = small.blocks_bytes(clients * TALK // PAGE + clients, PAGE)
        own |= {"sessions": Sessions(most_bytes=room), "max_model_len": TALK}
    options: dict[str, Any] = {
        "budget": 256,
        "parameters": {"window_size": 8},
        "max_num_seqs": clients,
        "max_num_batched_tokens": 400,
        "kv_cache_memory_bytes": small.blocks_bytes(blocks + 1, PAGE),
        "enable_prefix_caching": True,
        "max_model_len": LONGEST,
        **own,
    }
    if server == "strangers":
        return strangers_soak(small, options, seed, requests)
    with small_engine(small, **options) as engine:
        if server == "sessions":
            return sessions_soak(engine, draw, requests, clients)
        before = engine.waits
        together = list(answered_together(engine, draw, server, requests, clients))
        found = Round(server, [], len(together), engine.preempted, engine.waits - before)
        by_itself: dict[Asked, list[int]] = {}
        for one, answer in together:
            if one not in by_itself:
                engine.llm.reset_prefix_cache()
                (by_itself[one],) = engine.answers([one.ids], one.sampling)
            if answer != by_itself[one]:
                found.wrong.append(one)
        engine.require_empty()
    return found


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
