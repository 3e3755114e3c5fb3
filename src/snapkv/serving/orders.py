"""What the scheduler tells the workers about one step; no vLLM is needed here."""

from dataclasses import dataclass

from snapkv.policies import Policy
from snapkv.serving.methods import kept_tokens, parts_heads


@dataclass(frozen=True, kw_only=True)
class Move:
    """Where the blocks of a request lie before and after its prompt is compressed.

    Attributes:
        group: index of vLLM's KV cache group.
        sources: the blocks that hold the prompt.
        targets: the blocks that hold the kept tokens; some of the sources, or others.
    """

    group: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the workers do with one request in the step that carries the order.

    Attributes:
        policy: the method that chooses what stays.
        prompt_tokens: length of the whole prompt.
        query_tokens: how many of the request's last tokens in this step belong to the window, whose
            queries are put aside.
        compress: whether the prompt ends with this step and is compressed after it.
        moves: what happens to the blocks of each compressed KV cache group, if it is.
    """

    policy: Policy
    prompt_tokens: int
    query_tokens: int
    compress: bool
    moves: tuple[Move, ...] = ()

    @property
    def parts_heads(self) -> bool:
        """Whether the heads of a layer keep different numbers of tokens."""
        return parts_heads(self.policy)

    @property
    def kept_tokens(self) -> int:
        """Tokens that stay; on average, where heads keep different numbers."""
        return kept_tokens(self.policy, self.prompt_tokens)

    @property
    def dropped_tokens(self) -> int:
        """Tokens that go."""
        return self.prompt_tokens - self.kept_tokens


def order_for(
    policy: Policy | None, *, prompt_tokens: int, computed_tokens: int, step_tokens: int
) -> Order | None:
    """The order for a request of which this step computes more; None where there is none.

    Args:
        policy: the request's method; None leaves it whole.
        prompt_tokens: length of its prompt.
        computed_tokens: tokens computed when the step is done.
        step_tokens: of those, the ones of this step.
    """
    if policy is None or kept_tokens(policy, prompt_tokens) == prompt_tokens:
        return None
    begin = computed_tokens - step_tokens
    if begin >= prompt_tokens:
        return None
    window = max(begin, prompt_tokens - policy.query_tokens)
    ends = computed_tokens == prompt_tokens
    queries = max(computed_tokens - window, 0)
    if not (queries or ends):
        return None
    return Order(policy=policy, prompt_tokens=prompt_tokens, query_tokens=queries, compress=ends)


def step_end(prompt_tokens: int, computed_tokens: int, step_tokens: int) -> int:
    """How many tokens a step may compute, so that no step runs past the prompt's end.

    A request that was preempted while generating comes back with its answer behind its prompt;
    both in one step would let the answer see the whole prompt.
    """
    if computed_tokens < prompt_tokens < computed_tokens + step_tokens:
        return prompt_tokens - computed_tokens
    return step_tokens


def reusable_tokens(policy: Policy | None, prompt_tokens: int) -> int:
    """How much of a cached prefix a request may reuse: what lies before the queries that vote.

    Args:
        policy: the request's method; None reuses everything.
        prompt_tokens: length of its prompt.
    """
    if policy is None or kept_tokens(policy, prompt_tokens) == prompt_tokens:
        return prompt_tokens
    return max(prompt_tokens - policy.query_tokens, 0)
