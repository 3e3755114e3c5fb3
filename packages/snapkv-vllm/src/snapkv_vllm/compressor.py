"""Carries out the scheduler's orders on the tensors of one worker."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import UnsupportedModelError, wrong
from snapkv.policies import PromptLayer
from snapkv_vllm.across_layers import find_across_layers, select_across
from snapkv_vllm.admission.plans import Move, Order, TurnSelector
from snapkv_vllm.heads import HeadPlaces, HeadsAttention
from snapkv_vllm.layers import LayerRun, VotingLayer, layer_runs, voting_layer
from snapkv_vllm.layouts import pad_tokens, slot_numbers


@dataclass
class QueryRecorder:
    """Records the queries that will vote on the tokens of a prompt. vLLM's model computes them in
    one or several chunks.
    """

    # by request, the rows of this step's batch whose queries are recorded
    rows_of_requests: dict[str, slice] = field(default_factory=dict)
    # by request and layer, the (tokens, Hq, D) queries of every chunk so far
    recorded: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)

    def attach(self, name: str, layer: VotingLayer) -> None:
        """Record the queries that an attention layer computes from now on. In each step only the
        rows that `rows_of_requests` names are copied. It cannot be undone.

        Args:
            name: the name of the layer, under which its queries are recorded.
            layer: the layer, which is changed in place.
        """

        def record(query: Tensor) -> None:
            for request_id, rows in self.rows_of_requests.items():
                layers = self.recorded.setdefault(request_id, {})
                layers.setdefault(name, []).append(query[rows].clone())

        layer.add_query_listener(record)

    def take_queries(self, request_id: str, name: str, window: int) -> Tensor:
        """Return the queries of a request that were recorded in one layer, in the order of its
        tokens. They stay recorded until `forget`.

        Args:
            request_id: the id of the request.
            name: the name of the layer.
            window: how many queries must have been recorded, at least 1.

        Returns:
            A new tensor of shape (1, Hq, `window`, D).

        Raises:
            RuntimeError: another number of queries than `window` was recorded.
        """
        chunks = self.recorded.get(request_id, {}).get(name, [])
        captured = sum(len(chunk) for chunk in chunks)
        if captured != window:
            raise RuntimeError(
                f"{request_id}: expected {window} captured queries in {name}, but got {captured}"
            )
        return torch.cat(chunks).transpose(0, 1).unsqueeze(0)

    def forget(self, request_id: str) -> None:
        self.recorded.pop(request_id, None)


class Compressor:
    """Compresses requests on one worker: it selects the tokens that each request keeps, and moves
    their keys and values to other blocks.

    Args:
        groups: vLLM's attention layers that are compressed, by name, for the index of each KV cache
            group. Their queries are recorded from now on.
        recorder: records the queries that vote.
        device: the device of the worker.
        heads: gets the number of tokens of each head; needed if heads may keep different numbers.
    """

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
        """Look up the memory layout of every layer. vLLM must have allocated the caches before, and
        this must be called again if it allocates others.

        Args:
            block_tokens: the size of the scheduler's blocks, by KV cache group.

        Raises:
            UnsupportedModelError: the block size of a KV cache group is not a multiple of the block
                size of an attention backend.
        """
        self._block_tokens = dict(block_tokens)
        for group, layers in self._groups.items():
            for name, layer in layers.items():
                found, expected = layer.cache.shape[2], block_tokens[group]
                if expected % found:
                    problem = f"the block size {expected} is not a multiple of {found} in {name}"
                    remedy = f"Start the server with --block-size {found}"
                    raise wrong("snapkv", problem, remedy, UnsupportedModelError)
        self._runs = list(layer_runs(self._groups))

    def forget(self, request: str) -> None:
        self._recorder.forget(request)

    def compress(self, orders: Mapping[str, Order]) -> None:
        """Compress each request whose order is due after the step that has just run, and forget its
        recorded queries. Other orders are ignored.

        Args:
            orders: the orders of the scheduler, by request id.

        Raises:
            RuntimeError: another number of queries was recorded, or another number of tokens is
                kept, than the scheduler has counted.
            UnsupportedModelError: vLLM's kernel for CPUs does not store numbers unchanged.
        """
        for request, order in orders.items():
            if order.is_due:
                for move in order.moves:
                    runs = self._split_runs(move, order.held_tokens, order.kept_tokens)
                    share = find_across_layers(order.selector.policy)
                    for some in [list(runs)] if share else ([run] for run in runs):
                        self._move(some, request, order, move)
                self.forget(request)

    def _split_runs(self, move: Move, prompt_tokens: int, kept_tokens: int) -> Iterator[LayerRun]:
        """Yield the layers of one KV cache group in runs that are small enough to be copied at
        once.

        Args:
            move: the move of the group.
            prompt_tokens: how many tokens are stored before the compression.
            kept_tokens: how many tokens are kept.
        """
        for run in self._runs:
            if run.group == move.group:
                yield from run.split_by_memory(prompt_tokens, kept_tokens)

    def _move(self, runs: Sequence[LayerRun], request: str, order: Order, move: Move) -> None:
        """Read the tokens that some layers keep of a request, and then write them into the target
        blocks.

        No other request of the step reads the target blocks. All runs are read before one is
        written, because layers that share pages may write to a page that another layer still has to
        read.

        Args:
            runs: consecutive layers of one KV cache group; all of its layers if they share one
                budget.
            request: the id of the request.
            order: the order of the scheduler.
            move: the blocks of the group.

        Raises:
            RuntimeError: another number of queries was recorded, or another number of tokens is
                kept, than the scheduler has counted.
        """
        block_tokens, first = self._block_tokens[move.group], runs[0]
        sources = first.to_cache_blocks(move.sources, block_tokens)
        targets = torch.tensor(move.targets, device=self._device)
        capacity, (_, heads, page_tokens, _) = len(targets) * block_tokens, first.first.cache.shape
        target_slots = slot_numbers(targets, capacity, block_tokens)
        masks, places, moved = list[Tensor](), None, list[Tensor]()
        if find_across_layers(order.selector.policy):
            masks = self._select_across(runs, request, order, sources)
            kept = torch.cat([mask.sum(dim=-1) for mask in masks])
            places = HeadPlaces(kept.flatten(), page_tokens)
        for number, run in enumerate(runs):
            keys = run.layout.read_keys(sources, order.held_tokens)
            if masks:
                keep = ops.kept_indices(masks[number])
            else:
                keep = self._select_tokens(run, request, order, run.decode_keys(keys))
            if order.per_head_budget:
                kept = self._record_counts(run, request, order, (keep >= 0).sum(dim=-1))
                places, keep = places or HeadPlaces(kept, page_tokens), keep.clamp(min=0)
            states = run.layout.select_keys(keys, keep), run.layout.read_values(sources, keep)
            if places is None:
                moved = [pad_tokens(one, capacity) for one in states]
            else:
                moved = moved or [places.make_output(one, capacity) for one in states]
                for one, found in zip(states, moved, strict=True):
                    places.scatter(one, found, capacity, (run.depth - first.depth) * heads)
        if places is not None:
            moved = [one[..., :-1, :].reshape(-1, heads, capacity, one.shape[-1]) for one in moved]
        for run in runs:
            rows = slice(run.depth - first.depth, run.depth - first.depth + len(run.layers))
            run.layout.write(target_slots, *(one[rows] for one in moved))

    def _select_across(
        self, runs: Sequence[LayerRun], request: str, order: Order, sources: Tensor
    ) -> list[Tensor]:
        """Select the tokens of all layers together, because the layers share one budget.

        Args:
            runs: all layers.
            request: the id of the request.
            order: the order of the scheduler.
            sources: the numbers of the request's blocks in the caches.

        Returns:
            (layers, H, T) bool for each run, True for each token that is kept.

        Raises:
            RuntimeError: another number of queries was recorded, or another number of tokens is
                kept, than the scheduler has counted.
        """
        voters = min(order.selector.query_tokens, order.seen_tokens)

        def seen(run: LayerRun) -> PromptLayer:
            keys = run.layout.read_keys(sources, order.held_tokens)
            layer = self._prompt_layer(run, request, voters, run.decode_keys(keys))
            return replace(layer, protected=order.selector.protected_mask(layer))

        masks = select_across(order.selector.policy, map(seen, runs), order.kept_tokens)
        counts = torch.cat([mask.sum(dim=-1) for mask in masks])
        if int(counts.sum()) != order.kept_tokens * counts.numel():
            raise RuntimeError(
                f"{request}: expected {order.kept_tokens} kept tokens, but got {counts}"
            )
        return masks

    def _record_counts(self, run: LayerRun, request: str, order: Order, kept: Tensor) -> Tensor:
        """Record in `HeadsAttention` how many tokens each head keeps, and return these numbers
        unchanged.

        Args:
            run: the layers.
            request: the id of the request.
            order: the order of the scheduler.
            kept: (layers, H) int64, the number of tokens of each head.
        """
        assert self._heads is not None  # set wherever heads keep different numbers
        for name, of_layer in zip(run.layers, kept, strict=True):
            self._heads.record_kept(request, name, of_layer, order.seen_tokens)
        return kept

    def _select_tokens(self, run: LayerRun, request: str, order: Order, keys: Tensor) -> Tensor:
        """Select the tokens that a request keeps in a run of layers. For a request of a session the
        positions of these tokens are recorded as well.

        Args:
            run: the layers.
            request: the id of the request.
            order: the order of the scheduler.
            keys: (layers, Hkv, T, D) stored keys, decoded.

        Returns:
            (layers, H or 1, K) int64 slots; shorter rows begin with -1.

        Raises:
            RuntimeError: another number of queries was recorded, or another number of tokens is
                kept, than the scheduler has counted.
        """
        voters = min(order.selector.query_tokens, order.seen_tokens)  # a short prompt has fewer
        layer = self._prompt_layer(run, request, voters, keys)
        if isinstance(order.selector, TurnSelector):
            keep = self.positions.select(run, order, order.selector, layer)
        else:
            keep = order.selector.select(layer)
        if keep is None or not _matches_order(keep, order):
            kept = None if keep is None else (keep >= 0).sum(dim=-1)
            raise RuntimeError(
                f"{request}: expected {order.kept_tokens} kept tokens, but got {kept}"
            )
        return keep

    def _prompt_layer(self, run: LayerRun, request: str, tokens: int, keys: Tensor) -> PromptLayer:
        """Build the input of a policy from the stored keys and the recorded queries. Values are
        left out, because no served method reads them.

        Args:
            run: the layers, which become rows of a batch.
            request: the id of the request.
            tokens: how many queries must have been recorded in each layer; with 0 the input has
                none.
            keys: (layers, Hkv, T, D) stored keys, decoded.

        Raises:
            RuntimeError: another number of queries was recorded.
        """
        queries = keys.new_empty(len(run.layers), run.first.heads, 0, keys.shape[-1])
        if tokens:
            queries_of_layers = [
                layer.prepare_queries(self._recorder.take_queries(request, name, tokens))
                for name, layer in run.layers.items()
            ]
            queries = torch.cat(queries_of_layers)
        return PromptLayer(
            queries=queries,
            keys=keys,
            values=torch.empty_like(keys, device="meta"),  # no served method reads values
            score_options=run.first.score_options,
            layer_idx=run.depth,
            depth=run.depth,
            num_layers=len(self._layers),
            votes_impl=run.votes_impl,
        )


def _matches_order(keep: Tensor, order: Order) -> bool:
    """Whether the number of kept tokens is the number that the scheduler has counted with. If heads
    may differ, the number is that of all heads of each layer together.
    """
    if not order.per_head_budget:
        return keep.shape[-1] == order.kept_tokens
    return bool(((keep >= 0).sum(dim=(1, 2)) == order.kept_tokens * keep.shape[1]).all())


class HeldPositions:
    """The positions of the tokens that the requests of sessions keep. They are stored by the number
    of the first block that the request has after its compression, and by layer.
    """

    def __init__(self) -> None:
        self._positions: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)

    def select(
        self, run: LayerRun, order: Order, selector: TurnSelector, layer: PromptLayer
    ) -> Tensor | None:
        """Select the tokens of a session's request, and record their positions under the first
        block to which they move.

        Args:
            run: the layers, all of one KV cache group.
            order: the order of the scheduler, with one move for each group.
            selector: the selector of the order.
            layer: the stored keys and the recorded queries of the layers, as rows of a batch.

        Returns:
            (layers, H or 1, K) int64 slots, not positions; None if all tokens are kept, and then
            nothing is recorded.
        """
        positions = self._stored_positions(run, order, layer.keys.device)
        keep = selector.select_with_positions(layer, positions)
        if keep is None:
            return None
        stays = keep
        if positions is not None:
            stays = positions.expand(-1, keep.shape[1], -1).gather(2, keep)
        (move,) = (one for one in order.moves if one.group == run.group)
        for name, of_layer in zip(run.layers, stays, strict=True):
            self._positions[move.targets[0]][name] = of_layer.to(torch.int32)
        return keep

    def _stored_positions(self, run: LayerRun, order: Order, device: torch.device) -> Tensor | None:
        """Return the position in the conversation of each token that is still stored. Tokens after
        the last compression are all stored.

        Args:
            run: the layers, all of one KV cache group.
            order: the order of the scheduler. Its first source block must have recorded positions
                if tokens were dropped.
            device: where the result is needed.

        Returns:
            (layers, H or 1, held) int64, for the tokens that are stored before the compression;
            None if nothing was dropped, because slots are then positions.
        """
        if order.seen_tokens == order.held_tokens:
            return None
        (move,) = (one for one in order.moves if one.group == run.group)
        positions_of_layers = self._positions[move.sources[0]]
        kept = torch.stack([positions_of_layers[name] for name in run.layers]).long()
        later = order.held_tokens - kept.shape[2]
        tail = torch.arange(order.seen_tokens - later, order.seen_tokens, device=device)
        return torch.cat([kept, tail.expand(*kept.shape[:2], -1)], dim=2)

    def forget(self, first_blocks: Iterable[int]) -> None:
        """Forget the positions that are stored under these first blocks. Blocks without positions
        are ignored.
        """
        for block in first_blocks:
            self._positions.pop(block, None)
