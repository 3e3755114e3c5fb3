"""The last queries of a layer, for observation windows that begin before the last forward pass."""

from collections.abc import Callable

import torch
from torch import Tensor

from snapkv import ops
from snapkv.policies import EvictingPolicy, Policy
from snapkv.policies.base import ALL_QUERIES


class QueryMemory:
    """Holds the last queries of a layer as long as they may vote again.

    They vote at the end of a prompt that is read in pieces, with the next turn, or when a policy
    evicts tokens while the model generates.

    Attributes:
        window_tokens: how many queries vote at the end of a prompt.
        history_tokens: how many queries are held after a prompt: a short turn's window begins
            before the turn.
        held: (B, Hq, N, D), the queries of the last N tokens; None if none are needed. N may
            exceed `history_tokens` by the tokens that a crop may take back.
    """

    def __init__(self, policy: Policy) -> None:
        self.held: Tensor | None = None
        self.fit(policy, chooses_again=False)

    def fit(self, policy: Policy, *, chooses_again: bool) -> None:
        """Set how many queries to hold.

        Args:
            policy: the policy that they vote for.
            chooses_again: whether later turns vote, too.
        """
        wanted = self.window_tokens = policy.query_tokens
        if isinstance(policy, EvictingPolicy):
            self.history_tokens = policy.history_tokens
        else:
            self.history_tokens = wanted if chooses_again and wanted != ALL_QUERIES else 0

    @property
    def last(self) -> Tensor | None:
        """The queries that vote with the next turn.

        Shape: (B, Hq, N, D) with N up to `history_tokens`; None if no queries are held.
        """
        return None if self.held is None else last_tokens(self.held, self.history_tokens)

    @property
    def nbytes(self) -> int:
        """The number of bytes that the held queries take."""
        return 0 if self.held is None else self.held.nbytes

    # While a prompt or turn is read.

    def window(self, queries: Tensor, ahead_tokens: int = 0) -> Tensor:
        """Return the last queries, those of this pass included.

        Args:
            queries: (B, Hq, Q, D), the queries of this pass.
            ahead_tokens: how many more queries to return than `window_tokens`.

        Returns:
            (B, Hq, N, D), where N is `window_tokens` + `ahead_tokens`, or fewer if fewer are held.
        """
        if self.held is not None:
            queries = self._after_held(queries)
        return last_tokens(queries, self.window_tokens + ahead_tokens)

    def remember(self, queries: Tensor, ahead_tokens: int = 0) -> None:
        """Replace the held queries by a copy of those that `window` returns.

        They are needed for the next pieces of the prompt. The arguments are those of `window`.
        """
        self.held = self.window(queries, ahead_tokens).clone()

    def end_prompt(self, queries: Tensor) -> None:
        """Hold a copy of the last `history_tokens` queries of a prompt.

        Args:
            queries: (B, Hq, N, D). If there are fewer, all of them are held.
        """
        history = self.history_tokens
        self.held = queries[:, :, -history:].clone() if history else None

    # While tokens are generated.

    def look_back(self, queries: Tensor, draft_tokens: int = 0) -> Tensor:
        """Return the last `history_tokens` queries, and hold them for the steps to come.

        If no history is needed, return all queries of a turn that came in pieces, and hold none.

        Args:
            queries: (B, Hq, Q, D), the queries of this step.
            draft_tokens: how many more queries to hold, since `crop` may remove these tokens.

        Returns:
            (B, Hq, N, D).
        """
        history = self.history_tokens
        if not history:
            queries, self.held = self._after_held(queries), None
            return queries
        if self.held is not None:  # copy no more of them than stay
            left = history + draft_tokens - queries.shape[-2]
            self.held = last_tokens(self.held, left)
        self.held = last_tokens(self._after_held(queries), history + draft_tokens)
        return last_tokens(self.held, history)

    def write_over(self, queries: Tensor) -> None:
        """Append the queries of a step and drop the oldest ones, without making a new tensor.

        A captured step reads the tensor at its address. Does nothing if no queries are held.

        Args:
            queries: (B, Hq, Q, D).
        """
        if (held := self.held) is not None:
            held.copy_(last_tokens(self._after_held(queries), held.shape[2]))

    def own(self, draft_tokens: int) -> None:
        """Replace the held queries by a copy that no other layer shares.

        A replayed step writes into this copy.

        Args:
            draft_tokens: how many more queries than `last` to hold, since these tokens may be
                removed. If there are too few, zeros take the places of the oldest ones.
        """
        if self.held is not None:
            tokens = self.history_tokens + draft_tokens
            held = last_tokens(self.held, tokens)
            self.held = torch.nn.functional.pad(held, (0, 0, tokens - held.shape[2], 0))

    def can_write_back(self, tokens: int) -> bool:
        """Return whether enough queries are held to remove those of the last `tokens` tokens."""
        return self.held is None or self.held.shape[2] >= self.history_tokens + tokens

    def write_back(self, tokens: int) -> None:
        """Remove the queries of the last `tokens` tokens, without making a new tensor.

        They must be from the last pass, and not all of it. Does nothing if no queries are held.
        """
        # The rejected queries move to the front. Every pass drops more queries there than can be
        # rejected of it, so they never reach the last `history_tokens`.
        if (held := self.held) is not None:
            held.copy_(held.roll(tokens, dims=2))

    # When the cache changes.

    def change(self, make: Callable[[Tensor], Tensor]) -> None:
        """Replace the held queries, if there are any, by what `make` returns for them."""
        if self.held is not None:
            self.held = make(self.held)

    def select_rows(self, rows: Tensor) -> None:
        """Replace the batch rows of the held queries by the rows `rows`, in that order.

        Args:
            rows: (new B,) integers, the old row for every new one.
        """
        self.change(lambda held: held.index_select(0, rows.to(held.device)))

    def crop(self, tokens: int) -> None:
        """Forget the queries of the last `tokens` tokens."""
        self.change(lambda held: held[:, :, : max(0, held.shape[2] - tokens)])

    def drop(self, stays: Tensor, positions: Tensor) -> None:
        """Forget the queries of dropped tokens, so that all rows still hold the same number.

        A row that has no older tokens holds padding instead.

        Args:
            stays: (B, columns) bool, True for the tokens that are not dropped.
            positions: (B, columns) int64, their positions; negative for padding.
        """

        def left(held: Tensor) -> Tensor:
            stay = stays[:, stays.shape[1] - held.shape[2] :]
            places, counts = ops.kept_indices(stay[:, None]), stay.sum(dim=-1)
            is_all = counts >= (stays & (positions >= 0)).sum(dim=-1)
            fewest = int(counts.masked_fill(is_all, places.shape[-1]).min())
            return ops.gather_tokens(held, places[..., places.shape[-1] - fewest :])

        self.change(left)

    def _after_held(self, queries: Tensor) -> Tensor:
        held = self.held
        return queries if held is None else torch.cat([held, queries.detach()], dim=-2)


def last_tokens(queries: Tensor, tokens: int) -> Tensor:
    """Return the last `tokens` queries, or all of them if there are fewer.

    Args:
        queries: (B, Hq, N, D).
        tokens: how many queries to return; a negative number counts as 0.

    Returns:
        A view of `queries`, (B, Hq, up to `tokens`, D).
    """
    return queries[..., max(0, queries.shape[-2] - max(tokens, 0)) :, :]
