"""Estimate what a request needs with a full and a compressed cache, and what fits."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from snapkv.validation import format_bytes
from snapkv_app.plan.costs import Costs, Request
from snapkv_app.plan.footprint import Footprint, is_counted

FLOPS_PER_BYTE = 150
"""The number of operations that a GPU computes in the time in which it reads one byte.

This is about half of the ratios in data sheets for 16-bit matrices (A100 156, H100 295, H200 206),
because a GPU reaches neither of the two peaks.
"""

LAYER_MS = 0.17
"""The milliseconds that the kernel launches of a layer add to a step that is one CUDA graph.

A token of an 8B model in bfloat16 takes 10.0 to 11.0 ms on an H100 80GB HBM3
(docs/results/gpu.jsonl). Reading its bytes takes 5.1 ms of them.
"""

GPU_BANDWIDTH_BYTES = 3e12
"""The bytes per second that the same card reads, if no bandwidth is passed."""

_FELT = 1.5
"""The smallest speed-up that a reader of an answer notices."""

_WORTH_SAYING = 1.1
"""The smallest speed-up that counts as help."""


@dataclass(frozen=True, kw_only=True)
class CacheNeeds:
    """The memory and the time that a request needs with one kind of cache.

    If the memory size is unknown, the fields about what fits are None. "In pieces" means that a
    prompt is read with `snapkv.prefill` for the compressed cache, and with ``prefill_chunk_size``
    for the full one. The positions of the model are not considered.
    """

    cache_bytes: int  # of the batch, after the prompts
    prefill_peak_bytes: int  # an estimate for prompts read in one pass, without the weights
    total_bytes: int  # the weights and the peak of everything else
    step_bytes: int  # read by the decode step for the last token of every answer
    step_ms: float | None  # the time of that step as one graph; None without a bandwidth
    fits_in_one_pass: bool | None = None
    fits: bool | None = None  # in one pass or in pieces
    longest_prompt_tokens: int | None = None
    longest_prompt_in_pieces_tokens: int | None = None
    largest_batch: int | None = None  # of prompts that are read together, and answered together
    largest_decoding_batch: int | None = None  # of prompts read one by one, and answered together
    throughput: float | None = None  # of `largest_batch`, relative to the full cache in one row


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The result of `plan`: what a request needs, and how much compression helps.

    Attributes:
        model: the name of the model.
        request: the request.
        footprint: the sizes of the model.
        kept_tokens: the number of tokens that are kept of a prompt, as the mean over the compressed
            layers; 0 if there are none.
        full: what the cache of transformers needs.
        compressed: what the compressed cache needs.
        decode_speedup: the upper limit of the speed-up of decoding, from the bytes that a step
            reads.
        prefill_share: the estimated fraction of a request's time with the full cache that reading
            the prompt takes.
        request_speedup: the estimated upper limit of the speed-up of a complete request.
        verdict: sentences, of which the first says whether compression will help.
    """

    model: str
    request: Request
    footprint: Footprint
    kept_tokens: float
    full: CacheNeeds
    compressed: CacheNeeds
    decode_speedup: float
    prefill_share: float
    request_speedup: float
    verdict: tuple[str, ...]


def plan(model: str, footprint: Footprint, request: Request) -> Plan:
    """Compute what a request needs with a full and a compressed cache, and what fits.

    Everything is an estimate; nothing is loaded or run.

    Args:
        model: the name of the model in the plan.
        footprint: the sizes of the model, see `snapkv_app.footprints.find_footprint`.
        request: the prompts, the answers, the budget and the device.

    Raises:
        BudgetTooSmallError: a budget in bytes is too small for this prompt.
    """
    costs = Costs(footprint=footprint, request=request)
    kept = costs.kept(request.context_tokens, at_least=False)
    mean = sum(kept) / max(1, len(kept))
    full, compressed = (_needs(costs, each) for each in (False, True))
    reading = request.batch * footprint.prompt_flops(request.context_tokens) / FLOPS_PER_BYTE
    whole, less = (reading + request.new_tokens * each.step_bytes for each in (full, compressed))
    figures: dict[str, Any] = {
        "model": model,
        "request": request,
        "footprint": footprint,
        "kept_tokens": int(mean) if mean == int(mean) else mean,
        "full": full,
        "compressed": compressed,
        "decode_speedup": full.step_bytes / compressed.step_bytes,
        "prefill_share": reading / whole,
        "request_speedup": whole / less,
    }
    made = Plan(**figures, verdict=())
    return Plan(**figures, verdict=(*_headline(made, costs), *_limits(made), *_notes(made)))


def gpu_step_ms(costs: Costs, batch: int, *, compressed: bool) -> float:
    """Estimate the milliseconds of the last decode step of a batch on a GPU, as one CUDA graph.

    The bandwidth is that of the request, or `GPU_BANDWIDTH_BYTES`; the batch of the request is not
    used.
    """
    read = costs.step(costs.request.context_tokens, batch, compressed)
    bandwidth = costs.request.bandwidth_bytes or GPU_BANDWIDTH_BYTES
    return LAYER_MS * costs.footprint.layers + 1000 * read / bandwidth


def batch_of_speedup(costs: Costs, speedup: float) -> int | None:
    """Return the fewest rows at which a compressed cache decodes at least `speedup` times as fast.

    It is compared with the full cache in a batch of equally many rows. Both times are estimates for
    a GPU, see `gpu_step_ms`.

    Returns:
        The number of rows; None if it would be above 1,024.
    """
    for batch in range(1, 1025):
        full, compressed = (gpu_step_ms(costs, batch, compressed=each) for each in (False, True))
        if full >= speedup * compressed:
            return batch
    return None


def _needs(costs: Costs, compressed: bool) -> CacheNeeds:
    """Compute the memory and the time that the request needs with one kind of cache.

    It is the compressed cache if `compressed`, and else the full cache.
    """
    asked = costs.request
    tokens, batch = asked.context_tokens, asked.batch
    step_ms = gpu_step_ms(costs, batch, compressed=compressed)
    return CacheNeeds(
        cache_bytes=batch * costs.cache(tokens, 0, compressed),
        prefill_peak_bytes=batch * costs.prefill_peak(tokens, compressed, in_pieces=False),
        total_bytes=costs.total(tokens, batch, compressed, in_pieces=False),
        step_bytes=costs.step(tokens, batch, compressed),
        step_ms=None if asked.bandwidth_bytes is None else step_ms,
        **_fitting(costs, compressed),
    )


def _fitting(costs: Costs, compressed: bool) -> dict[str, Any]:
    """Return the fields of `CacheNeeds` about what fits; empty if the memory size is unknown."""
    asked, weights = costs.request, costs.footprint.weights_bytes
    if asked.memory_bytes is None:
        return {}
    free_bytes = asked.memory_bytes - asked.reserve_bytes
    tokens, batch = asked.context_tokens, asked.batch
    beside_weights = max(0, free_bytes - weights)
    most = beside_weights // (costs.least_total(tokens, 1, compressed) - weights)
    alone, together = (
        costs.step(tokens, rows, kind) for rows, kind in ((1, False), (most, compressed))
    )
    return {
        "fits_in_one_pass": costs.total(tokens, batch, compressed, in_pieces=False) <= free_bytes,
        "fits": costs.least_total(tokens, batch, compressed) <= free_bytes,
        "longest_prompt_tokens": costs.longest(free_bytes, compressed, in_pieces=False),
        "longest_prompt_in_pieces_tokens": costs.longest(free_bytes, compressed, in_pieces=True),
        "largest_batch": most,
        "largest_decoding_batch": beside_weights // costs.answering(tokens, compressed),
        "throughput": most * alone / together if most else None,
    }


def _headline(made: Plan, costs: Costs) -> Iterator[str]:
    """Yield one or two sentences that say whether compression will help.

    `made` needs no verdict yet.
    """
    tokens, kept = made.request.context_tokens, made.kept_tokens
    if kept >= tokens and made.request.bits is None:
        yield (
            f"Compression will not help: a prompt of {tokens:,} tokens is within the budget, and "
            "nothing is dropped."
        )
        return
    saved = made.full.cache_bytes - made.compressed.cache_bytes
    share = 1 - made.footprint.read_bytes(made.request.batch) / made.full.step_bytes
    if made.compressed.fits is False:
        yield "This does not fit in the memory with either cache, in one pass or in pieces."
    elif made.full.fits is False:
        yield "Compression is what makes this fit: the full cache does not fit."
    elif made.decode_speedup < _WORTH_SAYING and saved < 0.1 * made.full.total_bytes:
        yield (
            f"Compression will hardly help: the full cache is {share:.0%} of what a step reads, so "
            f"tokens come at most {made.decode_speedup:.2f} times as fast, and "
            f"{format_bytes(saved)} are saved. A longer prompt or a larger batch would change that."
        )
    else:
        yield (
            f"Compression helps: {format_bytes(saved)} of cache are saved, and tokens come up to "
            f"{made.decode_speedup:.1f} times as fast."
        )
        if (rows := batch_of_speedup(costs, _FELT) or 0) > (batch := made.request.batch):
            full, kept = (gpu_step_ms(costs, batch, compressed=each) for each in (False, True))
            floor = LAYER_MS * made.footprint.layers
            yield (
                f"On a GPU you will hardly feel it{' in one row' if batch == 1 else ''}: a token "
                f"takes about {full:.1f} ms, compressed {kept:.1f}, of which {floor:.1f} are "
                "launches of one CUDA graph, as on an H100, and most of the rest reads weights. "
                f"A batch of {rows:,} comes {_FELT} times as fast."
            )


def _limits(made: Plan) -> Iterator[str]:
    """Yield sentences about positions, about reading in pieces, and about the time of a request.

    Each sentence is left out if there is nothing to say.
    """
    tokens, positions = made.request.context_tokens, made.footprint.max_positions
    answer = made.request.new_tokens
    if positions is not None and tokens + answer > positions:
        yield (
            f"The model has {positions:,} positions, fewer than {tokens:,} tokens of prompt and "
            f"{answer:,} of answer need: it will be refused. {_remedy(positions, answer)}"
        )
    if made.compressed.fits and not made.compressed.fits_in_one_pass:
        yield (
            "Read in one pass, the prompts do not fit; read them in pieces, with "
            "snapkv.prefill.layer_by_layer."
        )
    one_pass, in_pieces = (
        made.compressed.longest_prompt_tokens,
        made.compressed.longest_prompt_in_pieces_tokens,
    )
    if one_pass and in_pieces is not None and in_pieces < one_pass:
        yield (
            "Read the prompts in one pass: layer_by_layer reads the sliding-window layers of this "
            "model in one pass too and holds the hidden states of all tokens besides, so it takes "
            "more memory. The full cache reads them in pieces, with prefill_chunk_size."
        )
    if made.request_speedup < _WORTH_SAYING <= made.decode_speedup:
        yield (
            "Do not expect the whole request to be faster: reading the prompt takes as long as "
            f"before, about {made.prefill_share:.0%} of the time with an answer of {answer:,} "
            "tokens. Longer answers, or several from one prompt, gain more."
        )


def _remedy(positions: int, answer: int) -> str:
    if answer >= positions:
        return "Ask for a shorter answer."
    return f"Shorten the prompt to {positions - answer:,} tokens, or the answer."


def _notes(made: Plan) -> Iterator[str]:
    """Yield sentences about layers that are not compressed, quantized weights, and experts.

    Each sentence is left out if the model has none of these.
    """
    model, tokens = made.footprint, made.request.context_tokens
    full = len(model.full_layers)
    if full < model.layers or model.state_bytes:
        share = model.token_bytes * tokens / model.cache_bytes(tokens, tokens)
        yield (
            f"{full} of {model.layers} layers grow with the prompt and are compressed, "
            f"{share:.1%} of the full cache here; sliding windows and states are not compressed."
        )
    if not is_counted(model.quantization):
        yield (
            f"The checkpoint's weights are quantized ({model.quantization}); they are counted in "
            f"{model.dtype}, which takes more."
        )
    if model.experts:
        yield (
            f"A token visits {model.experts_per_token} of {model.experts} experts per layer; the "
            "step is counted with those that the batch is expected to visit."
        )
