"""The page that shows which tokens of a text a cache has kept."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.prompt_state import PromptState
from snapkv.cache.report import CacheReport
from snapkv.errors import CacheMismatchError, InvalidTypeError, wrong
from snapkv.page import Page, Shown, Stop
from snapkv.page.words import kept_sentence

_NOT_KNOWN = (
    "A cache knows neither who voted nor the full cache's answer; snapkv inspect shows both."
)
_INCOMPLETE_CHARACTER = "\ufffd"


def page_of(
    state: PromptState, report: CacheReport, tokenizer: Any, input_ids: Tensor | None
) -> Page:
    """Build the page that `CompressedCache.show` returns.

    Args:
        state: the state of the cache, which must have a single row.
        report: the report of the cache.
        tokenizer: the tokenizer of the model.
        input_ids: (1, N) or (N,) integers, the ids that the cache has read; None if `generate` has
            read all of them.

    Raises:
        InvalidTypeError: `tokenizer` is no tokenizer, or `input_ids` is not a tensor of integers.
        InvalidArgumentError: the cache has several rows, or `input_ids` are missing, too few, or
            have several rows.
        CacheMismatchError: the prompt was not read to its end, spans of it were dropped, or the
            cache has read other ids.
    """
    if not hasattr(tokenizer, "decode"):
        raise wrong(
            "tokenizer",
            f"expected the tokenizer of the model, but got {tokenizer!r}",
            "Pass the tokenizer that made the input_ids",
            InvalidTypeError,
        )
    _require_showable(state)
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
    """Return a sentence that says how much of its prompt a cache keeps.

    Args:
        report: the report of the cache.
        counts: (tokens,) int64, how many heads keep each token of the prompt.
        heads: how many heads all layers have together.
    """
    kept = counts.sum().item() / heads
    sizes = report.held_bytes, report.full_bytes
    return kept_sentence(kept, len(counts), report["later_tokens"], *sizes)


def kept_counts(layers: Sequence[CompressedLayer], tokens: int) -> tuple[Tensor, int]:
    """Count how many heads keep each of the first `tokens` tokens, in a cache with one row.

    Returns:
        (tokens,) int64 on the CPU, and how many heads all layers have together.
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
    """Return the text that each token adds to the tokens before it.

    A token is decoded together with the previous one, which may decide about the space between
    them. If several tokens make up one character, it is the text of the last one, and the others
    have an empty text.
    """
    decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    texts, begin, end = [], 0, 0
    for place in range(1, len(ids) + 1):
        before, whole = (decode(ids[begin:to]) for to in (end, place))
        is_half = whole.endswith(_INCOMPLETE_CHARACTER) and place < len(ids) and place - end < 4
        texts.append("" if is_half else whole[len(before) :])
        if not is_half:
            begin, end = end, place
    return texts


def _require_showable(state: PromptState) -> None:
    """Raise if a page cannot show which tokens the cache keeps.

    Raises:
        InvalidArgumentError: the cache has several rows.
        CacheMismatchError: the prompt was not read to its end, or spans of it were dropped.
    """
    slots, rows = state.layers[0].slots, state.rows
    if rows > 1:
        raise wrong(
            "cache",
            f"only one row of the batch can be shown, but got {rows} rows",
            "Select one row in a copy of the cache: row = copy.copy(cache); "
            "row.batch_select_indices(torch.tensor([0]))",
        )
    if not rows or not slots.chosen_at:
        raise wrong(
            "cache",
            f"the cache has not read a whole prompt yet, but only {state.seen_tokens:,} tokens of "
            "it",
            "Pass the cache to model.generate first",
            CacheMismatchError,
        )
    if slots.removed_spans is not None:
        raise wrong(
            "cache",
            "the text cannot be shown, because some spans of it have been dropped",
            "Call cache.show() before you call cache.drop()",
            CacheMismatchError,
        )


def _ids_read(state: PromptState, given: Tensor | None) -> Tensor:
    """Return the ids of all tokens that a cache with one row has read.

    Args:
        state: the state of the cache.
        given: (1, N) or (N,) integers, the ids that the user has passed; None to use the ids that
            the cache knows.

    Returns:
        (seen,) integers.

    Raises:
        InvalidTypeError: `given` is not a tensor of integers with one or two axes.
        InvalidArgumentError: the cache does not know all ids, or `given` has too few tokens or
            several rows.
        CacheMismatchError: the cache has read other ids than `given`.
    """
    read, seen = state.read_ids, state.seen_tokens
    if given is None:
        known = read.known_from_start()
        if known.shape[1] < seen:
            raise wrong(
                "input_ids",
                f"the cache only knows the ids of the first {known.shape[1]:,} of its {seen:,} "
                "tokens, because it only receives the ids from model.generate",
                "Pass the ids of all tokens as input_ids",
            )
        return known[0, :seen]
    remedy = "Pass the token ids that the model has read, or the ids that model.generate returned"
    if not isinstance(given, Tensor) or given.is_floating_point() or given.ndim not in (1, 2):
        problem = f"expected a (1, tokens) tensor of integers, but got {type(given).__name__}"
        raise wrong("input_ids", problem, remedy, InvalidTypeError)
    ids = given.view(1, -1) if given.ndim == 1 else given
    if len(ids) != 1 or ids.shape[1] < seen:
        raise wrong(
            "input_ids",
            f"expected one row of at least the {seen:,} tokens that the cache has seen, but got a "
            f"tensor of shape {tuple(given.shape)}",
            remedy,
        )
    read.require(0, ids, seen, None)
    return ids[0, :seen]
