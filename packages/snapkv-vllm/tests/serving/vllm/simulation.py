"""A worker without a model, in which every slot records the token whose state it stores.

It moves blocks as vLLM's runner and this plugin do. In each step it checks that every request finds
exactly the states of its own tokens, or of those that it kept. A step may be carried out while the
scheduler is already a step ahead, as under asynchronous scheduling.
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
    """Choose `kept` of the positions, by nothing but their number: every few of the first ones, and
    the last ones. The result is in ascending order; `positions` must have at least `kept` entries.
    """
    tail, held = kept // 2, len(positions)
    front = [place * (held - tail) // (kept - tail) for place in range(kept - tail)]
    return [positions[place] for place in (*front, *range(held - tail, held))]


class SimulatedWorker:
    """Carries out vLLM's `SchedulerOutput`s in order.

    Args:
        blocks: the number of blocks.
        block_tokens: the number of tokens in a block.
        windows: the sliding window of each KV cache group; None has full attention and is
            compressed.
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
        """Carry out a step, and return its sampled tokens as vLLM's runner does.

        Raises:
            AssertionError: a request does not find the states of its own tokens, or an order does
                not fit the step.
        """
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
        """Update the blocks and the stored positions of requests by what the scheduler says at the
        beginning of a step.

        Args:
            output: the step.
            begin: how many tokens of each request are computed before the step, by request id.
        """
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
        """Return the slots of the first `tokens` tokens in some blocks."""
        return slot_numbers(torch.tensor(blocks), tokens, self.block_tokens).tolist()

    def _state(self, name: str, token: int) -> int:
        """Return a number that stands for the tokens of a request up to the position `token`, and
        for no others.
        """
        states, tokens = self.states[name], self.tokens[name]
        while len(states) <= token:
            states.append(hash((states[-1] if states else 0, tokens[len(states)])))
        return states[token]

    def _write(self, name: str, new: Sequence[int]) -> None:
        """Write the states of the new tokens of a request to the slots after its stored tokens, in
        every KV cache group.
        """
        for held, blocks in zip(self.held[name], self.blocks[name], strict=True):
            held += new
            places = self._slots(blocks, len(held))[len(held) - len(new) :]
            assert len(places) == len(new)
            for token, place in zip(new, places, strict=True):
                self.memory[place] = self._state(name, token)

    def _check(self, name: str, begin: int) -> None:
        """Check that the slots of a request have the states of its stored tokens. Tokens before a
        sliding window are not checked.

        Raises:
            AssertionError: a slot has another state.
        """
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
        """Move the states of the tokens that are kept to the target blocks, and check the order.

        Requests are compressed one after the other, so a source block that another request has
        written to in this step is noticed.

        Raises:
            AssertionError: the order does not fit the request, or a source slot has another state.
        """
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
        """Return the next token of a request in a list, which is empty inside a prompt and if the
        token is known already.
        """
        tokens = self.tokens[name]
        if end < self.prompts[name]:
            return []
        if end == len(tokens):
            tokens.append(next_token(tokens))
            return [tokens[end]]
        return []


def next_token(tokens: Sequence[int]) -> int:
    """Return the token that is sampled after `tokens`, which depends only on the last three of
    them.
    """
    return sum(tokens[-3:]) % 97 + 1


class Simulation:
    """A scheduler, a simulated worker, and the steps that are scheduled but not carried out yet.

    It also stores the answers that the requests must get.

    Args:
        scheduler: the compressing scheduler of vLLM.
        worker: carries out its steps.
        ahead: how many steps the scheduler may be ahead of the worker.
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
        """Add a request to the scheduler, and compute the answer that it must get.

        Args:
            name: the id of the request.
            ids: the prompt.
            generate: the number of tokens of the answer.
            extra_args: the settings of the request, or None.
        """
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
        """Abort a random request that has not ended, if there is one."""
        if self.scheduler.requests:
            name = draw.choice(sorted(self.scheduler.requests))
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            del self.expected[name]

    def finish(self) -> None:
        """Run steps until all requests have ended and the worker knows of the last ones, and check
        the answers of all requests that were not aborted.

        Raises:
            AssertionError: an answer is wrong.
        """
        while self.scheduler.requests:
            self.step()
        self.drain()
        self.step()
        self.drain()
        assert {name: self.worker.tokens[name] for name in self.expected} == self.expected
        self.expected = {}

    def step(self) -> None:
        """Schedule a step, and carry out steps until the scheduler is at most `ahead` steps ahead.
        If nothing is scheduled, all steps are carried out.
        """
        output = self.scheduler.schedule()
        self._under_way.append(output)
        allowed = self.ahead if output.total_num_scheduled_tokens else 0
        while len(self._under_way) > allowed:
            self._finish_one()

    def _finish_one(self) -> None:
        output = self._under_way.popleft()
        self.scheduler.update_from_output(output, self.worker.run(output))

    def drain(self) -> None:
        """Carry out all steps that are scheduled."""
        while self._under_way:
            self._finish_one()
