"""FastGen (Ge et al., ICLR 2024): every head keeps the kinds of tokens that it attends to."""

import functools
import math
import unicodedata
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from snapkv import ops
from snapkv.errors import InvalidTypeError, wrong
from snapkv.policies.base import ALL_QUERIES, EvictingPolicy, Need
from snapkv.policies.spans import Spans
from snapkv.policies.states import DecodeStep, Eviction, LayerStates, PromptLayer, Selection
from snapkv.validation import require_ratio

SPECIAL, PUNCTUATION, FREQUENT, LOCAL, FULL = range(5)
"""What a head keeps; each choice includes the ones before it, and `FULL` is everything."""

TokenIds = tuple[int | tuple[int, ...], ...]
"""Token ids. A marker that is several tokens, such as "[INST]", is a tuple of their ids."""


@dataclass(frozen=True)
class FastGen(EvictingPolicy):
    """Finds out which kinds of tokens each head attends to, and keeps only these kinds.

    Each head takes the first of these choices that recovers its attention over the prompt, and
    keeps it during decoding (Sec. 3): special tokens; punctuation too; the tokens that received
    most attention too; the most recent tokens too; everything. The recovered attention is the
    attention to the tokens that would be kept, averaged over the prompt's queries. So heads keep
    different numbers of tokens, and there is no budget: `recovery` decides.

    The paper leaves some choices open. It does not define its norm of the difference between two
    attention maps; this is half of the absolute one, by which a row with mass s on what is kept
    differs by 1 - s. The most attended tokens are chosen among those that are not special or
    punctuation, by plain sums. `local_ratio` counts from the prompt, `frequent_ratio` from all
    tokens so far, both at least one token. The heads that share a KV head decide together, by their
    mean; the paper has no such groups. The policy treats generated tokens like any other: a token
    attends to itself, and is then kept if its head keeps its kind; dropped tokens never return. So
    a head of special tokens keeps no generated words, and long answers may suffer. The code that
    the authors point to always keeps four first tokens more, ranks by sums per query that could see
    the token, and stores a full cache with a mask.

    Args:
        recovery: T, the attention to recover, in (0, 1]; 1 keeps everything. The paper uses 0.91 to
            0.98.
        local_ratio: recent tokens, as a fraction of the prompt, in (0, 1].
        frequent_ratio: most attended tokens, as a fraction of all tokens so far, in (0, 1].
        special_ids: ids of the special tokens; a chat marker of several tokens is a tuple of its
            ids. By default all tokens that the tokenizer calls special, see `with_tokenizer`.
        punctuation_ids: ids of the punctuation; by default all tokens that hold nothing else.

    Raises:
        InvalidTypeError: a value has the wrong type.
        InvalidArgumentError: a ratio is out of range, or a token id is negative.
    """

    name: ClassVar[str] = "fastgen"
    per_head_budget: ClassVar[bool] = True
    query_tokens: ClassVar[int] = ALL_QUERIES
    max_decode_tokens: ClassVar[None] = None

    recovery: float = 0.95
    _: KW_ONLY
    local_ratio: float = 0.3
    frequent_ratio: float = 0.3
    special_ids: TokenIds | None = field(default=None, repr=False)
    punctuation_ids: TokenIds | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("recovery", "local_ratio", "frequent_ratio"):
            require_ratio(name, getattr(self, name))
        for name in ("special_ids", "punctuation_ids"):
            require_token_ids(name, getattr(self, name))

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """Return a copy that knows the special tokens and the punctuation of `tokenizer`.

        Ids that the user has passed are not replaced. Finding the punctuation decodes every token
        of the vocabulary, which takes some time.
        """
        special, punctuation = self.special_ids, self.punctuation_ids
        return replace(
            self,
            special_ids=special_tokens(tokenizer) if special is None else special,
            punctuation_ids=punctuation_tokens(tokenizer) if punctuation is None else punctuation,
        )

    def describe(self) -> dict[str, Any]:
        """Return the name and the parameters as JSON values.

        Token ids are replaced by their number; None stays None.
        """
        described = super().describe()
        for name in ("special_ids", "punctuation_ids"):
            described[name] = None if described[name] is None else len(described[name])
        return described

    @property
    def needs(self) -> frozenset[Need]:
        """The names of the token ids, and of a tokenizer unless both kinds of ids were passed."""
        known = self.special_ids is not None and self.punctuation_ids is not None
        return frozenset({"token_ids"} if known else {"token_ids", "tokenizer"})

    def require_protection(self, spans: Spans) -> None:
        """Accept any spans, because there is no budget that they could exceed."""

    def select(self, layer: PromptLayer) -> Selection:
        """Decide which kinds of tokens each head keeps, and select these tokens.

        This waits for a GPU. The layer must have token ids, and the policy its special tokens and
        punctuation.

        Returns:
            The selection, with the scores and with the choice of each head in `head_notes`. If
            every head chose `FULL`, it has neither, and `evict` keeps everything, too.
        """
        if self.recovery == 1:
            return Selection.keep_all(layer)
        tokens = layer.row_tokens
        local_tokens = _part_of(tokens, self.local_ratio)
        received, from_afar = (
            ops.reduce_group(attention, layer.num_kv_heads, "mean")
            for attention in ops.attention_received_by_distance(layer, local_tokens)
        )
        columns = torch.arange(received.shape[-1], device=received.device).expand_as(received)
        columns = columns.masked_fill(columns < _pads(layer), -1)
        kinds = self._kinds(layer.token_ids)
        choice = self._profile(layer, received, from_afar, columns, kinds)
        if bool((choice == FULL).all()):
            return Selection.keep_all(layer)
        notes = torch.stack([choice, local_tokens[:, None].expand_as(choice)], dim=-1)
        scores = received.masked_fill(_of_kept_kinds(choice, *kinds), float("inf"))
        if layer.protected is not None:
            scores = scores.masked_fill(layer.protected, float("inf"))
        kept = self._kept(scores, columns, columns.shape[-1], tokens, notes)
        # A latent is stored once for all heads, so they all keep the same number of tokens.
        own = layer.stored_heads is None
        return Selection.of_mask(kept, per_head_budget=own, scores=scores, head_notes=notes)

    def evict(self, step: DecodeStep) -> Eviction:
        """Select the slots that each head keeps after a decode step.

        Every head keeps the kinds of tokens that it chose at the end of the prompt. The attention
        of this step is added to the scores. This waits for a GPU.

        Returns:
            The slots to keep and their scores; all slots if no choices were stored.
        """
        if step.head_notes is None:
            return Eviction()
        assert step.scores is not None
        received = ops.attention_to_stored(step, step.columns, step.seen_tokens)
        scores = step.scores + ops.reduce_group(received, step.num_kv_heads, "mean")
        kinds = self._kinds(step.token_ids)
        new = scores[..., -kinds[0].shape[-1] :]
        new.masked_fill_(_of_kept_kinds(step.head_notes[..., 0], *kinds), float("inf"))
        if step.protected is not None:
            scores = scores.masked_fill(step.protected, float("inf"))
        columns = step.columns.masked_fill(step.columns < _pads(step), -1)
        tokens = step.seen_tokens - _pads(step)[:, 0, 0]
        kept = self._kept(scores, columns, step.seen_tokens, tokens, step.head_notes)
        return Eviction.of_mask(kept, scores=scores)

    def _kinds(self, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return which tokens are special tokens and which are punctuation.

        Args:
            token_ids: (B, N) int64; None is not allowed.

        Returns:
            Two (B, N) bool tensors.
        """
        assert token_ids is not None
        assert self.special_ids is not None
        assert self.punctuation_ids is not None
        return found(token_ids, self.special_ids), found(token_ids, self.punctuation_ids)

    def _profile(
        self,
        layer: PromptLayer,
        received: Tensor,
        from_afar: Tensor,
        columns: Tensor,
        kinds: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return the first choice of each head that recovers enough attention.

        Two sums per token are enough, so the (queries x keys) matrix is never held: the attention
        that a token received, and the part of it from queries for which the token is not recent.
        The lost attention is counted rather than the recovered, so that `FULL` loses nothing to
        rounding, and attention that goes to no token at all (learned sinks) counts as recovered.

        Args:
            layer: the layer at the end of the prompt.
            received: (B, H, T) float32, attention that every token received.
            from_afar: (B, H, T) float32, the part of it from queries for which the token is not
                recent.
            columns: (B, H, T) int64, -1 for padding.
            kinds: which tokens are special and which are punctuation, both (B, T) bool.

        Returns:
            (B, H) int64, from `SPECIAL` to `FULL`.
        """
        tokens = layer.row_tokens
        special, punctuation = (kind[:, None] for kind in kinds)
        marked = special | punctuation
        frequent = marked | self._frequent(received, (columns >= 0) & ~marked, tokens)
        lost = [received.masked_fill(kept, 0.0) for kept in (special, marked, frequent)]
        lost.append(from_afar.masked_fill(frequent, 0.0))
        recovered = 1 - torch.stack(lost, dim=-1).sum(dim=2) / tokens[:, None, None]
        enough = torch.nn.functional.pad(recovered >= self.recovery, (0, 1), value=True)
        return enough.long().argmax(dim=-1)

    def _frequent(self, received: Tensor, candidates: Tensor, tokens: Tensor) -> Tensor:
        """Return a mask of the candidates that received the most attention.

        Their number is `frequent_ratio` of `tokens`, or that of all candidates if there are fewer.
        This waits for a GPU.

        Args:
            received: (B, H, S) float32, which stays unchanged.
            candidates: (B, H, S) bool.
            tokens: (B,) int64, tokens of each row so far.

        Returns:
            (B, H, S) bool.
        """
        wanted = _part_of(tokens, self.frequent_ratio).expand(len(received)).tolist()
        return candidates & ops.mask_best(received.masked_fill(~candidates, -math.inf), wanted)

    def _kept(
        self, scores: Tensor, columns: Tensor, seen_tokens: int, tokens: Tensor, notes: Tensor
    ) -> Tensor:
        """Return a mask of the slots that each head keeps.

        This waits for a GPU.

        Args:
            scores: (B, H, S) float32, infinite if a token is protected or of a kind that its head
                keeps.
            columns: (B, H, S) int64, -1 if a slot holds no token.
            seen_tokens: columns so far, padding included.
            tokens: (B,) int64, tokens so far without padding.
            notes: (B, H, 2) int64, every head's choice and its number of recent tokens.

        Returns:
            (B, H, S) bool.
        """
        choice, local_tokens = notes.unsqueeze(-2).unbind(dim=-1)
        real, marked = columns >= 0, scores.isinf()
        frequent = self._frequent(scores, real & ~marked, tokens)
        recent = columns >= seen_tokens - local_tokens
        return real & (marked | (frequent & (choice >= FREQUENT)) | (recent & (choice >= LOCAL)))


def _of_kept_kinds(choice: Tensor, special: Tensor, punctuation: Tensor) -> Tensor:
    """Return a mask of the tokens that each head keeps because of their kind.

    Args:
        choice: (B, H) int64, the choice of each head. With `FULL` every token is kept.
        special: (B, N) bool, which tokens are special tokens.
        punctuation: (B, N) bool, which tokens are punctuation.

    Returns:
        (B, H, N) bool.
    """
    choice = choice[..., None]
    return special[:, None] | (punctuation[:, None] & (choice >= PUNCTUATION)) | (choice == FULL)


def _part_of(tokens: Tensor, ratio: float) -> Tensor:
    """Return a fraction of the number of tokens, rounded down, but at least 1.

    Args:
        tokens: (B,) integers.
        ratio: the fraction.

    Returns:
        (B,) int64.
    """
    return (tokens.double() * ratio + 1e-9).floor().long().clamp(min=1)


def _pads(states: LayerStates) -> Tensor:
    """Return the number of padding tokens at the start of each row of the prompt.

    Returns:
        (B, 1, 1) int64; (1, 1, 1) with 0 if no row has any.
    """
    if states.pad_tokens is None:
        return torch.zeros(1, 1, 1, dtype=torch.int64, device=states.keys.device)
    return states.pad_tokens[:, None, None]


def special_tokens(tokenizer: Any) -> TokenIds:
    """Return the ids of all special tokens of a tokenizer, including chat markers.

    Returns:
        Ascending ids, each of them once.
    """
    added = tokenizer.added_tokens_decoder.items()
    marked = {index for index, token in added if token.special}
    return tuple(sorted(marked | set(tokenizer.all_special_ids)))


def punctuation_tokens(tokenizer: Any) -> TokenIds:
    """Return the ids of all tokens that consist of punctuation, with or without white space.

    A character is punctuation if its Unicode category begins with "P". Every id of the vocabulary
    is decoded, so variants with a space and single bytes are included. Special tokens are left out.

    Returns:
        Ascending ids, each of them once.
    """
    special = set(special_tokens(tokenizer))
    ids = sorted(set(tokenizer.get_vocab().values()) - special)
    return tuple(index for index in ids if _is_punctuation(tokenizer.decode([index])))


def _is_punctuation(text: str) -> bool:
    characters = text.strip()
    return bool(characters) and all(unicodedata.category(c).startswith("P") for c in characters)


def require_token_ids(argument: str, ids: object) -> None:
    """Raise unless `ids` is None or a tuple of token ids, as `TokenIds` describes it.

    Raises:
        InvalidTypeError: `ids` is not a tuple, or contains something that is neither a token id nor
            a tuple of token ids. An empty tuple inside `ids` is refused, too.
        InvalidArgumentError: a token id is negative.
    """
    if ids is None:
        return
    remedy = "Use a tuple such as (1, 2), or call with_tokenizer to set the token ids"
    if not isinstance(ids, tuple):
        problem = f"expected a tuple of token ids, but got {ids!r} of type {type(ids).__name__}"
        raise wrong(argument, problem, remedy, InvalidTypeError)
    for entry in ids:
        for index in entry if isinstance(entry, tuple) and entry else (entry,):
            if isinstance(index, bool) or not isinstance(index, int):
                problem = f"expected a tuple of token ids, but got one that contains {entry!r}"
                raise wrong(argument, problem, remedy, InvalidTypeError)
            if index < 0:
                raise wrong(argument, f"expected token ids of at least 0, but got {index}", remedy)


def found(token_ids: Tensor, wanted: TokenIds) -> Tensor:
    """Return a mask of the tokens that are in `wanted`.

    All tokens of a marker are included if they follow each other within `token_ids`. A marker that
    was read only in part is not found.

    Args:
        token_ids: (B, N) int64.
        wanted: ids and markers to look for.

    Returns:
        (B, N) bool.
    """
    singles, markers = _split(wanted, token_ids.device)
    matches = singles[torch.searchsorted(singles, token_ids.contiguous())] == token_ids
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
    """Split `wanted` into single tokens and markers of several tokens.

    The result is cached, so it must not be changed.

    Returns:
        The ascending ids of the single tokens and one number above all of them, (N,) int64; and the
        markers.
    """
    singles = [entry for entry in wanted if isinstance(entry, int)]
    markers = [entry for entry in wanted if isinstance(entry, tuple)]
    above = torch.iinfo(torch.int64).max
    return torch.tensor([*sorted(singles), above], device=device), markers
