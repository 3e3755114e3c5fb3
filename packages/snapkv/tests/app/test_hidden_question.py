"""A question that comes when the cache is compressed already."""

import pytest
import torch

from snapkv import CompressedCache, FullCache, SnapKV
from snapkv.app.answering import answer
from snapkv.app.prompts import Prompt
from snapkv.app.settings import GenerationSettings
from snapkv.errors import InvalidArgumentError

SHORT = GenerationSettings(max_new_tokens=6)
DOCUMENT = "The gate opens at nine. The key is under the blue stone. " * 12


def hidden_behind(text, question):
    return Prompt(text=text + question, context_characters=len(text))


QUESTION = "\n\nQuestion: Where is the key?\nAnswer: The key is under the"


def test_a_hidden_question_is_read_over_what_was_kept(demo):
    prompt = hidden_behind(DOCUMENT, QUESTION)
    behind = prompt.token_ids(demo.tokenizer).shape[1] - prompt.context_tokens(demo.tokenizer)
    hidden = answer(demo, prompt, SnapKV(48), SHORT)
    visible = answer(demo, Prompt(text=prompt.text), SnapKV(48), SHORT)
    assert hidden.prompt_tokens == visible.prompt_tokens
    assert visible.cache.kept_tokens == 48 + visible.new_tokens - 1
    assert hidden.cache.kept_tokens == 48 + behind + hidden.new_tokens - 1


def test_with_room_for_everything_hiding_changes_nothing(demo):
    prompt = hidden_behind(DOCUMENT, QUESTION)
    texts = {
        answer(demo, one, policy, SHORT).text
        for one in (prompt, Prompt(text=prompt.text))
        for policy in (FullCache(), SnapKV(1000))
    }
    assert texts == {" blue stone."}


def test_a_hidden_question_does_not_vote(demo):
    """What is kept of the context is the same for every question of one length."""
    kept = []
    for question in ("Where is the blue key now?", "When does the gate open up?"):
        prompt = hidden_behind(DOCUMENT, f"\n\n{question}")
        context = prompt.context_tokens(demo.tokenizer)
        ids = prompt.token_ids(demo.tokenizer)
        cache = CompressedCache(demo.model, SnapKV(48))
        with torch.inference_mode():
            demo.model(ids[:, :context], past_key_values=cache)
        kept.append((context, cache.layers[3].keys.clone()))
    assert kept[0][0] == kept[1][0]
    assert torch.equal(kept[0][1], kept[1][1])


@pytest.mark.parametrize("inside", range(8))
def test_a_token_over_the_contexts_end_belongs_to_the_question(demo, inside):
    """Wherever the end falls, the context's tokens are the first of the prompt's own."""
    text = "The key lies underneath."
    prompt = Prompt(text=text, context_characters=len("The key ") + inside)
    tokens = prompt.context_tokens(demo.tokenizer)
    ids = prompt.token_ids(demo.tokenizer)[0].tolist()
    begun = demo.tokenizer.decode(ids[:tokens])
    assert text.startswith(begun)
    assert len(begun) <= prompt.context_characters
    longer = demo.tokenizer.decode(ids[: tokens + 1])
    assert len(longer) > prompt.context_characters or inside == 0
    assert Prompt(text=text).context_tokens(demo.tokenizer) is None


@pytest.mark.parametrize(
    ("text", "characters", "said"),
    [
        ("Where?", 0, "context: expected text before a question that is hidden"),
        ("Underneath.", 3, "context: expected text before"),
        ("Here.", 5, "question: expected text behind the context"),
    ],
)
def test_a_context_of_nothing_or_of_everything_is_refused(demo, text, characters, said):
    prompt = Prompt(text=text, context_characters=characters)
    with pytest.raises(InvalidArgumentError, match=said):
        answer(demo, prompt, SnapKV(48), SHORT)
