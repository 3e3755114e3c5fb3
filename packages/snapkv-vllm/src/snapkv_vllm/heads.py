"""Requests whose KV heads hold different numbers of tokens, on vLLM's own kernels.

vLLM has one table of blocks for all heads of a layer. A block is as many pages as the layer has KV
heads, and nothing but that table says which head a page belongs to. So the pages of a request's
blocks are handed out again, every head of every request is shown to kernels as a sequence of its
own with one KV head, and the scheduler counts blocks as ever. The heads among which pages are
handed out are those of a layer; or those of all layers, whose pages then lie in one allocation.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from snapkv_vllm.kept_lengths import replace_lengths
from snapkv_vllm.refusals import require_shared_pages


@dataclass(frozen=True)
class HeadPlaces:
    """The places of heads that kept different numbers of tokens, and share a request's pages."""

    kept: Tensor  # (..., H) int64, tokens that every head kept at the prompt's end
    page_tokens: int

    def page_places(self, pages: Tensor) -> Tensor:
        """The places of some pages of every head.

        Args:
            pages: (..., H or 1, N) int64, which pages of a head, counted from its first token.

        Returns:
            (..., H, N) int64.
        """
        heads = self.kept.shape[-1]
        first, before, turn = (one.unsqueeze(-1) for one in self._prompt_pages)
        grown = first.sum(dim=-2, keepdim=True) + (pages - first) * heads + turn
        return torch.where(pages < first, before + pages, grown)

    def make_output(self, states: Tensor, slots: int) -> Tensor:
        """What `put` fills: (..., H * slots + 1, D) zeros, and in the last row then anything."""
        *others, heads = self.kept.shape
        return states.new_zeros(*others, heads * slots + 1, states.shape[-1])

    def scatter(self, states: Tensor, found: Tensor, slots: int, first_head: int = 0) -> None:
        """Put into `found` what some of the heads kept, (..., h, K, D), from the first of them on.

        Heads of several layers may share pages: `states` are reshaped.
        """
        states = states.reshape(*self.kept.shape[:-1], -1, *states.shape[-2:])
        heads, longest, size = states.shape[-3:]
        target = self._targets(longest, slots, slice(first_head, first_head + heads))
        index = target.flatten(-2).unsqueeze(-1).expand(*target.shape[:-2], -1, size)
        found.scatter_(-2, index, states.flatten(-3, -2))

    def _targets(self, longest: int, slots: int, some: slice) -> Tensor:
        """Where some heads' (..., h, K) tokens lie among (H * slots); H * slots: nowhere."""
        heads, device = self.kept.shape[-1], self.kept.device
        position = torch.arange(longest, device=device)
        position = position - (longest - self.kept[..., some].unsqueeze(-1))  # below 0 is none
        pages = torch.arange(-(-longest // self.page_tokens), device=device)[None]
        of_page = self.page_places(pages)[..., some, :]
        place = of_page.gather(-1, position.clamp(min=0) // self.page_tokens)
        slot = place // heads * self.page_tokens + position % self.page_tokens
        return (place % heads * slots + slot).where(position >= 0, heads * slots)

    @functools.cached_property
    def _prompt_pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """(..., H) pages at the prompt's end, pages of the heads before, and each head's turn.

        Heads with the least room take a place first.
        """
        pages = -(-self.kept // self.page_tokens)
        turn = (pages * self.page_tokens - self.kept).argsort(dim=-1, stable=True).argsort(dim=-1)
        return pages, pages.cumsum(dim=-1) - pages, turn


@dataclass(frozen=True)
class HeadPages:
    """Caches of layers that share pages: each block is as many pages as these have KV heads."""

    # (pages, 1, block_tokens, 2 * D), a view; where the tokens of a block lie before its heads in
    # memory, pages overlap, and most numbers belong to no head of a block
    cache: Tensor
    of_block: int  # how far the number of a page moves from block to block
    of_head: int  # the same from head to head
    of_layer: int  # the same from layer to layer
    heads: int  # KV heads of a layer
    layers: int

    @classmethod
    def from_caches(cls, *caches: Tensor) -> Self:
        """Of layers' (blocks, Hkv, block_tokens, 2 * D), in whatever order they lie in memory.

        Several must be alike and lie in one allocation, see `require_shared_pages`.
        """
        first, layers = caches[0], len(caches)
        blocks, heads, tokens, size = first.shape
        block, head, token, number = first.stride()
        layer = caches[1].storage_offset() - first.storage_offset() if layers > 1 else 0
        step = math.gcd(block, head if heads > 1 else 0, layer)
        of_block, of_layer = block // step, layer // step
        of_head = head // step if heads > 1 else 0
        pages = (blocks - 1) * of_block + (heads - 1) * of_head + (layers - 1) * of_layer + 1
        view = first.as_strided((pages, 1, tokens, size), (step, step, token, number))
        return cls(view, of_block, of_head, of_layer, heads, layers)

    def page_numbers(self, blocks: Tensor, places: Tensor) -> Tensor:
        head, layer = places % self.heads, places // self.heads % self.layers
        return blocks * self.of_block + head * self.of_head + layer * self.of_layer


@dataclass(frozen=True, kw_only=True)
class CompressedRows:
    """The requests of a batch whose heads hold their own numbers of tokens."""

    starts: Sequence[int] = ()  # where each one's tokens begin in the batch
    counts: Sequence[int] = ()  # how many tokens each has in this step
    rows: Sequence[int] = ()  # their numbers in the batch
    requests: tuple[str, ...] = ()  # their names
    is_entire_batch: bool = False  # whether there are no others


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Every head of some requests as a sequence with one KV head, in some layers that are alike.

    Sequences are ordered by request, then by head; their tokens lie one after the other.
    """

    # (N * Hkv,) int64, for every token of a sequence its place among a batch's tokens and their
    # heads, (tokens * Hkv)
    states: Tensor
    in_order: bool  # whether those are the first of them, one after the other
    starts: Tensor  # (sequences + 1,) int32, where the tokens of each sequence begin
    max_new_tokens: int  # tokens of the sequence that has the most of this step
    max_tokens: int  # a number that no sequence is longer than
    lengths: Tensor  # (layers, sequences) int32, tokens held, with those of this step
    tables: Tensor  # (layers, sequences, pages) int32
    slots: Tensor  # (layers, N * Hkv) int64, where the keys and values of this step go


def make_sequences(
    batch: CompressedRows,
    places: HeadPlaces,
    generated: Tensor,
    blocks: Tensor,
    pages: HeadPages,
    max_tokens: int,
) -> Sequences:
    """Lay out the heads of some requests as sequences.

    By the (N, requests, H) places of heads that share pages: of each layer's, or those of all.

    `generated` are (requests,) tokens after the prompt, with those of this step; `blocks` are
    (requests, most blocks), of which those after a request's own are not used.
    """
    device, heads, page_tokens = blocks.device, pages.heads, places.page_tokens
    counts = torch.tensor(batch.counts).repeat_interleave(heads)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    of_sequence = torch.arange(len(counts)).repeat_interleave(counts)
    within = torch.arange(len(of_sequence)) - starts[of_sequence]
    token = torch.tensor(batch.starts)[of_sequence // heads] + within
    states = (token * heads + of_sequence % heads).to(device)

    width = -(-max_tokens // page_tokens)
    place = places.page_places(torch.arange(width, device=device)[None])  # (N, requests, H, W)
    block = place // places.kept.shape[-1]
    block = block.clamp(max=blocks.shape[1] - 1)  # of pages that no head has yet
    requests = torch.arange(blocks.shape[0], device=device)[:, None, None]
    numbers = pages.page_numbers(blocks[requests, block].long(), place)
    tables = _split_layers(numbers, heads).flatten(1, 2)

    lengths = _split_layers(places.kept + generated[:, None], heads).flatten(1)
    of_sequence, within = of_sequence.to(device), within.to(device)
    behind = counts.to(device)[of_sequence] - within
    position = lengths[:, of_sequence] - behind  # (layers, N * H)
    page = tables[:, of_sequence].gather(2, (position // page_tokens).unsqueeze(2)).squeeze(2)
    return Sequences(
        states=states,
        in_order=max(batch.counts) == 1 and tuple(batch.starts) == tuple(range(len(batch.starts))),
        starts=starts.to(device, torch.int32),
        max_new_tokens=max(batch.counts),
        max_tokens=max_tokens,
        lengths=lengths.int(),
        tables=tables.int(),
        slots=page * page_tokens + position % page_tokens,
    )


def _split_layers(of_heads: Tensor, heads: int) -> Tensor:
    """Of (N, requests, H, ...), the heads of N times so many layers: (layers, requests, Hkv, ...).

    `_together` is the way back.
    """
    layers, rows, _, *more = of_heads.shape
    by_layer = of_heads.reshape(layers, rows, -1, heads, *more)
    return by_layer.transpose(1, 2).flatten(0, 1)


def _join_layers(of_layers: Tensor, layers: int) -> Tensor:
    """Of (layers, requests, Hkv) so many layers at a time, side by side: (N, requests, H)."""
    by_pool = of_layers.reshape(-1, layers, *of_layers.shape[1:])
    return by_pool.transpose(1, 2).flatten(2)


def sequence_metadata(
    plain: Any, found: Sequences, layer: int, *, builder: Any, group_size: int
) -> Any:
    """What a builder has made of a batch, for the sequences of one layer in its place."""
    own = _PLANS[type(plain).__name__](plain, found, layer, builder, group_size)
    return replace(
        plain,
        num_actual_tokens=len(found.states),
        max_query_len=found.max_new_tokens,
        query_start_loc=found.starts,
        max_seq_len=found.max_tokens,
        seq_lens=found.lengths[layer],
        block_table=found.tables[layer],
        slot_mapping=found.slots[layer],
        **own,
    )


def _cpu_plan(
    plain: Any, found: Sequences, layer: int, builder: Any, group_size: int
) -> dict[str, Any]:
    """How the kernel shares out the work among threads, which its builder asks for too."""
    from vllm import _custom_ops as ops
    from vllm import envs

    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=found.lengths.shape[1],
        num_heads=group_size,
        num_kv_heads=1,
        head_dim=builder.head_dim,
        seq_lens=found.lengths[layer],
        dtype=builder.dtype,
        query_start_loc=found.starts,
        causal=plain.causal,
        sliding_window_size=builder.window_size,
        isa=builder.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        kv_cache_dtype=builder.kv_cache_dtype,
    )
    return {"scheduler_metadata": plan}


_PLANS: dict[str, Callable[..., dict[str, Any]]] = {
    "CPUAttentionMetadata": _cpu_plan,
    # Buffers for splitting long sequences have the batch's size, so they are not split.
    "TritonAttentionMetadata": lambda *_: {"seq_threshold_3D": 0},
    # Made ahead for the batch; without it the kernel plans for itself.
    "FlashAttentionMetadata": lambda *_: {"scheduler_metadata": None},
}


@dataclass
class _KeptHeads:
    """What the heads of a request kept of its prompt, layer by layer."""

    prompt_tokens: int
    max_tokens: int = 0
    of_layers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _LayerStep:
    """What a layer does in a step for our rows, and whether there are no others."""

    found: Sequences
    pages: HeadPages
    metadata: Any
    covers_batch: bool

    def select_states(self, states: Tensor) -> Tensor:
        """Of a batch's (tokens, Hkv * G, D) states those of the sequences: (N, G, D)."""
        by_head = states.reshape(len(states) * self.pages.heads, -1, states.shape[-1])
        if self.found.in_order:
            return by_head[: len(self.found.states)]
        return by_head[self.found.states]


class HeadsAttention:
    """Shows the heads of some requests to vLLM's kernels as sequences with one KV head each.

    To the rest of the batch nothing changes: the kernels run over it as ever, see no more of our
    requests than the tokens of the step, and store none of these. What they answer for ours is
    then overwritten. Where all rows are ours they do not run.

    Args:
        across_layers: whether the heads of all layers share the pages of a request, in the order
            in which the layers are attached; else those of a layer do.
    """

    def __init__(self, *, across_layers: bool = False) -> None:
        self._across_layers = across_layers
        self._kept: dict[str, _KeptHeads] = {}
        self._batch = CompressedRows()
        self._layers: dict[str, Any] = {}
        self._steps: dict[str, _LayerStep] = {}
        self._places: dict[str, tuple[tuple[str, ...], HeadPlaces]] = {}

    def holds_any(self, requests: Iterable[str]) -> bool:
        return any(request in self._kept for request in requests)

    def record_kept(self, request: str, layer: str, kept: Tensor, prompt_tokens: int) -> None:
        """A request's prompt has ended; the heads of a layer hold (Hkv,) `kept` tokens of it."""
        mine = self._kept.setdefault(request, _KeptHeads(prompt_tokens))
        mine.of_layers[layer] = kept
        mine.max_tokens = max(mine.max_tokens, int(kept.max()))

    def forget(self, request: str) -> None:
        if self._kept.pop(request, None) is not None:
            self._places.clear()  # another one may come under its name

    def begin_step(self, requests: Sequence[str], query_ends: Sequence[int]) -> None:
        """A step begins with these rows, whose tokens end in the batch where it is said."""
        starts = (0, *query_ends[:-1])
        rows = tuple(row for row, request in enumerate(requests) if request in self._kept)
        self._batch = CompressedRows(
            requests=tuple(requests[row] for row in rows),
            rows=rows,
            starts=tuple(starts[row] for row in rows),
            counts=tuple(query_ends[row] - starts[row] for row in rows),
            is_entire_batch=len(rows) == len(requests),
        )

    def end_step(self) -> None:
        """The step is over; what follows may be a dummy batch."""
        self._batch = CompressedRows()
        self._steps.clear()

    def patch_layer(self, name: str, layer: Any) -> None:
        """Have one of vLLM's attention layers attend and store as said here from now on."""
        impl = layer.impl
        single = _single_head_impl(impl)
        forward, update = impl.forward, impl.do_kv_cache_update

        def forward_beside(
            layer: Any, query: Tensor, key: Any, value: Any, cache: Any, metadata: Any, **more: Any
        ) -> Any:
            step = self._steps.get(name)
            if step is None or not step.covers_batch:
                forward(layer, query, key, value, cache, metadata, **more)
            if step is not None:
                _attend(single, step, layer, query, more["output"])
            return more["output"]

        def update_beside(layer: Any, key: Tensor, value: Tensor, cache: Any, slots: Any) -> None:
            step = self._steps.get(name)
            if step is None or not step.covers_batch:
                update(layer, key, value, cache, slots)
            if step is not None:
                new = step.select_states(key), step.select_states(value)
                single.do_kv_cache_update(layer, *new, step.pages.cache, step.metadata.slot_mapping)

        impl.forward, impl.do_kv_cache_update = forward_beside, update_beside
        self._layers[name] = layer

    def patch_builder(self, builder: Any) -> None:
        """Have one of vLLM's attention metadata builders prepare our rows too from now on.

        Its layers are attached, and have their caches.
        """
        build: Callable[..., Any] = builder.build
        names = [name for name in self._layers if name in builder.layer_names]
        layers = [self._layers[name] for name in names]
        caches = [layer.kv_cache for layer in layers]
        if self._across_layers:
            require_shared_pages(caches, len(self._layers))
            pages = [HeadPages.from_caches(*caches)] * len(caches)
        else:
            pages = list(map(HeadPages.from_caches, caches))
        group_size = layers[0].impl.num_heads // pages[0].heads

        # vLLM's names: 0.31 passes these by keyword, later releases by position.
        def build_beside(
            common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if not self._batch.rows:
                return build(common_prefix_len, common_attn_metadata, *args, **kwargs)
            found = self._sequences(names, common_attn_metadata, pages[0])
            ours_left_out = self._hide_compressed_rows(common_attn_metadata)
            plain = build(common_prefix_len, ours_left_out, *args, **kwargs)
            for layer, name in enumerate(names):
                told = sequence_metadata(
                    plain, found, layer, builder=builder, group_size=group_size
                )
                self._steps[name] = _LayerStep(
                    found, pages[layer], told, self._batch.is_entire_batch
                )
            return plain

        builder.build = build_beside

    def _sequences(self, names: Sequence[str], common: Any, pages: HeadPages) -> Sequences:
        """The heads of our rows in some layers that are alike."""
        batch = self._batch
        rows = torch.tensor(batch.rows, device=common.seq_lens.device)
        kept = [self._kept[request] for request in batch.requests]
        prompts = torch.tensor([one.prompt_tokens for one in kept], device=rows.device)
        seen = common.seq_lens_cpu_upper_bound
        seen = common.seq_lens if seen is None else seen
        most = max(
            one.max_tokens - one.prompt_tokens + int(seen[row])
            for one, row in zip(kept, batch.rows, strict=True)
        )
        return make_sequences(
            batch,
            self._places_of(names, kept, pages),
            common.seq_lens[rows] - prompts,
            common.block_table_tensor[rows],
            pages,
            most,
        )

    def _places_of(
        self, names: Sequence[str], kept: Sequence[_KeptHeads], pages: HeadPages
    ) -> HeadPlaces:
        """Those of the batch's heads, which stay the same from step to step."""
        requests, places = self._places.get(names[0], ((), None))
        if places is None or requests != self._batch.requests:
            layers = [torch.stack([one.of_layers[name] for one in kept]) for name in names]
            together = _join_layers(torch.stack(layers), pages.layers)
            places = HeadPlaces(together, pages.cache.shape[2])
            self._places[names[0]] = self._batch.requests, places
        return places

    def _hide_compressed_rows(self, common: Any) -> Any:
        """vLLM's `CommonAttentionMetadata`, in which our rows hold this step's tokens single."""
        batch, device = self._batch, common.seq_lens.device
        lengths, counts = common.seq_lens.clone(), torch.tensor(batch.counts, dtype=torch.int32)
        lengths[torch.tensor(batch.rows, device=device)] = counts.to(device)
        spans = zip(batch.starts, batch.counts, strict=True)
        tokens = torch.cat([torch.arange(start, start + count) for start, count in spans])
        common.slot_mapping[tokens.to(device)] = -1  # in place: what layers store goes by it too
        bound = common.seq_lens_cpu_upper_bound
        if bound is not None:
            bound = bound.clone()
            bound[list(batch.rows)] = counts.to(bound.dtype)
        return replace_lengths(common, lengths, bound)


def _single_head_impl(impl: Any) -> Any:
    single = copy.copy(impl)
    single.num_kv_heads, single.num_heads = 1, impl.num_heads // impl.num_kv_heads
    return single


def _attend(single: Any, step: _LayerStep, layer: Any, query: Tensor, output: Tensor) -> None:
    """Write what the sequences answer into the batch's (tokens, Hq, D) output."""
    queries = step.select_states(query)
    answers = output.view(-1, *queries.shape[1:])
    found, cache = step.found, step.pages.cache
    if found.in_order:
        out = answers[: len(queries)]
        single.forward(layer, queries, None, None, cache, step.metadata, output=out)
        return
    out = torch.empty_like(queries, dtype=output.dtype)
    single.forward(layer, queries, None, None, cache, step.metadata, output=out)
    answers[found.states] = out
