"""A fleet of servers on paper: what load it bears, which part breaks first, how far to trust it.

`here`: requests arrive at vLLM in this process and, with what its steps took, in the simulation; by
the processor's clock, so that other programs disturb little, and nobody waits for an arrival.
`plan`: blocks and bytes of one long request. `fleet`: sessions of a large model at devices that are
known by their data sheets alone, of which assumed shares are reached. `here` needs vLLM's
environment, as `serving` does; import this before vLLM.
"""

import bisect
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from statistics import fmean, quantiles
from typing import Any

import torch

from snapkv.plan import Footprint, Plan, Request, footprint_of
from snapkv.plan.shapes import outline
from snapkv_lab.evaluate.haystack import load_haystack
from snapkv_lab.experiments.experiment import Experiment, Given, Sized
from snapkv_lab.experiments.pages import Pivot, Table
from snapkv_lab.experiments.records import Row, describe_environment, environment_line, of
from snapkv_lab.experiments.serving import BLOCK_TOKENS, StepEngine, _on
from snapkv_lab.measure.fleet import Engine, Router, Step, Turn, Work, simulate
from snapkv_lab.measure.timing import spread

WAYS = ("stock", "snapkv")


def _arrivals(given: Given, seed: int) -> list[Turn]:
    """Poisson, prompts with a heavy tail."""
    draw, now, found = random.Random(seed), 0.0, []
    for number in range(given.requests):
        now += draw.expovariate(given.rate)
        new = int(draw.lognormvariate(math.log(given.median_tokens), 0.8))
        sizes = {"new": min(max(64, new), given.most_tokens), "answer": draw.randint(16, 96)}
        found.append(Turn(session=number, arrived=now, **sizes))
    return found


def _serve(engine: StepEngine, turns: Sequence[Turn], text: list[int]) -> list[Step]:
    """The steps in which vLLM serves the turns."""
    from vllm import SamplingParams

    core, coming = engine.llm.llm_engine, deque(enumerate(turns))
    now, steps = 0.0, list[Step]()
    while coming or core.has_unfinished_requests():
        if not core.has_unfinished_requests():
            now = max(now, coming[0][1].arrived)
        start = time.process_time()
        while coming and coming[0][1].arrived <= now:
            place, turn = coming.popleft()
            own = SamplingParams(temperature=0, max_tokens=turn.answer, ignore_eos=True)
            ids = text[37 * place :][: turn.new]
            core.add_request(str(place), {"prompt_token_ids": ids}, own)
        computed, outputs = engine.step()
        steps.append(Step(Work(sum(computed), len(computed)), time.process_time() - start))
        now += steps[-1].seconds
        for one in outputs:
            turn = turns[int(one.request_id)]
            turn.first = now if math.isnan(turn.first) else turn.first
            turn.finished = now if one.finished else turn.finished
    return steps


def _simulated(
    given: Given, kept: int | None, turns: Sequence[Turn], seconds: Callable[[Work], float]
) -> list[Step]:
    sizes = {"blocks": given.blocks - 1, "block_tokens": BLOCK_TOKENS, "step_tokens": 2048}
    engine = Engine(seconds=seconds, kept=kept, **sizes)  # vLLM keeps a block for itself
    simulate([engine], turns, lambda turn, engines: 0)
    return engine.steps


def _calibrated(given: Given, engine: StepEngine, kept: int | None, text: list[int]) -> list[Step]:
    """What steps compute, and their seconds: of prompts alone, and of answers side by side.

    Raises:
        RuntimeError: vLLM plans other steps than the simulation.
    """
    found: list[Step] = []
    beside = ((count, given.beside_tokens) for count in given.beside)
    for count, tokens in (*((1, tokens) for tokens in given.alone), *beside):
        turns = [[Turn(session=n, new=tokens, answer=24) for n in range(count)] for _ in WAYS]
        planned = _simulated(given, kept, turns[0], lambda work: 1.0)
        steps = _serve(engine, turns[1], text)
        if [step.work[:2] for step in planned] != [step.work[:2] for step in steps]:
            raise RuntimeError(f"{count} requests of {tokens} tokens: vLLM plans other steps")
        found += (Step(a.work, b.seconds) for a, b in zip(planned, steps, strict=True))
    return found


def fitted(steps: Sequence[Step]) -> list[float]:
    """Seconds of a step and of each of what it computes: least relative squares, none below 0."""
    seconds = torch.tensor([step.seconds for step in steps], dtype=torch.float64)[:, None]
    counts = torch.tensor([(1, *step.work) for step in steps], dtype=torch.float64) / seconds
    scale = counts.amax(dim=0)
    best, least = torch.zeros_like(scale), math.inf
    for chosen in itertools.product((0.0, 1.0), repeat=len(scale)):
        part = counts / scale * torch.tensor(chosen)
        found = torch.linalg.lstsq(part, torch.ones_like(seconds), driver="gelsd").solution[:, 0]
        error = float((part @ found - 1).square().sum())
        if error < least and bool((found > -1e-12).all()):
            best, least = found, error
    return [float(each) for each in best.clamp(min=0) / scale]


def linear(costs: Sequence[float], work: Work) -> float:
    return sum(cost * count for cost, count in zip(costs, (1, *work), strict=True))


def _here(given: Given) -> Iterator[Row]:
    text = list(given.loaded.tokenizer(load_haystack().text[:100_000])["input_ids"])
    room = {"dtype": "bfloat16", "blocks": given.blocks, "most_tokens": given.most_tokens + 128}
    for way, kept in zip(WAYS, (None, given.budget), strict=True):
        engine = StepEngine(given, kept, **room)
        _serve(engine, [Turn(new=300, answer=4)], text)  # the first request of all takes longer
        steps = [_calibrated(given, engine, kept, text)]
        for seed in range(given.rounds):
            real, copies = _arrivals(given, seed), _arrivals(given, seed)
            served = _serve(engine, real, text)
            steps.append(_calibrated(given, engine, kept, text))
            costs = fitted(steps[-2] + steps[-1])
            simulated = _simulated(given, kept, copies, partial(linear, costs))
            pairs = zip(copies, real, strict=True)
            ratios = [(a.finished - a.arrived) / (b.finished - b.arrived) for a, b in pairs]
            sizes = {name: getattr(given, name) for name in ("blocks", "requests", "rate")}
            yield {
                "way": way,
                "seed": seed,
                "budget": kept,
                "costs": costs,
                **sizes,
                "measured": _outcome(real, served),
                "simulated": _outcome(copies, simulated),
                "finished_ratio": spread(ratios, 3),
                **_on(given, "bfloat16"),
            }
        engine.close()


def _outcome(turns: Sequence[Turn], steps: Sequence[Step]) -> Row:
    ended = max(turn.finished for turn in turns)
    most = max(step.work.requests for step in steps)
    return _waits(turns) | {"ended": ended, "steps": len(steps), "most": most}


def _waits(turns: Sequence[Turn]) -> Row:
    """Seconds until the first token."""
    cuts = quantiles([turn.first - turn.arrived for turn in turns], n=20, method="inclusive")
    return {"first_p50": cuts[9], "first_p95": cuts[18]}


def roofline(given: Given, model: Footprint) -> Callable[[Work], float]:
    """Seconds of a step: operations or bytes, whatever takes longer."""
    operations = given.gpus * given.teraflops * 1e12 * given.flops_share
    bandwidth = given.gpus * given.terabytes * 1e12 * given.bandwidth_share
    token_bytes, least = model.token_bytes, given.step_ms / 1000

    def seconds(work: Work) -> float:
        flops = model.token_flops * work.tokens + model.pair_flops * (work.pairs + work.held)
        read = model.read_bytes(work.requests) + token_bytes * work.held
        return float(least + max(flops / operations, read / bandwidth))

    return seconds


def _engine(given: Given, model: Footprint, way: str) -> Engine:
    memory = int(given.gpus * given.gigabytes * 1e9 * given.memory_share)
    ours = {"kept": given.kept_tokens, "history_share": 0.25}  # as the server does by default
    return Engine(
        seconds=roofline(given, model),
        blocks=(memory - model.weights_bytes) // (given.block_tokens * model.token_bytes),
        block_tokens=given.block_tokens,
        step_tokens=given.step_tokens,
        **(ours if way == "snapkv" else {"history_share": 1.0}),
    )


def _plan(given: Given) -> Iterator[Row]:
    """Blocks and bytes of one request with all of the model's positions."""
    model, tokens = footprint_of(outline(given.shape, dtype=torch.bfloat16)), given.context
    asked = Request(context_tokens=tokens, new_tokens=1, budget=given.kept_tokens)
    plan = Plan(model=given.shape, footprint=model, request=asked)
    for way, needs in zip(WAYS, (plan.full, plan.compressed), strict=True):
        engine = _engine(given, model, way)
        held = -(-needs.cache_bytes // (given.block_tokens * model.token_bytes))
        read = -(-tokens // given.block_tokens)
        yield {
            "way": way,
            "shape": given.shape,
            "prompt_tokens": tokens,
            "cache_bytes": needs.cache_bytes,
            "blocks": {"read": read, "held": held, "pool": engine.blocks},
            "alone_seconds": roofline(given, model)(Work(tokens, 1, tokens**2 // 2)),
            "assumed": {name: getattr(given, name) for name in ASSUMED},
        }


def sessions(given: Given, rate: float) -> list[Turn]:
    """The first turns of sessions, so many in a second, each with those behind it."""
    draw, now, found = random.Random(given.seed), 0.0, list[Turn]()
    later = (given.turns - 1) * (given.turn_tokens + given.answer_tokens)
    most = given.context - later - given.answer_tokens
    while (now := now + draw.expovariate(1.0) / rate) < given.arriving_seconds:
        sizes: dict[str, Any] = {"session": len(found), "answer": given.answer_tokens}
        found.append(Turn(arrived=now, new=draw.randint(given.least_tokens, most), **sizes))
        turn = found[-1]
        for _ in range(given.turns - 1):
            sizes |= {"history": turn.prompt + turn.answer, "new": given.turn_tokens}
            turn.then = Turn(think=draw.expovariate(1 / given.think_seconds), **sizes)
            turn = turn.then
    return found


STAYS = "where least is to read, then there"


def _routes(given: Given) -> dict[str, Router]:
    """A turn goes to any engine, to that of its session's hash, or where its session began."""
    draw, homes = random.Random(given.seed), dict[int, int]()

    def unread(engine: Engine) -> int:
        return sum(turn.prompt - turn.read for turn in (*engine.waiting, *engine.running))

    def by_hash(turn: Turn, engines: Sequence[Engine]) -> int:
        return random.Random(turn.session).randrange(len(engines))

    def stay(turn: Turn, engines: Sequence[Engine]) -> int:
        if turn.session not in homes:
            homes[turn.session] = min(range(len(engines)), key=lambda at: unread(engines[at]))
        return homes[turn.session]

    return {
        "each turn at random": lambda turn, engines: draw.randrange(len(engines)),
        "by the session's hash": by_hash,
        STAYS: stay,
    }


def _at(given: Given, model: Footprint, way: str, route: str, rate: float) -> Row:
    """How long turns wait at a rate of sessions, but for the first third of the time."""
    first = sessions(given, rate)
    engines = [_engine(given, model, way) for _ in range(given.replicas)]
    ended, turns = simulate(engines, first, _routes(given)[route]), list(first)
    for turn in turns:  # which grows
        turns += [turn.then] if turn.then else []
    steps = [step for engine in engines for step in engine.steps]
    busy = [sum(step.seconds for step in engine.steps) / ended for engine in engines]
    asked = sum(turn.new + turn.answer - 1 for turn in turns)
    counted = [turn for turn in turns if 1 / 3 <= turn.arrived / given.arriving_seconds <= 1]
    return _waits(counted) | {
        "busy": fmean(busy),
        "busiest": max(busy),
        "lacking": sum(step.seconds for step in steps if step.lacking) / ended / len(engines),
        "again": sum(step.work.tokens for step in steps) / asked - 1,
    }


def _borne(given: Given, model: Footprint, way: str, route: str) -> Row:
    """The highest of some rates whose waits are within the limit, and what the next is like."""
    at = cache(partial(_at, given, model, way, route))
    rates = [0.05 * 1.1**step for step in range(given.rates)]
    place = bisect.bisect(rates, 0, key=lambda rate: at(rate)["first_p95"] > given.limit_seconds)
    borne = 60 * rates[place - 1] * given.turns if place else 0.0
    return {"turns_per_minute": borne, **at(rates[min(place, given.rates - 1)])}


PARTS = {"operations": "teraflops", "bandwidth": "terabytes", "memory": "gigabytes"}


def _fleet(given: Given) -> Iterator[Row]:
    """The load that is borne by every route, and where one part of the devices is doubled."""
    model = footprint_of(outline(given.shape, dtype=torch.bfloat16))
    cases = [(route, "none") for route in _routes(given)] + [(STAYS, part) for part in PARTS]
    for way, (route, part) in itertools.product(WAYS, cases):
        twice = {name: 2 * getattr(given, name) for key, name in PARTS.items() if key == part}
        own = Given(**vars(given) | twice)
        yield {"way": way, "route": route, "twice": part, **_borne(own, model, way, route)}


ASSUMED = {
    "replicas": Sized(4, 2),
    "gpus": 8,
    "gigabytes": 80.0,
    "memory_share": 0.9,
    "teraflops": 989.0,
    "flops_share": 0.5,
    "terabytes": 3.35,
    "bandwidth_share": 0.7,
    "step_ms": 5.0,
    "step_tokens": 8192,
    "block_tokens": 16,
    "kept_tokens": 2048,
    "context": 131_072,
    "arriving_seconds": Sized(1500, 300),
    "turns": 6,
    "least_tokens": 16_384,
    "turn_tokens": 1024,
    "answer_tokens": Sized(256, 16),
    "think_seconds": 20.0,
    "limit_seconds": 20.0,
}
"""Of a GPU: memory, operations in 16 bits and bytes from memory in a second, as its data sheet says
(NVIDIA H100 SXM), and what is reached of them. Of a session: its turns and their tokens."""

_TABLES = [
    Table(
        {
            "engine": "{way}",
            "draw": "{seed}",
            "p50 s": "{measured[first_p50]:.2f}",
            "simulated p50": "{simulated[first_p50]:.2f}",
            "p95 s": "{measured[first_p95]:.2f}",
            "simulated p95": "{simulated[first_p95]:.2f}",
            "all done s": "{measured[ended]:.1f}",
            "simulated end": "{simulated[ended]:.1f}",
            "at once": "{measured[most]}",
            "simulated": "{simulated[most]}",
            "ratio of a request": "{finished_ratio:spread|.2f}",
        },
        "{requests} requests, {rate} a second, {blocks} blocks",
        {"part": "here"},
    ),
    Table(
        {
            "engine": "{way}",
            "cache": "{cache_bytes:bytes}",
            "blocks read": "{blocks[read]:,}",
            "blocks held": "{blocks[held]:,}",
            "blocks of a replica": "{blocks[pool]:,}",
            "alone": "{alone_seconds:.1f} s",
        },
        "One request of {prompt_tokens:,} tokens, {shape}",
        {"part": "plan"},
    ),
    Table(
        {
            "engine": "{way}",
            "route": "{route}",
            "turns a minute": "{turns_per_minute:.0f}",
            "computed again": "{again:.0%}",
            "busy": "{busy:.0%}",
            "busiest": "{busiest:.0%}",
            "blocks lack": "{lacking:.0%}",
        },
        "What is borne, and where it breaks",
        {"part": "fleet", "twice": "none"},
    ),
    Table(
        Pivot("engine", "{way}", "{twice}", "{turns_per_minute:.0f}"),
        "Turns a minute with twice of one part",
        {"part": "fleet", "route": STAYS},
    ),
    Table(
        {"assumed": "{name}", "value": "{value:,g}"},
        "Assumed",
        {"part": "plan"},
        lambda rows: [{"name": n, "value": v} for n, v in rows[0]["assumed"].items()],
    ),
]

SCALE = Experiment(
    name="scale",
    title="A fleet of servers on paper",
    takes="half an hour",
    threads=1,
    measure={"here": _here, "plan": _plan, "fleet": _fleet},
    options={
        "requests": Sized(40, 4),
        "rate": 1.5,
        "median_tokens": Sized(600, 200),
        "most_tokens": Sized(3000, 400),
        "blocks": Sized(40, 12),
        "budget": Sized(256, 128),
        "alone": Sized((64, 300, 1000, 2000, 3000), (64, 300)),
        "beside": Sized((2, 4, 8), (2,)),
        "beside_tokens": Sized(500, 100),
        "rounds": Sized(3, 1),
        "shape": "llama-3.1-70b",
        "rates": Sized(40, 8),
        "seed": 0,
        **ASSUMED,
    },
    described=lambda given: {"environment": describe_environment()},
    measured=lambda rows: environment_line(of(rows, part="here")),
    tables=_TABLES,
)
