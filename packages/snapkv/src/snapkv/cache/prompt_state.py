"""What a cache is told of what it reads: where a prompt ends, how it comes, what its masks hide."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from snapkv import ops
from snapkv.cache.layer import CompressedLayer
from snapkv.cache.layer_group import LayerGroup
from snapkv.cache.read_ids import ReadIds
from snapkv.cache.shared_budget import SharedBudget
from snapkv.errors import (
    CacheMismatchError,
    InvalidArgumentError,
    InvalidTypeError,
    UnsupportedModelError,
)
from snapkv.policies import (
    AcrossLayers,
    EvictingPolicy,
    Policy,
    PromptLayer,
    Selection,
    checks,
)
from snapkv.validation import require_int


def one_reading_refusal(policy: Policy, remedy: str) -> InvalidArgumentError:
    """Of a method that chooses in all layers at once, where each is to choose by itself."""
    return InvalidArgumentError(
        f"policy: expected one that chooses when a layer has read a prompt, got {policy.name}, "
        "which chooses when all of them have read a text, before any question is known; "
        f"{remedy}"
    )


@dataclass(eq=False)
class PaddingTracker:
    """Looks at the masks of a cache's forward passes as they are made.

    Pads stand in front of a row, and nowhere else. Those in front of a prompt are read where it
    ends. A batch whose turns or answers differ in length is refused before anything is read.
    The last mask was made for a pass by whose end `masked_to` tokens have been seen.
    """

    layers: Sequence[CompressedLayer]
    masked_to: int | None = None
    has_states: bool = False

    def expect(self, visible: Tensor | None, new_tokens: int) -> Tensor | None:
        """(B, tokens seen + new) bool, which are no pads, to make masks of; None for all.

        Of the same as the model was given it; pads behind a row's first token are refused.
        """
        layer = self.layers[0]
        if not layer.store.has_room:
            self.masked_to = layer.seen_tokens + new_tokens
        if new_tokens == 1 and visible is not None:
            self.require_token(visible[:, : layer.seen_tokens + 1][:, -1])
        if not layer.slots.chosen_at or (visible is None and layer.slots.pads is None):
            return visible
        total = layer.seen_tokens + new_tokens
        known = layer.slots.visible_columns(layer.store, total)
        if visible is None:
            return known
        if len(visible) != len(known):
            return visible
        visible = _whole(visible, total)[:, :total]
        _, offset = layer.get_mask_sizes(new_tokens)
        rows = (known & ~visible).any(dim=-1).sum()
        hidden_rows, hides_nothing = torch.stack([rows, known[:, offset:].all()]).tolist()
        if hidden_rows:
            raise UnsupportedModelError(
                f"attention_mask: expected no padding after a row's first token, since a row is "
                f"one conversation, got {hidden_rows} of {len(visible)} rows with some (a turn or "
                "an answer shorter than others of the batch); give each conversation a cache of "
                "its own, or pass attention_mask where the text itself has the pad token"
            )
        return None if hides_nothing else known  # a pad stays one

    def require_token(self, visible: Tensor | None) -> None:
        """Refuse a pad that is read alone into a state, which transformers does not hide there."""
        in_first = self.has_states and not self.layers[0].slots.chosen_at
        if in_first and visible is not None and not bool(visible.all()):
            raise UnsupportedModelError(
                "attention_mask: expected several tokens at once where a row has padding and "
                "layers carry a state, which hides none of a single one, got one; read the "
                "prompt in larger pieces"
            )


def _whole(visible: Tensor, total: int) -> Tensor:
    """A mask for all tokens; one that is too short must hide nothing.

    transformers 5.17 makes such masks where a later prompt is read in pieces.
    """
    if visible.shape[1] >= total:
        return visible
    if not bool(visible.all()):
        raise UnsupportedModelError(
            f"attention_mask: expected a column for each of {total:,} tokens, those seen before "
            f"included, got {visible.shape[1]:,}; pass the whole mask"
        )
    return visible.new_ones(len(visible), total)


@dataclass(kw_only=True)
class PromptState:
    """What a cache has been told of the prompt or turn that it reads.

    The wrapped attention depends on this, not on the cache.

    Attributes:
        layers: the compressed ones.
        prompt_end: tokens up to the end of the prompt or of the turn; None until it is known.
        turn_start: tokens before it.
        question_tokens: the length of the question that comes next, as `expect_question` has it;
            None where nobody has said.
        is_piecewise: whether one layer after the other is reading.
        verifies_drafts: whether a forward pass may hold drafts.
        coming_ids: after how many tokens the tokens of which ids come; None while not announced.
        read_ids: what is known of the tokens that were read, by `generate` alone.
        ids_start: columns before the ids that `generate` goes on with; None while it reads a
            prompt, whose ids may come in pieces.
        is_broken: whether a layer's attention has begun and not come to its end.
        thread: identifier of the thread whose forward pass began last; None before the first.
        yet_to_choose: indices of the layers, in order, that have yet to read the end of the prompt
            or turn in this forward pass; those of a pass that is over were missed.
        shared: the budget that the layers of the prompt share whose end is being read, if any.
        group: layers that have read the prompt's end and wait for others to choose with.
        looks_at_tokens: whether the policy is told the ids of all tokens.
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
    yet_to_choose: tuple[int, ...] = ()
    shared: SharedBudget | None = None
    group: LayerGroup = field(default_factory=LayerGroup, init=False)

    def __post_init__(self) -> None:
        self.looks_at_tokens = "token_ids" in self.policy.needs

    @property
    def policy(self) -> Policy:
        """That of all layers."""
        return self.layers[0].policy

    @property
    def seen_tokens(self) -> int:
        return self.layers[0].seen_tokens

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 while empty."""
        layer = self.layers[0]
        return len(layer.keys) if layer.is_initialized else 0

    @property
    def is_announced(self) -> bool:
        """Whether it is known where the prompt or turn that comes next ends."""
        return self.prompt_end is not None and self.seen_tokens < self.prompt_end

    @property
    def is_coming(self) -> bool:
        """Whether what is read next may be a prompt: its end has yet to be read."""
        return self.prompt_end is None or self.is_announced

    def forget(self) -> None:
        """Begin anew: nothing has been read, nothing is announced."""
        vars(self).update(vars(PromptState(layers=self.layers)))

    def crop(self, count: int) -> None:
        """Take the last tokens back from all layers; where one refuses, none has changed."""
        seen = self.seen_tokens
        for layer in self.layers:
            layer.require_croppable(count)
        recalls = any(layer.must_recall(count) for layer in self.layers)
        if recalls:
            for layer in self.layers:
                layer.recall()
        for layer in self.layers:
            layer.take_back(count)
        self.read_ids = self.read_ids.up_to(seen - count)
        if recalls and not self.is_announced:
            self.prompt_end = None  # what was recalled is chosen from again with the next tokens
        self.forget_end_within(seen)

    def forget_end_within(self, seen_tokens: int) -> None:
        """Some of so many tokens were taken back: an end among them is to be announced again."""
        if self.prompt_end is not None and self.seen_tokens < self.prompt_end <= seen_tokens:
            self.prompt_end = None
        self._recall_for_a_turn()

    def end_prompt(
        self, layer: CompressedLayer, prompt: PromptLayer, *, once: bool = False
    ) -> None:
        """Let the policy choose of a prompt that a layer has read, and the layer keep that.

        What is chosen `once` is not chosen from again with what follows, even if nothing was
        dropped.
        """
        self.group.add(layer, prompt)
        self.choose(once=once)

    def choose(self, *, once: bool = False) -> None:
        """Let the policy choose for the layers that wait, and these keep that; as `end_prompt`.

        Of a budget that all layers share, they keep what may be among the best until the last one.
        """
        group, policy = self.group, self.policy
        self.group = LayerGroup()
        if isinstance(policy, AcrossLayers) and policy.shares:
            if self.shared is None or not group.stack.depth:
                self.shared = SharedBudget(policy, group.prompts[0], once=once)
            with ops.scoring(group.stack.keys):
                self.shared.take(group)
            if group.reaches_last:
                self.shared = None
            return
        with ops.scoring(group.stack.keys):
            layers = [prompt.layer_idx for prompt in group.prompts]
            selection = checks.select(policy, group.stack, layers)
            if selection is None and once:
                selection = Selection.keep_all(group.stack)
        group.keep(selection)

    # Where the prompt ends.

    def end_by(self, seen_tokens: int) -> int:
        """Where the prompt ends; without an announcement, with the pass that has seen so many."""
        if self.prompt_end is None:
            self.require_end()
            self.turn_start, self.prompt_end = self.seen_tokens, seen_tokens
        return self.prompt_end

    def require_end(self, new_tokens: int = 0) -> None:
        """Refuse a pass that may hold drafts, or more tokens than the prompt that it ends."""
        if self.prompt_end is None and self.verifies_drafts:
            raise CacheMismatchError(
                "cache: expected to know where the prompt ends before drafts are "
                "verified, got a first forward pass that may hold drafts; call "
                "cache.expect_prompt(prompt_tokens)"
            )
        if tokens := self.tokens_behind(new_tokens):
            raise CacheMismatchError(
                "cache: expected a forward pass to end where the prompt does, got one "
                f"with {tokens:,} tokens after it; read them in a pass of their own"
            )

    def tokens_behind(self, new_tokens: int) -> int:
        """How many of a pass that ends the prompt stand behind it; 0 of any other pass."""
        if self.prompt_end is None or new_tokens <= 1 or not self.is_announced:
            return 0
        return max(0, self.seen_tokens + new_tokens - self.prompt_end)

    def require_choice(self, new_tokens: int) -> None:
        """Refuse a prompt's end at which the method cannot choose, before a layer has changed."""
        first, end = self.layers[0], self.prompt_end
        policy = first.policy
        needs_all = "all_layers" in policy.needs and policy.needs_reconstruction_pass
        if not needs_all or first.slots.is_compressed:
            return
        seen = self.seen_tokens
        if end is None or seen < end <= seen + new_tokens:
            remedy = "fill the cache with snapkv.kvzip.read_context(model, input_ids, policy)"
            raise one_reading_refusal(policy, remedy)

    def expect_prompt(self, prompt_tokens: int) -> None:
        """Announce that the prompt ends after that many tokens; see `CompressedCache`."""
        prompt_tokens = require_int("prompt_tokens", prompt_tokens, minimum=1)
        seen = self.seen_tokens
        if prompt_tokens <= seen:
            raise CacheMismatchError(
                f"cache: expected a prompt longer than the {seen} tokens the cache has "
                f"already seen, got {prompt_tokens} tokens; pass the whole conversation, or call "
                "cache.reset() before another one"
            )
        self.require_one_choice()
        self.require_queries(prompt_tokens)
        if not self.is_announced:  # or the turn has begun, and only its end is another
            self.turn_start = seen
        self.prompt_end = prompt_tokens
        self._recall_for_a_turn()

    def require_one_choice(self) -> None:
        """Refuse a turn behind what was kept, at whose end some rows alone would choose first."""
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
        of_layers = torch.stack([each.slots.whole_rows(each.store) for each in compressed])
        together = "all_layers" in policy.needs  # where one may hold all and others do not
        whole = int((of_layers.all(dim=0) if together else of_layers.any(dim=0)).sum())
        if whole:
            raise CacheMismatchError(
                f"cache: expected rows that were all compressed where a turn is stored "
                f"after them, got {whole} of {self.rows} rows that have kept everything; give "
                "each conversation a cache of its own, or pass recall='host'"
            )

    def require_queries(self, prompt_tokens: int) -> None:
        """Refuse a prompt up to there whose end asks for queries that are not held."""
        layer = self.layers[0]
        most = layer.policy.most_tokens
        if not self.seen_tokens or "queries" not in layer.policy.needs:
            return
        held = 0 if layer.state.last_queries is None else layer.state.last_queries.shape[2]
        if held >= self.seen_tokens:
            return
        choosing = prompt_tokens - layer.slots.removed_tokens
        if layer.slots.kept is None and (most is None or choosing > most):
            raise InvalidArgumentError(
                f"policy: expected one that does not ask for the queries of earlier turns where "
                f"one of them fitted the budget, got {self.policy.name} and a turn up to "
                f"{prompt_tokens:,} tokens; read the conversation into a new cache, or use LagKV "
                "or KeyDiff"
            )

    def _recall_for_a_turn(self) -> None:
        """Read the tokens of a turn over all that was seen, in layers that can recall it."""
        for layer in self.layers:
            if layer.offloaded is not None:
                is_needed = self.is_coming or layer.store.slots == 0
                layer.offloaded.is_due = is_needed and not layer.holds_all

    @contextlib.contextmanager
    def announced(self, prompt_tokens: int) -> Iterator[None]:
        """Announce a prompt, and take the announcement back if nothing of it could be read."""
        before, seen = self.prompt_end, self.seen_tokens
        self.expect_prompt(prompt_tokens)
        try:
            yield
            self.require_arrived()
            self.read_ids = self.read_ids.on_host()
        except BaseException:
            self.read_ids = self.read_ids.up_to(self.seen_tokens)
            if self.seen_tokens == seen:
                self.prompt_end = before
                self._recall_for_a_turn()
            raise

    def require_arrived(self) -> None:
        """Refuse a model whose forward pass has not read the announced prompt into every layer."""
        if self.is_announced:
            raise UnsupportedModelError(
                f"model: expected one that reads a prompt into the cache it is given, got "
                f"{self.seen_tokens:,} of {self.prompt_end:,} tokens in it; use transformers' own "
                "cache for it"
            )
        if self.yet_to_choose:
            raise self.interrupted(self.yet_to_choose)

    def interrupted(self, layers: Sequence[int] = ()) -> CacheMismatchError:
        """Return the error of a forward pass that some layers have not read to its end.

        Args:
            layers: indices of those that did not attend through snapkv, if they are known.
        """
        if self.thread not in (None, threading.get_ident()):
            return CacheMismatchError(
                "cache: another thread has begun a forward pass with this cache and not finished "
                "it, so the tokens of both would be mixed. Give each thread a CompressedCache of "
                "its own, and call cache.reset() before this one is used again"
            )
        of = f", in which layer {', '.join(map(str, layers))} did not attend" if layers else ""
        return CacheMismatchError(
            "cache: expected every layer's attention to run through snapkv, got a forward pass "
            "that was interrupted, of another model, or of another attention implementation"
            f"{of}; call cache.reset(), and make a CompressedCache for each model as it is"
        )

    # Which tokens come.

    def expect_tokens(self, token_ids: Tensor) -> None:
        """Announce the ids of the tokens of the next forward pass; see `CompressedCache`."""
        is_tensor = isinstance(token_ids, Tensor)
        if not is_tensor or token_ids.ndim != 2 or token_ids.is_floating_point():
            got = f"{token_ids!r} of type {type(token_ids).__name__}"
            if is_tensor:
                got = f"a {token_ids.dtype} tensor of shape {tuple(token_ids.shape)}"
            raise InvalidTypeError(
                f"token_ids: expected a (batch, tokens) tensor of integers, got {got}; pass the "
                "input_ids of the next forward pass"
            )
        if self.looks_at_tokens:
            self.coming_ids = (self.seen_tokens, token_ids)

    def expect_text(self, ids: Tensor, end: int, visible: Tensor | None) -> None:
        """Go on with a text that ends there in (B, N) ids; refused where another one was read."""
        self.ids_start, seen = end - ids.shape[1], self.seen_tokens
        if ids.shape[1] and self.ids_start > seen:
            raise InvalidArgumentError(
                f"attention_mask: expected a column for each of {seen + ids.shape[1]:,} tokens, "
                f"got {end:,}; pass one that goes with the input_ids"
            )
        if self.read_ids.parts:
            self.read_ids.require(self.ids_start, ids, seen, visible)

    def note_text(self, ids: Tensor) -> None:
        """All (B, N) ids that `generate` goes on with, those of the next pass last."""
        if self.ids_start is not None:
            self.read_ids = self.read_ids.followed_by(self.ids_start, ids)

    @contextlib.contextmanager
    def reading_text(self, ids: Tensor) -> Iterator[None]:
        """Within this block the (B, N) ids are read, perhaps in pieces."""
        with self._while(ids_start=None):
            yield
        self.note_text(ids)

    def require_ids(self, tokens: int, rows: int | None) -> None:
        """Refuse tokens whose ids were not announced, where the policy looks at them.

        `rows` is None where it is not known yet how many there are.
        """
        if not self.looks_at_tokens:
            return
        begin, ids = self.coming_ids or (None, None)
        if ids is None or begin != self.seen_tokens:
            told = "none"
        elif ids.shape != (len(ids) if rows is None else rows, tokens):
            told = f"those of {tuple(ids.shape)}"
        else:
            return
        raise CacheMismatchError(
            f"token_ids: expected the ids of the next {tokens} tokens of every row, since "
            f"{self.policy.name} looks at tokens, got {told}; call cache.expect_tokens(input_ids) "
            "before model(input_ids, ...), or use model.generate"
        )

    # How it comes.

    @contextlib.contextmanager
    def attending(self) -> Iterator[None]:
        """Around a layer's attention; behind an error in it the cache is to be reset."""
        self.is_broken = True
        yield
        self.is_broken = False

    @contextlib.contextmanager
    def _while(self, **states: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in states}
        vars(self).update(states)
        try:
            yield
        finally:
            vars(self).update(before)

    def require_pieces(self) -> None:
        """Refuse to read one layer after the other, in pieces: ids are announced all at once."""
        if self.looks_at_tokens:
            raise InvalidArgumentError(
                f"policy: expected one that does not look at tokens where a prompt is read layer "
                f"by layer, got {self.policy.name}; read it with prefill_chunk_size"
            )

    @contextlib.contextmanager
    def in_pieces(self, layer: CompressedLayer, tokens: int) -> Iterator[None]:
        """Within this block one layer reads that many tokens in pieces, and no other does."""
        end = self.end_by(layer.seen_tokens + tokens)
        with self._while(is_piecewise=True):
            yield
        if layer.seen_tokens < end:
            layer.set_aside()
