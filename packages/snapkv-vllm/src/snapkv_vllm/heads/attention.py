"""Attention of requests whose heads hold different numbers of tokens, beside all others."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from snapkv_vllm.heads.metadata import sequence_metadata
from snapkv_vllm.heads.pages import HeadPages
from snapkv_vllm.heads.places import HeadPlaces
from snapkv_vllm.heads.step import Rows, Sequences, sequences


@dataclass
class _KeptHeads:
    """What the heads of a request kept of its prompt, layer by layer."""

    prompt_tokens: int
    most_tokens: int = 0
    of_layers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Batch:
    """The rows of a step's batch that are ours, and whose they are."""

    requests: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    is_whole: bool = False


@dataclass(frozen=True)
class _LayerStep:
    """What a layer does in a step.

    Attributes:
        found: the heads of our rows as sequences.
        pages: of the layer's cache.
        metadata: the backend's, for those sequences.
        alone: whether there are no other rows.
    """

    found: Sequences
    pages: HeadPages
    metadata: Any
    alone: bool

    def taken(self, states: Tensor) -> Tensor:
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
    """

    def __init__(self) -> None:
        self._kept: dict[str, _KeptHeads] = {}
        self._documents: dict[int, _KeptHeads] = {}
        self._batch = _Batch()
        self._layers: dict[str, Any] = {}
        self._steps: dict[str, _LayerStep] = {}
        self._places: dict[str, tuple[tuple[str, ...], HeadPlaces]] = {}

    @property
    def requests(self) -> Iterable[str]:
        """Those that something is remembered of."""
        return self._kept

    def holds_any(self, requests: Iterable[str]) -> bool:
        """Whether any of these is one of them."""
        return any(request in self._kept for request in requests)

    def note(self, request: str, layer: str, kept: Tensor, prompt_tokens: int) -> None:
        """A request's prompt has ended; the heads of a layer hold (Hkv,) `kept` tokens of it."""
        mine = self._kept.setdefault(request, _KeptHeads(prompt_tokens))
        mine.of_layers[layer] = kept
        mine.most_tokens = max(mine.most_tokens, int(kept.max()))

    def keep_document(self, request: str, first_block: int) -> None:
        """What a request has kept is a document from now on, whose blocks begin with this one."""
        self._documents[first_block] = self._kept[request]

    def begin_with(self, request: str, first_block: int) -> None:
        """A request begins with such a document, whose heads hold what they kept of it."""
        self._kept[request] = self._documents[first_block]

    def forget(self, request: str) -> None:
        """The request has ended, or begins anew."""
        if self._kept.pop(request, None) is not None:
            self._places.clear()  # another one may come under its name

    def enter(self, requests: Sequence[str], query_ends: Sequence[int]) -> None:
        """A step begins.

        Args:
            requests: of the batch, row by row.
            query_ends: where the tokens of each request end in the batch.
        """
        starts = (0, *query_ends[:-1])
        rows = tuple(row for row, request in enumerate(requests) if request in self._kept)
        self._batch = _Batch(
            requests=tuple(requests[row] for row in rows),
            rows=rows,
            starts=tuple(starts[row] for row in rows),
            counts=tuple(query_ends[row] - starts[row] for row in rows),
            is_whole=len(rows) == len(requests),
        )

    def leave(self) -> None:
        """The step is over; what follows may be a dummy batch."""
        self._batch = _Batch()
        self._steps.clear()

    def attach(self, name: str, layer: Any) -> None:
        """Have one of vLLM's attention layers attend and store as said here from now on."""
        impl = layer.impl
        alone = _of_one_head(impl)
        forward, update = impl.forward, impl.do_kv_cache_update

        def forward_beside(
            layer: Any, query: Tensor, key: Any, value: Any, cache: Any, metadata: Any, **more: Any
        ) -> Any:
            step = self._steps.get(name)
            if step is None or not step.alone:
                forward(layer, query, key, value, cache, metadata, **more)
            if step is not None:
                _attend(alone, step, layer, query, more["output"])
            return more["output"]

        def update_beside(layer: Any, key: Tensor, value: Tensor, cache: Any, slots: Any) -> None:
            step = self._steps.get(name)
            if step is None or not step.alone:
                update(layer, key, value, cache, slots)
            if step is not None:
                new = step.taken(key), step.taken(value)
                alone.do_kv_cache_update(layer, *new, step.pages.cache, step.metadata.slot_mapping)

        impl.forward, impl.do_kv_cache_update = forward_beside, update_beside
        self._layers[name] = layer

    def tell(self, builder: Any) -> None:
        """Have one of vLLM's attention metadata builders prepare our rows too from now on.

        Its layers are attached, and have their caches.
        """
        build: Callable[..., Any] = builder.build
        layers = [self._layers[name] for name in builder.layer_names]
        pages = [HeadPages.of(layer.kv_cache) for layer in layers]
        group_size = layers[0].impl.num_heads // pages[0].heads

        def build_beside(prefix: int, common: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._batch.rows:
                return build(prefix, common, *args, **kwargs)
            found = self._sequences(builder.layer_names, common, pages[0])
            plain = build(prefix, self._without_ours(common), *args, **kwargs)
            for layer, name in enumerate(builder.layer_names):
                told = sequence_metadata(
                    plain, found, layer, builder=builder, group_size=group_size
                )
                self._steps[name] = _LayerStep(found, pages[layer], told, self._batch.is_whole)
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
            one.most_tokens - one.prompt_tokens + int(seen[row])
            for one, row in zip(kept, batch.rows, strict=True)
        )
        return sequences(
            Rows(starts=batch.starts, counts=batch.counts, most_tokens=most),
            self._places_of(names, kept, pages),
            common.seq_lens[rows] - prompts,
            common.block_table_tensor[rows],
            pages,
        )

    def _places_of(
        self, names: Sequence[str], kept: Sequence[_KeptHeads], pages: HeadPages
    ) -> HeadPlaces:
        """Those of the batch's heads, which stay the same from step to step."""
        requests, places = self._places.get(names[0], ((), None))
        if places is None or requests != self._batch.requests:
            layers = [torch.stack([one.of_layers[name] for one in kept]) for name in names]
            places = HeadPlaces(torch.stack(layers), pages.cache.shape[2])
            self._places[names[0]] = self._batch.requests, places
        return places

    def _without_ours(self, common: Any) -> Any:
        """vLLM's `CommonAttentionMetadata`, in which our rows hold this step's tokens alone."""
        batch, device = self._batch, common.seq_lens.device
        lengths, counts = common.seq_lens.clone(), torch.tensor(batch.counts, dtype=torch.int32)
        lengths[torch.tensor(batch.rows, device=device)] = counts.to(device)
        spans = zip(batch.starts, batch.counts, strict=True)
        tokens = torch.cat([torch.arange(start, start + count) for start, count in spans])
        common.slot_mapping[tokens.to(device)] = -1  # in place: what layers store goes by it too
        changed: dict[str, Any] = {"seq_lens": lengths, "_num_computed_tokens_cache": None}
        bound = common.seq_lens_cpu_upper_bound
        if bound is not None:
            bound = bound.clone()
            bound[list(batch.rows)] = counts.to(bound.dtype)
            changed |= {"seq_lens_cpu_upper_bound": bound, "max_seq_len": int(bound.max())}
        return common.replace(**changed)


def _of_one_head(impl: Any) -> Any:
    """A backend's implementation, for sequences with a single KV head."""
    alone = copy.copy(impl)
    alone.num_kv_heads, alone.num_heads = 1, impl.num_heads // impl.num_kv_heads
    return alone


def _attend(alone: Any, step: _LayerStep, layer: Any, query: Tensor, output: Tensor) -> None:
    """Write what the sequences answer into the batch's (tokens, Hq, D) output."""
    queries = step.taken(query)
    answers = output.view(-1, *queries.shape[1:])
    found, cache = step.found, step.pages.cache
    if found.in_order:
        out = answers[: len(queries)]
        alone.forward(layer, queries, None, None, cache, step.metadata, output=out)
        return
    out = torch.empty_like(queries)
    alone.forward(layer, queries, None, None, cache, step.metadata, output=out)
    answers[found.states] = out
