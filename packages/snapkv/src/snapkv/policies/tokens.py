"""Which ids of a tokenizer are special tokens or punctuation, and where a prompt has them."""

import functools
import unicodedata
from typing import Any

import torch
from torch import Tensor

from snapkv.errors import InvalidArgumentError, InvalidTypeError

TokenIds = tuple[int | tuple[int, ...], ...]
"""Ids; or, where a marker such as "[INST]" is several tokens, a tuple of theirs."""


def special_tokens(tokenizer: Any) -> TokenIds:
    """All tokens that the tokenizer calls special, chat markers among them."""
    added = tokenizer.added_tokens_decoder.items()
    marked = {index for index, token in added if token.special}
    return tuple(sorted(marked | set(tokenizer.all_special_ids)))


def punctuation_tokens(tokenizer: Any) -> TokenIds:
    """All tokens whose text is punctuation and white space around it, such as " (" or "...".

    Punctuation is what Unicode calls so. Every id of the vocabulary is decoded, so variants with a
    space and single bytes are among them.
    """
    special = set(special_tokens(tokenizer))
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    return tuple(index for index in ids if _is_punctuation(tokenizer.decode([index])))


def _is_punctuation(text: str) -> bool:
    characters = text.strip()
    return bool(characters) and all(unicodedata.category(c).startswith("P") for c in characters)


def require_token_ids(argument: str, ids: object) -> None:
    """Raise unless `ids` are `TokenIds`, or None."""
    if ids is None:
        return
    remedy = "pass a tuple such as (1, 2), or leave it to with_tokenizer"
    if not isinstance(ids, tuple):
        raise InvalidTypeError(
            f"{argument}: expected token ids, got {ids!r} of type {type(ids).__name__}; {remedy}"
        )
    for entry in ids:
        for index in entry if isinstance(entry, tuple) and entry else (entry,):
            if isinstance(index, bool) or not isinstance(index, int):
                raise InvalidTypeError(
                    f"{argument}: expected token ids, got {entry!r} among them; {remedy}"
                )
            if index < 0:
                raise InvalidArgumentError(
                    f"{argument}: expected ids of at least 0, got {index}; {remedy}"
                )


def found(token_ids: Tensor, wanted: TokenIds) -> Tensor:
    """Which tokens are among the wanted ones: (B, N) bool.

    A marker of several tokens is found where they follow each other.

    Args:
        token_ids: (B, N) int64.
        wanted: what to look for.
    """
    singles, markers = _split(wanted, token_ids.device)
    matches = torch.isin(token_ids, singles)
    for marker in markers:
        starts = token_ids.shape[1] - len(marker) + 1
        if starts < 1:
            continue
        run = token_ids.unfold(1, len(marker), 1) == torch.tensor(marker, device=token_ids.device)
        for offset in range(len(marker)):
            matches[:, offset : offset + starts] |= run.all(dim=-1)
    return matches


@functools.lru_cache(maxsize=8)
def _split(wanted: TokenIds, device: torch.device) -> tuple[Tensor, list[tuple[int, ...]]]:
    """The wanted tokens that are no markers of several, (N,) int64, and the markers."""
    singles = [entry for entry in wanted if isinstance(entry, int)]
    markers = [entry for entry in wanted if isinstance(entry, tuple)]
    return torch.tensor(singles, dtype=torch.int64, device=device), markers
