"""Carries out the scheduler's orders on one worker's tensors."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import UnsupportedModelError
from snapkv.policies import PromptLayer
from snapkv_vllm.across_layers import find_across_layers, select_across_layers
from snapkv_vllm.admission.plans import Move, Order, TurnSelector
from snapkv_vllm.heads import HeadPlaces, HeadsAttention
from snapkv_vllm.layers import LayerRun, VotingLayer, layer_runs, voting_layer
from snapkv_vllm.layouts import pad_tokens, slot_numbers


@dataclass
class QueryRecorder:
    """Captures the queries that will vote while vLLM's model runs, chunk by chunk."""

    # per request, which rows of the batch of this step
    rows_of_requests: dict[str, slice] = field(default_factory=dict)
    # per request and layer, (tokens, Hq, D) of every chunk so far
    recorded: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)

    def attach(self, name: str, layer: VotingLayer) -> None:
        """Capture the queries of a layer from now on."""

        def record(query: Tensor) -> None:
            for request_id, rows in self.rows_of_requests.items():
                layers = self.recorded.setdefault(request_id, {})
                layers.setdefault(name, []).append(query[rows].clone())

        layer.add_query_listener(record)

    def take_queries(self, request_id: str, name: str, window: int) -> Tensor:
        """The queries of a request in a layer: (1, Hq, W, D)."""
        chunks = self.recorded.get(request_id, {}).get(name, [])
        captured = sum(len(chunk) for chunk in chunks)
        if captured != window:
            raise RuntimeError(
                f"{request_id}: {captured} queries captured in {name}, {window} expected"
            )
        return torch.cat(chunks).transpose(0, 1).unsqueeze(0)

    def forget(self, request_id: str) -> None:
        self.recorded.pop(request_id, None)


class Compressor:
    """Chooses what stays of requests, and moves it."""

    def __init__(
        self,
        groups: Mapping[int, Mapping[str, Any]],
        recorder: QueryRecorder,
        *,
        device: torch.device,
        heads: HeadsAttention | None = None,
    ) -> None:
        self._recorder = recorder
        self._groups = {
            group: {name: voting_layer(layer) for name, layer in layers.items()}
            for group, layers in groups.items()
        }
        self._layers = {name: one for of in self._groups.values() for name, one in of.items()}
        self._device, self._heads = device, heads
        self._runs: list[LayerRun] = []
        self._block_tokens: dict[int, int] = {}
        self.positions = HeldPositions()
        for name, layer in self._layers.items():
            recorder.attach(name, layer)

    def bind_caches(self, block_tokens: Mapping[int, int]) -> None:
        """Look up the layout of every layer, once vLLM has allocated the caches."""
        self._block_tokens = dict(block_tokens)
        for group, layers in self._groups.items():
            for name, layer in layers.items():
                found, expected = layer.cache.shape[2], block_tokens[group]
                if expected % found:
                    raise UnsupportedModelError(
                        f"snapkv: expected blocks of {expected} tokens, or some that these can be "
                        f"cut into, got {found} in {name}; pass --block-size {found}"
                    )
        self._runs = list(layer_runs(self._groups))

    def forget(self, request: str) -> None:
        self._recorder.forget(request)

    def compress(self, orders: Mapping[str, Order]) -> None:
        """Compress the requests of which a choice is due after the step that has just run."""
        for request, order in orders.items():
            if order.is_due:
                for move in order.moves:
                    runs = self._split_runs(move, order.held_tokens, order.kept_tokens)
                    share = find_across_layers(order.selector.policy)
                    for some in [list(runs)] if share else ([run] for run in runs):
                        self._move(some, request, order, move)
                self.forget(request)

    def _split_runs(self, move: Move, prompt_tokens: int, kept_tokens: int) -> Iterator[LayerRun]:
        """The layers of a group, as many at a time as may be copied."""
        for whole in self._runs:
            if whole.group == move.group:
                yield from whole.split_by_memory(prompt_tokens, kept_tokens)

    def _move(self, runs: Sequence[LayerRun], request: str, order: Order, move: Move) -> None:
        """Read what stays, then write it where it goes, which no other request of the step reads.

        Of several runs all is read before any is written: they share pages, and what stays of one
        layer may go to a page of another.
        """
        block_tokens, first = self._block_tokens[move.group], runs[0]
        sources = first.to_cache_blocks(move.sources, block_tokens)
        targets = torch.tensor(move.targets, device=self._device)
        whole, (_, heads, page_tokens, _) = len(targets) * block_tokens, first.first.cache.shape
        masks, places, laid = list[Tensor](), None, list[Tensor]()
        if find_across_layers(order.selector.policy):
            masks = self._select_across_layers(runs, request, order, sources)
            kept = torch.cat([mask.sum(dim=-1) for mask in masks])
            places = HeadPlaces(kept.flatten(), page_tokens)
        for number, run in enumerate(runs):
            keys = run.layout.read_keys(sources, order.held_tokens)
            if masks:
                keep = ops.kept_indices(masks[number])
            else:
                keep = self._select_tokens(run, request, order, run.decode_keys(keys))
            if order.per_head_budget:
                kept = self._noted(run, request, order, (keep >= 0).sum(dim=-1))
                places, keep = places or HeadPlaces(kept, page_tokens), keep.clamp(min=0)
            states = run.layout.select_keys(keys, keep), run.layout.read_values(sources, keep)
            if places is None:
                laid = [pad_tokens(one, whole) for one in states]
            else:
                laid = laid or [places.make_output(one, whole) for one in states]
                for one, found in zip(states, laid, strict=True):
                    places.scatter(one, found, whole, (run.depth - first.depth) * heads)
        if places is not None:
            laid = [one[..., :-1, :].reshape(-1, heads, whole, one.shape[-1]) for one in laid]
        for run in runs:
            rows = slice(run.depth - first.depth, run.depth - first.depth + len(run.layers))
            run.layout.write(
                slot_numbers(targets, whole, block_tokens), *(one[rows] for one in laid)
            )

    def _select_across_layers(
        self, runs: Sequence[LayerRun], request: str, order: Order, sources: Tensor
    ) -> list[Tensor]:
        """What is kept of all layers together: (layers, H, T) bool of each run."""
        voters = min(order.selector.query_tokens, order.seen_tokens)

        def seen(run: LayerRun) -> PromptLayer:
            keys = run.layout.read_keys(sources, order.held_tokens)
            layer = self._make_prompt_layer(run, request, voters, run.decode_keys(keys))
            return replace(layer, protected=order.selector.protected_mask(layer))

        masks = select_across_layers(order.selector.policy, map(seen, runs), order.kept_tokens)
        counts = torch.cat([mask.sum(dim=-1) for mask in masks])
        if int(counts.sum()) != order.kept_tokens * counts.numel():
            raise RuntimeError(f"{request}: {counts} tokens kept, {order.kept_tokens} expected")
        return masks

    def _noted(self, run: LayerRun, request: str, order: Order, kept: Tensor) -> Tensor:
        """Note the (layers, H) numbers of tokens that heads keep, which are returned."""
        assert self._heads is not None  # a server of such a method has them
        for name, of_layer in zip(run.layers, kept, strict=True):
            self._heads.record_kept(request, name, of_layer, order.seen_tokens)
        return kept

    def _select_tokens(self, run: LayerRun, request: str, order: Order, keys: Tensor) -> Tensor:
        """What is kept of a run of layers: (layers, H, K), as many as the scheduler counts."""
        voters = min(
            order.selector.query_tokens, order.seen_tokens
        )  # fewer where a prompt has fewer
        layer = self._make_prompt_layer(run, request, voters, keys)
        if isinstance(order.selector, TurnSelector):
            keep = self.positions.kept(run, order, order.selector, layer)
        else:
            keep = order.selector.select(layer)
        if keep is None or not _matches_order(keep, order):
            kept = None if keep is None else (keep >= 0).sum(dim=-1)
            raise RuntimeError(f"{request}: {kept} tokens kept, {order.kept_tokens} expected")
        return keep

    def _make_prompt_layer(
        self, run: LayerRun, request: str, tokens: int, keys: Tensor
    ) -> PromptLayer:
        """A run of layers as policies see them: rows of (layers, H, held tokens, D) keys."""
        queries = keys.new_empty(len(run.layers), run.first.heads, 0, keys.shape[-1])
        if tokens:
            taken = [
                layer.prepare_queries(self._recorder.take_queries(request, name, tokens))
                for name, layer in run.layers.items()
            ]
            queries = torch.cat(taken)
        return PromptLayer(
            queries=queries,
            keys=keys,
            values=torch.empty_like(keys, device="meta"),  # no served method looks at them
            score_options=run.first.score_options,
            layer_idx=run.depth,
            depth=run.depth,
            num_layers=len(self._layers),
            votes_impl=run.votes_impl,
        )


def _matches_order(keep: Tensor, order: Order) -> bool:
    """Whether (layers, H, K) indices are as many as the scheduler has counted."""
    if not order.per_head_budget:
        return keep.shape[-1] == order.kept_tokens
    return bool(((keep >= 0).sum(dim=(1, 2)) == order.kept_tokens * keep.shape[1]).all())


class HeldPositions:
    """Positions of kept tokens, layer by layer, by the first of the blocks that hold them."""

    def __init__(self) -> None:
        self._noted: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)

    def kept(
        self, run: LayerRun, order: Order, selector: TurnSelector, layer: PromptLayer
    ) -> Tensor | None:
        """Have a request of a session chosen from, and note which tokens stay: (layers, H, K)."""
        positions = self._of(run, order, layer.keys.device)
        keep = selector.select_with_positions(layer, positions)
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
