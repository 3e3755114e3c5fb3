"""Questions about one text, answered one behind the other in one compressed cache."""

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor

from snapkv.app.answering import Answer, answer_ids, prompt_ids, require_positions
from snapkv.app.conversation import behind
from snapkv.app.models import LoadedModel
from snapkv.app.prefills import Prefill
from snapkv.app.prompt_end import PromptEnd
from snapkv.cache.paging import PageRecall
from snapkv.hf.cache import CompressedCache
from snapkv.policies import Policy
from snapkv_lab.evaluate.sample import Conversation, Setting, Template, later_turn

LaterWord = Literal["append", "compress", "recall"]

Later = LaterWord | PageRecall
"""What a later question does: it is stored behind what was kept, votes on what was kept, or votes
on all that was read; with pages, every step of all answers also attends to some of the rest."""

LATER: dict[LaterWord, dict[str, Any]] = {
    "append": {},
    "compress": {"turns": "compress"},
    "recall": {"recall": "host"},
}
"""Those that have a word, as options of `CompressedCache`."""


def cache_options(later: Later) -> dict[str, Any]:
    """Options of `CompressedCache` for what later questions do."""
    return {"recall": later} if isinstance(later, PageRecall) else LATER[later]


def described(later: Later) -> str | dict[str, int]:
    """What later questions do, ready for JSON."""
    return later.describe() if isinstance(later, PageRecall) else later


def converse(
    loaded: LoadedModel,
    conversation: Conversation,
    policy: Policy,
    template: Template,
    setting: Setting,
    *,
    prefill: Prefill,
    later: Later,
    ends: list[PromptEnd] | None = None,
) -> Iterator[Answer]:
    """Read the text once, and answer every question behind the one before it and its answer.

    An answer is the model's own, and what is wrong in it stays in the conversation.

    Args:
        loaded: model and tokenizer.
        conversation: the text and its questions.
        policy: what the cache keeps of the text.
        template: as in `Sample.prompt`.
        setting: whether the first question votes on the text; the later ones do as `later` says.
        prefill: how every turn is read.
        later: what becomes of later questions.
        ends: gets the end of every question, as it was answered; None for none.

    Raises:
        PromptTooLongError: the model has no positions left for a question and its answer.
        OutOfMemoryError: the device or the host is full.
    """
    tokenizer = loaded.tokenizer
    policy = loaded.completed(policy)
    prompt = conversation.prompt(tokenizer, template, setting)
    spans = conversation.protection.spans(prompt, policy, tokenizer)
    cache = CompressedCache(loaded.model, policy, protect=spans, **cache_options(later))
    said: Tensor | None = None
    for turn in conversation.turns:
        if said is None:
            ids = prompt_ids(loaded, prompt, turn.settings)
            context_tokens = prompt.context_tokens(tokenizer)
        else:
            text = later_turn(turn, tokenizer, template)
            is_chat = turn.is_chat(tokenizer, template)
            ids, context_tokens = behind(loaded, said, text, turn.settings, is_chat=is_chat), None
            require_positions(loaded, ids.shape[1], turn.settings)
        found, said = answer_ids(
            loaded,
            ids,
            cache,
            turn.settings,
            answer_start=turn.answer_start,
            context_tokens=context_tokens,
            prefill=prefill,
            on_prompt_end=None if ends is None else ends.append,
        )
        yield found
