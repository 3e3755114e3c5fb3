"""What a step tells the kernels of requests whose heads hold different numbers of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapkv_vllm.heads.pages import HeadPages
from snapkv_vllm.heads.places import HeadPlaces


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The requests of a batch whose heads hold their own numbers of tokens.

    Attributes:
        starts: where each one's tokens begin in the batch.
        counts: how many tokens each has in this step.
        most_tokens: of what any of their heads holds when the step is done, or a number above.
    """

    starts: Sequence[int]
    counts: Sequence[int]
    most_tokens: int


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Every head of some requests as a sequence with one KV head, in some layers that are alike.

    Sequences are ordered by request, then by head; their tokens lie one behind the other.

    Attributes:
        states: (N * Hkv,) int64, for every token of a sequence its place among a batch's tokens and
            their heads, (tokens * Hkv).
        in_order: whether those are the first of them, one after the other.
        starts: (sequences + 1,) int32, where the tokens of each sequence begin.
        most_new: tokens of the sequence that has the most of this step.
        most_tokens: a number that no sequence is longer than.
        lengths: (layers, sequences) int32, tokens held, with those of this step.
        tables: (layers, sequences, pages) int32.
        slots: (layers, N * Hkv) int64, where the keys and values of this step go.
    """

    states: Tensor
    in_order: bool
    starts: Tensor
    most_new: int
    most_tokens: int
    lengths: Tensor
    tables: Tensor
    slots: Tensor


def sequences(
    batch: Rows, places: HeadPlaces, generated: Tensor, blocks: Tensor, pages: HeadPages
) -> Sequences:
    """Lay out the heads of some requests as sequences.

    Args:
        batch: the requests.
        places: of (layers, requests, Hkv) heads.
        generated: (requests,) tokens behind the prompt, with those of this step.
        blocks: (requests, most blocks), the requests' own; what stands behind them is not used.
        pages: of the layers' caches, which are alike.
    """
    device, heads, page_tokens = blocks.device, pages.heads, places.page_tokens
    counts = torch.tensor(batch.counts).repeat_interleave(heads)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    of_sequence = torch.arange(len(counts)).repeat_interleave(counts)
    within = torch.arange(len(of_sequence)) - starts[of_sequence]
    token = torch.tensor(batch.starts)[of_sequence // heads] + within
    states = (token * heads + of_sequence % heads).to(device)

    width = -(-batch.most_tokens // page_tokens)
    place = places.of_pages(torch.arange(width, device=device)[None])  # (layers, requests, H, W)
    block = (place // heads).clamp(max=blocks.shape[1] - 1)  # of pages that no head has yet
    requests = torch.arange(blocks.shape[0], device=device)[:, None, None]
    tables = pages.numbers(blocks[requests, block].long(), place).flatten(1, 2)

    lengths = (places.kept + generated[:, None]).flatten(1)
    of_sequence, within = of_sequence.to(device), within.to(device)
    behind = counts.to(device)[of_sequence] - within
    position = lengths[:, of_sequence] - behind  # (layers, N * H)
    page = tables[:, of_sequence].gather(2, (position // page_tokens).unsqueeze(2)).squeeze(2)
    return Sequences(
        states=states,
        in_order=max(batch.counts) == 1 and tuple(batch.starts) == tuple(range(len(batch.starts))),
        starts=starts.to(device, torch.int32),
        most_new=max(batch.counts),
        most_tokens=batch.most_tokens,
        lengths=lengths.int(),
        tables=tables.int(),
        slots=page * page_tokens + position % page_tokens,
    )
