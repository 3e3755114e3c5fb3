"""What a cache kept of the text that it has read, as a page."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.prompt_state import PromptState
from snapkv.cache.report import CacheReport
from snapkv.errors import CacheMismatchError, InvalidArgumentError, InvalidTypeError
from snapkv.page import Page, Shown, Stop
from snapkv.page.words import kept_sentence

_NOT_KNOWN = (
    "A cache knows neither who voted nor the full cache's answer; snapkv inspect shows both."
)
_HALF_A_CHARACTER = "\ufffd"


def page_of(
    state: PromptState, report: CacheReport, tokenizer: Any, input_ids: Tensor | None
) -> Page:
    """The page of `CompressedCache.show`."""
    if not hasattr(tokenizer, "decode"):
        raise InvalidTypeError(
            f"tokenizer: expected that of the model, got {tokenizer!r}; pass the tokenizer that "
            "made the input_ids"
        )
    _require_ended(state)
    slots = state.layers[0].slots
    pads = 0 if slots.pads is None else int(slots.pads)
    ids = _ids_read(state, input_ids)[pads:].tolist()
    prompt_tokens = slots.chosen_at - pads
    counts, heads = kept_counts(state.layers, len(ids))
    answer = {"text": tokenizer.decode(ids[prompt_tokens:], skip_special_tokens=True)}
    stop = Stop(
        label="",
        sentences=(kept_of(report, counts[:prompt_tokens], heads), _NOT_KNOWN),
        counts=counts,
        heads=heads,
        answer=answer if answer["text"] else None,
    )
    return Page(
        title="What the cache kept",
        question="",
        pieces=token_texts(tokenizer, ids),
        methods=[Shown(label=state.policy.name, stops=[stop], unvoted="")],
        request={"policy": state.policy.describe()},
    )


def kept_of(report: CacheReport, counts: Tensor, heads: int) -> str:
    """How much a cache keeps of its prompt, in words; see `kept_counts`."""
    kept = counts.sum().item() / heads
    sizes = report.held_bytes, report.full_bytes
    return kept_sentence(kept, len(counts), report["later_tokens"], *sizes)


def kept_counts(layers: Sequence[CompressedLayer], tokens: int) -> tuple[Tensor, int]:
    """How many heads of all layers keep each of the first tokens of a cache with one row.

    Returns:
        (tokens,) int64 in main memory, and the number of heads.
    """
    counts, heads = torch.zeros(tokens, dtype=torch.int64), 0
    for layer in layers:
        positions = layer.stored_positions()[0].cpu()
        heads += len(positions)
        counts += torch.bincount(
            positions[(positions >= 0) & (positions < tokens)], minlength=tokens
        )
    return counts, heads


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One text per token: what it adds to the one before it, as that may decide its space.

    If several tokens make one character, the last one has it and the others are empty.
    """
    decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    texts, begin, end = [], 0, 0
    for place in range(1, len(ids) + 1):
        before, whole = (decode(ids[begin:to]) for to in (end, place))
        is_half = whole.endswith(_HALF_A_CHARACTER) and place < len(ids) and place - end < 4
        texts.append("" if is_half else whole[len(before) :])
        if not is_half:
            begin, end = end, place
    return texts


def _require_ended(state: PromptState) -> None:
    """Refuse a cache that has chosen nothing of a single text yet."""
    slots, rows = state.layers[0].slots, state.rows
    if rows > 1:
        raise InvalidArgumentError(
            f"cache: expected one row to show, got {rows}; pick one from a copy: row = "
            "copy.copy(cache); row.batch_select_indices(torch.tensor([0]))"
        )
    if not rows or not slots.chosen_at:
        raise CacheMismatchError(
            f"cache: expected one that has read a prompt to its end, got one that has seen "
            f"{state.seen_tokens:,} tokens of it; pass it to model.generate first"
        )
    if slots.removed_spans is not None:
        raise CacheMismatchError(
            "cache: expected one that was told to drop nothing, whose text is whole, got one with "
            "dropped spans; show it before drop"
        )


def _ids_read(state: PromptState, given: Tensor | None) -> Tensor:
    """(seen,) ids of what a cache of one row has read: the given ones, or those it was told."""
    read, seen = state.read_ids, state.seen_tokens
    if given is None:
        told = read.from_the_first()
        if told.shape[1] < seen:
            raise InvalidArgumentError(
                f"input_ids: expected the ids of all {seen:,} tokens, which only generate tells a "
                f"cache, got those of the first {told.shape[1]:,}; pass input_ids"
            )
        return told[0, :seen]
    if not isinstance(given, Tensor) or given.is_floating_point() or given.ndim not in (1, 2):
        raise InvalidTypeError(
            f"input_ids: expected (1, tokens) integers, got {type(given).__name__}; pass what the "
            "model has read, or what generate returned"
        )
    ids = given.view(1, -1) if given.ndim == 1 else given
    if len(ids) != 1 or ids.shape[1] < seen:
        raise InvalidArgumentError(
            f"input_ids: expected one row of at least the {seen:,} tokens that the cache has seen, "
            f"got {tuple(given.shape)}; pass what the model has read, or what generate returned"
        )
    read.require(0, ids, seen, None)
    return ids[0, :seen]
