"""A fleet of vLLM's engines as events: how long requests wait, given what a step takes.

An engine works in steps, as vLLM's scheduler plans them: every running request computes what it can
of a step's tokens, in the order they came; then waiting ones begin, the first first, while there
are blocks for their whole prompts. Who finds no block for its next tokens takes those of the
youngest, which reads again. At the end of a prompt few of its tokens are kept, or all of them.
"""

import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from snapkv.errors import InvalidArgumentError


class Work(NamedTuple):
    """What a step computes: tokens of so many requests.

    Attributes:
        pairs: of a token that is read and one that it attends to.
        held: tokens that those attend to which generate.
    """

    tokens: int
    requests: int
    pairs: int = 0
    held: int = 0


class Step(NamedTuple):
    """A step, its seconds, and whether a request lacked blocks when it began."""

    work: Work
    seconds: float
    lacking: bool = False


@dataclass(eq=False, kw_only=True)
class Turn:
    """A request: `new` tokens behind the `history` of its session, and an answer of so many.

    Attributes:
        then: the session's next turn. think: seconds from the end of the one before.
        arrived, first, finished: seconds; of the answer's first token and of its last.
        read: tokens computed so far. held: of these, how many are stored. blocks: where.
    """

    session: int = 0
    history: int = 0
    new: int
    answer: int
    then: "Turn | None" = None
    think: float = 0.0
    arrived: float = 0.0
    first: float = math.nan
    finished: float = math.nan
    read: int = 0
    held: int = 0
    blocks: int = 0
    generated: int = 0

    @property
    def prompt(self) -> int:
        return self.history + self.new


@dataclass(eq=False, kw_only=True)
class Engine:
    """One replica.

    Attributes:
        seconds: that a step takes, of at most `step_tokens`.
        blocks: of the pool, each of `block_tokens`.
        kept: tokens of a prompt; None for all.
        history_share: of the pool that the histories of sessions may take between turns.
    """

    seconds: Callable[[Work], float]
    blocks: int
    block_tokens: int
    step_tokens: int
    kept: int | None = None
    history_share: float = 0.0
    waiting: deque[Turn] = field(default_factory=deque)
    running: list[Turn] = field(default_factory=list)
    planned: dict[Turn, int] = field(default_factory=dict)
    histories: OrderedDict[int, tuple[int, int, int]] = field(default_factory=OrderedDict)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free, self.idle = self.blocks, 0  # blocks; histories hold the idle ones

    def submit(self, turn: Turn) -> None:
        if self._blocks(turn.prompt + turn.answer) > self.blocks:
            raise InvalidArgumentError(
                f"blocks: expected enough for {turn.prompt + turn.answer:,} tokens, got "
                f"{self.blocks} of {self.block_tokens}; pass more blocks, or shorter prompts"
            )
        self.waiting.append(turn)

    def begin(self) -> float:
        """Plan a step; the seconds that it takes."""
        left, lacking, place = self.step_tokens, False, 0
        while left and place < len(self.running):
            if planned := self._plan(self.running[place], left):
                left, place = left - planned, place + 1
            else:
                lacking = True
                self._preempt(self.running.pop())
        while left and self.waiting and not (lacking := lacking or not self._fits(self.waiting[0])):
            self._start(self.waiting.popleft())
            left -= self._plan(self.running[-1], left)
        work = self._work()
        self.steps.append(Step(work, self.seconds(work), lacking))
        return self.steps[-1].seconds

    def end(self, now: float) -> list[Turn]:
        """The turns whose answers are complete with this step."""
        ended = []
        for turn, count in self.planned.items():
            turn.read += count
            turn.held += count
            if turn.read == turn.prompt and self.kept is not None:
                turn.held = min(turn.held, self.kept)
                self._trim(turn)
            if turn.read == turn.prompt + turn.generated:
                turn.first = turn.first if turn.generated else now
                turn.generated += 1
            if turn.generated == turn.answer:
                turn.finished = now
                ended.append(turn)
                self.running.remove(turn)
                self._remember(turn)
        self.planned.clear()
        return ended

    def _work(self) -> Work:
        pairs = held = 0
        for turn, count in self.planned.items():
            if turn.read < turn.prompt:
                pairs += count * turn.held + count * (count + 1) // 2
            else:
                held += turn.held + count
        return Work(sum(self.planned.values()), len(self.planned), pairs, held)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _plan(self, turn: Turn, left: int) -> int:
        """How many tokens of a request this step computes; none where blocks are lacking."""
        end = turn.prompt + turn.generated
        if self.kept is not None and turn.read < turn.prompt:
            end = turn.prompt  # where it is compressed, also when it is read again
        count = min(left, end - turn.read)
        missing = max(0, self._blocks(turn.held + count) - turn.blocks)
        if missing > self.free + self.idle:
            return 0
        while missing > self.free:
            self._forget(missing - self.free)
        self.free -= missing
        turn.blocks += missing
        self.planned[turn] = count
        return count

    def _preempt(self, turn: Turn) -> None:
        self.free += turn.blocks
        turn.read = turn.held = turn.blocks = 0
        self.waiting.appendleft(turn)

    def _fits(self, turn: Turn) -> bool:
        """Whether the whole prompt would find blocks."""
        read, held, _ = self.histories.get(turn.session, (0, 0, 0))
        needed = self._blocks(held + turn.prompt + turn.generated - read)
        return needed <= self.free + self.idle

    def _start(self, turn: Turn) -> None:
        """Go on from the history of its session, where this engine holds it."""
        turn.read, turn.held, turn.blocks = self.histories.pop(turn.session, (0, 0, 0))
        self.idle -= turn.blocks
        self.running.append(turn)

    def _trim(self, turn: Turn) -> None:
        self.free += turn.blocks - self._blocks(turn.held)
        turn.blocks = self._blocks(turn.held)

    def _remember(self, turn: Turn) -> None:
        """Hold what the next turn can begin with; of a cached prefix full blocks."""
        if self.kept is None:
            turn.read = turn.held = turn.held // self.block_tokens * self.block_tokens
        self._trim(turn)
        self.histories[turn.session] = turn.read, turn.held, turn.blocks
        self.idle += turn.blocks
        while (over := self.idle - int(self.history_share * self.blocks)) > 0:
            self._forget(over)

    def _forget(self, blocks: int) -> None:
        """Free blocks of the oldest history: of a cached prefix the last, of a kept one all."""
        session, (_, _, had) = next(iter(self.histories.items()))
        left = max(0, had - blocks) if self.kept is None else 0
        self.histories[session] = left * self.block_tokens, left * self.block_tokens, left
        if not left:
            del self.histories[session]
        self.free += had - left
        self.idle -= had - left


Router = Callable[[Turn, Sequence[Engine]], int]
"""Which engine serves a turn."""


def simulate(engines: Sequence[Engine], turns: Iterable[Turn], route: Router) -> float:
    """Serve all turns and those behind them; seconds until the last one ends.

    Raises:
        InvalidArgumentError: a request that the pool of its engine cannot hold.
    """
    order, now = itertools.count(), 0.0
    events: list[tuple[float, int, Turn | int]] = []  # an arrival, or the end of an engine's step
    for turn in turns:
        heapq.heappush(events, (turn.arrived, next(order), turn))
    while events:
        now, touched = events[0][0], set[int]()
        while events and events[0][0] == now:
            what = heapq.heappop(events)[-1]
            place = route(what, engines) if isinstance(what, Turn) else what
            touched.add(place)
            if isinstance(what, Turn):
                engines[place].submit(what)
                continue
            for then in filter(None, (ended.then for ended in engines[place].end(now))):
                then.arrived = now + then.think
                heapq.heappush(events, (then.arrived, next(order), then))
        for place in sorted(touched):
            engine = engines[place]
            if not engine.planned and (engine.waiting or engine.running):
                heapq.heappush(events, (now + engine.begin(), next(order), place))
    return now
