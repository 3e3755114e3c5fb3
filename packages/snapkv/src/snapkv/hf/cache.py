"""The drop-in cache: a transformers `Cache` that keeps only what its policy chooses."""

import copy
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from snapkv.cache.layer import CompressedLayer, Turns
from snapkv.cache.prompt_state import PaddingTracker, PromptState
from snapkv.cache.report import CacheReport
from snapkv.cache.shown import page_of
from snapkv.cache.spans import (
    RowSpans,
    drop_spans,
    require_between_turns,
    require_droppable,
    require_turns_can_follow,
    row_tokens,
    spans_of_rows,
)
from snapkv.cache.taking_back import count_to_remove, take_back
from snapkv.errors import (
    CacheMismatchError,
    InvalidArgumentError,
    InvalidTypeError,
    UnsupportedModelError,
)
from snapkv.hf import forward_context, saved, step_graph
from snapkv.hf.build import layers_for, other_kinds, plain_layers
from snapkv.hf.fidelity import VoteCheck
from snapkv.hf.forward_context import ForwardContext, Pass, phase_of
from snapkv.hf.identity import unwrapped
from snapkv.hf.install import use
from snapkv.hf.known_gates import with_known
from snapkv.hf.model_parts import States, shares_latent, states_of
from snapkv.hf.support import Setup
from snapkv.page import Page
from snapkv.policies import Policy, default_policy
from snapkv.policies.default import adapt_to_question
from snapkv.policies.spans import Span, Spans
from snapkv.storage import uncompressed
from snapkv.storage.bits import Bits, KVCodes, Quantize
from snapkv.storage.offload import OffloadedTokens, Recall
from snapkv.storage.uncompressed import AbsentLayer
from snapkv.validation import path_of, plain_number, require_int


class CompressedCache(Cache):
    """A key-value cache that shrinks to its budget at the end of the prompt.

    Pass it to ``model.generate(..., past_key_values=cache)`` or to plain ``model(...)`` calls (from
    transformers 5.24 on as ``cache=cache``; the old name goes on). The
    prompt is read with full attention, so the first generated token is that of the full cache;
    what is stored shrinks layer by layer inside the same forward pass. Positions stay true.

    The prompt ends where `generate` says it does; in plain calls, with the first forward pass on
    the empty cache. Announce a longer prompt with `expect_prompt` to feed it in pieces. What comes
    after the prompt is stored whole. `reset()` makes the cache ready for another prompt. A policy
    that looks at tokens (`FastGen`) is told their ids by `generate`; before plain calls, do that
    with `expect_tokens`.

    On a GPU `generate` lends it room while it makes tokens, records a step as a CUDA graph and
    replays that.

    As long as a cache of it lives, the model's attention implementation is a wrapper of the one it
    has (``"sdpa"`` becomes ``"snapkv|sdpa"``), which leaves other caches untouched. When the last
    one is gone, the model is as it was; see `snapkv.install` and `snapkv.uninstall`.

    Args:
        model: a decoder-only transformers model, or one in a `PeftModel`.
        policy: what to keep; `snapkv.default_policy()` by default.
        turns: what becomes of a later prompt. "append", the default, stores it whole behind what
            was kept; "compress" reads it over what was kept, lets its end vote on all of that, and
            brings the cache back to its budget; "recall" does so over all that was seen, layer by
            layer, for which evicted keys and values are offloaded instead of being dropped.
        recall: where they go: "host", the memory of the host, or a folder for files that are mapped
            into it. Given alone, it means ``turns="recall"``; "host" is where they go without it.
        recall_bytes: how many bytes `recall` may take; no limit by default.
        quantize: hold what is kept of a prompt, and all but the last of what is generated, in few
            bits: "int8", "int4", "K8V4", or a `KVCodes`.
            The model's own dtype by default.
        protect: half-open spans of positions, such as ``[(0, 200)]``, that every layer and head
            keeps whatever the scores. Positions are those of `kept_positions`: of each row's own
            tokens, over the whole conversation; where a span reaches past the end of a prompt, what
            is there stays. They count towards the budget.

    Raises:
        InvalidArgumentError: an unknown option, or one that does not go with the policy; a policy
            without the tokenizer it needs; or more is protected than the budget holds beside the
            window. Where only the prompt can tell, its end raises this, before anything is dropped.
        InvalidTypeError: `model` or `policy` is not one.
        UnsupportedModelError: the model cannot be compressed correctly; the message says why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy | None = None,
        *,
        turns: Turns | None = None,
        recall: Recall | None = None,
        recall_bytes: int | None = None,
        quantize: Quantize | None = None,
        protect: Iterable[Span] | None = None,
    ) -> None:
        model = unwrapped(model)
        policy = default_policy() if policy is None else policy
        if not isinstance(policy, Policy):
            is_class = isinstance(policy, type)
            got = f"the class {policy.__name__}" if is_class else f"a {type(policy).__name__}"
            raise InvalidTypeError(
                f"policy: expected a policy such as SnapKV(budget=1024), got {got}; see "
                "snapkv.policies.POLICIES"
            )
        policy = with_known(model, policy)
        spans = None if protect is None else Spans.of("protect", protect)
        plain = plain_layers(model)
        has_states = any(hasattr(layer, "conv_states") for layer in plain)
        setup = Setup(
            policy=policy,
            model=type(model).__name__,
            other_layers=other_kinds(plain),
            shares_latent=shares_latent(model),
            states=states_of(model) if has_states else States.NONE,
            quantize=quantize,
            turns=turns,
            recall=recall,
            recall_bytes=plain_number(recall_bytes),
            protect=spans if spans and spans.parts else None,
        )
        setup.require_words()
        setup.require("made")
        if setup.protect is not None:
            policy.require_protection(setup.protect)
        super().__init__(layers=layers_for(model, policy, setup.codes))
        compressed = [layer for layer in self.layers if isinstance(layer, CompressedLayer)]
        pool = setup.pool
        for layer in compressed:
            layer.turns, layer.protect = setup.going_on, setup.protect
            layer.queries.fit(policy, chooses_again=layer.chooses_again)
            layer.offloaded = OffloadedTokens(pool)
        self._use = use(model)
        self.policy, self.setup = policy, setup
        self.prompt_state = PromptState(layers=compressed)
        self._choosing = tuple(self.compressed_layers)
        self._first = self._choosing[0]
        # Models ask layer 0 for the sizes of their masks. Where it was taken out, the first that is
        # there answers.
        self._asked_of = {
            index: self._first
            for index, layer in enumerate(self.layers)
            if isinstance(layer, AbsentLayer)
        }
        self._padding = PaddingTracker(compressed, has_states=has_states)
        self._check = VoteCheck()

    # What transformers asks of a cache.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new tokens of one layer; returns all its stored keys and values."""
        if layer_idx >= len(self.layers):
            raise UnsupportedModelError(
                f"model: expected the {len(self.layers)} layers that its configuration counts, got "
                f"keys of layer {layer_idx}; set config.num_hidden_layers to the number of layers, "
                "and make the cache again"
            )
        layer, new_tokens = self.layers[layer_idx], key_states.shape[-2]
        if layer_idx <= self._first:
            self._require_coming(new_tokens, rows=len(key_states))
        if not isinstance(layer, CompressedLayer):
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            uncompressed.let_go_of_the_past(layer, new_tokens)
            return keys, values
        if layer.store.has_room and not layer.recall_due:
            keys, values = layer.update(key_states, value_states)
            forward_context.share_heads(layer, self.prompt_state, keys)
            return keys, values
        current, prompt_state, seen = forward_context.current, self.prompt_state, layer.seen_tokens
        if current.context is not None and forward_context.leave(prompt_state):
            raise prompt_state.interrupted()  # the attention of the layer before did not run
        is_first = layer is prompt_state.layers[0]
        if is_first or prompt_state.is_piecewise:
            prompt_state.forward_pass = self._begin_pass(seen, new_tokens)
        read: Pass | None = prompt_state.forward_pass
        if read is None or read.start != seen or read.new_tokens != new_tokens:
            raise prompt_state.interrupted()  # layers before have read other tokens, or none
        keys, values = layer.update(key_states, value_states, coming=read.coming)
        if is_first and read.coming == 0:
            prompt_state.chooser.unread_layers = self._choosing
        if prompt_state.coming_ids is not None:
            layer.remember_ids(prompt_state.coming_ids[1].to(key_states.device))
        phase = read.turn_phase if layer.slots.is_compressed else read.phase
        current.context = ForwardContext(
            layer=layer, keys=keys, values=values, forward_pass=read, phase=phase
        )
        return keys, values

    def _begin_pass(self, seen_tokens: int, new_tokens: int) -> Pass:
        """Return the forward pass that reads `new_tokens` after `seen_tokens` in every layer.

        Raises:
            CacheMismatchError: it may hold drafts, and no prompt has been announced.
        """
        state, seen = self.prompt_state, seen_tokens + new_tokens
        end, turns = state.end_by(seen), state.layers[0].turns
        return Pass(
            prompt_state=state,
            modules=self._use.modules,
            check=self._check,
            start=seen_tokens,
            new_tokens=new_tokens,
            coming=None if seen > end else end - seen,
            reads_end=seen >= end,
            turn_tokens=end - state.turn_start,
            phase=phase_of(seen, new_tokens, end, None),
            turn_phase=phase_of(seen, new_tokens, end, turns),
            has_own_mask=self._padding.masked_to != (end if state.is_piecewise else seen),
        )

    def keep_among_last(self, tokens: int, places: Tensor) -> None:
        """Keep some of the last tokens in every layer, and forget the others.

        So ends a pass that has read alternatives, see `snapkv.hf.forward_context.branching`. The
        kept tokens stand one behind the other then, as if they alone had been read, since each was
        read at the position of its place in its branch. `activate_past_recording` must have been
        called before that pass.

        Args:
            tokens: how many of the last tokens to choose from.
            places: (N,) int64 on the CPU, ascending from 0: which of them stay.

        Raises:
            InvalidArgumentError: the tokens are not all behind the prompt, or were read before
                `activate_past_recording`; a place is not among them, or does not ascend.
        """
        state = self.prompt_state
        end = state.prompt_end if state.verifies_drafts else None
        behind = 0 if end is None else max(0, self.get_seq_length() - end)
        if not 0 <= tokens <= behind:
            raise InvalidArgumentError(
                f"tokens: expected at most {behind:,}, the tokens that were read behind the prompt "
                f"since activate_past_recording(), got {tokens:,}; call it before the pass whose "
                "tokens are chosen from"
            )
        if (given := places.tolist()) != sorted({*given} & {*range(tokens)}):
            raise InvalidArgumentError(
                f"places: expected ascending places from 0 to {tokens - 1}, each once, got "
                f"{given}; pass for instance torch.tensor([0, 2])"
            )
        if not torch.equal(places, torch.arange(len(places))):
            for layer in self.layers:
                if getattr(layer, "keys", None) is not None:
                    _bring_forward(layer, places, tokens)
        self.crop(len(places) - tokens)

    def require_rows(self, rows: int) -> None:
        """Refuse another batch than the one that was read."""
        if (read := self.prompt_state.rows) not in (0, rows):
            remedy = "call cache.reset() or make a new CompressedCache"
            if rows % read == 0:
                more = f"cache.batch_repeat_interleave({rows // read})"
                remedy = f"call {more} first for several beams or answers of each, or cache.reset()"
            raise CacheMismatchError(
                f"cache: expected a batch of {read}, the size the cache was filled "
                f"with, got {rows}; {remedy}"
            )

    def _require_coming(self, new_tokens: int, rows: int | None = None) -> None:
        """Refuse tokens that cannot be read, before any layer has changed.

        So it is asked when their mask is made; what made one itself is asked by its first layer.
        What is no step of the `generate` that has lent room is read by a cache that grows.
        """
        if torch.compiler.is_compiling():
            _refuse_compiled()
        current, prompt_state = forward_context.current, self.prompt_state
        if prompt_state.layers[0].store.has_room and not current.is_step:
            self.leave_room()
        if prompt_state.looks_at_tokens:
            prompt_state.require_ids(new_tokens, rows)
        if current.is_recording:
            return
        _require_reached(self._use.model)
        if rows is not None:
            self.require_rows(rows)
        prompt_state.require_prompt(new_tokens)
        prompt_state.require_chosen()
        if self._check.doubts or prompt_state.is_broken or not self._use.is_in_place:
            raise prompt_state.interrupted()
        prompt_state.thread = threading.get_ident()
        begins_anew = self.setup.states is States.BEGIN_ANEW
        if begins_anew and prompt_state.seen_tokens and not prompt_state.is_piecewise:
            self._require_states(new_tokens)

    def require_pieces(self, prompt_end: int, piece_tokens: int, visible: Tensor | None) -> None:
        """Refuse a prompt in such pieces before the first one is read; `visible` as its mask."""
        left = prompt_end - self.prompt_state.seen_tokens
        if left <= piece_tokens:
            return
        self.prompt_state.require_choice(left)
        self._require_states(min(piece_tokens, left - piece_tokens))
        if piece_tokens == 1:
            self._padding.require_token(visible)

    def _require_states(self, new_tokens: int) -> None:
        """Refuse several tokens behind others where the model's states would begin anew."""
        if new_tokens > 1 and self.setup.states is States.BEGIN_ANEW:
            raise UnsupportedModelError(
                f"model: expected layers whose state goes on when several tokens come at once, "
                f"got {type(self.model).__name__}, whose own code forgets it; read the whole text "
                "in one forward pass, or go on by one token at a time"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens, such as rejected drafts.

        Raises:
            InvalidArgumentError: `tokens_to_remove` is positive, or some layer cannot take that
                many tokens back. Nothing has changed then.
            InvalidTypeError: `tokens_to_remove` is not an integer.
        """
        count = count_to_remove(tokens_to_remove)
        self.leave_room()
        seen = self.prompt_state.seen_tokens
        has_restored = take_back(self.layers, count)
        self.prompt_state.forget_taken_back(seen, chooses_again=has_restored)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put the rows of all layers in the order of `beam_idx`; what is no row changes none."""
        if not self.prompt_state.rows:
            return
        try:
            chosen = torch.arange(self.prompt_state.rows, device=beam_idx.device)[beam_idx]
        except (AttributeError, IndexError):  # no tensor; a row that is not there, or no integers
            chosen = torch.empty(0)
        if chosen.ndim != 1 or not len(chosen):
            got = beam_idx.tolist() if isinstance(beam_idx, Tensor) else repr(beam_idx)
            raise InvalidArgumentError(
                f"rows: expected some of the {self.prompt_state.rows} rows of the batch, got "
                f"{got}; pass a 1-D tensor of integers, 0 for the first one"
            )
        self.leave_room()
        for layer in self.layers:
            layer.reorder_cache(chosen)
        self.prompt_state.read_ids = self.prompt_state.read_ids.select_rows(chosen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of all layers `repeats` times, an integer of at least 1."""
        require_int("repeats", repeats, minimum=1)
        self.reorder_cache(torch.arange(self.prompt_state.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows in `indices` in all layers; errors as in `reorder_cache`."""
        self.reorder_cache(indices)

    def reset(self) -> None:
        """Empty the cache for another prompt, of any length and batch size."""
        for layer in self.layers:
            uncompressed.reset(layer)
        forward_context.leave(self.prompt_state)
        self._check = VoteCheck()
        self.prompt_state.forget()
        self.expect_question(None)

    def offload(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse transformers' way of moving layers off the device.

        Raises:
            InvalidArgumentError: always.
        """
        raise InvalidArgumentError(
            "offloading: expected none with a CompressedCache, whose layers hold more than keys "
            "and values, got a call of transformers' offload or prefetch; pass recall='host' to "
            "the CompressedCache to hold evicted tokens in the host's memory"
        )

    prefetch = offload

    def activate_past_recording(self) -> None:
        """Called before drafts are verified: from now on a forward pass may hold drafts."""
        self.setup.require("drafts")
        if self.get_seq_length() and self.prompt_state.is_coming:
            raise InvalidArgumentError(
                f"cache: expected an empty cache where drafts are verified (assistant "
                f"model, prompt lookup), since transformers reads the text from its start into it, "
                f"got one that has seen {self.get_seq_length():,} tokens; generate without drafts"
            )
        super().activate_past_recording()
        self.prompt_state.verifies_drafts = True

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(columns, offset) of a mask, which this thread will make next."""
        layer_idx = self._asked_of.get(layer_idx, layer_idx)
        layer = self.layers[layer_idx]
        if isinstance(layer, CompressedLayer) and not forward_context.current.is_recording:
            self._require_coming(query_length)
            forward_context.enter_padding(self._padding)
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    @property
    def is_initialized(self) -> bool:
        """Whether it holds tokens: models ask, of which the first pass alone sees ahead."""
        return bool(self.prompt_state.rows)

    def leave_room(self) -> None:
        """Grow again in the midst of a `generate`: its recorded step knows of no other change."""
        for layer in self.prompt_state.layers:
            layer.leave_room()

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens seen, whatever is stored of them."""
        of = self._first if layer_idx is None else self._asked_of.get(layer_idx, layer_idx)
        return int(super().get_seq_length(of))

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Where the next query stands; a tensor where the device counts."""
        layer_idx = self._asked_of.get(layer_idx, layer_idx)
        layer = self.layers[layer_idx]
        if isinstance(layer, CompressedLayer) and (count := layer.store.tail.count) is not None:
            return layer.slots.seen(layer.store.unmasked_slots + count)
        return super().get_query_offset(layer_idx)

    # What users tell and ask a cache.

    def expect_prompt(self, prompt_tokens: int) -> None:
        """Announce that the prompt ends after `prompt_tokens` tokens, those already seen included.

        `model.generate` does this by itself. Call it before feeding a prompt in pieces through
        ``model(...)``: nothing is dropped before the announced end has been read. On a cache that
        has read a prompt, it announces the end of the next turn.

        Raises:
            CacheMismatchError: the cache has already seen that many tokens; or a turn is stored
                behind what was kept, and a row of the batch has kept everything.
            InvalidArgumentError: the policy would choose by queries of earlier turns, too
                (`ExpectedAttention` behind a prompt that fitted its budget).
        """
        self.prompt_state.expect_prompt(prompt_tokens)

    def expect_question(self, question_tokens: int | None) -> None:
        """Say how many tokens the next prompts have from their question's first one on.

        Where the policy is `snapkv.default_policy`, all of them vote. 0: the text is read before it
        is asked about, and its last 64 vote. None, or more than 64, which hold a text of their own:
        nobody knows, and the last 16 vote.
        """
        if question_tokens is not None:
            question_tokens = require_int("question_tokens", question_tokens, minimum=0)
        self.prompt_state.question_tokens = question_tokens
        asked = adapt_to_question(self.policy, question_tokens)
        for layer in self.prompt_state.layers:
            layer.policy = asked
            layer.queries.fit(asked, chooses_again=layer.chooses_again)

    def expect_tokens(self, token_ids: Tensor) -> None:
        """Announce the ids of the tokens of the next forward pass, pads included: (B, N) integers.

        `model.generate` does this by itself. Needed before every ``model(token_ids, ...)`` where
        the policy looks at tokens (`FastGen`); without effect where it does not.

        Raises:
            InvalidTypeError: not a tensor of that kind.
        """
        self.prompt_state.expect_tokens(token_ids)

    def drop(self, spans: RowSpans) -> None:
        """Forget spans of the text, behind a prompt's end: their memory is free for good.

        The layers that grow with the text, and the pool of `recall`, no longer hold them. What is
        left keeps its positions, and what stands behind a span has read it. From then on the cache
        chooses as if the text had never had them.

        Args:
            spans: half-open spans of positions, such as ``[(300, 500)]``, counted from each row's
                first token, over the whole conversation; or one list for each row of a batch. What
                was dropped before is passed over.

        Raises:
            InvalidArgumentError: a span that is reversed, protected or reaches beyond what was
                seen, nothing that would be left, a prompt that is still coming in, or options that
                cannot follow (methods that evict while generating or ask where tokens stand).
                Nothing has changed then.
            InvalidTypeError: something else than spans.
        """
        self.leave_room()
        rows, layers = self._rows_of(spans), self.prompt_state.layers
        require_droppable(layers, rows)
        require_turns_can_follow(layers, rows)
        if any(own.parts for own in rows):
            with self.prompt_state.attending():
                drop_spans(layers, rows)

    def _rows_of(self, spans: RowSpans) -> list[Spans]:
        """The spans of every row, of a cache that can obey."""
        if self.prompt_state.is_broken:
            raise self.prompt_state.interrupted()
        self.setup.require("drop")
        require_between_turns(self.prompt_state)
        return spans_of_rows(spans, row_tokens(self.prompt_state.layers[0]))

    @property
    def options(self) -> dict[str, Any]:
        """What it was made with, ready for JSON."""
        return self.setup.options

    @property
    def model(self) -> PreTrainedModel:
        """The model the cache was made for; CacheMismatchError where nobody holds it any more."""
        return self._use.model

    @property
    def compressed_layers(self) -> list[int]:
        """Indices of the layers that are compressed; the others stay transformers' own."""
        return [layer.identity.layer_idx for layer in self.prompt_state.layers]

    @property
    def is_hybrid(self) -> bool:
        """Whether some layer slides over a window, or carries a state: it does not go back."""
        return bool(self.setup.other_layers)

    def kept_positions(self, layer_idx: int) -> Tensor:
        """True positions of all tokens that a layer stores, generated ones included.

        Returns:
            (B, Hkv, kept) int64, ascending, counted from each row's first real token; -1 where a
            row keeps fewer. Hq instead of Hkv for ``group_reduce="none"``.

        Raises:
            InvalidArgumentError: the layer is not one of `compressed_layers`.
        """
        for layer in self.prompt_state.layers:
            if layer.identity.layer_idx == layer_idx:
                return layer.stored_positions()
        raise InvalidArgumentError(
            f"layer_idx: expected one of the compressed layers {self.compressed_layers}, got "
            f"{layer_idx}; layers with a sliding window or no attention keep transformers' own "
            "storage"
        )

    def report(self) -> CacheReport:
        """Tokens seen and kept, bytes held and bytes a full cache would hold."""
        steps = step_graph.described(self)
        return CacheReport.of(self.policy.name, self.layers, steps)

    def show(self, tokenizer: Any, input_ids: Tensor | None = None) -> Page:
        """A page of what was kept of the text, which a notebook shows; ``.html`` is a file.

        Args:
            tokenizer: that of the model.
            input_ids: (1, tokens) integers, what the cache has read or `generate` returned; None
                where `generate` has told the cache all of them.

        Raises:
            CacheMismatchError: the prompt has not ended, tokens were dropped, or other ids were
                read.
            InvalidArgumentError: several rows, or ids that are missing.
            InvalidTypeError: something else than a tokenizer or ids.
        """
        return page_of(self.prompt_state, self.report(), tokenizer, input_ids)

    def save(
        self,
        path: str | Path,
        *,
        beside: Mapping[str, Tensor] | None = None,
        bits: Bits | KVCodes | None = None,
    ) -> None:
        """Write the cache to a file: safetensors, with its policy, its model and all it has seen.

        The file appears under its name when it is complete; a crash leaves what was there before.
        Its header holds a checksum of every byte.

        Args:
            path: the file; a cache that was saved there is replaced, any other file is refused.
            beside: tensors to keep with it, such as the token ids; `load_with` gives them back.
            bits: the file holds keys and values in so few, as for `quantize`; what is loaded is
                what those stand for.

        Raises:
            InvalidArgumentError: `bits` is none of those, or a number is not finite.
            CacheFileError: the file cannot be written, or holds something else than a cache.
            CacheMismatchError: the model is gone, so that the file could not say whose it is, or a
                forward pass has ended in an error; call `reset`.
            UnsupportedModelError: an image has moved the positions behind it (M-RoPE); how far is
                known to the model alone.
        """
        if self.prompt_state.is_broken:
            raise self.prompt_state.interrupted()
        saved.require_plain_positions(self.model)
        codes = None if bits is None else KVCodes.of(bits, "bits")
        saved.write(self, self.options, path_of("path", path), beside or {}, codes)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel, **options: Any) -> Self:
        """The cache that `save` has written, for the same model in the same dtype.

        Args:
            path: the file. It is read in full and checked first; nothing in it is run.
            model: the model that filled the cache, on any device.
            options: `policy`, where it is not one of the package's; `recall`, "host" if left out,
                and `recall_bytes`, for a cache that was saved with recall.

        Raises:
            CacheFileError: no such file, or not one that `save` has written, whole and unchanged.
            CacheMismatchError: another model, dtype or policy than the cache was saved with.
        """
        cache, _ = cls.load_with(path, model, **options)
        return cache

    @classmethod
    def load_with(
        cls,
        path: str | Path,
        model: PreTrainedModel,
        *,
        policy: Policy | None = None,
        recall: Recall | None = None,
        recall_bytes: int | None = None,
    ) -> tuple[Self, dict[str, Tensor]]:
        """As `load`, with the tensors that were saved beside the cache."""
        return saved.read(cls, path_of("path", path), model, policy, recall, recall_bytes)

    def _repr_html_(self) -> str:
        """Return the cache's report as a table for a notebook; `show` draws the text itself."""
        return self.report()._repr_html_()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy!r}: {self.report().summary})"

    # Copies.

    def __reduce__(self) -> NoReturn:
        raise InvalidTypeError(
            f"cache: expected cache.save(path) to keep it or to bring it to another process, got "
            f"a pickle of a {type(self).__name__}; read it with CompressedCache.load(path, model)"
        )

    def __copy__(self) -> Self:
        """A branch: it goes on by itself, and shares what is stored so far."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.layers = [_branch(layer) for layer in self.layers]
        compressed = [layer for layer in copied.layers if isinstance(layer, CompressedLayer)]
        chooser = replace(self.prompt_state.chooser)
        copied.prompt_state = replace(self.prompt_state, layers=compressed, chooser=chooser)
        copied._padding, copied._check = replace(self._padding, layers=compressed), VoteCheck()
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy what is stored; the model that it belongs to is shared."""
        memo.update({id(module): module for module in self._use.modules})
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            copied.__dict__[name] = copy.deepcopy(value, memo)
        copied.leave_room()
        return copied


def _require_reached(model: PreTrainedModel) -> None:
    """Refuse a forward pass in which transformers takes the cache away from the layers."""
    if model.training and any(
        part.training and getattr(part, "gradient_checkpointing", False) for part in model.modules()
    ):
        raise UnsupportedModelError(
            f"model: expected one whose layers are given the cache, got {type(model).__name__} in "
            "train mode with gradient checkpointing, where transformers takes it away; call "
            "model.eval() or model.gradient_checkpointing_disable() first"
        )


def _branch(layer: Any) -> Any:
    """A layer that goes on by itself; states that are written over in place are copied."""
    written_over = hasattr(layer, "recurrent_states")
    return copy.deepcopy(layer) if written_over else copy.copy(layer)


@torch.compiler.disable  # type: ignore[untyped-decorator] # torch's
def _refuse_compiled() -> NoReturn:
    raise UnsupportedModelError(
        "model: expected one that torch.compile has not compiled for a CompressedCache, whose "
        "choices it does not follow, got one that it has; pass the model as it was: on a GPU "
        "generate records its steps by itself"
    )


def _bring_forward(layer: Any, places: Tensor, tokens: int) -> None:
    """Move keys, values and queries at these places among the last tokens in front of the rest."""

    def move(states: Tensor, end: int) -> Tensor:
        start = end - tokens
        kept = states[..., start:end, :].index_select(-2, places.to(states.device))
        states[..., start : start + len(places), :] = kept
        return states

    if isinstance(layer, CompressedLayer):
        layer.queries.change(lambda held: move(held.clone(), held.shape[-2]))
    for states in (layer.keys, layer.values):
        move(states, layer.keys.shape[-2])
