"""Answers from documents that a library has read."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from snapkv.hf.cache import CompressedCache
from snapkv.policies import FullCache, Policy
from snapkv.storage.bits import Quantize
from snapkv.validation import DEFAULT_RECOMPUTE
from snapkv_app.answering import Answer, TextSink, answer_ids, require_positions
from snapkv_app.library.about import question_ids
from snapkv_app.library.library import Library
from snapkv_app.library.searching import Hit
from snapkv_app.library_hits import Found
from snapkv_app.models import LoadedModel
from snapkv_app.settings import GenerationSettings


@dataclass(frozen=True, kw_only=True)
class LibraryQuestion:
    """A question about the best-matching documents of a library."""

    loaded: LoadedModel
    library: Library
    text: str
    hits: Sequence[Hit]  # the best first
    settings: GenerationSettings
    recompute: float = DEFAULT_RECOMPUTE
    answer_start: str = ""
    search_ms: float = 0.0  # counts towards the first token
    left_out: Sequence[Hit] = field(default_factory=list)  # the model has no positions for them

    def answer(
        self,
        policy: Policy,
        on_text: TextSink | None = None,
        *,
        quantize: Quantize | None = None,
    ) -> Answer:
        """Answer from the library's caches."""
        start = time.perf_counter()
        inputs = self.library.inputs(
            *self._asked,
            policy=self.loaded.completed(policy),
            recompute=self.recompute,
            answer_start=self.answer_start,
            quantize=quantize,
        )
        before_ms = self.search_ms + 1000 * (time.perf_counter() - start)
        ids, cache = inputs["input_ids"], inputs["past_key_values"]
        return self._answered(ids, cache, self.settings, on_text).later(before_ms)

    def answer_in_full(self, new_tokens: int | None = None) -> Answer:
        """The full cache's answer, with the same documents read together."""
        ids = self.library.token_ids(*self._asked, answer_start=self.answer_start)
        limit = self.settings.max_new_tokens if new_tokens is None else new_tokens
        cache = CompressedCache(self.loaded.model, FullCache())
        return self._answered(ids, cache, replace(self.settings, max_new_tokens=limit))

    @property
    def _asked(self) -> tuple[Any, Any, str, Sequence[Hit]]:
        return self.loaded.model, self.loaded.tokenizer, self.text, self.hits

    def _answered(
        self,
        ids: Tensor,
        cache: CompressedCache,
        settings: GenerationSettings,
        on_text: TextSink | None = None,
    ) -> Answer:
        start = self.answer_start
        return answer_ids(self.loaded, ids, cache, settings, answer_start=start, on_text=on_text)[0]


def take(
    loaded: LoadedModel,
    library: Library,
    question: str,
    found: Found,
    settings: GenerationSettings,
    *,
    recompute: float = DEFAULT_RECOMPUTE,
    answer_start: str = "",
) -> LibraryQuestion:
    """Keep as many of the found documents as the model has positions for."""
    taken = len(library.required().prefix_ids)
    taken += len(question_ids(loaded.tokenizer, question, answer_start))
    kept: list[Hit] = []
    for hit in found.hits:
        needed = taken + hit.tokens + settings.max_new_tokens
        if loaded.has_positions(needed):
            kept.append(hit)
            taken += hit.tokens
    if not kept:
        require_positions(loaded, taken + found.hits[0].tokens, settings)
    return LibraryQuestion(
        loaded=loaded,
        library=library,
        text=question,
        hits=kept,
        settings=settings,
        recompute=recompute,
        answer_start=answer_start,
        search_ms=found.search_ms,
        left_out=[hit for hit in found.hits if hit not in kept],
    )
