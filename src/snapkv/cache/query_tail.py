"""The last queries that a layer holds on to: the window may begin before the pass that ends it."""

import torch
from torch import Tensor

from snapkv.cache.keeping import last_tokens, pads_first, put_in_order
from snapkv.cache.stored import StoredTokens
from snapkv.policies import EvictingPolicy, Policy


class RememberedQueries(StoredTokens):
    """What a layer stores, and the last queries of what it has read.

    Attributes:
        policy: how many queries it wants to see.
        history_tokens: how many of the last queries the layer holds on to behind a prompt.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.history_tokens = policy.history_tokens if isinstance(policy, EvictingPolicy) else 0

    def remember_queries(self, queries: Tensor, ahead_tokens: int) -> None:
        """Hold on to the last queries of a chunk: the window may begin in it.

        And to those of tokens that will be forgotten, which `crop` takes away.
        """
        self._query_tail = self.with_remembered(queries, ahead_tokens).clone()

    def with_remembered(self, queries: Tensor, ahead_tokens: int = 0, drafts: int = 0) -> Tensor:
        """(B, Hq, up to `query_tokens` + ahead, D): the last queries of the prompt so far.

        Behind the queries' own tokens stand as many drafts; of pads only some in front are left.
        """
        queries = self._queries_with_tail(queries, drafts)
        return last_tokens(queries, self.policy.query_tokens + ahead_tokens)

    def _queries_with_tail(self, queries: Tensor, drafts: int = 0) -> Tensor:
        """The queries held on to and behind them new ones, those of pads in front of each row."""
        new, tail = queries.shape[-2], self._query_tail
        if tail is not None:
            queries = torch.cat([tail, queries.detach()], dim=-2)
        if self.gaps is None:
            return queries
        visible = torch.ones_like(queries[:, 0, :, 0], dtype=torch.bool)
        visible[:, visible.shape[1] - new :] = self.visible_columns(new, drafts)
        return put_in_order(queries, pads_first(visible))

    def forget_queries(self) -> None:
        """A turn has ended, in which no later one begins."""
        if not self.history_tokens:
            self._query_tail = None

    def look_back(self, queries: Tensor) -> Tensor:
        """(B, Hq, N, D): a step's queries, or as many of the last ones as the policy wants to see.

        Holds on to those for the steps to come.
        """
        if not self.history_tokens:
            return queries if self.gaps is None else self._queries_with_tail(queries)
        if self.gaps is None and self._query_tail is not None:  # of no pads, so no more is needed
            earlier = self.history_tokens - queries.shape[-2]
            self._query_tail = last_tokens(self._query_tail, earlier)
        self._query_tail = last_tokens(self._queries_with_tail(queries), self.history_tokens)
        return self._query_tail

    def own_queries(self, turn_tokens: int, drafts: int = 0) -> list[int]:
        """For each row how many of the last queries are its own; 0 if none of its turn's is.

        Args:
            turn_tokens: how many tokens the turn has, whether it came in pieces or not.
            drafts: how many tokens stand behind them.
        """
        own = self.visible_columns(turn_tokens, drafts).sum(dim=-1)
        if self.history_tokens:  # those of the turns before count, too
            seen = self.visible_columns(self.cumulative_length - drafts, drafts).sum(dim=-1)
            own = torch.where(own > 0, seen, own)
        counts: list[int] = own.tolist()
        return counts
