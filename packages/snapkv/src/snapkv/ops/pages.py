"""Pages of keys: how high a query can score in them, without reading them.

Quest (Tang et al., 2024, arXiv 2406.10774, Figure 5, first stage): a page is known by the least and
the highest value of every channel of its keys. B batch, H heads that hold keys, Hq query heads, N
pages, P tokens of a page, D head_dim.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from snapkv.ops.votes.blocked import gather_tokens


def page_bounds(keys: Tensor, pages: Tensor) -> Tensor:
    """The least and the highest value of every channel of every page: (B, H, N, 2, D).

    `pages`, (B, H, N, P) int64, are which of the T keys, (B, Hkv, T, D), each page holds; -1 is
    none, and zeros bound a page without any. H is Hkv, or a multiple of it where the query heads of
    a group have pages of their own.
    """
    heads = pages.shape[1] // keys.shape[1]
    bounds = []
    for head, of_head in enumerate(pages.unbind(dim=1)):  # never a copy of all keys at once
        own = keys[:, head // heads, None]
        grouped = gather_tokens(own, of_head.flatten(1)[:, None]).view(*of_head.shape, -1)
        empty = (of_head < 0)[..., None]
        least = grouped.masked_fill(empty, float("inf")).amin(dim=2)
        highest = grouped.masked_fill(empty, float("-inf")).amax(dim=2)
        bounds.append(torch.stack([least, highest], dim=2))
    nothing = (pages < 0).all(dim=-1)[..., None, None]
    return torch.stack(bounds, dim=1).masked_fill(nothing, 0.0)


def page_scores(queries: Tensor, bounds: Tensor) -> Tensor:
    """How high a query can score in each page, at most; a group's query heads by their mean.

    A query head's bound is the sum over the channels i of max(q_i * least_i, q_i * highest_i): no
    key between the bounds has a higher product with it. Queries are (B, Hq, D), of one token, the
    result is (B, H, N) float32.
    """
    B, Hq, D = queries.shape
    heads = bounds.shape[1]
    grouped = queries.float().view(B, heads, Hq // heads, D)
    # Where q_i is negative the least key gives the larger product, elsewhere the highest one.
    signed = torch.cat([grouped.clamp(max=0), grouped.clamp(min=0)], dim=-1)
    of_group = signed.mean(dim=2)[..., None]  # the mean of the products is that with the mean
    device = queries.device.type
    # Autocast would round the bounds; some devices have none.
    rounds = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if rounds else nullcontext():
        return (bounds.flatten(3).float() @ of_group).squeeze(-1)
