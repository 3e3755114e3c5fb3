"""Hold a conversation about documents in one cache that stays within its budget."""

import copy
import functools
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from snapkv.cache.report import CacheReport
from snapkv.errors import CacheFileError, CacheMismatchError, wrong
from snapkv.hf.cache import CompressedCache
from snapkv.hf.placement import device_of
from snapkv.hf.support import Turns
from snapkv.kvzip import require_one_reading
from snapkv.policies import POLICIES, EvictingPolicy, Policy
from snapkv.policies.default import MOST_CHAT_VOTERS
from snapkv.policies.spans import Span
from snapkv.storage.bits import Quantize
from snapkv.storage.offload import Recall
from snapkv_app.answering import (
    Answer,
    TextSink,
    answer_ids,
    end_token_ids,
    prompt_ids,
    require_positions,
)
from snapkv_app.models import LoadedModel
from snapkv_app.parts import (
    MARKS,
    ROLES,
    SpokenPart,
    generation_tokens,
    question_parts,
    thinking,
    turn,
)
from snapkv_app.plan.advice import token_costs
from snapkv_app.prefills import Exact, Prefill
from snapkv_app.prompts import Prompt, next_turn, question_prompt, require_question
from snapkv_app.protection import Protection
from snapkv_app.settings import GenerationSettings

NO_RECALL = "none"


class Conversation:
    """A sequence of questions and answers about documents, which all share one cache.

    Args:
        loaded: the model and its tokenizer.
        policy: selects the tokens that the cache keeps for each question.
        settings: the length of the answers and how they are sampled.
        document: the text that the questions are about; may be empty.
        recall: where evicted tokens are offloaded, so that a later question can use them: "host" or
            a folder, see `CompressedCache`. With "none" they are lost. None means "host", and
            "none" for policies that evict while generating.
        protection: the tokens of the first prompt that every turn keeps; None protects none.
        prefill: how the tokens of every turn are read; None reads them exactly, in one pass.
        quantize: the format of stored keys and values: "int8", "int4", "K8V4" or a
            `KVCodes`; None for the dtype of the model.

    Attributes:
        cache: the cache that has read the conversation so far.

    Raises:
        InvalidArgumentError: the policy reads prompts twice, or it evicts while generating and
            `recall` is neither None nor "none".
        UnsupportedModelError: the model's cache cannot be compressed, or the model has no gate for
            a policy that needs one.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        policy: Policy,
        settings: GenerationSettings,
        *,
        document: str = "",
        recall: Recall | None = None,
        protection: Protection | None = None,
        prefill: Prefill | None = None,
        quantize: Quantize | None = None,
    ) -> None:
        require_one_reading(policy, "Choose snapkv, whose turns vote on the whole conversation")
        policy = loaded.completed(policy)
        evicts = isinstance(policy, EvictingPolicy)
        self._prefill = prefill or Exact()
        if recall is None:
            recall = NO_RECALL if evicts else "host"
        self._loaded, self._settings, self._document = loaded, settings, document
        self._ids: Tensor | None = None
        self._parts: list[SpokenPart] = []
        self._protection = protection
        turns: Turns = "append" if evicts else "compress"
        drops = recall == NO_RECALL
        kept: dict[str, Any] = {"turns": turns} if drops else {"recall": recall}
        self._options = kept | {"quantize": quantize}
        self.cache = CompressedCache(loaded.model, policy, **self._options)

    @property
    def tokens(self) -> int:
        """The number of tokens of the conversation, including those that were evicted."""
        return 0 if self._ids is None else int(self._ids.shape[1])

    def ask(self, question: str, *, on_text: TextSink | None = None) -> Answer:
        """Answer a question, and add both to the conversation.

        If this raises, the conversation is as it was before.

        Args:
            question: the question.
            on_text: called with every finished piece of the answer.

        Raises:
            InvalidArgumentError: the question is empty, the chat template does not repeat earlier
                answers, the policy cannot compress this prompt, or the first prompt does not
                contain the protected texts.
            PromptTooLongError: the conversation and the answer need more positions than the model
                has.
            UnsupportedModelError: the model cannot read prompts by the `prefill` that was passed.
            OutOfMemoryError: the device is full.
        """
        require_question(question)
        ids, parts, asked = self._with(question)
        require_positions(self._loaded, ids.shape[1], self._settings)
        before = copy.copy(self.cache)
        tokens = asked.question_tokens(self._loaded.tokenizer)
        self.cache.expect_question(None if tokens and tokens > MOST_CHAT_VOTERS else tokens)
        try:
            found, self._ids = answer_ids(
                self._loaded,
                ids,
                self.cache,
                self._settings,
                on_text=on_text,
                prefill=self._prefill,
            )
        except BaseException:
            self.cache = before  # layers may have read different parts of the turn
            raise
        answer = SpokenPart(role="assistant", span=(ids.shape[1], int(self._ids.shape[1])))
        self._parts = [*parts, answer]
        return found

    def _with(self, question: str) -> tuple[Tensor, list[SpokenPart], Prompt]:
        """Append a question to a copy of the conversation's tokens.

        The first question also replaces the empty cache by one that keeps the protected tokens.

        Returns:
            (1, T) int64, the tokens of the conversation with the question; the parts of the
            conversation with the question; and the prompt that contains the new tokens.

        Raises:
            InvalidArgumentError: the chat template does not repeat earlier answers, or the first
                prompt does not contain the protected texts.
            PromptTooLongError: the first prompt and its answer need more positions than the model
                has.
        """
        tokenizer = self._loaded.tokenizer
        if self._ids is not None:
            later, is_chat = next_turn(tokenizer, question), bool(tokenizer.chat_template)
            ids = joined(self._loaded, self._ids, later, self._settings, is_chat=is_chat)
            new = later.token_ids(tokenizer).shape[1]
            asked = SpokenPart(role="user", span=(ids.shape[1] - new, ids.shape[1]))
            return ids, [*self._parts, asked], later
        prompt = question_prompt(tokenizer, self._document, question)
        begun = prompt_ids(self._loaded, prompt, self._settings)
        self._protect(prompt)
        return begun, question_parts(tokenizer, prompt, self._document), prompt

    def drop(self, what: str) -> dict[str, Any]:
        """Remove the tokens of a part of the conversation from the cache for good.

        Later questions cannot use them any more, not even with recall.

        Args:
            what: "thinking" drops the thinking of all answers, "document" drops the document, and
                the number of a turn, counted from 1, drops a question and its answer.

        Returns:
            The number of `tokens` that were dropped, and the `device_bytes` and `host_bytes` that
            this has freed.

        Raises:
            InvalidArgumentError: `what` is none of these, there is no such turn, nothing of the
                part is left in the cache, or the cache cannot drop tokens.
        """
        seen, before = self.cache.get_seq_length(), self.report()
        spans = [(start, min(stop, seen)) for start, stop in self._spans_of(what) if start < seen]
        if spans:
            self.cache.drop(spans)
        after = self.report()
        tokens = after["dropped_tokens"] - before["dropped_tokens"]
        if not tokens:
            marks = f" (searched for {', '.join(MARKS)})" if what == "thinking" else ""
            raise wrong(
                "drop",
                f"the conversation does not contain any {what!r} that could be dropped{marks}",
                "Use thinking, document or the number of a turn",
            )
        freed = {name: before[name] - after[name] for name in ("held_bytes", "host_bytes")}
        return {
            "tokens": tokens,
            "device_bytes": freed["held_bytes"],
            "host_bytes": freed["host_bytes"],
        }

    def _spans_of(self, what: str) -> list[Span]:
        """Return the spans of tokens that `drop` removes for `what`; empty if there are none.

        Raises:
            InvalidArgumentError: `what` is not a part, or there is no turn with that number.
        """
        if what == "document":
            return [part.span for part in self._parts if part.role == what]
        if what == "thinking":
            answers = [part.span for part in self._parts if part.role == "assistant"]
            return [span for answer in answers for span in self._thinking(*answer)]
        if not what.isdecimal() or not what.isascii() or len(what) > 9:
            raise wrong(
                "drop",
                f"expected thinking, document or the number of a turn, but got {what!r:.60}",
                "For example, type /drop 1",
            )
        return [part.span for part in turn(self._parts, int(what))]

    def _thinking(self, start: int, stop: int) -> list[Span]:
        """Return the spans of thinking in an answer, in positions of the conversation.

        The tokens that the chat template has written before the answer are searched, too, since it
        may have written the mark that begins the thinking.

        Args:
            start: the position of the first token of the answer in the conversation.
            stop: the position after its last token.
        """
        assert self._ids is not None
        start = max(0, start - generation_tokens(self._loaded.tokenizer))
        return thinking(self._loaded.tokenizer, self._ids[0, start:stop].tolist(), start)

    def _protect(self, prompt: Prompt) -> None:
        """Replace the empty cache by one that keeps the protected tokens of the first prompt.

        Nothing happens without `protection`.

        Raises:
            InvalidArgumentError: the prompt does not contain a protected text, or the protected
                tokens do not fit into the budget.
        """
        if self._protection is not None:
            policy = self.cache.policy
            model, quantize = self._loaded.model, self._options["quantize"]
            costs = functools.partial(token_costs, model, policy, quantize)
            spans = self._protection.spans(prompt, policy, self._loaded.tokenizer, costs)
            self.cache = CompressedCache(model, policy, protect=spans, **self._options)

    def report(self) -> CacheReport:
        return self.cache.report()

    def save(self, path: str | Path) -> None:
        """Write the conversation to a file, from which `load` continues it.

        A saved conversation or cache with this name is replaced.

        Raises:
            InvalidArgumentError: no question has been asked yet.
            CacheFileError: the file cannot be written, or another kind of file has that name.
            CacheMismatchError: the model has been deleted, or a forward pass was interrupted.
        """
        if self._ids is None:
            raise wrong(
                "save",
                "no question has been asked in this conversation yet",
                "Ask a question first",
            )
        parts = [(ROLES.index(part.role), *part.span) for part in self._parts]
        rows = torch.tensor(parts, dtype=torch.int64).view(-1, 3)
        self.cache.save(path, beside={"conversation": self._ids, "parts": rows})

    @classmethod
    def load(
        cls,
        path: str | Path,
        loaded: LoadedModel,
        settings: GenerationSettings,
        policy: Policy,
        *,
        recall: Recall | None = None,
        prefill: Prefill | None = None,
    ) -> Self:
        """Load a conversation that `save` has written.

        Args:
            path: the file.
            loaded: the model that has read the conversation, and its tokenizer.
            settings: the length of the answers and how they are sampled.
            policy: a policy that is not in `POLICIES` must be the policy of the conversation. Any
                other is ignored, and the file's policy is used.
            recall: where evicted tokens are offloaded from now on: "host" or a folder. None for the
                host if the conversation was saved with recall, and for no recall if it was not.
                "none" is only accepted in the second case.
            prefill: how the tokens of every turn are read; None reads them exactly, in one pass.

        Raises:
            CacheFileError: the file is missing or damaged, or contains no conversation.
            CacheMismatchError: the file belongs to another model or policy, or `recall` contradicts
                the choice that was saved.
        """
        policy = policy.with_tokenizer(loaded.tokenizer)
        own = None if policy.name in POLICIES else policy
        wanted = None if recall == NO_RECALL else recall
        cache, beside = CompressedCache.load_with(path, loaded.model, policy=own, recall=wanted)
        if recall == NO_RECALL and cache.options["turns"] == "recall":
            raise wrong(
                "recall",
                "the conversation was saved with recall, so the value must be 'host', a folder "
                f"or None, but got {recall!r}",
                "Remove this option",
                CacheMismatchError,
            )
        if "conversation" not in beside:
            raise wrong(
                "path",
                f"the file {str(path)!r} contains a cache without a conversation",
                "Use CompressedCache.load to load this file",
                CacheFileError,
            )
        conversation = cls.__new__(cls)
        conversation._loaded, conversation._settings = loaded, settings
        conversation.cache, conversation._prefill = cache, prefill or Exact()
        conversation._ids = beside["conversation"].to(device_of(loaded.model))
        conversation._parts = [
            SpokenPart(role=ROLES[role], span=(start, stop))
            for role, start, stop in beside.get("parts", torch.empty(0, 3)).tolist()
        ]
        return conversation


def joined(
    loaded: LoadedModel, ids: Tensor, turn: Prompt, settings: GenerationSettings, *, is_chat: bool
) -> Tensor:
    """Append a new turn to the tokens of a conversation.

    An end token at the end of the last answer is removed if the turn begins with the same token,
    which would otherwise occur twice. Without a chat template it is always removed, so that the
    turn follows the text of the answer. Any other end token of an answer stays, and an answer that
    was cut off gets none.

    Args:
        loaded: the model and its tokenizer.
        ids: (1, T) int64, the tokens of the conversation, which end with an answer; T is at least
            1.
        turn: the question, as the chat template or `next_turn` writes it.
        settings: names further tokens that end an answer, besides those of the model.
        is_chat: whether a chat template has written `turn`.

    Returns:
        (1, T + new) int64, or (1, T - 1 + new) if an end token was removed; a new tensor on the
        device of `ids`.

    Raises:
        InvalidArgumentError: the tokenizer turns ordinary words of the turn into control tokens.
    """
    tokenizer, last = loaded.tokenizer, int(ids[0, -1])
    is_written = not is_chat or turn.text.startswith(tokenizer.decode([last]))
    if is_written and last in end_token_ids(loaded.model, settings):
        ids = ids[:, :-1]
    return torch.cat([ids, turn.token_ids(tokenizer).to(ids.device)], dim=1)
