"""When requests are compressed: worked examples, and every way to cut a prompt into steps."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv import TOVA, SnapKV, StreamingLLM
from snapkv_vllm.admission.plans import (
    AnswerLimit,
    AnswerSelector,
    Order,
    PromptPlan,
)

POLICY = SnapKV(64, window_size=32)


@dataclass
class Requests:
    """One request that is computed step by step, as a scheduler does it."""

    plan: PromptPlan
    seen: int = 0
    dropped: int = 0
    orders: list[Order] = field(default_factory=list)
    max_held: int = 0

    @property
    def held(self) -> int:
        return self.seen - self.dropped

    def step(self, offered: int) -> int:
        tokens = self.plan.limit_step(self.seen, self.held, offered)
        assert 0 <= tokens <= offered
        if not tokens:
            return 0
        order = self.plan.make_order(self.seen, self.held, tokens)
        room = order.reserved_tokens(16) if order is not None and order.is_due else 0
        assert self.plan.tokens_to_reserve(self.seen, self.held, tokens, 16) == room
        self.max_held = max(self.max_held, self.held + tokens)
        self.seen += tokens
        if order is not None:
            self.orders.append(order)
            if order.is_due:
                self.seen, self.dropped = order.seen_tokens, order.dropped_tokens
        return tokens

    def run(self, total: int, chunks) -> "Requests":
        """Up to that many tokens, in chunks, which come again from the first."""
        turn = 0
        while self.seen < total:
            end = self.plan.prompt_tokens if self.seen < self.plan.prompt_tokens else self.seen + 1
            self.step(min(chunks[turn % len(chunks)], max(total, end) - self.seen))
            turn += 1
        return self

    @property
    def ended(self) -> list[tuple[int, int]]:
        """Where it was compressed, and what it held then."""
        return [(order.seen_tokens, order.kept_tokens) for order in self.orders if order.is_due]


def whole(prompt, policy=POLICY, step=None):
    return Requests(PromptPlan(prompt_tokens=prompt, policy=policy)).run(prompt, [step or prompt])


def test_cached_prefix_ends_before_the_tokens_that_vote():
    def reusable(policy, tokens):
        return PromptPlan(prompt_tokens=tokens, policy=policy).reusable_tokens

    assert reusable(POLICY, 200) == 168  # 200 - 32
    assert reusable(None, 200) is None
    assert reusable(POLICY, 60) is None  # nothing will be dropped
    assert reusable(StreamingLLM(64), 200) == 199  # one token has to be computed
    assert reusable(TOVA(64), 200) == 199


GROWTH = AnswerLimit(policy=TOVA(70), max_tokens=80, evict_every=10)


def test_answer_grows_to_its_budget_and_is_evicted_from_immediately():
    """64 prompt tokens and 16 generated ones are 80; then every ten tokens evict ten."""
    plan = PromptPlan(prompt_tokens=100, policy=POLICY, answer_limit=GROWTH)
    request = Requests(plan).run(140, [100])
    assert request.ended == [(100, 64), (116, 70), (126, 70), (136, 70)]
    ended = [order for order in request.orders if order.is_due]
    assert ended[1].selector == AnswerSelector(TOVA(70), 1)
    assert (ended[1].held_tokens, ended[1].dropped_tokens) == (80, 46)
    assert request.max_held == 100


def test_eviction_sees_only_queries_of_the_answer():
    policy = SnapKV(64, window_size=32)
    answer_limit = AnswerLimit(policy=_Looking(60), max_tokens=70, evict_every=10)
    plan = PromptPlan(prompt_tokens=100, policy=policy, answer_limit=answer_limit)
    late = plan.next_compression(100, 64)
    assert (late.trigger_tokens, late.selector.query_tokens) == (106, 6)
    early = PromptPlan(prompt_tokens=100, answer_limit=answer_limit).next_compression(0, 0)
    assert (early.trigger_tokens, early.selector.query_tokens) == (101, 1)


class _Looking(TOVA):
    """Wants eight queries."""

    history_tokens = 8


@settings(deadline=None)
@given(
    prompt=st.integers(1, 400),
    answer=st.integers(0, 120),
    chunks=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    window=st.integers(1, 40),
    every=st.none() | st.integers(1, 30),
)
def test_compression_does_not_depend_on_how_a_request_is_cut_into_steps(
    prompt, answer, chunks, window, every
):
    """The reference reads one token after the other."""
    policy = SnapKV(64, window_size=window)
    answer_limit = every and AnswerLimit(policy=TOVA(90 - every), max_tokens=90, evict_every=every)
    plan = PromptPlan(prompt_tokens=prompt, policy=policy, answer_limit=answer_limit or None)
    request = Requests(plan).run(prompt + answer, [*chunks, 200])
    expected, held = [], 0
    for seen in range(1, prompt + answer + 1):
        held, left = held + 1, prompt - seen
        if left == 0 and held > 64:
            held = 64
            expected.append((seen, held))
        elif left < 0 and every and held >= 90:
            held = 90 - every
            expected.append((seen, held))
    assert request.ended == expected
    assert request.max_held <= plan.max_held(prompt + answer) <= prompt + answer
    queries = [0]
    for order in request.orders:
        queries[-1] += order.query_tokens
        if order.is_due:
            assert queries[-1] == order.selector.query_tokens
            queries.append(0)
    if expected:
        assert plan.shareable_tokens == expected[0][0]
        assert plan.reusable_tokens < expected[0][0]
