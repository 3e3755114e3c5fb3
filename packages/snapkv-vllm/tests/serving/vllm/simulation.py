"""A worker without a model: every slot remembers which token's state it holds.

It does with blocks what vLLM's runner and this plugin do, and checks before each step's end that
every request finds exactly the states of its own tokens, or of those it kept. A step may be carried
out while the scheduler is already a step ahead, as under asynchronous scheduling.
"""

from collections import Counter, deque
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from snapkv_vllm.admission.plans import Move, Order
from snapkv_vllm.layouts import slot_numbers


def chosen(positions: Sequence[int], kept: int) -> list[int]:
    """Some choice that depends on nothing else: every few of them, and the last ones."""
    tail, held = kept // 2, len(positions)
    front = [place * (held - tail) // (kept - tail) for place in range(kept - tail)]
    return [positions[place] for place in (*front, *range(held - tail, held))]


class SimulatedWorker:
    """Carries out `SchedulerOutput`s in order.

    Args:
        blocks: how many there are.
        block_tokens: tokens in a block.
        windows: of the KV cache groups; None has full attention and is compressed.
    """

    def __init__(
        self, blocks: int, block_tokens: int, windows: Sequence[int | None] = (None,)
    ) -> None:
        self.windows = windows
        self.memory: list[Any] = [None] * (blocks * block_tokens)
        self.block_tokens = block_tokens
        self.tokens: dict[str, list[int]] = {}
        self.states: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.blocks: dict[str, list[list[int]]] = {}
        self.held: dict[str, list[list[int]]] = {}
        self.moved: dict[str, Sequence[Move]] = {}
        self.queries: dict[str, int] = {}
        self.compressed: Counter[str] = Counter()
        self.histories: dict[int, list[int]] = {}

    def run(self, output: Any) -> ModelRunnerOutput:
        begin = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        begin |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        orders = output.snapkv_orders
        self._take_over(output, begin)
        ends = {}
        for name, tokens in output.num_scheduled_tokens.items():
            ends[name] = begin[name] + tokens
            self._write(name, range(begin[name], ends[name]))
        for name in ends:
            self._check(name, begin[name])
        self._run_orders(orders)
        sampled = [self._sample(name, end) for name, end in ends.items()]
        rows = {name: row for row, name in enumerate(ends)}
        return ModelRunnerOutput(list(ends), rows, sampled_token_ids=sampled)

    def _take_over(self, output: Any, begin: dict[str, int]) -> None:
        cached = output.scheduled_cached_reqs
        for name in (*output.finished_req_ids, *cached.resumed_req_ids):
            self.moved.pop(name, None)
            self.queries.pop(name, None)
        for name, moves in self.moved.items():
            for move in moves:
                self.blocks[name][move.group] = list(move.targets)
        self.moved = {}
        for one in output.scheduled_new_reqs:
            self.tokens[one.req_id] = list(one.prompt_token_ids)
            self.states[one.req_id] = []
            self.prompts[one.req_id] = len(one.prompt_token_ids)
            self.blocks[one.req_id] = [list(blocks) for blocks in one.block_ids]
        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.blocks[name] = [list(blocks) for blocks in new]
            elif new is not None:
                for blocks, more in zip(self.blocks[name], new, strict=True):
                    blocks += more
        dropped = output.snapkv_dropped
        for name in (*(one.req_id for one in output.scheduled_new_reqs), *cached.resumed_req_ids):
            self.held[name] = [list(range(begin[name])) for _ in self.windows]
            if name in dropped:
                kept = [list(self.histories[first]) for first, *_ in self.blocks[name]]
                held = begin[name] - dropped[name]
                assert all(len(one) <= held for one in kept)
                self.held[name] = [  # behind what was kept a history goes on
                    [*one, *range(begin[name] - held + len(one), begin[name])] for one in kept
                ]

    def _slots(self, blocks: Sequence[int], tokens: int) -> list[int]:
        """The slots of the first tokens in these blocks."""
        return slot_numbers(torch.tensor(blocks), tokens, self.block_tokens).tolist()

    def _state(self, name: str, token: int) -> int:
        """A number that stands for the tokens up to a position, and for no others."""
        states, tokens = self.states[name], self.tokens[name]
        while len(states) <= token:
            states.append(hash((states[-1] if states else 0, tokens[len(states)])))
        return states[token]

    def _write(self, name: str, new: Sequence[int]) -> None:
        for held, blocks in zip(self.held[name], self.blocks[name], strict=True):
            held += new
            places = self._slots(blocks, len(held))[len(held) - len(new) :]
            assert len(places) == len(new)
            for token, place in zip(new, places, strict=True):
                self.memory[place] = self._state(name, token)

    def _check(self, name: str, begin: int) -> None:
        for group, window in enumerate(self.windows):
            held = self.held[name][group]
            for token, place in zip(
                held, self._slots(self.blocks[name][group], len(held)), strict=True
            ):
                gone = window is not None and token < begin - window + 1
                found = gone or self.memory[place] == self._state(name, token)
                assert found, (name, group, token)

    def _run_orders(self, orders: dict[str, Order]) -> None:
        for name, order in orders.items():
            self.queries[name] = self.queries.get(name, 0) + order.query_tokens
            if order.is_due:
                self._choose(name, order)

    def _choose(self, name: str, order: Order) -> None:
        """Move what stays, from where no request that comes later in the step has written."""
        assert self.queries[name] == order.selector.query_tokens
        self.queries[name] = 0
        assert [move.group for move in order.moves] == self._compressed_groups
        for move in order.moves:
            held = self.held[name][move.group]
            assert len(held) == order.held_tokens
            places = self._slots(self.blocks[name][move.group], len(held))
            assert {place // self.block_tokens for place in places} == set(move.sources)
            kept = chosen(held, order.kept_tokens)
            read = {token: self.memory[place] for token, place in zip(held, places, strict=True)}
            for token, place in zip(kept, self._slots(move.targets, len(kept)), strict=True):
                assert read[token] == self._state(name, token)
                self.memory[place] = read[token]
            self.held[name][move.group] = list(kept)
            self.histories[move.targets[0]] = kept
        self.moved[name] = order.moves
        self.compressed[order.selector.stage] += 1

    @property
    def _compressed_groups(self) -> list[int]:
        return [group for group, window in enumerate(self.windows) if window is None]

    def _sample(self, name: str, end: int) -> list[int]:
        """The next token, which the tokens before it decide; none inside a prompt."""
        tokens = self.tokens[name]
        if end < self.prompts[name]:
            return []
        if end == len(tokens):
            tokens.append(next_token(tokens))
            return [tokens[end]]
        return []


def next_token(tokens: Sequence[int]) -> int:
    """What is sampled after these, which decide it."""
    return sum(tokens[-3:]) % 97 + 1


class Simulation:
    """A scheduler, a simulated worker, and steps under way between them; what requests should get.

    Args:
        scheduler: vLLM's, compressing.
        worker: carries its steps out.
        ahead: how many steps the scheduler may be ahead.
    """

    def __init__(self, scheduler: Any, worker: SimulatedWorker, ahead: int) -> None:
        self.scheduler, self.worker, self.ahead = scheduler, worker, ahead
        self._under_way: deque[Any] = deque()
        self.expected: dict[str, list[int]] = {}  # of all that were sent and not aborted
        self.preempted = 0
        preempt = scheduler._preempt_request

        def count(*args: Any, **kwargs: Any) -> None:
            self.preempted += 1
            preempt(*args, **kwargs)

        scheduler._preempt_request = count

    def send(self, name: str, ids: Sequence[int], generate: int, extra_args: Any) -> None:
        init_none_hash(sha256)
        sampling = SamplingParams(
            max_tokens=generate, temperature=0, ignore_eos=True, extra_args=extra_args
        )
        hasher = get_request_block_hasher(self.worker.block_tokens, sha256)
        self.scheduler.add_request(Request(name, [*ids], sampling, None, block_hasher=hasher))
        tokens = [*ids]
        for _ in range(generate):
            tokens.append(next_token(tokens))
        self.expected[name] = tokens

    def abort(self, draw: Random) -> None:
        """Abort one that is under way, if there is one."""
        if self.scheduler.requests:
            name = draw.choice(sorted(self.scheduler.requests))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            del self.expected[name]

    def finish(self) -> None:
        """Go on until all have ended, and the worker has heard of the last ones; check answers."""
        while self.scheduler.requests:
            self.step()
        self.drain()
        self.step()
        self.drain()
        assert {name: self.worker.tokens[name] for name in self.expected} == self.expected
        self.expected = {}

    def step(self) -> None:
        output = self.scheduler.schedule()
        self._under_way.append(output)
        allowed = self.ahead if output.total_num_scheduled_tokens else 0
        while len(self._under_way) > allowed:
            self._finish_one()

    def _finish_one(self) -> None:
        output = self._under_way.popleft()
        self.scheduler.update_from_output(output, self.worker.run(output))

    def drain(self) -> None:
        while self._under_way:
            self._finish_one()
