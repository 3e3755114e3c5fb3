"""Prompts that end in the start of a copy, and where votes fall beside what is copied next.

Axes: H query heads, P positions before the window, N tokens that are copied.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LEAD = "\nThe secret code of the archive is"
_RIVAL = "\nThe secret code of the {name} is {digits}.\n"
_NAMES = ("library", "museum", "station", "castle", "harbour", "school", "hospital", "theatre")


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A prompt at whose end a copy of something in it begins, and the copy."""

    prompt: list[int]
    answer: list[int]
    start: int

    @property
    def ids(self) -> Tensor:
        """(1, T + N - 1) int64: prompt and copy, without the last token, which asks for nothing."""
        return torch.tensor([self.prompt + self.answer[:-1]])

    @property
    def places(self) -> Tensor:
        """(N,) int64: where the tokens stand that are copied."""
        return torch.arange(self.start, self.start + len(self.answer))


def hidden_copy(
    tokenizer: Any, text: Sequence[int], *, kind: str, items: int, depth: float, seed: str
) -> Copy:
    """Hide something in a text, and begin to say it behind the text."""
    draw = random.Random(seed)
    answer = _drawn(tokenizer, text, kind, items, draw)
    begin = [own for own in _ids(tokenizer, "", special=True) if own == tokenizer.bos_token_id]
    lead, end = _ids(tokenizer, _LEAD), _ids(tokenizer, ".\n")
    place = int(depth * len(text))
    before = [*begin, *text[:place], *lead]
    prompt = [*before, *answer, *end, *text[place:], *_ids(tokenizer, "\n"), *lead]
    return Copy(prompt=prompt, answer=answer, start=len(before))


def with_rivals(
    tokenizer: Any, text: Sequence[int], *, count: int, digits: int, seed: str
) -> list[int]:
    """A text with codes of other places in it, evenly spread, which nobody asks for."""
    draw, found = random.Random(seed), list(text)
    for number in reversed(range(count)):
        name, again = _NAMES[number % len(_NAMES)], number // len(_NAMES)
        code = "".join(draw.choices("0123456789", k=digits))
        rival = _RIVAL.format(name=f"{name} {again + 1}" if again else name, digits=code)
        place = len(text) * (number + 1) // (count + 1)
        found[place:place] = _ids(tokenizer, rival)
    return found


def _drawn(
    tokenizer: Any, text: Sequence[int], kind: str, items: int, draw: random.Random
) -> list[int]:
    if kind == "tokens":
        return draw.choices(text, k=items)
    if kind == "digits":
        return _ids(tokenizer, " " + "".join(draw.choices("0123456789", k=items)))
    words = sorted(set(re.findall(r"[A-Za-z]{4,}", tokenizer.decode(list(text)))))
    return _ids(tokenizer, " " + " ".join(draw.choices(words or ["code"], k=items)))


def _ids(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return found


def votes_around(votes: Tensor, start: int, reach: int) -> Tensor:
    """Which part of its votes a head gives every distance from a position.

    Returns:
        (H, 2 * reach + 1) float32, the position itself in the middle; zero outside the prefix.
    """
    shares = votes / votes.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(votes.dtype).tiny)
    around = torch.nn.functional.pad(shares, (reach, reach))
    return around[:, start : start + 2 * reach + 1]


def base_share(votes: Tensor, start: int, reach: int, sink_tokens: int) -> Tensor:
    """The mean part of its votes that a head gives a position elsewhere: (H,) float32.

    Elsewhere is further than `reach` from the position, and behind the first `sink_tokens`.
    """
    elsewhere = torch.ones(votes.shape[-1], dtype=torch.bool, device=votes.device)
    elsewhere[:sink_tokens] = False
    elsewhere[max(0, start - reach) : start + reach + 1] = False
    total = votes.sum(dim=-1).clamp(min=torch.finfo(votes.dtype).tiny)
    return votes[:, elsewhere].sum(dim=-1) / total / elsewhere.sum().clamp(min=1)


def distances_to_voted(voted: Tensor, places: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """How far positions stand before the nearest one that is voted for, and how far behind it.

    Returns:
        Two of (H, N) int64.
    """
    apart = places[:, None] - torch.arange(voted.shape[-1], device=voted.device)
    far = reach + 1

    def nearest(distance: Tensor) -> Tensor:
        usable = voted[:, None] & (distance >= 0) & (distance < far)
        return torch.where(usable, distance, far).amin(dim=-1)

    return nearest(-apart), nearest(apart)


def smallest_pair(counts: Tensor, share: float) -> tuple[int, int, float] | None:
    """The narrowest pair (before, behind) within which a share of positions has a vote.

    Positions without one anywhere within reach do not count: no pooling would keep them.

    Returns:
        before, behind, and the share that is reached; of two as narrow the one that reaches less
        far before. None where no pair does, or nothing was counted.
    """
    counts = counts.clone()
    counts[-1, -1] = 0
    total = counts.sum()
    missed = counts.flip(0, 1).cumsum(0).cumsum(1).flip(0, 1)[1:, 1:]
    covered = 1 - missed / total.clamp(min=1)
    within = (covered >= share).nonzero().tolist() if total else []
    if not within:
        return None
    before, behind = min(within, key=lambda pair: (sum(pair), pair[0]))
    return before, behind, float(covered[before, behind])


def quantile(shares: Sequence[float], distances: Sequence[int], part: float) -> int | None:
    """The distance up to which that part of the shares lies; None where there are none."""
    wanted, reached = part * sum(shares), 0.0
    for share, distance in zip(shares, distances, strict=True):
        reached += share
        if reached >= wanted > 0:
            return distance
    return None
