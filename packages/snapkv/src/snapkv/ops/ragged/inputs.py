"""The arguments that every implementation of attention to ragged heads takes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from snapkv.ops.scores import ScoreOptions


@dataclass(frozen=True)
class TailInputs:
    """The queries and the tail of an attention call, and the options of the model's attention.

    The keys and values that the heads keep of the prompt are separate arguments of each
    implementation. Every query sees all of them.

    Attributes:
        queries: (B, Hq, Q, D), the queries of the last Q tokens.
        tail_keys: (B, H, S, D), the append buffer: the tokens after those that the heads keep. The
            last Q are the queries' own tokens.
        tail_values: (B, H, S, Dv).
        score_options: how the model's attention turns products into scores.
        own_visible: (Q, N) bool, lower triangular: which of the last N tokens of the tail each
            query sees, if the queries are a tree of candidates. None if each query sees itself and
            every token before it.
        tail_tokens: () int64 on the device, how many of the S slots have been written; None if all
            have.
    """

    queries: Tensor
    tail_keys: Tensor
    tail_values: Tensor
    score_options: ScoreOptions
    own_visible: Tensor | None = None
    tail_tokens: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "TailInputs":
        """Return a copy in which the queries and the tail have the given dtype."""
        return replace(
            self,
            queries=self.queries.to(dtype),
            tail_keys=self.tail_keys.to(dtype),
            tail_values=self.tail_values.to(dtype),
        )

    def block(self, start: int, stop: int) -> "TailInputs":
        """Return a copy with only some of the queries, and without the tokens after them.

        Args:
            start: the first query.
            stop: the query after the last one.
        """
        after = self.queries.shape[2] - stop
        counted, visible = self.tail_tokens, self.own_visible
        slots = self.tail_keys.shape[2] - (after if counted is None else 0)
        return replace(
            self,
            queries=self.queries[:, :, start:stop],
            tail_keys=self.tail_keys[:, :, :slots],
            tail_values=self.tail_values[:, :, :slots],
            own_visible=None if visible is None else visible[start:stop, :stop],
            tail_tokens=None if counted is None else counted - after,
        )

    def hidden(self) -> Tensor:
        """Return a mask of the slots in the tail that each query must not see.

        Returns:
            (Q, S) bool.
        """
        S, Q, visible = self.tail_keys.shape[2], self.queries.shape[2], self.own_visible
        end = S if self.tail_tokens is None else self.tail_tokens
        slots = torch.arange(S, device=self.tail_keys.device)
        own = torch.arange(1 - Q, 1, device=self.tail_keys.device)[:, None] + end
        hidden = slots >= own
        if visible is None:
            return hidden
        among = slots - end + visible.shape[1]
        apart = ~visible[:, among.clamp(0, visible.shape[1] - 1)]
        return hidden | (apart & (among >= 0))
