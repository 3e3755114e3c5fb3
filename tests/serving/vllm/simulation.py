"""A worker without a model: every slot remembers which token's state it holds.

It does with blocks what vLLM's runner and this plugin do, and checks before each step's end that
every request finds exactly the states of its own tokens, or of those it kept. A step may be carried
out while the scheduler is already a step ahead, as under asynchronous scheduling.
"""

from collections import deque
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

from snapkv.serving.orders import slots
from snapkv.serving.scheduler import ORDERS


def kept_positions(prompt: int, kept: int) -> list[int]:
    """Some choice that depends on nothing else: every few tokens, and the last ones."""
    tail = kept // 2
    front = [position * (prompt - tail) // (kept - tail) for position in range(kept - tail)]
    return [*front, *range(prompt - tail, prompt)]


class SimulatedWorker:
    """Carries out `SchedulerOutput`s in order.

    Args:
        blocks: how many there are.
        block_tokens: tokens in a block.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.memory: list[Any] = [None] * (blocks * block_tokens)
        self.block_tokens = block_tokens
        self.tokens: dict[str, list[int]] = {}
        self.states: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.held: dict[str, list[int] | None] = {}
        self.moved: dict[str, list[int]] = {}
        self.queries: dict[str, int] = {}
        self.compressed = 0

    def run(self, output: Any) -> ModelRunnerOutput:
        self._take_over(output)
        begin = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        begin |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ends = {name: begin[name] + n for name, n in output.num_scheduled_tokens.items()}
        for name, end in ends.items():
            self._write(name, begin[name], end)
        for name, end in ends.items():
            self._check(name, end)
        self._carry_out(getattr(output, ORDERS))
        sampled = [self._sample(name, end) for name, end in ends.items()]
        rows = {name: row for row, name in enumerate(ends)}
        return ModelRunnerOutput(list(ends), rows, sampled_token_ids=sampled)

    def _take_over(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        for name in (*output.finished_req_ids, *cached.resumed_req_ids):
            self.held.pop(name, None)
            self.moved.pop(name, None)
            self.queries.pop(name, None)
        for name, blocks in self.moved.items():
            self.blocks[name] = list(blocks)
        self.moved = {}
        for one in output.scheduled_new_reqs:
            self.tokens[one.req_id] = list(one.prompt_token_ids)
            self.states[one.req_id] = []
            self.prompts[one.req_id] = len(one.prompt_token_ids)
            self.blocks[one.req_id] = list(one.block_ids[0])
        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.blocks[name] = list(new[0])
            elif new is not None:
                self.blocks[name] += new[0]

    def _positions(self, name: str, end: int) -> list[int]:
        """Whose states the request must find, in order, when it has seen `end` tokens."""
        kept = self.held.get(name)
        return list(range(end)) if kept is None else [*kept, *range(self.prompts[name], end)]

    def _state(self, name: str, position: int) -> int:
        """A number that stands for the tokens up to a position, and for no others."""
        states, tokens = self.states[name], self.tokens[name]
        while len(states) <= position:
            states.append(hash((states[-1] if states else 0, tokens[len(states)])))
        return states[position]

    def _write(self, name: str, begin: int, end: int) -> None:
        positions = self._positions(name, end)
        places = slots(self.blocks[name], len(positions), self.block_tokens)
        for position, place in list(zip(positions, places, strict=True))[begin - end :]:
            self.memory[place] = self._state(name, position)

    def _check(self, name: str, end: int) -> None:
        positions = self._positions(name, end)
        places = slots(self.blocks[name], len(positions), self.block_tokens)
        for position, place in zip(positions, places, strict=True):
            assert self.memory[place] == self._state(name, position), (name, position, end)

    def _carry_out(self, orders: dict[str, Any]) -> None:
        for name, order in orders.items():
            self.queries[name] = self.queries.get(name, 0) + order.query_tokens
        ending = {name: order for name, order in orders.items() if order.compress}
        assert all(self.queries[name] == one.policy.query_tokens for name, one in ending.items())
        kept = {}
        for name, order in ending.items():
            positions = kept_positions(order.prompt_tokens, order.kept_tokens)
            kept[name] = positions, [self._state(name, position) for position in positions]
        for name, order in ending.items():
            blocks = list(order.target_blocks or self.blocks[name])
            positions, states = kept[name]
            for place, state in zip(
                slots(blocks, len(states), self.block_tokens), states, strict=True
            ):
                self.memory[place] = state
            needed = -(-len(states) // self.block_tokens)
            self.held[name], self.moved[name] = positions, blocks[:needed]
            self.compressed += 1

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
