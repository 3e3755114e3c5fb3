"""Pages of keys: how high a query can score in them, without reading them.

Quest (Tang et al., 2024, arXiv 2406.10774, Figure 5, first stage): a page is known by the least and
the highest value of every channel of its keys. B batch, H heads that hold keys, Hq query heads, N
pages, P tokens of a page, D head_dim.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from snapkv.ops.votes.api import gather_tokens


def page_bounds(keys: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the highest value of every channel of every page.

    Args:
        keys: (B, Hkv, T, D).
        pages: (B, H, N, P) int64, which of the T each page holds; -1 is none. H is Hkv, or a
            multiple of it where the query heads of a group have pages of their own.

    Returns:
        Two tensors (B, H, N, D) in the dtype of the keys; zeros for a page that holds nothing.
    """
    heads = pages.shape[1] // keys.shape[1]
    least, highest = [], []
    for head, of_head in enumerate(pages.unbind(dim=1)):  # never a copy of all keys at once
        own = keys[:, head // heads, None]
        grouped = gather_tokens(own, of_head.flatten(1)[:, None]).view(*of_head.shape, -1)
        empty = (of_head < 0)[..., None]
        least.append(grouped.masked_fill(empty, float("inf")).amin(dim=2))
        highest.append(grouped.masked_fill(empty, float("-inf")).amax(dim=2))
    nothing = (pages < 0).all(dim=-1)[..., None]
    bounds = torch.stack(least, dim=1), torch.stack(highest, dim=1)
    return bounds[0].masked_fill(nothing, 0.0), bounds[1].masked_fill(nothing, 0.0)


def page_scores(queries: Tensor, least: Tensor, highest: Tensor) -> Tensor:
    """How high a query can score in each page, at most; a group's query heads by their mean.

    A query head's bound is the sum over the channels i of max(q_i * least_i, q_i * highest_i): no
    key between the bounds has a higher product with it.

    Args:
        queries: (B, Hq, D), of one token.
        least: (B, H, N, D), see `page_bounds`.
        highest: (B, H, N, D).

    Returns:
        (B, H, N) float32.
    """
    B, Hq, D = queries.shape
    heads = least.shape[1]
    grouped = queries.float().view(B, heads, Hq // heads, D)
    # Where q_i is positive the highest key gives the larger product, elsewhere the least one.
    with _without_autocast(queries.device.type):  # which would round the bounds
        bounds = grouped.clamp(min=0) @ highest.float().mT + grouped.clamp(max=0) @ least.float().mT
    return bounds.mean(dim=2)


def _without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Autocast turned off where it is on; some devices have none."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
