"""Conversations: every turn attends to all earlier turns, within one budget."""

from typing import ClassVar

import pytest
import torch

from snapkv import (
    H2O,
    CacheFileError,
    CacheMismatchError,
    FastGen,
    FullCache,
    InvalidArgumentError,
    KVzap,
    KVzip,
    PromptTooLongError,
    SnapKV,
    default_policy,
)
from snapkv.policies.default import by_layer
from snapkv_app.answering import end_token_ids
from snapkv_app.conversation import Conversation, joined
from snapkv_app.prompts import next_turn
from snapkv_app.settings import GenerationSettings

SHORT = GenerationSettings(max_new_tokens=6)
DOCUMENT = (
    "The gate opens at nine in the morning. "
    + "The weather was mild and the road was long. " * 6
    + "The key is under the blue stone. "
)
POLICY = SnapKV(64, window_size=16, kernel_size=13)
QUESTIONS = ("Where is the key?", "When does the gate open?", "What was the road like?")


def said(tiny, policy, **options):
    conversation = Conversation(tiny, policy, SHORT, document=DOCUMENT, **options)
    return conversation, [conversation.ask(question).text for question in QUESTIONS]


def test_second_question_is_answered_from_recalled_tokens(demo):
    conversation = Conversation(demo, POLICY, SHORT, document=DOCUMENT)
    full = Conversation(demo, FullCache(), SHORT, document=DOCUMENT)
    assert conversation.ask(QUESTIONS[1]).text[:10] == full.ask(QUESTIONS[1]).text[:10]
    assert "blue" in conversation.ask("The key is under which stone?").text


@pytest.mark.parametrize("recall", [None, "none"])
def test_tokens_of_each_question_vote_in_its_turn(tiny, recall):
    policy = default_policy(64) if recall is None else default_policy(64).policy
    conversation = Conversation(tiny, policy, SHORT, document=DOCUMENT, recall=recall)
    long = "And when, if it is not too much to ask, does the gate open in the morning, and why?"
    for question in (QUESTIONS[0], long, QUESTIONS[2]):
        conversation.ask(question)
        tokens = by_layer(conversation.cache.prompt_state.policy).voters
        expected = next_turn(tiny.tokenizer, question).question_tokens(tiny.tokenizer)
        assert tokens == max(16, expected)
        assert by_layer(conversation.cache.policy).voters is None
    conversation.ask("The road was long. " * 30)  # a message that probably contains a text
    assert by_layer(conversation.cache.prompt_state.policy).voters is None


def test_every_turn_reads_all_tokens_and_stays_within_the_budget(tiny):
    conversation, _ = said(tiny, POLICY)
    report = conversation.report()
    assert report.kept_tokens <= 64 + 6
    assert report.seen_tokens == conversation.tokens - 1
    assert report.host_bytes > report.held_bytes
    text = tiny.tokenizer.decode(conversation._ids[0])
    assert all(question in text for question in QUESTIONS)
    assert text.count("<|im_start|>user") == text.count("<|im_start|>assistant") == 3
    assert said(tiny, FullCache())[0].report().host_bytes == 0
    forgetful, _ = said(tiny, POLICY, recall="none")
    assert forgetful.report().kept_tokens <= 64 + 6
    assert forgetful.report().host_bytes == 0
    evicting, _ = said(tiny, H2O(64))
    assert evicting.report().kept_tokens <= 64


def test_saved_conversation_continues_with_its_own_or_another_recall(tiny, tmp_path):
    conversation, _ = said(tiny, POLICY, recall="host")
    conversation.save(tmp_path / "talk")
    answers = []
    for recall, told in ((None, "host"), (tmp_path / "parked",) * 2):
        loaded = Conversation.load(tmp_path / "talk", tiny, SHORT, SnapKV(), recall=recall)
        assert loaded.cache.policy == POLICY
        assert loaded.tokens == conversation.tokens
        assert loaded.cache.options["recall"] == told
        answers.append(loaded.ask("Who came that day?").token_ids)
    assert answers == [conversation.ask("Who came that day?").token_ids] * 2
    with pytest.raises(CacheMismatchError, match=r"recall: .* must be 'host', a folder or None"):
        Conversation.load(tmp_path / "talk", tiny, SHORT, POLICY, recall="none")
    conversation.cache.save(tmp_path / "cache")
    with pytest.raises(CacheFileError, match=r"path: .* contains a cache without a conversation"):
        Conversation.load(tmp_path / "cache", tiny, SHORT, POLICY)


@pytest.mark.parametrize("other", [default_policy(80), KVzap(80), SnapKV(80)])
def test_loaded_conversation_keeps_its_budget_whatever_the_policy_of_now_is(tiny, tmp_path, other):
    for policy in (default_policy(64), FastGen()):
        conversation, _ = said(tiny, policy)
        conversation.save(tmp_path / "talk")
        loaded = Conversation.load(tmp_path / "talk", tiny, SHORT, other)
        assert loaded.cache.policy == conversation.cache.policy


def test_conversation_with_evicted_tokens_is_loaded_without_recall(tiny, tmp_path):
    conversation, _ = said(tiny, POLICY, recall="none")
    conversation.save(tmp_path / "talk")
    for recall in (None, "none"):
        loaded = Conversation.load(tmp_path / "talk", tiny, SHORT, POLICY, recall=recall)
        assert loaded.cache.options["recall"] is None
    with pytest.raises(CacheMismatchError, match="recall: the cache was saved without recall"):
        Conversation.load(tmp_path / "talk", tiny, SHORT, POLICY, recall="host")


def test_interrupted_turn_leaves_the_conversation_unchanged(tiny):
    conversation = Conversation(tiny, POLICY, SHORT, document=DOCUMENT)
    other = Conversation(tiny, POLICY, SHORT, document=DOCUMENT)
    assert conversation.ask(QUESTIONS[0]).text == other.ask(QUESTIONS[0]).text
    dropped = [each.drop("document")["tokens"] for each in (conversation, other)]
    before = conversation.tokens

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.ask(QUESTIONS[1], on_text=interrupt)
    assert conversation.tokens == before
    again = conversation.ask(QUESTIONS[1])
    assert again.cache.seen_tokens == conversation.tokens - 1
    assert again.text[:5] == other.ask(QUESTIONS[1]).text[:5]
    assert [each.report()["dropped_tokens"] for each in (conversation, other)] == dropped


def test_refused_question_leaves_the_conversation_unchanged(tiny):
    conversation = Conversation(tiny, POLICY, SHORT, document=DOCUMENT)
    with pytest.raises(InvalidArgumentError, match="save: no question has been asked"):
        conversation.save("nowhere")
    with pytest.raises(InvalidArgumentError, match="question: expected a question"):
        conversation.ask("  ")
    with pytest.raises(PromptTooLongError, match="512 positions"):
        conversation.ask("word " * 600)
    assert conversation.tokens == 0
    with pytest.raises(
        InvalidArgumentError,
        match=r"policy: .* can only be used with a policy that only compresses prompts",
    ):
        Conversation(tiny, H2O(64), SHORT, recall="host")
    with pytest.raises(
        InvalidArgumentError, match=r"policy: kvzip .* read only once.*\. Choose snapkv"
    ):
        Conversation(tiny, KVzip(64), SHORT)


def test_turns_without_a_chat_template_are_plain_text(demo):
    class Plain:
        chat_template = None
        added_tokens_decoder: ClassVar = {}

    class Forgetful(Plain):
        chat_template = "yes"

        def apply_chat_template(self, turns, **options):
            return turns[-1]["content"]

    assert next_turn(Plain(), "Who?").text == "\n\nQuestion: Who?\nAnswer:"
    with pytest.raises(
        InvalidArgumentError, match="chat: the chat template of the model does not contain"
    ):
        next_turn(Forgetful(), "Who?")
    assert next_turn(demo.tokenizer, "Who?").text.startswith("<|im_end|>\n<|im_start|>user\nWho?")


def test_next_turn_follows_exactly_one_end_of_the_answer(tiny):
    turn = next_turn(tiny.tokenizer, "Who?")
    own = turn.token_ids(tiny.tokenizer)[0].tolist()
    (end,) = end_token_ids(tiny.model, SHORT)
    for said_ids, kept in (([5, 7, end], [5, 7]), ([5, 7], [5, 7])):
        ids = joined(tiny, torch.tensor([said_ids]), turn, SHORT, is_chat=True)
        assert ids.tolist() == [[*kept, *own]]
