"""Turns about documents in one cache that stays within its budget."""

from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from snapkv.app.answering import Answer, TextSink, answer_ids, end_token_ids, require_positions
from snapkv.app.models import LoadedModel
from snapkv.app.prefills import Exact, Prefill
from snapkv.app.prompts import Prompt, next_turn, question_prompt
from snapkv.app.protection import Protection
from snapkv.app.settings import GenerationSettings
from snapkv.cache.options import Turns
from snapkv.cache.paging import Recall
from snapkv.cache.report import CacheReport
from snapkv.errors import CacheFileError, CacheMismatchError, InvalidArgumentError
from snapkv.hf.cache import CompressedCache
from snapkv.kvzip import require_one_reading
from snapkv.policies import EvictingPolicy, Policy
from snapkv.storage.auto import Quantize

NO_RECALL = "none"


class Conversation:
    """Questions and answers about documents, one behind the other in the same cache.

    Args:
        loaded: model and tokenizer.
        policy: what the cache keeps for each question.
        settings: length and sampling.
        document: what the questions are about; may be empty.
        recall: "host", a folder or a `PageRecall`, see `CompressedCache`; "none" drops for good
            what a turn does not need. None for "host", or "none" for methods that evict while
            generating.
        protection: what of the first prompt must stay, through all turns; None for nothing.
        prefill: how every turn is read; None for exactly, at once.
        quantize: as for `CompressedCache`.
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
        require_one_reading(policy, "choose snapkv, whose turns vote on all that was said")
        policy = loaded.completed(policy)
        evicts = isinstance(policy, EvictingPolicy)
        self._prefill = prefill or Exact()
        if recall is None:
            recall = NO_RECALL if evicts or not self._prefill.holds_all else "host"
        self._loaded, self._settings, self._document = loaded, settings, document
        self._ids: Tensor | None = None
        self._protection = protection
        turns: Turns = "append" if evicts else "compress"
        drops = recall == NO_RECALL
        kept: dict[str, Any] = {"turns": turns} if drops else {"recall": recall}
        self._options = kept | {"quantize": quantize}
        self.cache = CompressedCache(loaded.model, policy, **self._options)

    @property
    def tokens(self) -> int:
        return 0 if self._ids is None else int(self._ids.shape[1])

    def ask(self, question: str, *, on_text: TextSink | None = None) -> Answer:
        if not question.strip():
            raise InvalidArgumentError("question: expected a question, got an empty text; ask one")
        ids = self._with(question)
        require_positions(self._loaded, ids.shape[1], self._settings)
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
            self.cache.reset()  # layers may have read different parts; the next turn reads all anew
            raise
        return found

    def _with(self, question: str) -> Tensor:
        """(1, T) int64: all that was said, and the question."""
        tokenizer, device = self._loaded.tokenizer, self._loaded.model.device
        if self._ids is None:
            prompt = question_prompt(tokenizer, self._document, question)
            self._protect(prompt)
            begun: Tensor = prompt.token_ids(tokenizer)
            return begun.to(device)
        text, is_chat = next_turn(tokenizer, question), bool(tokenizer.chat_template)
        return behind(self._loaded, self._ids, text, self._settings, is_chat=is_chat)

    def _protect(self, prompt: Prompt) -> None:
        """Begin with a cache that keeps what must stay of the first prompt."""
        if self._protection is not None:
            policy = self.cache.policy
            spans = self._protection.spans(prompt, policy, self._loaded.tokenizer)
            self.cache = CompressedCache(self._loaded.model, policy, protect=spans, **self._options)

    def report(self) -> CacheReport:
        return self.cache.report()

    def save(self, path: str | Path) -> None:
        """Write the conversation to a file; see `CompressedCache.save`."""
        if self._ids is None:
            raise InvalidArgumentError(
                "save: expected a conversation that has begun, got none yet; ask something first"
            )
        self.cache.save(path, beside={"conversation": self._ids})

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
        """The conversation that `save` has written; it goes on with the policy it was saved with.

        `policy` is used where it is the saved one, for methods that need a tokenizer. `recall` says
        where evicted tokens lie from now on; None for the host, and the choice that was saved. A
        conversation that was saved without takes none, or "none".
        """
        policy = policy.with_tokenizer(loaded.tokenizer)
        own = policy if policy.needs else None
        wanted = None if recall == NO_RECALL else recall
        cache, beside = CompressedCache.load_with(path, loaded.model, policy=own, recall=wanted)
        if recall == NO_RECALL and cache.options["recall"] is not None:
            raise CacheMismatchError(
                f"recall: expected 'host', a folder or nothing for a conversation that was saved "
                f"with recall, got {recall!r}; leave it out"
            )
        if "conversation" not in beside:
            raise CacheFileError(
                f"path: expected a conversation that was saved, got a cache without one at "
                f"{str(path)!r}; load it with CompressedCache.load"
            )
        conversation = cls.__new__(cls)
        conversation._loaded, conversation._settings = loaded, settings
        conversation.cache, conversation._prefill = cache, prefill or Exact()
        conversation._ids = beside["conversation"].to(loaded.model.device)
        return conversation


def behind(
    loaded: LoadedModel, said: Tensor, text: str, settings: GenerationSettings, *, is_chat: bool
) -> Tensor:
    """All that was said, (1, T) int64, and a text behind it, which a chat template has made or not.

    A template's text follows the token that ends an answer, once; no cache has read that token yet.
    Another text goes on where the answer's own ends.
    """
    tokenizer, last = loaded.tokenizer, int(said[0, -1])
    if last in end_token_ids(loaded.model, settings):
        end = tokenizer.decode([last])
        said = said[:, :-1]  # the template may write it itself
        text = text if text.startswith(end) or not is_chat else end + text
    new = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    return torch.cat([said, new.to(said.device)], dim=1)
