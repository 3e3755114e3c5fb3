"""A worker without a model: every slot remembers which token's state it holds.

It does with blocks what vLLM's runner and this plugin do, and checks before each step's end that
every request finds exactly the states of its own tokens, or of those it kept. A step may be carried
out while the scheduler is already a step ahead, as under asynchronous scheduling.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.outputs import ModelRunnerOutput

from snapkv.serving.compressor import slots
from snapkv.serving.orders import Move
from snapkv.serving.scheduler import ORDERS


def chosen(positions: Sequence[int], kept: int) -> list[int]:
    """Some choice that depends on nothing else: every few of them, and the last ones."""
    tail, held = kept // 2, len(positions)
    front = [place * (held - tail) // (kept - tail) for place in range(kept - tail)]
    return [positions[place] for place in (*front, *range(held - tail, held))]


@dataclass
class Kept:
    """What a request held when it was compressed last."""

    positions: list[int]
    seen: int


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
        self.held: dict[str, Kept] = {}
        self.moved: dict[str, Sequence[Move]] = {}
        self.queries: dict[str, int] = {}
        self.compressed: Counter[str] = Counter()
        self.ahead: dict[str, tuple[Sequence[int], Sequence[int]]] = {}

    def run(self, output: Any) -> ModelRunnerOutput:
        self._take_over(output)
        begin = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        begin |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        orders = getattr(output, ORDERS)
        self.ahead = {
            name: order.ahead.rows for name, order in orders.items() if order.ahead is not None
        }
        ends = {
            name: begin[name] + n - len(self.ahead.get(name, ((), ()))[0])
            for name, n in output.num_scheduled_tokens.items()
        }
        for name, end in ends.items():
            self._write(name, begin[name], end)
        for name, end in ends.items():
            self._check(name, begin[name], end)
        self._carry_out(orders)
        sampled = [self._sample(name, end) for name, end in ends.items()]
        rows = {name: row for row, name in enumerate(ends)}
        return ModelRunnerOutput(list(ends), rows, sampled_token_ids=sampled)

    def _take_over(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        for name in (*output.finished_req_ids, *cached.resumed_req_ids):
            self.held.pop(name, None)
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

    def _positions(self, name: str, group: int, end: int) -> list[int]:
        """Whose states a group holds of a request, in order, when it has seen `end` tokens.

        Those read ahead in this step come last, with negative numbers.
        """
        kept, (_, ahead) = self.held.get(name), self.ahead.get(name, ((), ()))
        read = [-position for position in ahead]
        if kept is None or self.windows[group] is not None:
            return [*range(end), *read]
        return [*kept.positions, *range(kept.seen, end), *read]

    def _places(self, name: str, group: int, end: int) -> list[tuple[int, int]]:
        """Those positions, each with its slot."""
        positions = self._positions(name, group, end)
        places = self._slots(self.blocks[name][group], len(positions))
        return list(zip(positions, places, strict=True))

    def _slots(self, blocks: Sequence[int], tokens: int) -> list[int]:
        """The slots of the first tokens in these blocks."""
        return slots(torch.tensor(blocks), tokens, self.block_tokens).tolist()

    def _state(self, name: str, position: int) -> int:
        """A number that stands for the tokens up to a position, and for no others."""
        if position < 0:  # read ahead, behind other tokens than its own
            return position
        states, tokens = self.states[name], self.tokens[name]
        while len(states) <= position:
            states.append(hash((states[-1] if states else 0, tokens[len(states)])))
        return states[position]

    def _write(self, name: str, begin: int, end: int) -> None:
        ids, ahead = self.ahead.get(name, ((), ()))
        assert list(ids) == [self.tokens[name][position] for position in ahead]
        for group in range(len(self.windows)):
            for position, place in self._places(name, group, end)[begin - end - len(ahead) :]:
                self.memory[place] = self._state(name, position)

    def _check(self, name: str, begin: int, end: int) -> None:
        for group, window in enumerate(self.windows):
            first = 0 if window is None else begin - window + 1
            for position, place in self._places(name, group, end):
                found = position < first or self.memory[place] == self._state(name, position)
                assert found, (name, group, position, end)

    def _carry_out(self, orders: dict[str, Any]) -> None:
        for name, order in orders.items():
            self.queries[name] = self.queries.get(name, 0) + order.query_tokens
        ending = {name: order for name, order in orders.items() if order.ends}
        for name, one in ending.items():
            assert self.queries[name] == one.choice.query_tokens
            self.queries[name] = 0 if one.moves else one.choice.remembered_tokens
        written = {}
        for name, order in ending.items():
            if not order.moves:
                continue
            held = self._positions(name, order.moves[0].group, order.seen_tokens)
            assert len(held) == order.held_tokens
            positions = chosen([one for one in held if one >= 0], order.kept_tokens)
            states = [self._state(name, position) for position in positions]
            for move in order.moves:
                places = self._places(name, move.group, order.seen_tokens)
                assert {place // self.block_tokens for _, place in places} == set(move.sources)
                targets = self._slots(move.targets, len(states))
                written |= dict(zip(targets, states, strict=True))
            assert [move.group for move in order.moves] == self._compressed_groups
            self.held[name] = Kept(positions, order.seen_tokens)
            self.moved[name] = order.moves
            self.compressed[order.choice.stage] += 1
        for place, state in written.items():
            self.memory[place] = state

    @property
    def _compressed_groups(self) -> list[int]:
        return [group for group, window in enumerate(self.windows) if window is None]

    def _sample(self, name: str, end: int) -> list[int]:
        """The next token, which the tokens before it decide; none inside a prompt."""
        tokens = self.tokens[name]
        if end < self.prompts[name]:
            return []
        if end == len(tokens):
            tokens.append(sum(tokens[-3:]) % 97 + 1)
            return [tokens[end]]
        return []


class Simulation:
    """A scheduler, a simulated worker, and steps under way between them.

    Args:
        scheduler: vLLM's, compressing.
        worker: carries its steps out.
        ahead: how many steps the scheduler may be ahead.
    """

    def __init__(self, scheduler: Any, worker: SimulatedWorker, ahead: int) -> None:
        self.scheduler, self.worker, self.ahead = scheduler, worker, ahead
        self._under_way: deque[Any] = deque()
        self.preempted = 0
        preempt = scheduler._preempt_request

        def count(*args: Any, **kwargs: Any) -> None:
            self.preempted += 1
            preempt(*args, **kwargs)

        scheduler._preempt_request = count

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
