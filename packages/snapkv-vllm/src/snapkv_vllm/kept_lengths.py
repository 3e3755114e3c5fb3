"""Tells attention how many tokens each request stores, if that is fewer than it has computed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class KeptLengths:
    """The numbers of stored tokens of the requests in a batch. The runner's own lengths count all
    computed tokens.

    The buffers live as long as the runner. CUDA graphs that read them during capture therefore read
    the lengths of the current step during replay.

    Args:
        most_requests: the largest number of requests in a batch.
        device: the device of the worker.
    """

    def __init__(self, most_requests: int, device: torch.device) -> None:
        self._dropped_cpu = torch.zeros(most_requests, dtype=torch.int32)
        self._dropped = self._dropped_cpu.to(device)
        self._seq_lens = torch.zeros(most_requests, dtype=torch.int32, device=device)
        self._has_dropped = False

    def begin_step(self, requests: Sequence[str], dropped: Mapping[str, int]) -> None:
        """Set how many tokens each request of the batch has dropped, before the step is run.

        Args:
            requests: the ids of the requests, in the order of the batch.
            dropped: how many tokens a request has dropped, by request id. Requests that have
                dropped none may be left out, and others may be there that are not in the batch.
        """
        self.end_step()
        self._has_dropped = any(request in dropped for request in requests)
        if self._has_dropped:
            rows = np.fromiter(
                (dropped.get(request, 0) for request in requests), np.int32, len(requests)
            )
            self._dropped_cpu[: len(requests)] = torch.from_numpy(rows)
            self._dropped.copy_(self._dropped_cpu, non_blocking=True)

    def end_step(self) -> None:
        """Reset the numbers of dropped tokens to zero, because a dummy batch may follow. Until
        `begin_step` is called, every length is that of vLLM.
        """
        if self._has_dropped:
            self._dropped_cpu.zero_()
            self._dropped.zero_()
            self._has_dropped = False

    def stored_positions(self, positions: Tensor, query_start_loc: Tensor) -> Tensor | None:
        """Return the positions of the new tokens of a batch, counted without the tokens that were
        dropped.

        Args:
            positions: (tokens,) int64, the true positions of the tokens of the batch.
            query_start_loc: (requests + 1,) int32, where the tokens of each request begin.

        Returns:
            A new int64 tensor of shape (tokens,), or None if no request of the batch has dropped
            tokens.
        """
        if not self._has_dropped:
            return None
        ends = query_start_loc[1:].contiguous()
        tokens = torch.arange(len(positions), dtype=ends.dtype, device=ends.device)
        rows = torch.searchsorted(ends, tokens, right=True).clamp_(max=len(ends) - 1)
        return positions - self._dropped[rows]

    def patch_builder(self, builder: Any) -> None:
        """Patch one of vLLM's attention metadata builders in place, so that it gets the numbers of
        stored tokens instead of computed tokens. A builder must be patched only once.
        """
        build = builder.build

        def build_for_held(
            common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
        ) -> Any:
            return build(common_prefix_len, self.convert(common_attn_metadata), *args, **kwargs)

        builder.build = build_for_held

    def convert(self, metadata: Any) -> Any:
        """Return a copy of vLLM's `CommonAttentionMetadata` in which the lengths are the numbers of
        stored tokens.

        The lengths are a view of this object's buffer, which the next call overwrites. The bounds
        on the host are changed only if a request of the batch has dropped tokens.
        """
        rows = metadata.seq_lens.shape[0]
        held = self._seq_lens[:rows]
        torch.sub(metadata.seq_lens, self._dropped[:rows], out=held)
        bound = metadata.seq_lens_cpu_upper_bound
        if self._has_dropped and bound is not None:
            return replace_lengths(metadata, held, bound - self._dropped_cpu[: bound.shape[0]])
        return replace_lengths(metadata, held)


def replace_lengths(metadata: Any, lengths: Tensor, bound: Tensor | None = None) -> Any:
    """Return a copy of vLLM's `CommonAttentionMetadata` in which the lengths of the requests are
    replaced by other lengths. Everything else is shared.

    Args:
        metadata: the metadata of a batch.
        lengths: (requests,) int32 on the device.
        bound: upper bounds of the lengths on the host; None keeps the former ones.
    """
    changed: dict[str, Any] = {"seq_lens": lengths, "_num_computed_tokens_cache": None}
    if bound is not None:
        changed |= {"seq_lens_cpu_upper_bound": bound, "max_seq_len": int(bound.max())}
    return metadata.replace(**changed)
