"""What a cache knows about the text that it reads: where the prompt ends, its ids, its padding."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from snapkv.cache.chooser import Chooser
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.read_ids import ReadIds
from snapkv.cache.recall import offload_all, schedule_recall
from snapkv.errors import (
    CacheMismatchError,
    InvalidTypeError,
    SnapKVError,
    UnsupportedModelError,
    wrong,
)
from snapkv.policies import EvictingPolicy, Policy
from snapkv.validation import require_int


def one_reading_refusal(policy: Policy, remedy: str) -> SnapKVError:
    """Build the error for a policy that must read a text twice, where it is read only once.

    Args:
        policy: the policy.
        remedy: what to do instead, as for `snapkv.errors.wrong`.

    Returns:
        An InvalidArgumentError, which the caller raises.
    """
    return wrong(
        "policy",
        f"{policy.name} cannot be used for a prompt that is read only once, because it selects "
        "tokens after a second reading of the text",
        remedy,
    )


@dataclass(eq=False)
class PaddingTracker:
    """Checks the padding in the attention masks of a cache's forward passes.

    Padding is only allowed in front of a row. So a batch whose later turns or answers have
    different lengths is refused before anything is read.

    Attributes:
        layers: the compressed layers.
        masked_to: how many tokens will have been seen after the forward pass for which the last
            mask was made; None before the first one.
        has_states: whether the model has layers with a recurrent state.
    """

    layers: Sequence[CompressedLayer]
    masked_to: int | None = None
    has_states: bool = False

    def expect(self, visible: Tensor | None, new_tokens: int) -> Tensor | None:
        """Check the padding mask of a forward pass, and return the mask to use.

        Args:
            visible: (B, seen + new) bool, False for padding, as the model received it; None if
                there is no padding.
            new_tokens: how many tokens the forward pass reads.

        Returns:
            (B, seen + new) bool in which the padding of earlier tokens is filled in, or None if
            nothing is hidden.

        Raises:
            UnsupportedModelError: a row has padding after its first token, the mask does not
                cover all tokens, or a single padding token would be read into a recurrent state.
        """
        layer = self.layers[0]
        if not layer.store.has_room:
            self.masked_to = layer.seen_tokens + new_tokens
        if new_tokens == 1 and visible is not None:
            self.require_token(visible[:, : layer.seen_tokens + 1][:, -1])
        if not layer.slots.chosen_at or (visible is None and layer.slots.pads is None):
            return visible
        total = layer.seen_tokens + new_tokens
        keys = layer.keys
        known = layer.slots.visible_columns(total, len(keys), keys.device)
        if visible is None:
            return known
        if len(visible) != len(known):
            return visible
        visible = _full_mask(visible, total)[:, :total]
        _, offset = layer.get_mask_sizes(new_tokens)
        rows = (known & ~visible).any(dim=-1).sum()
        hidden_rows, hides_nothing = torch.stack([rows, known[:, offset:].all()]).tolist()
        if hidden_rows:
            raise wrong(
                "attention_mask",
                f"{hidden_rows} of {len(visible)} rows have padding after their first token, "
                "because a turn or an answer is shorter than the others in the batch",
                "Use a separate cache for each conversation, or pass attention_mask if the text "
                "itself contains the pad token",
                UnsupportedModelError,
            )
        return None if hides_nothing else known  # what was padding before stays hidden

    def require_token(self, visible: Tensor | None) -> None:
        """Raise if a single padding token would be read into a recurrent state.

        transformers hides padding from a recurrent state only if several tokens are read at once.
        Nothing is refused if no layer has a recurrent state, or after the first prompt has ended.

        Args:
            visible: bool of any shape, False for padding: for the token of each row, or for all
                tokens that are read one by one. None for no padding.

        Raises:
            UnsupportedModelError: `visible` contains padding.
        """
        in_first = self.has_states and not self.layers[0].slots.chosen_at
        if in_first and visible is not None and not bool(visible.all()):
            raise wrong(
                "attention_mask",
                "a single padding token would be read into the recurrent state of a layer, which "
                "can only ignore padding if several tokens are read at once",
                "Read the prompt in larger pieces",
                UnsupportedModelError,
            )


def _full_mask(visible: Tensor, total: int) -> Tensor:
    """Extend a mask that hides nothing to `total` columns.

    A mask that is long enough is returned unchanged.

    Args:
        visible: (B, S) bool.
        total: how many columns the mask needs.

    Returns:
        (B, at least `total`) bool.

    Raises:
        UnsupportedModelError: the mask is too short, and it hides something.
    """
    # transformers 5.17 makes masks that are too short when it reads a later prompt in pieces.
    if visible.shape[1] >= total:
        return visible
    if not bool(visible.all()):
        raise wrong(
            "attention_mask",
            f"expected one column for each of the {total:,} tokens, including the earlier ones, "
            f"but got {visible.shape[1]:,} columns",
            "Pass the mask of the whole conversation",
            UnsupportedModelError,
        )
    return visible.new_ones(len(visible), total)


def _rows_without_eviction(layer: CompressedLayer) -> Tensor:
    """Return a mask of the rows that still hold all their tokens in a compressed layer.

    Returns:
        (B,) bool on the CPU.
    """
    slots = layer.slots
    # If all rows hold the same number of tokens, every row has evicted some. This needs no number
    # from the device.
    if slots.pads is None and slots.padding_slots is None and layer.store.ragged is None:
        return torch.zeros(len(layer.keys), dtype=torch.bool)
    return slots.rows_without_evictions().cpu()


@dataclass(kw_only=True)
class PromptState:
    """What a cache knows about the prompt or turn that it is reading.

    The wrapped attention depends on this class and not on the cache.

    Attributes:
        layers: the compressed layers.
        prompt_end: how many tokens there are up to the end of the prompt or turn; None until it is
            known.
        turn_start: how many tokens there are before the prompt or turn.
        question_tokens: the length of the next question, as set by `expect_question`; None if it
            is not known.
        is_piecewise: whether the layers read the prompt one after the other, each in pieces.
        verifies_drafts: whether a forward pass may contain draft tokens.
        coming_ids: the announced ids of the next tokens, after the number of tokens that come
            before them; None if no ids were announced.
        read_ids: the ids of the tokens that `generate` has read.
        ids_start: how many columns there are before the ids that `generate` continues; None while
            it reads a prompt, whose ids may come in pieces.
        is_broken: whether the attention of a layer was interrupted, so that the layers may have
            seen different numbers of tokens.
        thread: identifier of the thread that began the last forward pass; None before the first.
        chooser: decides when the layers choose what they keep of the prompt.
        looks_at_tokens: whether the policy needs the ids of all tokens.
        forward_pass: the `snapkv.hf.forward_context.Pass` that the first layer has begun; None
            before the first one, and after tokens were taken back.
    """

    layers: Sequence[CompressedLayer]
    prompt_end: int | None = None
    turn_start: int = 0
    question_tokens: int | None = None
    is_piecewise: bool = False
    verifies_drafts: bool = False
    coming_ids: tuple[int, Tensor] | None = None
    read_ids: ReadIds = field(default_factory=ReadIds)
    ids_start: int | None = 0
    is_broken: bool = False
    thread: int | None = None
    chooser: Chooser = field(default_factory=Chooser)
    forward_pass: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.looks_at_tokens = "token_ids" in self.policy.needs

    @property
    def policy(self) -> Policy:
        """The policy of the cache, which is the same in all layers."""
        return self.layers[0].policy

    @property
    def seen_tokens(self) -> int:
        """The number of tokens that the first compressed layer has seen."""
        return self.layers[0].seen_tokens

    @property
    def rows(self) -> int:
        """The number of batch rows, which is 0 while the cache is empty."""
        keys = self.layers[0].store.keys
        return 0 if keys is None else len(keys)

    @property
    def is_announced(self) -> bool:
        """Whether a prompt or turn was announced and has not been read to its end."""
        return self.prompt_end is not None and self.seen_tokens < self.prompt_end

    @property
    def is_coming(self) -> bool:
        """Whether the next tokens may belong to a prompt, because its end was not read so far."""
        return self.prompt_end is None or self.is_announced

    def forget(self) -> None:
        """Reset everything to the state of an empty cache."""
        vars(self).update(vars(PromptState(layers=self.layers)))

    def forget_taken_back(self, seen_before: int, *, chooses_again: bool = False) -> None:
        """Forget what was known about tokens that the layers have just removed.

        Args:
            seen_before: how many tokens the layers had seen before.
            chooses_again: whether the next tokens end a prompt whose tokens are all selected from,
                even if the end of the last prompt was not removed.
        """
        self.read_ids = self.read_ids.truncate(self.seen_tokens)
        end = self.prompt_end
        if end is not None and end <= seen_before and (chooses_again or self.seen_tokens < end):
            self.prompt_end = None
        self.forward_pass = None
        schedule_recall(self.layers, is_prompt_next=self.is_coming)

    # Where the prompt ends.

    def end_by(self, seen_tokens: int) -> int:
        """Return how many tokens there are up to the end of the prompt.

        If no end was announced, the prompt ends with the present forward pass: `prompt_end` is set
        to `seen_tokens`.

        Args:
            seen_tokens: how many tokens will have been seen after the present forward pass.

        Raises:
            CacheMismatchError: the end was not announced, and the pass may contain draft tokens.
        """
        if self.prompt_end is None:
            self.require_end()
            self.turn_start, self.prompt_end = self.seen_tokens, seen_tokens
        return self.prompt_end

    def require_prompt(self, new_tokens: int) -> None:
        """Raise if the next forward pass cannot read its part of the prompt correctly.

        Does nothing if the prompt has been read to its end. It is called before any layer changes.

        Args:
            new_tokens: how many tokens the forward pass reads.

        Raises:
            CacheMismatchError: the pass may contain draft tokens while the prompt's end is not
                known, or it contains tokens after the end.
            InvalidArgumentError: the policy cannot select at the prompt's end, or needs queries
                that are not held.
        """
        if self.prompt_end is not None and self.prompt_end <= self.layers[0].seen_tokens:
            return
        self.require_end(new_tokens)
        self.require_choice(new_tokens)
        if self.prompt_end is None:
            self.require_queries(self.seen_tokens + new_tokens)

    def require_end(self, new_tokens: int = 0) -> None:
        """Raise if the next forward pass cannot read the end of the prompt.

        Args:
            new_tokens: how many tokens the forward pass reads; 0 if this is not known.

        Raises:
            CacheMismatchError: the pass may contain draft tokens while the prompt's end is not
                known, or it contains tokens after the end.
        """
        if self.prompt_end is None and self.verifies_drafts:
            raise wrong(
                "cache",
                "it does not know where the prompt ends, and its first forward pass may contain "
                "draft tokens",
                "Call cache.expect_prompt(prompt_tokens) before drafts are verified",
                CacheMismatchError,
            )
        if tokens := self.tokens_behind(new_tokens):
            raise wrong(
                "cache",
                f"the forward pass that ends the prompt contains {tokens:,} tokens after it",
                "Pass these tokens to the model in a separate forward pass",
                CacheMismatchError,
            )

    def tokens_behind(self, new_tokens: int) -> int:
        """Return how many tokens of the next forward pass come after the end of the prompt.

        The result is 0 for a pass that does not end an announced prompt.

        Args:
            new_tokens: how many tokens the forward pass reads.
        """
        if self.prompt_end is None or new_tokens <= 1 or not self.is_announced:
            return 0
        return max(0, self.seen_tokens + new_tokens - self.prompt_end)

    def require_choice(self, new_tokens: int) -> None:
        """Raise if the next forward pass ends a prompt that the policy would have to read twice.

        Args:
            new_tokens: how many tokens the forward pass reads.

        Raises:
            InvalidArgumentError: the policy needs a second reading of the text.
        """
        first, end = self.layers[0], self.prompt_end
        policy = first.policy
        needs_all = "all_layers" in policy.needs and policy.needs_reconstruction_pass
        if not needs_all or first.slots.is_compressed:
            return
        seen = self.seen_tokens
        if end is None or seen < end <= seen + new_tokens:
            remedy = "Use snapkv.kvzip.read_context(model, input_ids, policy) to fill the cache"
            raise one_reading_refusal(policy, remedy)

    def expect_prompt(self, prompt_tokens: int) -> None:
        """Announce how many tokens there are up to the end of the prompt.

        See `CompressedCache.expect_prompt`.

        Raises:
            InvalidArgumentError: `prompt_tokens` is less than 1, or the policy needs queries that
                are not held.
            InvalidTypeError: `prompt_tokens` is not an integer.
            CacheMismatchError: the cache has already seen that many tokens, or only some rows were
                compressed.
        """
        prompt_tokens = require_int("prompt_tokens", prompt_tokens, minimum=1)
        seen = self.seen_tokens
        if prompt_tokens <= seen:
            raise wrong(
                "cache",
                f"expected a prompt longer than the {seen} tokens that the cache has already "
                f"seen, but got {prompt_tokens} tokens",
                "Pass the whole conversation, or call cache.reset() before you start a new one",
                CacheMismatchError,
            )
        self.require_one_choice()
        self.require_queries(prompt_tokens)
        if not self.is_announced:  # otherwise the turn has begun, and only its end changes
            self.turn_start = seen
        self.prompt_end = prompt_tokens
        schedule_recall(self.layers, is_prompt_next=self.is_coming)

    def require_one_choice(self) -> None:
        """Raise if only some rows were compressed, and the tokens of the next turn will be stored.

        The other rows would then select at the end of that turn.

        Raises:
            CacheMismatchError: some rows still hold all their tokens, while others do not.
        """
        first = self.layers[0]
        policy = first.policy
        if (
            first.chooses_again
            or policy.needs_reconstruction_pass
            or isinstance(policy, EvictingPolicy)
        ):
            return
        compressed = [layer for layer in self.layers if layer.slots.is_compressed]
        if not compressed:
            return
        by_layer = torch.stack([_rows_without_eviction(layer) for layer in compressed])
        # A budget for all layers may leave everything in one layer and evict in others.
        is_shared = "all_layers" in policy.needs
        rows = int((by_layer.all(dim=0) if is_shared else by_layer.any(dim=0)).sum())
        if rows:
            raise wrong(
                "cache",
                f"the new turn cannot be stored after the prompt, because {rows} of the "
                f"{self.rows} rows have kept the whole prompt, and the other rows were compressed",
                "Use a separate cache for each conversation, or set recall='host'",
                CacheMismatchError,
            )

    def require_queries(self, prompt_tokens: int) -> None:
        """Raise if the policy needs the queries of earlier turns and the layers do not hold them.

        Args:
            prompt_tokens: how many tokens there are up to the end of the prompt.

        Raises:
            InvalidArgumentError: the policy needs queries that are not held.
        """
        layer = self.layers[0]
        most = layer.policy.most_tokens
        if not self.seen_tokens or "queries" not in layer.policy.needs:
            return
        held = 0 if layer.queries.held is None else layer.queries.held.shape[2]
        if held >= self.seen_tokens:
            return
        choosing = prompt_tokens - layer.slots.removed_tokens
        if layer.slots.kept is None and (most is None or choosing > most):
            raise wrong(
                "policy",
                f"{self.policy.name} needs the queries of earlier turns to compress the "
                f"conversation at {prompt_tokens:,} tokens, but these queries were not kept, "
                "because the earlier turns were small enough for the budget",
                "Read the whole conversation into a new cache, or use a different policy, such as "
                "LagKV or KeyDiff",
            )

    @contextlib.contextmanager
    def announced(self, prompt_tokens: int) -> Iterator[None]:
        """Announce a prompt within this block, and withdraw it if none of it could be read.

        Raises:
            SnapKVError: as `expect_prompt` and `require_arrived` do.
        """
        before, seen = self.prompt_end, self.seen_tokens
        self.expect_prompt(prompt_tokens)
        try:
            yield
            self.require_arrived()
            self.read_ids = self.read_ids.on_host()
        except BaseException:
            self.read_ids = self.read_ids.truncate(self.seen_tokens)
            if self.seen_tokens == seen:
                self.prompt_end = before
                schedule_recall(self.layers, is_prompt_next=self.is_coming)
            raise

    def require_arrived(self) -> None:
        """Raise unless the announced prompt has been read into every layer.

        Raises:
            UnsupportedModelError: the model has not read the whole prompt into the cache.
            CacheMismatchError: a layer did not read the prompt's end, or still waits to choose.
        """
        if self.is_announced:
            raise wrong(
                "model",
                f"the model has read only {self.seen_tokens:,} of the {self.prompt_end:,} tokens "
                "of the prompt into the cache",
                "Use the default cache of transformers for this model",
                UnsupportedModelError,
            )
        self.require_chosen()

    def record_end(self, layer_idx: int) -> None:
        """Record that a layer is reading the end of the prompt or turn.

        Args:
            layer_idx: the index of the layer.

        Raises:
            CacheMismatchError: an earlier layer has not read it, or this layer reads it twice.
        """
        first, *later = self.chooser.unread_layers
        if first != layer_idx:
            unread = self.chooser.unread_layers
            raise self.interrupted([index for index in unread if index < layer_idx])
        self.chooser.unread_layers = tuple(later)

    def require_chosen(self) -> None:
        """Raise if a layer has not yet selected which tokens of the last prompt it keeps.

        Raises:
            CacheMismatchError: a layer did not read the prompt's end, or still waits to choose.
        """
        if self.chooser.unread_layers or self.chooser.group.layers:
            raise self.interrupted(self.chooser.unread_layers)

    def interrupted(self, layers: Sequence[int] = ()) -> SnapKVError:
        """Return the `CacheMismatchError` for a forward pass that some layers have not finished.

        Args:
            layers: indices of the layers that did not attend through snapkv, if they are known.
        """
        if self.thread not in (None, threading.get_ident()):
            return wrong(
                "cache",
                "another thread has begun a forward pass with this cache and not finished it, so "
                "the tokens of both would be mixed",
                "Use a separate CompressedCache for each thread, and call cache.reset() before "
                "this one is used again",
                CacheMismatchError,
            )
        missing = f"layer {', '.join(map(str, layers))}" if layers else "some layer"
        return wrong(
            "cache",
            f"{missing} did not attend through snapkv in the last forward pass, because the pass "
            "was interrupted, or was one of another model or another attention implementation",
            "Call cache.reset(), and make a new CompressedCache for another or a changed model",
            CacheMismatchError,
        )

    # Which tokens come next.

    def expect_tokens(self, token_ids: Tensor) -> None:
        """Announce the token ids of the next forward pass; see `CompressedCache`.

        Args:
            token_ids: (B, N) integers.

        Raises:
            InvalidTypeError: `token_ids` is anything else.
        """
        is_tensor = isinstance(token_ids, Tensor)
        if not is_tensor or token_ids.ndim != 2 or token_ids.is_floating_point():
            got = f"{token_ids!r} of type {type(token_ids).__name__}"
            if is_tensor:
                got = f"a {token_ids.dtype} tensor of shape {tuple(token_ids.shape)}"
            raise wrong(
                "token_ids",
                f"expected a tensor of integers with the shape (batch, tokens), but got {got}",
                "Pass the same input_ids as in the next forward pass",
                InvalidTypeError,
            )
        if self.looks_at_tokens:
            self.coming_ids = (self.seen_tokens, token_ids)

    def expect_text(self, ids: Tensor, end: int, visible: Tensor | None) -> None:
        """Check that a text continues the one that was read, and remember where its ids begin.

        Args:
            ids: (B, N) integers, the last ids of the text.
            end: how many columns the text has.
            visible: (B, end), the attention mask, or None.

        Raises:
            InvalidArgumentError: the mask has fewer columns than the text has tokens.
            CacheMismatchError: the cache has read another text.
        """
        self.ids_start, seen = end - ids.shape[1], self.seen_tokens
        if ids.shape[1] and self.ids_start > seen:
            raise wrong(
                "attention_mask",
                f"expected one column for each of the {seen + ids.shape[1]:,} tokens, but got "
                f"{end:,} columns",
                "Pass the mask that belongs to the input_ids",
            )
        if self.read_ids.parts:
            self.read_ids.require(self.ids_start, ids, seen, visible)

    def record_text(self, ids: Tensor) -> None:
        """Record the ids of the text that `generate` continues.

        Args:
            ids: (B, N) integers, which end with the tokens of the next forward pass.
        """
        if self.ids_start is not None:
            self.read_ids = self.read_ids.replace_from(self.ids_start, ids)

    @contextlib.contextmanager
    def reading_text(self, ids: Tensor) -> Iterator[None]:
        """Record the ids of the text that is read within this block, when the block ends.

        The text may be read in several pieces. After an error, nothing is recorded.

        Args:
            ids: (B, N) integers, which end with the last token that the block reads.
        """
        with self._temporarily(ids_start=None):
            yield
        self.record_text(ids)

    def require_ids(self, tokens: int, rows: int | None) -> None:
        """Raise if the token ids of the next forward pass have not been announced.

        Args:
            tokens: how many tokens are read next.
            rows: how many rows the batch has; None if it is not known yet.

        Raises:
            CacheMismatchError: no ids were announced, or another number of them.
        """
        begin, ids = self.coming_ids or (None, None)
        if ids is None or begin != self.seen_tokens:
            announced = "none"
        elif ids.shape != (len(ids) if rows is None else rows, tokens):
            announced = f"a tensor of shape {tuple(ids.shape)}"
        else:
            return
        raise wrong(
            "token_ids",
            f"{self.policy.name} needs the ids of the next {tokens} tokens of every row, but got "
            f"{announced}",
            "Call cache.expect_tokens(input_ids) before you call model(input_ids, ...), or use "
            "model.generate",
            CacheMismatchError,
        )

    # How the text is read.

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """Mark the cache as broken if the attention of a layer fails within this block."""
        self.is_broken = True
        yield
        self.is_broken = False

    @contextlib.contextmanager
    def _temporarily(self, **states: Any) -> Iterator[None]:
        """Set attributes within this block, and restore their former values afterwards."""
        before = {name: getattr(self, name) for name in states}
        vars(self).update(states)
        try:
            yield
        finally:
            vars(self).update(before)

    def require_pieces(self) -> None:
        """Raise if the policy cannot be used when a prompt is read layer by layer.

        Raises:
            InvalidArgumentError: the policy needs token ids, which are announced for a whole
                forward pass.
        """
        if self.looks_at_tokens:
            raise wrong(
                "policy",
                f"the method {self.policy.name} needs the token ids, so the prompt cannot be read "
                "layer by layer",
                "Set prefill_chunk_size to read the prompt in chunks instead",
            )

    @contextlib.contextmanager
    def in_pieces(self, layer: CompressedLayer, tokens: int) -> Iterator[None]:
        """Let a single layer read its next `tokens` tokens in pieces within this block.

        If the prompt goes on after these tokens, a layer with recall then offloads all its tokens.

        Args:
            layer: the layer, which changes in place.
            tokens: how many tokens the block reads.

        Raises:
            CacheMismatchError: the prompt was not announced, and may contain draft tokens.
            OutOfMemoryError: there is no room for the offloaded tokens.
        """
        end = self.end_by(layer.seen_tokens + tokens)
        with self._temporarily(is_piecewise=True):
            yield
        if layer.seen_tokens < end:
            offload_all(layer)
