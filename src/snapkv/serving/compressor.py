"""Carries out the scheduler's orders on one worker's tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import UnsupportedModelError
from snapkv.policies import PromptLayer
from snapkv.serving.layouts import Layout, layout_of
from snapkv.serving.orders import Order, slots


@dataclass
class QueryRecorder:
    """Captures the queries that will vote while vLLM's model runs, chunk by chunk.

    Attributes:
        wanted: per request, which rows of the batch of this step.
        recorded: per request and layer, (tokens, Hq, D) of every chunk so far.
    """

    wanted: dict[str, slice] = field(default_factory=dict)
    recorded: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)

    def listen(self, name: str, layer: Any) -> None:
        """Capture queries of one of vLLM's attention layers from now on."""
        forward = layer.impl.forward

        def forward_and_record(layer: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            for request_id, rows in self.wanted.items():
                layers = self.recorded.setdefault(request_id, {})
                layers.setdefault(name, []).append(query[rows].clone())
            return forward(layer, query, *args, **kwargs)

        layer.impl.forward = forward_and_record

    def take(self, request_id: str, name: str) -> Tensor:
        """The queries of a request in a layer: (1, Hq, W, D)."""
        chunks = self.recorded[request_id][name]
        return torch.cat(chunks).transpose(0, 1).unsqueeze(0)

    def forget(self, request_id: str) -> None:
        """Drop what was put aside for a request."""
        self.recorded.pop(request_id, None)


class Compressor:
    """Votes on prompts that end in a step, and moves what stays.

    Args:
        layers: vLLM's attention layers by name, in the order of the model.
        block_tokens: tokens in a block.
        device: where the cache is.
    """

    def __init__(
        self, layers: Mapping[str, Any], *, block_tokens: int, device: torch.device
    ) -> None:
        self.recorder = QueryRecorder()
        self._layers = layers
        self._block_tokens = block_tokens
        self._device = device
        self._layouts: dict[str, Layout] = {}
        for name, layer in layers.items():
            self.recorder.listen(name, layer)

    def bind_caches(self) -> None:
        """Look up the layout of every layer, once vLLM has allocated the caches.

        Raises:
            UnsupportedModelError: the caches are cut into other blocks than the scheduler counts.
        """
        for name, layer in self._layers.items():
            if layer.kv_cache.shape[2] != self._block_tokens:
                raise UnsupportedModelError(
                    f"snapkv: expected blocks of {self._block_tokens} tokens, got "
                    f"{layer.kv_cache.shape[2]} in {name}; pass --block-size "
                    f"{layer.kv_cache.shape[2]}"
                )
            self._layouts[name] = layout_of(layer)

    def compress(self, orders: Mapping[str, Order], blocks: Mapping[str, list[int]]) -> None:
        """Compress the requests whose prompt ends in the step that has just run.

        Args:
            orders: of the step, by request.
            blocks: the blocks of each request, as the step used them.
        """
        ending = {request: order for request, order in orders.items() if order.compress}
        for depth, name in enumerate(self._layers):
            # A target may be a block that another request of this step gave up: read all first.
            kept = [
                self._kept(name, depth, request, order, blocks[request])
                for request, order in ending.items()
            ]
            for slots_and_states in kept:
                self._layouts[name].write(*slots_and_states)
        for request in ending:
            self.recorder.forget(request)

    def _kept(
        self, name: str, depth: int, request: str, order: Order, blocks: list[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a layer keeps of a request, read and not yet written: slots, keys, values."""
        layout = self._layouts[name]
        used = torch.tensor(blocks[: -(-order.prompt_tokens // self._block_tokens)])
        used = used.to(self._device)
        keys = layout.read_keys(used, order.prompt_tokens)
        keep = self._keep_indices(name, depth, request, order, keys)
        targets = slots(order.target_blocks or blocks, order.kept_tokens, self._block_tokens)
        values = layout.read_values(used, keep)
        return torch.tensor(targets, device=self._device), ops.gather_tokens(keys, keep), values

    def _keep_indices(
        self, name: str, depth: int, request: str, order: Order, keys: Tensor
    ) -> Tensor:
        """What the policy keeps of a layer: (1, H, K)."""
        impl = self._layers[name].impl
        heads = self._layers[name].num_heads
        queries = keys.new_empty(1, heads, 0, keys.shape[-1])
        if order.policy.query_tokens:
            queries = self.recorder.take(request, name)
        layer = PromptLayer(
            queries=queries,
            keys=keys,
            values=torch.empty_like(keys, device="meta"),  # no served method looks at them
            score_options=ops.ScoreOptions(
                scaling=impl.scale,
                softcap=getattr(impl, "logits_soft_cap", None) or None,
                sink_logits=getattr(impl, "sinks", None),
            ),
            layer_idx=depth,
            depth=depth,
            num_layers=len(self._layers),
        )
        selection = order.policy.select(layer)
        if selection is None or selection.keep_indices.shape[-1] != order.kept_tokens:
            kept = None if selection is None else selection.keep_indices.shape[-1]
            raise RuntimeError(f"{request}: {kept} tokens kept, {order.kept_tokens} expected")
        return selection.keep_indices
