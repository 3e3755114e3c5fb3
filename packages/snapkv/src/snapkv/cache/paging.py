"""Evicted tokens in pages, some of which every step attends to (Quest, arXiv 2406.10774)."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from snapkv import ops
from snapkv.cache.rows import RowRecord, per_row
from snapkv.validation import require_int


@dataclass(frozen=True)
class PageRecall:
    """Recall at every step: its query chooses pages of evicted tokens and attends to them, too.

    Of each KV head, the tokens that were evicted lie off the device, in the order of the text, cut
    into pages of `page_tokens`; the last one may be shorter. On the device stay, for every page,
    the least and the highest value of each channel of its keys. They bound how high the step's
    query can score in that page; the pages with the highest bounds come to the device for this
    step, one layer at a time. A page's bound is the mean of those of the group's query heads; of
    equal ones the earlier page wins. Quest (Tang et al., 2024, arXiv 2406.10774) does so with the
    whole cache; here the policy's choice stays on the device, and every head has pages of its own.

    Args:
        pages: how many pages each KV head attends to at a step, in every row and layer; all of
            them where there are fewer.
        page_tokens: tokens of a page.
        where: where evicted tokens lie: "host" for the memory of the host, or a folder, as for the
            `recall` of `CompressedCache`.

    Raises:
        InvalidArgumentError: a number that is not positive.
        InvalidTypeError: `pages` or `page_tokens` is not an integer.
    """

    pages: int
    _: KW_ONLY
    page_tokens: int = 16
    where: str | Path = "host"

    def __post_init__(self) -> None:
        """Check the numbers; where tokens lie is checked by who makes room there."""
        require_int("pages", self.pages, minimum=1)
        require_int("page_tokens", self.page_tokens, minimum=1)

    def cut(
        self, kept: Tensor, pads: Tensor | None, keys: Tensor, tokens: int
    ) -> "PageTable | None":
        """The pages of what was not kept; None where nothing was evicted.

        Args:
            kept: (B, H, K), the columns that were kept; negative ones are none.
            pads: (B,) int64, leading pads of each row, or None.
            keys: (B, Hkv, T, D), of the first `tokens` columns at least, on any device.
            tokens: how many columns were chosen from.
        """
        columns = evicted_columns(kept, pads, tokens)
        if not columns.shape[2]:
            return None
        page_tokens = min(self.page_tokens, columns.shape[2])
        short = -columns.shape[2] % page_tokens
        columns = torch.nn.functional.pad(columns, (0, short), value=-1)
        pages = columns.reshape(*columns.shape[:2], -1, page_tokens)
        bounds = ops.page_bounds(keys, pages.to(keys.device)).to(kept.device)
        return PageTable(columns=pages.to(torch.int32), bounds=bounds, chosen_pages=self.pages)

    def describe(self) -> dict[str, int]:
        """How steps choose pages, ready for JSON; where they lie changes no token."""
        return {name: value for name, value in vars(self).items() if name != "where"}

    @classmethod
    def read(cls, description: Mapping[str, Any]) -> Self:
        """The rule that `describe` has described, with tokens in the memory of the host."""
        if set(description) != {"pages", "page_tokens"}:
            raise ValueError(f"expected pages and page_tokens, got {description}")
        return cls(**description)


@dataclass(frozen=True, kw_only=True)
class PageTable(RowRecord):
    """The pages of a layer's evicted tokens, and by what each of them is known.

    Attributes:
        columns: (B, H, N, P) int32, the columns that each page holds; -1 is none.
        bounds: (B, H, N, 2, D), see `snapkv.ops.page_bounds`.
        chosen_pages: how many of them each head attends to at a step, all where there are fewer.
    """

    columns: Tensor = per_row()
    bounds: Tensor = per_row()
    chosen_pages: int

    @torch.no_grad()  # numbers of pages have no gradient, bounds may be inference tensors
    def choose(self, query: Tensor) -> Tensor:
        """(B, H, K) int64: columns of the pages that a token's (B, Hq, D) query chooses, or -1."""
        pages = self.columns
        scores = ops.page_scores(query, self.bounds)
        scores = scores.masked_fill(pages[..., 0] < 0, float("-inf"))
        wanted = [min(self.chosen_pages, pages.shape[2])] * len(pages)
        best = ops.keep_best(scores, wanted)[..., None].expand(-1, -1, -1, pages.shape[-1])
        return pages.gather(2, best).flatten(2).long()


Recall = str | Path | PageRecall
"""What a cache may be told of evicted tokens: "host", a folder, or how steps choose among them."""


def evicted_columns(kept: Tensor, pads: Tensor | None, tokens: int) -> Tensor:
    """(B, H, E) int64: the columns of each head that hold a token that was not kept, ascending.

    Heads with fewer than others end in -1. Arguments as for `PageRecall.cut`.
    """
    evicted = torch.ones(*kept.shape[:2], tokens + 1, dtype=torch.bool, device=kept.device)
    kept = kept.long()
    evicted = evicted.scatter(2, kept.masked_fill((kept < 0) | (kept > tokens), tokens), False)
    order = torch.arange(tokens, device=kept.device)
    evicted = evicted[..., :tokens]
    if pads is not None:
        evicted = evicted & (order >= pads[:, None, None])
    most = int(evicted.sum(dim=-1).max())
    columns = order.masked_fill(~evicted, tokens).sort(dim=-1).values[..., :most]
    return columns.masked_fill(columns == tokens, -1)
