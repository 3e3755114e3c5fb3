"""Serves requests whose KV heads store different numbers of tokens, with vLLM's own kernels.

vLLM has one block table for all heads of a layer. A block consists of one page for each KV head of
the layer, and only the block table says which head a page belongs to. So the pages of a request's
blocks are distributed anew among its heads. Kernels see every head of such a request as a sequence
with one KV head, and the scheduler still counts blocks. Pages are distributed among the heads of
one layer, or among those of all layers if their caches lie in one allocation.
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
    """Computes where the pages of each head lie among all pages of a request, if the heads keep
    different numbers of tokens. The pages of the prompt come first, head by head; later pages are
    given to the heads in turn.
    """

    # (..., H) int64, the tokens that each of the H heads which share pages keeps at the end of the
    # prompt
    kept: Tensor
    page_tokens: int  # the size of a page

    def page_places(self, pages: Tensor) -> Tensor:
        """Return where some pages of every head lie among all pages of the request. The pages need
        not be allocated yet.

        Args:
            pages: (..., H or 1, N) int64, the numbers of N pages of each head, counted from its
                first token. With a second to last size of 1, all heads have the same numbers.

        Returns:
            (..., H, N) int64, their places among all pages of the request, counted block by block.
        """
        heads = self.kept.shape[-1]
        first, before, turn = (one.unsqueeze(-1) for one in self._prompt_pages)
        grown = first.sum(dim=-2, keepdim=True) + (pages - first) * heads + turn
        return torch.where(pages < first, before + pages, grown)

    def make_output(self, states: Tensor, slots: int) -> Tensor:
        """Create the tensor of zeros into which `scatter` writes the kept states.

        Args:
            states: (..., K, D) keys or values, from which only D, the dtype and the device are
                taken.
            slots: how many slots the request has per head.

        Returns:
            A new tensor of shape (..., H * slots + 1, D). Its last row receives the padding of
            `scatter`, and the caller must cut it off.
        """
        *others, heads = self.kept.shape
        return states.new_zeros(*others, heads * slots + 1, states.shape[-1])

    def scatter(self, states: Tensor, found: Tensor, slots: int, first_head: int = 0) -> None:
        """Write the kept states of some heads to their places. Slots of the output without a token
        stay as they are.

        Args:
            states: (..., h, K, D) keys or values of h successive heads, where K is the largest
                number of tokens of one of them. Heads with fewer tokens are padded on the left.
                Heads of several layers that share pages are joined.
            found: the output of `make_output`, changed in place.
            slots: how many slots the request has per head.
            first_head: the number of the first of these heads.
        """
        states = states.reshape(*self.kept.shape[:-1], -1, *states.shape[-2:])
        heads, longest, size = states.shape[-3:]
        target = self._targets(longest, slots, slice(first_head, first_head + heads))
        index = target.flatten(-2).unsqueeze(-1).expand(*target.shape[:-2], -1, size)
        found.scatter_(-2, index, states.flatten(-3, -2))

    def _targets(self, longest: int, slots: int, some: slice) -> Tensor:
        """Return the row of the output tensor into which each token of some heads is written.

        Args:
            longest: the largest number of tokens of one head, to which all heads are padded on the
                left.
            slots: how many slots the request has per head.
            some: the range of the heads.

        Returns:
            (..., h, K) int64, for the h heads of the range and K right-aligned tokens, where K is
            `longest`. The target of padding is the row after those of all heads, which is thrown
            away.
        """
        heads, device = self.kept.shape[-1], self.kept.device
        position = torch.arange(longest, device=device)
        position = position - (longest - self.kept[..., some].unsqueeze(-1))  # below 0 for padding
        pages = torch.arange(-(-longest // self.page_tokens), device=device)[None]
        of_page = self.page_places(pages)[..., some, :]
        place = of_page.gather(-1, position.clamp(min=0) // self.page_tokens)
        slot = place // heads * self.page_tokens + position % self.page_tokens
        return (place % heads * slots + slot).where(position >= 0, heads * slots)

    @functools.cached_property
    def _prompt_pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """The number of pages of each head at the end of the prompt, and where they begin.

        Returns:
            Three (..., H) tensors: the pages of each head, the pages of all heads before it, and
            its turn. The turn is the order in which heads get new pages; the head with the fewest
            free slots is first.
        """
        pages = -(-self.kept // self.page_tokens)
        turn = (pages * self.page_tokens - self.kept).argsort(dim=-1, stable=True).argsort(dim=-1)
        return pages, pages.cumsum(dim=-1) - pages, turn


@dataclass(frozen=True)
class HeadPages:
    """The caches of one or several layers, seen as pages. Each block of vLLM consists of one page
    for each KV head of these layers.
    """

    # A view of (pages, 1, block_tokens, 2 * D). If the strides of tokens are larger than those of
    # heads, pages overlap, and most page numbers belong to no head of a block.
    cache: Tensor
    block_step: int  # the difference between page numbers of successive blocks
    head_step: int  # the same for heads
    layer_step: int  # the same for layers
    heads: int  # KV heads of a layer
    layers: int

    @classmethod
    def from_caches(cls, *caches: Tensor) -> Self:
        """Build the pages of one or several layers, as views of their caches.

        Args:
            caches: (blocks, Hkv, block_tokens, 2 * D) of each layer, with any strides. Several
                caches must be alike and lie in one allocation; see `require_shared_pages`.
        """
        first, layers = caches[0], len(caches)
        blocks, heads, tokens, size = first.shape
        block, head, token, number = first.stride()
        layer = caches[1].storage_offset() - first.storage_offset() if layers > 1 else 0
        step = math.gcd(block, head if heads > 1 else 0, layer)
        block_step, layer_step = block // step, layer // step
        head_step = head // step if heads > 1 else 0
        pages = (blocks - 1) * block_step + (heads - 1) * head_step + (layers - 1) * layer_step + 1
        view = first.as_strided((pages, 1, tokens, size), (step, step, token, number))
        return cls(view, block_step, head_step, layer_step, heads, layers)

    def page_numbers(self, blocks: Tensor, places: Tensor) -> Tensor:
        """Return the numbers of the pages at `places` in `blocks`, which are tensors of the same
        shape.

        Args:
            blocks: the numbers of blocks in the caches.
            places: the places of pages among all pages of a request. Their remainder by the heads
                of all layers is the place in the block, where the heads of the first layer come
                first.
        """
        head, layer = places % self.heads, places // self.heads % self.layers
        return blocks * self.block_step + head * self.head_step + layer * self.layer_step


@dataclass(frozen=True, kw_only=True)
class CompressedRows:
    """The requests of a batch whose KV heads store different numbers of tokens, all in the order of
    the batch.
    """

    starts: Sequence[int] = ()  # where the tokens of each request begin in the batch
    counts: Sequence[int] = ()  # how many tokens each request has in this step
    rows: Sequence[int] = ()  # the rows of the requests in the batch
    requests: tuple[str, ...] = ()  # their ids
    is_complete: bool = False  # whether the batch has no other requests


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The heads of some requests in layers that are alike, where each head is a sequence with one
    KV head.

    Sequences are ordered by request, then by head. Their tokens follow each other. N is the number
    of tokens of these requests in the step.
    """

    # (N * Hkv,) int64, for each token of a sequence its index among the (tokens * Hkv) states of
    # the batch
    states: Tensor
    in_order: bool  # whether `states` are 0, 1, 2 and so on
    starts: Tensor  # (sequences + 1,) int32, where the tokens of each sequence begin
    max_new_tokens: int  # the most tokens of one sequence in this step
    max_tokens: int  # a number of tokens that no sequence exceeds
    lengths: Tensor  # (layers, sequences) int32, stored tokens, including this step
    tables: Tensor  # (layers, sequences, pages) int32
    slots: Tensor  # (layers, N * Hkv) int64, where new keys and values are stored


def make_sequences(
    batch: CompressedRows,
    places: HeadPlaces,
    generated: Tensor,
    blocks: Tensor,
    pages: HeadPages,
    max_tokens: int,
) -> Sequences:
    """Build a sequence for each head of some requests, in the form that vLLM's attention kernels
    read.

    Args:
        batch: the requests, at least one.
        places: the places of (N, requests, H) heads, where H are the heads that share pages: those
            of one layer, or of all layers. N is 1 if they are those of all layers, otherwise the
            number of layers.
        generated: (requests,) how many tokens each request has after its prompt, including this
            step.
        blocks: (requests, most blocks) the block table; blocks after those of a request are not
            used.
        pages: the caches of the layers.
        max_tokens: a number of tokens that no sequence exceeds.
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
    block = block.clamp(max=blocks.shape[1] - 1)  # no head has the pages after the last block yet
    requests = torch.arange(blocks.shape[0], device=device)[:, None, None]
    numbers = pages.page_numbers(blocks[requests, block].long(), place)
    tables = _split_layers(numbers, heads).flatten(1, 2)

    lengths = _split_layers(places.kept + generated[:, None], heads).flatten(1)
    of_sequence, within = of_sequence.to(device), within.to(device)
    remaining = counts.to(device)[of_sequence] - within
    position = lengths[:, of_sequence] - remaining  # (layers, N * H)
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
    """Split the heads that share pages into the layers to which they belong. `_join_layers` is the
    inverse.

    Args:
        of_heads: (N, requests, H, ...), for N groups of layers. H is the number of heads that share
            pages: those of all layers of a group, one layer after the other.
        heads: the number Hkv of KV heads of one layer; H must be a multiple of it.

    Returns:
        A tensor of shape (layers, requests, Hkv, ...), where layers is N * H / Hkv; the layers of
        the first group come first. It may share memory with `of_heads`.
    """
    layers, rows, _, *more = of_heads.shape
    by_layer = of_heads.reshape(layers, rows, -1, heads, *more)
    return by_layer.transpose(1, 2).flatten(0, 1)


def _join_layers(of_layers: Tensor, layers: int) -> Tensor:
    """Join the heads of the layers that share pages. `_split_layers` is the inverse.

    Args:
        of_layers: (all layers, requests, Hkv), where the layers of a group follow each other.
        layers: how many layers share pages; the number of all layers must be a multiple of it.

    Returns:
        A tensor of shape (N, requests, H), where N is the number of groups and H is `layers` * Hkv.
    """
    by_pool = of_layers.reshape(-1, layers, *of_layers.shape[1:])
    return by_pool.transpose(1, 2).flatten(2)


def sequence_metadata(
    plain: Any, found: Sequences, layer: int, *, builder: Any, group_size: int
) -> Any:
    """Return a copy of a batch's attention metadata that shows the sequences of one layer instead
    of the batch.

    Args:
        plain: the metadata that `builder` has built for the batch. The name of its class must be in
            `_PLANS`.
        found: the sequences of all layers of the builder.
        layer: the index of the layer among those of `found`.
        builder: vLLM's attention metadata builder.
        group_size: the number of query heads per KV head.
    """
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
    """Plan how the kernel of the CPU backend distributes the work on the sequences among threads.
    vLLM's own builder requests this plan from the kernel in the same way.

    Returns:
        A dict with the only key "scheduler_metadata", the field of the backend's metadata that
        contains the plan.
    """
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
    # The buffers for splitting long sequences have the size of the batch, so nothing is split.
    "TritonAttentionMetadata": lambda *_: {"seq_threshold_3D": 0},
    # vLLM has planned for the batch; without a plan the kernel makes its own.
    "FlashAttentionMetadata": lambda *_: {"scheduler_metadata": None},
}


@dataclass
class _KeptHeads:
    """How many tokens of its prompt each head of a request keeps, layer by layer."""

    prompt_tokens: int
    max_tokens: int = 0  # the most tokens of one head in any layer
    counts_by_layer: dict[str, Tensor] = field(default_factory=dict)  # (Hkv,) by name of the layer


@dataclass(frozen=True)
class _LayerStep:
    """The data with which a layer runs one step for the requests whose heads store different
    numbers of tokens.
    """

    found: Sequences
    pages: HeadPages
    metadata: Any  # vLLM's attention metadata of the sequences
    covers_batch: bool  # whether the batch has no other requests

    def select_states(self, states: Tensor) -> Tensor:
        """Select the states that belong to the sequences from the states of the whole batch.

        Args:
            states: (tokens, Hkv * G, D) queries, keys or values of the batch, with G heads for each
                KV head.

        Returns:
            A tensor of shape (N * Hkv, G, D) for the N tokens of the sequences; a view of `states`
            if the sequences are in the order of the batch.
        """
        by_head = states.reshape(len(states) * self.pages.heads, -1, states.shape[-1])
        if self.found.in_order:
            return by_head[: len(self.found.states)]
        return by_head[self.found.states]


class HeadsAttention:
    """Patches vLLM's attention so that each KV head of a compressed request is treated as a
    separate sequence with one KV head.

    For the other requests of a batch nothing changes. vLLM's kernels run over the whole batch, but
    of the compressed requests they see only the new tokens and store none of them; then the output
    of these requests is replaced. If a batch has no other requests, the kernels do not run over it.

    Args:
        across_layers: True if the heads of all layers share the pages of a request, in the order in
            which the layers are patched; False if the heads of each layer do.
    """

    def __init__(self, *, across_layers: bool = False) -> None:
        self._across_layers = across_layers
        self._kept: dict[str, _KeptHeads] = {}
        self._batch = CompressedRows()
        self._layers: dict[str, Any] = {}
        self._steps: dict[str, _LayerStep] = {}
        self._places: dict[str, tuple[tuple[str, ...], HeadPlaces]] = {}

    def holds_any(self, requests: Iterable[str]) -> bool:
        """Whether one of the requests has heads that store different numbers of tokens."""
        return any(request in self._kept for request in requests)

    def record_kept(self, request: str, layer: str, kept: Tensor, prompt_tokens: int) -> None:
        """Record how many tokens of a prompt the heads of a layer keep. On a GPU the host waits for
        `kept`.

        Args:
            request: the id of the request.
            layer: the name of the layer.
            kept: (Hkv,) tokens of each head.
            prompt_tokens: the length of the prompt.
        """
        counts = self._kept.setdefault(request, _KeptHeads(prompt_tokens))
        counts.counts_by_layer[layer] = kept
        counts.max_tokens = max(counts.max_tokens, int(kept.max()))

    def forget(self, request: str) -> None:
        """Forget a request that has ended or was preempted. An unknown request is ignored."""
        if self._kept.pop(request, None) is not None:
            self._places.clear()  # another request may get the same id

    def begin_step(self, requests: Sequence[str], query_ends: Sequence[int]) -> None:
        """Look up which requests of the batch have heads that store different numbers of tokens,
        before attention metadata are built for the step.

        Args:
            requests: the ids of the requests, in the order of the batch.
            query_ends: where the tokens of each request end in the batch.
        """
        starts = (0, *query_ends[:-1])
        rows = tuple(row for row, request in enumerate(requests) if request in self._kept)
        self._batch = CompressedRows(
            requests=tuple(requests[row] for row in rows),
            rows=rows,
            starts=tuple(starts[row] for row in rows),
            counts=tuple(query_ends[row] - starts[row] for row in rows),
            is_complete=len(rows) == len(requests),
        )

    def end_step(self) -> None:
        """Forget the batch and its sequences, because a dummy batch may follow. The numbers of kept
        tokens stay.
        """
        self._batch = CompressedRows()
        self._steps.clear()

    def patch_layer(self, name: str, layer: Any) -> None:
        """Patch one of vLLM's attention layers, so that it also computes attention and stores new
        tokens for the sequences of each step. A layer must be patched only once.
        """
        impl = layer.impl
        single = _single_head_impl(impl)
        forward, update = impl.forward, impl.do_kv_cache_update

        def forward_with_sequences(
            layer: Any, query: Tensor, key: Any, value: Any, cache: Any, metadata: Any, **more: Any
        ) -> Any:
            step = self._steps.get(name)
            if step is None or not step.covers_batch:
                forward(layer, query, key, value, cache, metadata, **more)
            if step is not None:
                _attend(single, step, layer, query, more["output"])
            return more["output"]

        def store_states(layer: Any, key: Tensor, value: Tensor, cache: Any, slots: Any) -> None:
            step = self._steps.get(name)
            if step is None or not step.covers_batch:
                update(layer, key, value, cache, slots)
            if step is not None:
                new = step.select_states(key), step.select_states(value)
                single.do_kv_cache_update(layer, *new, step.pages.cache, step.metadata.slot_mapping)

        impl.forward, impl.do_kv_cache_update = forward_with_sequences, store_states
        self._layers[name] = layer

    def patch_builder(self, builder: Any) -> None:
        """Patch one of vLLM's attention metadata builders, so that it also prepares the sequences
        of each step.

        Its layers must be patched already, and their caches allocated. Building metadata then
        changes the slots of compressed requests in vLLM's `slot_mapping` in place.

        Raises:
            UnsupportedModelError: layers that share pages have caches that cannot; see
                `require_shared_pages`.
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

        # The names are those of vLLM: 0.31 passes them by keyword, later releases by position.
        def build_with_sequences(
            common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if not self._batch.rows:
                return build(common_prefix_len, common_attn_metadata, *args, **kwargs)
            found = self._sequences(names, common_attn_metadata, pages[0])
            others = self._hide_compressed_rows(common_attn_metadata)
            plain = build(common_prefix_len, others, *args, **kwargs)
            for layer, name in enumerate(names):
                own = sequence_metadata(plain, found, layer, builder=builder, group_size=group_size)
                self._steps[name] = _LayerStep(found, pages[layer], own, self._batch.is_complete)
            return plain

        builder.build = build_with_sequences

    def _sequences(self, names: Sequence[str], common: Any, pages: HeadPages) -> Sequences:
        """Build the sequences of this step.

        Args:
            names: the names of the layers of one attention metadata builder.
            common: vLLM's `CommonAttentionMetadata` of the batch.
            pages: the pages of the first of these layers, with the steps that all of them have.
        """
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
        """Return where the pages of each head of this batch lie. The result is stored, and later
        steps with the same requests and layers get the same object.

        Args:
            names: the names of the layers of one attention metadata builder.
            kept: the numbers of kept tokens of each compressed request of the batch.
            pages: the pages of the first of these layers.
        """
        requests, places = self._places.get(names[0], ((), None))
        if places is None or requests != self._batch.requests:
            layers = [torch.stack([one.counts_by_layer[name] for one in kept]) for name in names]
            together = _join_layers(torch.stack(layers), pages.layers)
            places = HeadPlaces(together, pages.cache.shape[2])
            self._places[names[0]] = self._batch.requests, places
        return places

    def _hide_compressed_rows(self, common: Any) -> Any:
        """Return a copy of vLLM's metadata in which the compressed requests of the batch store only
        the new tokens of the step.

        Their slots in `common.slot_mapping` are set to -1 in place, because layers store new tokens
        by it as well.
        """
        batch, device = self._batch, common.seq_lens.device
        lengths, counts = common.seq_lens.clone(), torch.tensor(batch.counts, dtype=torch.int32)
        lengths[torch.tensor(batch.rows, device=device)] = counts.to(device)
        spans = zip(batch.starts, batch.counts, strict=True)
        tokens = torch.cat([torch.arange(start, start + count) for start, count in spans])
        common.slot_mapping[tokens.to(device)] = -1  # in place, because layers store by it as well
        bound = common.seq_lens_cpu_upper_bound
        if bound is not None:
            bound = bound.clone()
            bound[list(batch.rows)] = counts.to(bound.dtype)
        return replace_lengths(common, lengths, bound)


def _single_head_impl(impl: Any) -> Any:
    """Return a copy of vLLM's implementation of attention for one KV head and the query heads that
    share it.
    """
    single = copy.copy(impl)
    single.num_kv_heads, single.num_heads = 1, impl.num_heads // impl.num_kv_heads
    return single


def _attend(single: Any, step: _LayerStep, layer: Any, query: Tensor, output: Tensor) -> None:
    """Compute the attention of the sequences, and write the result into the output of the batch.

    Args:
        single: vLLM's implementation of attention, changed to one KV head.
        step: the sequences of the layer.
        layer: vLLM's attention layer.
        query: (tokens, Hq, D) queries of the batch.
        output: (tokens, Hq, D), changed in place in the rows of the sequences.
    """
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
