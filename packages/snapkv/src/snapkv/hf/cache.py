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

from snapkv.cache.layer import CompressedLayer
from snapkv.cache.prompt_state import PaddingTracker, PromptState
from snapkv.cache.recall import restore_offloaded
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
    InvalidTypeError,
    UnsupportedModelError,
    wrong,
)
from snapkv.hf import forward_context, saved, step_graph
from snapkv.hf.build import layers_for, other_kinds, plain_layers
from snapkv.hf.fidelity import VoteCheck
from snapkv.hf.forward_context import ForwardContext, Pass, phase_of
from snapkv.hf.identity import unwrapped
from snapkv.hf.install import use
from snapkv.hf.known_gates import with_known
from snapkv.hf.model_parts import States, shares_latent, states_of
from snapkv.hf.support import Setup, Turns
from snapkv.page import Page
from snapkv.policies import Policy, default_policy
from snapkv.policies.default import adapt_to_question
from snapkv.policies.spans import Span, Spans
from snapkv.storage import uncompressed
from snapkv.storage.bits import Bits, KVCodes, Quantize
from snapkv.storage.lent_tail import LentTail
from snapkv.storage.offload import OffloadedTokens, Recall
from snapkv.storage.uncompressed import AbsentLayer
from snapkv.validation import path_of, plain_number, require_int


class CompressedCache(Cache):
    """A key-value cache that evicts the tokens its policy does not keep when the prompt ends.

    Pass it to ``model.generate(..., past_key_values=cache)`` or to plain ``model(...)`` calls.
    (Since transformers 5.24 the argument is called ``cache``; the old name still works.) The model
    reads the prompt with full attention, so the first generated token is the same as with a full
    cache. Each layer is compressed inside that forward pass, right after it has attended. Tokens
    keep their original positions.

    With `generate`, the prompt is what `generate` was given. In plain calls, it is what the first
    forward pass on the empty cache reads; to feed a longer prompt in pieces, announce its length
    with `expect_prompt`. Tokens after the prompt are all stored. `reset()` empties the cache for
    another prompt. A policy that looks at tokens (`FastGen`) needs their ids: `generate` passes
    them, and before a plain call the caller must pass them to `expect_tokens`.

    On a GPU, `generate` captures a decode step as a CUDA graph and replays it. The cache allocates
    an append buffer of fixed size for that time.

    While a model has a compressed cache, its attention implementation is wrapped (``"sdpa"``
    becomes ``"snapkv|sdpa"``). Other caches work as before. When the last compressed cache is
    deleted, the wrapper is removed; see `snapkv.install` and `snapkv.uninstall`.

    Args:
        model: a decoder-only transformers model, or a `PeftModel` around one.
        policy: selects the tokens to keep; `snapkv.default_policy()` by default.
        turns: how a later prompt is handled. "append", the default: store all of its tokens.
            "compress": let its last queries vote on the stored tokens, then compress the cache to
            its budget again. "recall": restore every evicted token first, then compress; for this,
            evicted keys and values are offloaded instead of being deleted.
        recall: where evicted keys and values are offloaded to: "host" for the memory of the host,
            or the path of a folder for memory-mapped files. Implies ``turns="recall"``, for which
            the default is "host".
        recall_bytes: the largest number of bytes to offload; no limit by default.
        quantize: the format in which to store the kept tokens of a prompt and all but the latest
            generated tokens: "int8", "int4", "K8V4", or a `KVCodes`. By default they are stored
            in the dtype of the model.
        protect: half-open spans of positions, such as ``[(0, 200)]``, that every layer and head
            keeps regardless of the scores. Positions are counted as in `kept_positions`, from the
            first token of each row and over the whole conversation. A span may reach past the end
            of the prompt. Protected tokens count towards the budget.

    Raises:
        InvalidArgumentError: an option is unknown or does not work with the policy; the policy
            needs a tokenizer that it does not have; or the budget cannot hold the protected tokens
            and the observation window. If this depends on the length of the prompt, the error is
            raised at the end of the prompt, before any token is evicted.
        InvalidTypeError: `model` is not a transformers model, or `policy` is not a policy.
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
            raise wrong(
                "policy",
                f"expected a policy such as SnapKV(budget=1024), but got {got}",
                "See snapkv.policies.POLICIES for a list of all policies",
                InvalidTypeError,
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
        setup.require_known_options()
        setup.require("made")
        if setup.protect is not None:
            policy.require_protection(setup.protect)
        super().__init__(layers=layers_for(model, policy, setup.codes))
        compressed = [layer for layer in self.layers if isinstance(layer, CompressedLayer)]
        pool = setup.pool
        for layer in compressed:
            layer.chooses_again, layer.protect = setup.chooses_again, setup.protect
            layer.queries.fit(policy, chooses_again=layer.chooses_again)
            layer.offloaded = OffloadedTokens(pool)
        self._use = use(model)
        self.policy, self.setup = policy, setup
        self.prompt_state = PromptState(layers=compressed)
        self._choosing, self._layer_count = tuple(self.compressed_layers), len(self.layers)
        self._first = self._choosing[0]
        # Models ask layer 0 for the sizes of their masks. If that layer was pruned from the model,
        # the first compressed layer answers in its place.
        self._asked_of = {
            index: self._first
            for index, layer in enumerate(self.layers)
            if isinstance(layer, AbsentLayer)
        }
        self._padding = PaddingTracker(compressed, has_states=has_states)
        self._check = VoteCheck()

    # The interface of a transformers cache.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the new tokens of one layer and return all keys and values that it stores.

        Also prepares the attention call that follows in the same thread.

        Args:
            key_states: (B, Hkv, N, D) keys of the N new tokens, after rotary embedding.
            value_states: (B, Hkv, N, Dv) values of the N new tokens.
            layer_idx: the index of the layer.
            args: passed on to a layer that is not compressed.
            kwargs: passed on to a layer that is not compressed.

        Returns:
            The keys and values to attend to, with the new tokens at the end.

        Raises:
            CacheMismatchError: the batch has another size, an announced length does not fit, or
                an earlier forward pass was interrupted.
            UnsupportedModelError: the model has more layers than its configuration says, or adds
                layers to the cache, or transformers would not pass the cache to its layers.
        """
        if layer_idx >= self._layer_count:  # a model may have added layers to `self.layers`
            raise wrong(
                "model",
                f"the configuration of the model says that it has {self._layer_count} layers, but "
                f"got keys of layer {layer_idx}",
                "Set config.num_hidden_layers to the number of layers, and make the cache again",
                UnsupportedModelError,
            )
        layer, new_tokens = self.layers[layer_idx], key_states.shape[-2]
        if layer_idx <= self._first:
            self._require_coming(new_tokens, rows=len(key_states))
        if not isinstance(layer, CompressedLayer):
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            uncompressed.free_dropped_tokens(layer, new_tokens)
            return keys, values
        if layer.store.has_room and not layer.offloaded.is_due:
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
            raise prompt_state.interrupted()  # the layers before have not read the same tokens
        if layer.offloaded.is_due:
            restore_offloaded(layer)
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
        """Return the description of the forward pass that reads `new_tokens` after `seen_tokens`.

        Raises:
            CacheMismatchError: the pass may contain drafts, and no prompt has been announced.
        """
        state, seen = self.prompt_state, seen_tokens + new_tokens
        end, chooses_again = state.end_by(seen), state.layers[0].chooses_again
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
            turn_phase=phase_of(seen, new_tokens, end, chooses_again),
            has_own_mask=self._padding.masked_to != (end if state.is_piecewise else seen),
        )

    def keep_among_last(self, tokens: int, places: Tensor) -> None:
        """Keep only the tokens at `places` among the last `tokens` tokens of every layer.

        Call it after a forward pass over alternative continuations; see
        `snapkv.hf.forward_context.branching`. The kept tokens become consecutive, as if the model
        had read only them: each was already read at its position within its branch. The caller
        must have called `activate_past_recording` before that forward pass.

        Args:
            tokens: how many of the last tokens to choose from.
            places: (N,) int64 on the CPU, the tokens to keep as ascending indices into those last
                `tokens` tokens.

        Raises:
            InvalidArgumentError: some of the tokens belong to the prompt or were read before
                `activate_past_recording`; or `places` is out of range or not ascending.
        """
        state = self.prompt_state
        end = state.prompt_end if state.verifies_drafts else None
        behind = 0 if end is None else max(0, self.get_seq_length() - end)
        if not 0 <= tokens <= behind:
            raise wrong(
                "tokens",
                f"expected at most {behind:,}, the number of tokens read after the prompt since "
                f"activate_past_recording(), but got {tokens:,}",
                "Call activate_past_recording() before the forward pass that reads these tokens",
            )
        if (given := places.tolist()) != sorted({*given} & {*range(tokens)}):
            raise wrong(
                "places",
                f"expected indices between 0 and {tokens - 1} in ascending order and without "
                f"repetitions, but got {given}",
                "For example, pass torch.tensor([0, 2])",
            )
        if not torch.equal(places, torch.arange(len(places))):
            self.release_append_buffers()
            for layer in self.layers:
                if getattr(layer, "keys", None) is not None:
                    _bring_forward(layer, places, tokens)
        self.crop(len(places) - tokens)

    def require_rows(self, rows: int) -> None:
        """Raise unless the cache is empty or holds a batch of this size.

        Args:
            rows: the number of batch rows that the next forward pass reads.

        Raises:
            CacheMismatchError: the cache was filled with another number of rows.
        """
        if (read := self.prompt_state.rows) not in (0, rows):
            remedy = "Call cache.reset(), or make a new CompressedCache"
            if rows % read == 0:
                more = f"cache.batch_repeat_interleave({rows // read})"
                remedy = (
                    f"To generate several beams or answers for each row, call {more} first, or "
                    "start again with cache.reset()"
                )
            raise wrong(
                "cache",
                f"expected a batch of {read}, because the cache was filled with this batch size, "
                f"but got {rows}",
                remedy,
                CacheMismatchError,
            )

    def _require_coming(self, new_tokens: int, rows: int | None = None) -> None:
        """Raise if the next tokens cannot be read, before any layer has changed.

        It is called when the attention mask is made, and again in the update of the first layer,
        because a caller may have passed a mask of its own. Unless the pass is a decode step of the
        `generate` that allocated the append buffers, they are replaced by growing ones.

        Args:
            new_tokens: how many tokens the pass reads.
            rows: how many batch rows the pass reads; None if that is not known yet.

        Raises:
            CacheMismatchError: the batch, an announced length or missing token ids do not fit, or
                an earlier forward pass was interrupted.
            UnsupportedModelError: the model was compiled, is trained with gradient checkpointing,
                or would reset its recurrent states.
        """
        if torch.compiler.is_compiling():
            _refuse_compiled()
        current, prompt_state = forward_context.current, self.prompt_state
        if prompt_state.layers[0].store.has_room and not current.is_step:
            self.release_append_buffers()
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
        """Raise if a prompt cannot be read in pieces of this size.

        Args:
            prompt_end: how many tokens the cache will have seen when the prompt ends.
            piece_tokens: how many tokens each forward pass reads.
            visible: (B, S) padding mask of the prompt, as passed to `generate`; None without one.

        Raises:
            InvalidArgumentError: the policy or the mask does not allow pieces of this size.
            UnsupportedModelError: the model resets its recurrent states in every piece.
        """
        left = prompt_end - self.prompt_state.seen_tokens
        if left <= piece_tokens:
            return
        self.prompt_state.require_choice(left)
        self._require_states(min(piece_tokens, left - piece_tokens))
        if piece_tokens == 1:
            self._padding.require_token(visible)

    def _require_states(self, new_tokens: int) -> None:
        """Raise if the model would reset its recurrent states before it reads the next tokens.

        Raises:
            UnsupportedModelError: `new_tokens` is above 1 and the model resets its states then.
        """
        if new_tokens > 1 and self.setup.states is States.BEGIN_ANEW:
            raise wrong(
                "model",
                f"{type(self.model).__name__} forgets the state of its recurrent layers when "
                "several tokens follow earlier ones",
                "Read the whole text in one forward pass, or continue with one token at a time",
                UnsupportedModelError,
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens from every layer, such as rejected drafts.

        Args:
            tokens_to_remove: the number of tokens to remove, as a negative integer or 0: -3
                removes the last three tokens.

        Raises:
            InvalidArgumentError: `tokens_to_remove` is positive, or some layer cannot remove that
                many tokens. The cache is unchanged then.
            InvalidTypeError: `tokens_to_remove` is not an integer.
        """
        count, has_restored = count_to_remove(tokens_to_remove), False
        seen, steps = self.prompt_state.seen_tokens, step_graph.running(self)
        if steps is None or not steps.buffers.remove_drafts(count):
            self.release_append_buffers()
            has_restored = take_back(self.layers, count)
        self.prompt_state.forget_taken_back(seen, chooses_again=has_restored)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch rows of all layers, or select some of them.

        Does nothing if the cache is empty.

        Args:
            beam_idx: (N,) integers or (B,) bool, the rows to keep; a row may be repeated.

        Raises:
            InvalidArgumentError: `beam_idx` is not such a tensor, selects no row, or names a row
                that the batch does not have. The cache is unchanged then.
        """
        if not self.prompt_state.rows:
            return
        try:
            chosen = torch.arange(self.prompt_state.rows, device=beam_idx.device)[beam_idx]
        except (AttributeError, IndexError):  # no tensor; a row that is not there, or no integers
            chosen = torch.empty(0)
        if chosen.ndim != 1 or not len(chosen):
            got = beam_idx.tolist() if isinstance(beam_idx, Tensor) else repr(beam_idx)
            raise wrong(
                "rows",
                f"expected the indices of some of the {self.prompt_state.rows} rows of the batch, "
                f"but got {got}",
                "Pass a 1-D tensor of integers, where 0 is the first row",
            )
        self.release_append_buffers()
        for layer in self.layers:
            layer.reorder_cache(chosen)
        self.prompt_state.read_ids = self.prompt_state.read_ids.select_rows(chosen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row of all layers `repeats` times, so that its copies are consecutive.

        Args:
            repeats: how often each row occurs in the new batch.

        Raises:
            InvalidArgumentError: `repeats` is below 1.
            InvalidTypeError: `repeats` is not an integer.
        """
        require_int("repeats", repeats, minimum=1)
        self.reorder_cache(torch.arange(self.prompt_state.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the batch rows `indices` in all layers, in that order.

        Args:
            indices: as `beam_idx` in `reorder_cache`, which raises the same errors.
        """
        self.reorder_cache(indices)

    def reset(self) -> None:
        """Remove all tokens, so that the cache can read another prompt of any batch size.

        Also ends the effect of `expect_prompt` and `expect_question`, and makes a cache usable
        again whose forward pass was interrupted.
        """
        for layer in self.layers:
            uncompressed.reset(layer)
        forward_context.leave(self.prompt_state)
        self._check = VoteCheck()
        self.prompt_state.forget()
        self.expect_question(None)

    def offload(self, *_: Any, **__: Any) -> NoReturn:
        """Raise, because transformers cannot offload the layers of a compressed cache.

        Raises:
            InvalidArgumentError: always.
        """
        raise wrong(
            "offloading",
            "the methods offload and prefetch of transformers do not work with a CompressedCache, "
            "because its layers hold more than keys and values",
            "To keep the evicted tokens in the memory of the host, make the cache with "
            "recall='host'",
        )

    prefetch = offload

    def activate_past_recording(self) -> None:
        """Announce that later forward passes may contain draft tokens, which `crop` may remove.

        transformers calls it before it verifies drafts (assistant model, prompt lookup).

        Raises:
            InvalidArgumentError: the policy evicts while generating, or the cache is to read a
                further prompt.
            UnsupportedModelError: the model has recurrent states, which cannot be cropped.
        """
        self.setup.require("drafts")
        if self.get_seq_length() and self.prompt_state.is_coming:
            raise wrong(
                "cache",
                "transformers needs an empty cache to verify drafts (of an assistant model or of "
                "prompt lookup), because it reads the text from the beginning, but this cache "
                f"has already seen {self.get_seq_length():,} tokens",
                "Generate without drafts",
            )
        super().activate_past_recording()
        self.prompt_state.verifies_drafts = True

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of columns of the attention mask and its offset.

        Also checks that the next tokens can be read, and remembers for this thread which cache the
        next mask is made for.

        Args:
            query_length: how many tokens the forward pass reads.
            layer_idx: the index of a layer that uses the mask.

        Raises:
            CacheMismatchError: the next tokens cannot be read into this cache.
            UnsupportedModelError: the model cannot be compressed in its present state.
        """
        layer_idx = self._asked_of.get(layer_idx, layer_idx)
        layer = self.layers[layer_idx]
        if isinstance(layer, CompressedLayer) and not forward_context.current.is_recording:
            self._require_coming(query_length)
            forward_context.enter_padding(self._padding)
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    @property
    def is_initialized(self) -> bool:
        """Whether the cache has read tokens.

        Models with bidirectional attention over images ask for it, because only their first
        forward pass may attend in both directions.
        """
        return bool(self.prompt_state.rows)

    def release_append_buffers(self) -> None:
        """Replace the append buffers of fixed size by buffers that grow, in all layers.

        Call it before a change that a captured decode step cannot follow. Does nothing if the
        buffers are not fixed.
        """
        for layer in self.prompt_state.layers:
            layer.release_append_buffer()

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Return how many tokens the model has read into the cache, evicted ones included.

        Args:
            layer_idx: the index of a layer; None for the first compressed layer.
        """
        of = self._first if layer_idx is None else self._asked_of.get(layer_idx, layer_idx)
        return int(super().get_seq_length(of))

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Return the position of the next query, which transformers needs to make a mask.

        Args:
            layer_idx: the index of a layer that uses the mask.

        Returns:
            An int; a () int64 tensor on the device if a captured decode step counts its tokens
            there.
        """
        layer_idx = self._asked_of.get(layer_idx, layer_idx)
        layer = self.layers[layer_idx]
        if isinstance(layer, CompressedLayer) and isinstance(tail := layer.store.tail, LentTail):
            return layer.slots.count_seen(layer.store.unmasked_slots + tail.start)
        return super().get_query_offset(layer_idx)

    # Methods for users.

    def expect_prompt(self, prompt_tokens: int) -> None:
        """Announce where the prompt ends, so that it can be fed in pieces through ``model(...)``.

        No token is evicted before the announced end has been read. `model.generate` calls this
        method itself. If the cache has already read a prompt, it announces the end of the next
        turn.

        Args:
            prompt_tokens: how many tokens the cache will have seen when the prompt ends, including
                those it has already seen.

        Raises:
            CacheMismatchError: the cache has already seen that many tokens; or the turn would be
                appended to a batch in which only some rows have been compressed.
            InvalidArgumentError: `prompt_tokens` is below 1; or the policy needs the queries of
                earlier turns, which are no longer held (`ExpectedAttention` after a prompt that
                fitted into its budget).
            InvalidTypeError: `prompt_tokens` is not an integer.
        """
        self.prompt_state.expect_prompt(prompt_tokens)

    def expect_question(self, question_tokens: int | None) -> None:
        """Announce the length of the question at the end of the next prompts.

        This changes which tokens vote under `snapkv.default_policy`; other policies ignore it. It
        holds until the next call or `reset`.

        Args:
            question_tokens: the number of tokens from the first one of the question to the end of
                the prompt: these tokens vote, but never fewer than the last 16. 0 means that the
                prompt contains no question yet: its last 64 tokens vote. None (unknown) or a
                number above 1,024: the last 16 tokens vote, or 18 with a small budget. The number
                is limited because the cache remembers the queries of all voters.

        Raises:
            InvalidArgumentError: `question_tokens` is negative.
            InvalidTypeError: `question_tokens` is neither an integer nor None.
        """
        if question_tokens is not None:
            question_tokens = require_int("question_tokens", question_tokens, minimum=0)
        self.prompt_state.question_tokens = question_tokens
        asked = adapt_to_question(self.policy, question_tokens)
        for layer in self.prompt_state.layers:
            layer.policy = asked
            layer.queries.fit(asked, chooses_again=layer.chooses_again)

    def expect_tokens(self, token_ids: Tensor) -> None:
        """Pass the token ids of the next forward pass to a policy that looks at tokens.

        With such a policy (`FastGen`), call it before every ``model(token_ids, ...)``;
        `model.generate` calls it itself. With other policies it has no effect.

        Args:
            token_ids: (B, N) integers, including padding.

        Raises:
            InvalidTypeError: `token_ids` is not a 2-D tensor of integers.
        """
        self.prompt_state.expect_tokens(token_ids)

    def drop(self, spans: RowSpans) -> None:
        """Delete the tokens in `spans` from the cache and free their memory for good.

        They are removed from all compressed layers and from the offloaded tokens of `recall`. The
        remaining tokens keep their positions. The keys and values of later tokens do not change,
        although the model had read the deleted tokens when it computed them. Later selections
        ignore the deleted tokens.

        Args:
            spans: half-open spans of positions, such as ``[(300, 500)]``, counted from the first
                token of each row and over the whole conversation; or one list of spans for each
                row of the batch. Tokens that were deleted before are skipped.

        Raises:
            CacheMismatchError: an earlier forward pass was interrupted; call `reset`.
            InvalidArgumentError: a span is reversed, protected or reaches beyond the tokens seen;
                no token would be left; a prompt has not been read to its end; or the policy evicts
                while generating or needs positions. The cache is unchanged then.
            InvalidTypeError: `spans` does not consist of spans.
        """
        self.release_append_buffers()
        rows, layers = self._rows_of(spans), self.prompt_state.layers
        require_droppable(layers, rows)
        require_turns_can_follow(layers, rows)
        if any(own.parts for own in rows):
            with self.prompt_state.attending():
                drop_spans(layers, rows)

    def _rows_of(self, spans: RowSpans) -> list[Spans]:
        """Check that the cache can drop spans, and return the spans to drop from each batch row.

        Raises:
            CacheMismatchError: an earlier forward pass was interrupted.
            InvalidArgumentError: the policy cannot drop spans, a prompt has not ended, or a span is
                not valid.
            InvalidTypeError: `spans` does not consist of spans.
        """
        if self.prompt_state.is_broken:
            raise self.prompt_state.interrupted()
        self.setup.require("drop")
        require_between_turns(self.prompt_state)
        return spans_of_rows(spans, row_tokens(self.prompt_state.layers[0]))

    @property
    def options(self) -> dict[str, Any]:
        """The options that the cache was made with, as a dict that JSON can represent."""
        return self.setup.options

    @property
    def model(self) -> PreTrainedModel:
        """The model for which the cache was made.

        Raises:
            CacheMismatchError: the model has been deleted; the cache does not keep it alive.
        """
        return self._use.model

    @property
    def compressed_layers(self) -> list[int]:
        """The indices of the layers that are compressed; other layers are stored as usual."""
        return [layer.identity.layer_idx for layer in self.prompt_state.layers]

    @property
    def is_hybrid(self) -> bool:
        """Whether some layer has a sliding window or a recurrent state, which limits `crop`."""
        return bool(self.setup.other_layers)

    def kept_positions(self, layer_idx: int) -> Tensor:
        """Return the positions of all tokens that a layer stores, including generated ones.

        Args:
            layer_idx: the index of the layer in the model.

        Returns:
            (B, Hkv, kept) int64, ascending, counted from the first token of each row that is not
            padding. Rows with fewer tokens are filled up with -1. With ``group_reduce="none"``
            there is one entry per query head instead of KV head.

        Raises:
            InvalidArgumentError: the layer is not one of `compressed_layers`.
        """
        for layer in self.prompt_state.layers:
            if layer.identity.layer_idx == layer_idx:
                return layer.stored_positions()
        raise wrong(
            "layer_idx",
            f"expected one of the compressed layers {self.compressed_layers}, but got "
            f"{layer_idx!r}",
            "See cache.compressed_layers for a list of these layers. Layers with a sliding window "
            "or without attention are not compressed",
        )

    def report(self) -> CacheReport:
        """Measure how many tokens the cache has seen and keeps, and how many bytes they take.

        The report compares the bytes with those of a full cache.
        """
        steps = step_graph.described(self)
        return CacheReport.of(self.policy.name, self.layers, steps)

    def show(self, tokenizer: Any, input_ids: Tensor | None = None) -> Page:
        """Return a page that shows the text and which of its tokens were kept.

        A notebook displays the page; its ``html`` is the text of an HTML file.

        Args:
            tokenizer: the tokenizer of the model.
            input_ids: (1, tokens) integers, the tokens that the cache has read, or what `generate`
                returned. None if `generate` has read all of them, since the cache remembers those.

        Raises:
            CacheMismatchError: the prompt has not been read to its end, spans were dropped, or
                `input_ids` are not the tokens that the cache has read.
            InvalidArgumentError: the batch has several rows, or token ids are missing.
            InvalidTypeError: `tokenizer` or `input_ids` has the wrong type.
        """
        return page_of(self.prompt_state, self.report(), tokenizer, input_ids)

    def save(
        self,
        path: str | Path,
        *,
        beside: Mapping[str, Tensor] | None = None,
        bits: Bits | KVCodes | None = None,
    ) -> None:
        """Save the cache to a safetensors file, together with its policy and its options.

        The file also identifies the model and contains a checksum. It is written under a temporary
        name and renamed when it is complete, so a crash leaves an older file unchanged.

        Args:
            path: the file to write. A saved cache with this name is replaced; any other file is
                left alone, and the call fails.
            beside: further tensors to store in the file, such as token ids; `load_with` returns
                them.
            bits: the format in which the file stores keys and values, as for `quantize`. Loading
                decodes them, so the loaded values are rounded.

        Raises:
            InvalidArgumentError: `bits` is not a known format, or a stored number is not finite.
            InvalidTypeError: `path` is not a path, or `beside` has a value that is not a tensor.
            CacheFileError: the file cannot be written, or another kind of file has that name.
            CacheMismatchError: the model has been deleted, so the file could not identify it; or a
                forward pass was interrupted, after which only `reset` helps.
            UnsupportedModelError: the model has read an image, after which positions do not count
                tokens (M-RoPE); the shift is stored in the model and would be missing in the file.
        """
        if self.prompt_state.is_broken:
            raise self.prompt_state.interrupted()
        saved.require_plain_positions(self.model)
        codes = None if bits is None else KVCodes.of(bits, "bits")
        saved.write(self, self.options, path_of("path", path), beside or {}, codes)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel, **options: Any) -> Self:
        """Load a cache that `save` has written. The model must be the same, in the same dtype.

        Args:
            path: the file. It is read completely and its checksum is compared before it is used;
                no code from it is run.
            model: the model that filled the cache, on any device.
            options: `policy` if it is not one of this package; `recall` ("host" by default) and
                `recall_bytes` if the cache was saved with recall.

        Returns:
            A cache that continues where the saved one was.

        Raises:
            CacheFileError: the file does not exist, is damaged, or was not written by `save`.
            CacheMismatchError: the cache was saved with another model, dtype or policy, or without
                recall although `recall` is given.
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
        """Load a cache, and the tensors that were passed to `save` as `beside`.

        Args:
            path: the file.
            model: the model that filled the cache, on any device.
            policy: the policy of the saved cache if it is not one of this package.
            recall: where to offload evicted tokens to; "host" by default.
            recall_bytes: the largest number of bytes to offload; no limit by default.

        Returns:
            The cache and the tensors by name.

        Raises:
            CacheFileError: the file does not exist, is damaged, or was not written by `save`.
            CacheMismatchError: the cache was saved with another model, dtype or policy, or without
                recall although `recall` is given.
        """
        return saved.read(cls, path_of("path", path), model, policy, recall, recall_bytes)

    def _repr_html_(self) -> str:
        """Return the cache's report as a table for a notebook; `show` draws the text itself."""
        return self.report()._repr_html_()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy!r}: {self.report().summary})"

    # Copies.

    def __reduce__(self) -> NoReturn:
        """Raise an error, because a cache is saved with `save` and cannot be pickled.

        Raises:
            InvalidTypeError: always.
        """
        raise wrong(
            "cache",
            f"a {type(self).__name__} cannot be pickled",
            "To keep the cache or to pass it to another process, call cache.save(path), and load "
            "the file with CompressedCache.load(path, model)",
            InvalidTypeError,
        )

    def __copy__(self) -> Self:
        """Return a branch: an independent cache that shares the memory of the stored tokens."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.layers = [_branch(layer) for layer in self.layers]
        compressed = [layer for layer in copied.layers if isinstance(layer, CompressedLayer)]
        chooser = replace(self.prompt_state.chooser)
        copied.prompt_state = replace(self.prompt_state, layers=compressed, chooser=chooser)
        copied._padding, copied._check = replace(self._padding, layers=compressed), VoteCheck()
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent cache with copies of all stored tensors; the model is shared."""
        memo.update({id(module): module for module in self._use.modules})
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            copied.__dict__[name] = copy.deepcopy(value, memo)
        copied.release_append_buffers()
        return copied


def _require_reached(model: PreTrainedModel) -> None:
    """Raise if transformers would not pass the cache to the layers of the model.

    Raises:
        UnsupportedModelError: the model is in training mode and uses gradient checkpointing.
    """
    if model.training and any(
        part.training and getattr(part, "gradient_checkpointing", False) for part in model.modules()
    ):
        raise wrong(
            "model",
            f"transformers does not pass the cache to the layers of {type(model).__name__}, which "
            "is in train mode with gradient checkpointing",
            "Call model.eval() or model.gradient_checkpointing_disable() first",
            UnsupportedModelError,
        )


def _branch(layer: Any) -> Any:
    """Return an independent copy of a layer, which shares the memory of the stored tokens.

    Recurrent states are copied, because they change in place.
    """
    written_over = hasattr(layer, "recurrent_states")
    return copy.deepcopy(layer) if written_over else copy.copy(layer)


@torch.compiler.disable  # type: ignore[untyped-decorator] # torch's
def _refuse_compiled() -> NoReturn:
    """Raise the error for a model that was compiled with `torch.compile`.

    Raises:
        UnsupportedModelError: always.
    """
    raise wrong(
        "model",
        "a model that torch.compile has compiled cannot use a CompressedCache, because compiled "
        "code does not follow which tokens it keeps",
        "Use the original model instead. On a GPU, model.generate captures its decode steps in a "
        "CUDA graph",
        UnsupportedModelError,
    )


def _bring_forward(layer: Any, places: Tensor, tokens: int) -> None:
    """Move some of the last tokens of a layer to the front of its last `tokens` slots, in place.

    Args:
        layer: the layer.
        places: (N,) int64, ascending indices into the last `tokens` tokens.
        tokens: how many of the last tokens there are to choose from.
    """

    def move(states: Tensor, end: int) -> Tensor:
        start = end - tokens
        kept = states[..., start:end, :].index_select(-2, places.to(states.device))
        states[..., start : start + len(places), :] = kept
        return states

    if isinstance(layer, CompressedLayer):
        layer.queries.change(lambda held: move(held.clone(), held.shape[-2]))
    for states in (layer.keys, layer.values):
        move(states, layer.keys.shape[-2])
