"""Which parts of a prompt the answer needs: mask each in turn and compare."""

import copy
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from snapkv.hf.cache import CompressedCache
from snapkv.hf.cache_argument import passed
from snapkv.hf.placement import device_of
from snapkv.policies import Eviction

SINK_TOKENS = 4
"""Never masked, since they are attention sinks."""

_FIRST_SPANS = 24
_SMALLEST_SPAN = 16
_PARTS = 4


@dataclass(frozen=True, kw_only=True)
class Span:
    """Neighbouring tokens of a prompt that were masked for the answer.

    Attributes:
        start: the first of them.
        stop: one past the last.
        loss: how much less likely the answer became, in nats per token; negative if more likely.
        changed: whether the greedy choice of any token of the answer changed.
    """

    start: int
    stop: int
    loss: float
    changed: bool


@dataclass(frozen=True, kw_only=True)
class LeaveOut:
    """The outcome.

    Attributes:
        answer_ids: the greedy answer of the full cache.
        spans: in order, without overlap; empty if the answer has a single token, which no cache can
            change.
    """

    answer_ids: tuple[int, ...]
    spans: tuple[Span, ...]


def needed_spans(spans: Sequence[Span]) -> list[Span]:
    """Spans that change the answer, neighbours joined, the largest loss first."""
    found: list[Span] = []
    for span in spans:
        if not span.changed:
            continue
        if found and found[-1].stop == span.start:
            before = found.pop()
            span = replace(span, start=before.start, loss=max(before.loss, span.loss))
        found.append(span)
    return sorted(found, key=lambda span: -span.loss)


@torch.inference_mode()
def leave_out(
    model: Any,
    cache: CompressedCache,
    last_logits: Tensor,
    *,
    checks: int,
    answer_tokens: int,
    keep_last_tokens: int,
    end_ids: Sequence[int] = (),
) -> LeaveOut:
    """Mask parts of a prompt for the answer, not for the prompt itself, as a compressed cache does.

    The whole prompt has been read. The full cache's answer is fed again to a copy that has dropped
    a span in all heads and layers that can be compressed. The spans with the largest loss are split
    until the checks are used up or the spans are small.

    Args:
        model: the model.
        cache: a full cache of the prompt; not changed.
        last_logits: (V,), at the end of the prompt.
        checks: how many spans to mask; 0 for none.
        answer_tokens: how many tokens of the answer to compare.
        keep_last_tokens: last tokens of the prompt, never masked, since methods keep them.
        end_ids: tokens that end an answer.
    """
    prompt_tokens = cache.get_seq_length()
    answer = _greedy(model, copy.copy(cache), last_logits, answer_tokens, end_ids)
    first, last = SINK_TOKENS, prompt_tokens - keep_last_tokens
    if checks < 1 or len(answer) < 2 or last - first < _SMALLEST_SPAN:
        return LeaveOut(answer_ids=tuple(answer), spans=())
    ids = torch.tensor([answer], device=device_of(model))
    baseline, _ = _read_again(model, copy.copy(cache), ids)

    def hide(start: int, stop: int) -> Span:
        score, changed = _read_again(model, _without(cache, start, stop), ids)
        return Span(start=start, stop=stop, loss=baseline - score, changed=changed)

    beginnings = _split(first, last, min(_FIRST_SPANS, checks))
    spans = [hide(start, stop) for start, stop in beginnings]
    left = checks - len(spans)
    worst = [(-span.loss, span.start, span) for span in spans]
    heapq.heapify(worst)
    done: list[Span] = []
    while worst:
        _, _, span = heapq.heappop(worst)
        parts = _split(span.start, span.stop, _PARTS)
        if left < len(parts) or span.stop - span.start < 2 * _SMALLEST_SPAN:
            done.append(span)
            continue
        left -= len(parts)
        for start, stop in parts:
            part = hide(start, stop)
            heapq.heappush(worst, (-part.loss, part.start, part))
    return LeaveOut(
        answer_ids=tuple(answer), spans=tuple(sorted(done, key=lambda span: span.start))
    )


def _split(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """That many adjacent spans of about equal length, at least one token each."""
    parts = max(1, min(parts, (stop - start) // _SMALLEST_SPAN))
    edges = [start + (stop - start) * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


def _greedy(
    model: Any,
    cache: CompressedCache,
    last_logits: Tensor,
    most_tokens: int,
    end_ids: Sequence[int],
) -> list[int]:
    """Greedy tokens, up to an end token."""
    answer = [int(last_logits.argmax())]
    while len(answer) < most_tokens and answer[-1] not in end_ids:
        ids = torch.tensor([answer[-1:]], device=device_of(model))
        cache.expect_tokens(ids)
        answer.append(int(model(ids, **passed(cache)).logits[0, -1].argmax()))
    return answer


def _without(cache: CompressedCache, start: int, stop: int) -> CompressedCache:
    """A copy that has dropped these tokens, in every layer that can be compressed."""
    rest = copy.copy(cache)
    for layer in rest.prompt_state.layers:
        slots = torch.arange(layer.store.slots, device=layer.keys.device)
        kept = slots[(slots < start) | (slots >= stop)]
        layer.apply_eviction(Eviction(keep_indices=kept.expand(1, 1, -1)))
    return rest


def _read_again(model: Any, cache: CompressedCache, answer: Tensor) -> tuple[float, bool]:
    """Mean log-likelihood of the answer after its first token; whether a greedy choice changed."""
    cache.expect_tokens(answer[:, :-1])
    logits = model(answer[:, :-1], **passed(cache)).logits[0]
    likely = logits.float().log_softmax(dim=-1)
    wanted = answer[0, 1:]
    chosen = likely.gather(1, wanted[:, None]).mean()
    return float(chosen), bool((likely.argmax(dim=-1) != wanted).any())
