"""Which tokens stayed of the histories that an engine holds, on one worker."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from snapkv.policies import PromptLayer
from snapkv_vllm.layers import LayerRun
from snapkv_vllm.plans import EndOfTurn, Order


class HeldPositions:
    """Positions of kept tokens, layer by layer, by the first of the blocks that hold them."""

    def __init__(self) -> None:
        self._noted: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)

    def kept(
        self, run: LayerRun, order: Order, choice: EndOfTurn, layer: PromptLayer
    ) -> Tensor | None:
        """Have a request of a session chosen from, and note which tokens stay: (layers, H, K)."""
        positions = self._of(run, order, layer.keys.device)
        keep = choice.keep_at(layer, positions)
        if keep is None:
            return None
        stays = keep
        if positions is not None:
            stays = positions.expand(-1, keep.shape[1], -1).gather(2, keep)
        (move,) = (one for one in order.moves if one.group == run.group)
        for name, of_layer in zip(run.layers, stays, strict=True):
            self._noted[move.targets[0]][name] = of_layer.to(torch.int32)
        return keep

    def _of(self, run: LayerRun, order: Order, device: torch.device) -> Tensor | None:
        """(layers, H, held) int64; None where nothing was dropped, and slots are positions."""
        if order.seen_tokens == order.held_tokens:
            return None
        (move,) = (one for one in order.moves if one.group == run.group)
        noted = self._noted[move.sources[0]]
        kept = torch.stack([noted[name] for name in run.layers]).long()
        behind = order.held_tokens - kept.shape[2]
        tail = torch.arange(order.seen_tokens - behind, order.seen_tokens, device=device)
        return torch.cat([kept, tail.expand(*kept.shape[:2], -1)], dim=2)

    def forget(self, first_blocks: Iterable[int]) -> None:
        """Histories that begin with these blocks are gone."""
        for block in first_blocks:
            self._noted.pop(block, None)
