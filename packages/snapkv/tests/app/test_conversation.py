"""Conversations: the second question finds what the first one did not need."""

from dataclasses import replace

import pytest
import torch

from snapkv import (
    H2O,
    CacheFileError,
    CacheMismatchError,
    FullCache,
    InvalidArgumentError,
    KVzip,
    PageRecall,
    PromptTooLongError,
    SnapKV,
)
from snapkv.app.conversation import Conversation
from snapkv.app.prompts import next_turn
from snapkv.app.settings import GenerationSettings

SHORT = GenerationSettings(max_new_tokens=6)
DOCUMENT = (
    "The gate opens at nine in the morning. "
    + "The weather was mild and the road was long. " * 8
    + "The key is under the blue stone. "
    + "Nobody came that day, and nobody called. " * 8
)
POLICY = SnapKV(64, window_size=16, kernel_size=13)
QUESTIONS = ("Where is the key?", "When does the gate open?", "What was the road like?")


def said(demo, policy, **options):
    conversation = Conversation(demo, policy, SHORT, document=DOCUMENT, **options)
    return conversation, [conversation.ask(question).text for question in QUESTIONS]


def test_every_turn_reads_all_that_was_said_and_stays_within_the_budget(demo):
    conversation, answers = said(demo, POLICY)
    report = conversation.report()
    assert report.kept_tokens <= 64 + 6
    assert report.seen_tokens == conversation.tokens - 1
    assert report.host_bytes > report.held_bytes
    text = demo.tokenizer.decode(conversation._ids[0])
    assert all(question in text for question in QUESTIONS)
    assert text.count("<|im_start|>user") == text.count("<|im_start|>assistant") == 3
    assert text.count("<|im_end|>\n<|im_start|>user") == 3
    roomy, full_answers = said(demo, FullCache())
    assert answers[0][:10] == full_answers[0][:10]
    assert roomy.report().host_bytes == 0


def test_without_recall_the_cache_stays_within_the_budget_too(demo):
    conversation, _ = said(demo, POLICY, recall="none")
    assert conversation.report().kept_tokens <= 64 + 6
    assert conversation.report().host_bytes == 0
    evicting, _ = said(demo, H2O(64))
    assert evicting.report().kept_tokens <= 64


def test_a_saved_conversation_goes_on_as_the_other(demo, tmp_path):
    conversation, _ = said(demo, POLICY)
    conversation.save(tmp_path / "talk")
    loaded = Conversation.load(tmp_path / "talk", demo, SHORT, SnapKV())
    assert loaded.cache.policy == POLICY
    assert loaded.tokens == conversation.tokens
    question = "Who came that day?"
    assert loaded.ask(question).text == conversation.ask(question).text
    conversation.cache.save(tmp_path / "cache")
    with pytest.raises(CacheFileError, match="path: expected a conversation"):
        Conversation.load(tmp_path / "cache", demo, SHORT, POLICY)


@pytest.mark.parametrize("saved", ["host", PageRecall(2)], ids=["host", "pages"])
def test_a_loaded_conversation_recalls_from_where_it_is_told_to(demo, saved, tmp_path):
    conversation, _ = said(demo, POLICY, recall=saved)
    conversation.save(tmp_path / "talk")
    pages = replace(saved, where=tmp_path / "parked") if saved != "host" else tmp_path / "parked"
    for recall, told in ((None, saved), (tmp_path / "parked", pages), (PageRecall(3),) * 2):
        loaded = Conversation.load(tmp_path / "talk", demo, SHORT, POLICY, recall=recall)
        assert loaded.cache.options["recall"] == told
        loaded.ask("Who came that day?")
    with pytest.raises(CacheMismatchError, match="recall: expected 'host', a folder or nothing"):
        Conversation.load(tmp_path / "talk", demo, SHORT, POLICY, recall="none")


def test_a_conversation_that_forgot_is_loaded_without_recall(demo, tmp_path):
    conversation, _ = said(demo, POLICY, recall="none")
    conversation.save(tmp_path / "talk")
    for recall in (None, "none"):
        loaded = Conversation.load(tmp_path / "talk", demo, SHORT, POLICY, recall=recall)
        assert loaded.cache.options["recall"] is None
    with pytest.raises(CacheMismatchError, match="recall: expected none for a cache that was"):
        Conversation.load(tmp_path / "talk", demo, SHORT, POLICY, recall="host")


def test_an_interrupted_turn_does_not_count(demo):
    conversation = Conversation(demo, POLICY, SHORT, document=DOCUMENT)
    first = conversation.ask(QUESTIONS[0])
    before = conversation.tokens

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.ask(QUESTIONS[1], on_text=interrupt)
    assert conversation.tokens == before
    other = Conversation(demo, POLICY, SHORT, document=DOCUMENT)
    assert other.ask(QUESTIONS[0]).text == first.text
    again = conversation.ask(QUESTIONS[1])
    assert again.cache.seen_tokens == conversation.tokens - 1
    assert again.text[:5] == other.ask(QUESTIONS[1]).text[:5]


def test_what_cannot_be_asked_is_refused_and_changes_nothing(demo):
    conversation = Conversation(demo, POLICY, SHORT, document=DOCUMENT)
    with pytest.raises(InvalidArgumentError, match="save: expected a conversation that has begun"):
        conversation.save("nowhere")
    with pytest.raises(InvalidArgumentError, match="question: expected a question"):
        conversation.ask("  ")
    with pytest.raises(PromptTooLongError, match="8,192 positions"):
        conversation.ask("word " * 9000)
    assert conversation.tokens == 0
    with pytest.raises(InvalidArgumentError, match="policy: expected one that only compresses"):
        Conversation(demo, H2O(64), SHORT, recall="host")
    with pytest.raises(InvalidArgumentError, match=r"one that chooses when .* kvzip"):
        Conversation(demo, KVzip(64), SHORT)


def test_turns_of_a_model_without_a_template_are_plain_text(demo):
    class Plain:
        chat_template = None

    class Forgetful:
        chat_template = "yes"

        def apply_chat_template(self, turns, **options):
            return turns[-1]["content"]

    assert next_turn(Plain(), "Who?") == "\n\nQuestion: Who?\nAnswer:"
    with pytest.raises(InvalidArgumentError, match="chat: expected a chat template that repeats"):
        next_turn(Forgetful(), "Who?")
    assert next_turn(demo.tokenizer, "Who?").startswith("<|im_end|>\n<|im_start|>user\nWho?")
    assert torch.is_tensor(Conversation(demo, POLICY, SHORT)._with("Who?"))
