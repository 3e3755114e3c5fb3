"""Dropping parts of a conversation: its document, a turn, or the model's thinking."""

import pytest

from snapkv import InvalidArgumentError, SnapKV
from snapkv_app.conversation import Conversation
from snapkv_app.parts import MARKS, thinking
from tests.app.test_conversation import DOCUMENT, POLICY, QUESTIONS, SHORT, said


@pytest.fixture
def thinks(tiny, monkeypatch):
    """The model's template begins every answer with a thought, which never ends."""
    template = tiny.tokenizer.chat_template.replace("assistant\n", "assistant\n<think>\n")
    monkeypatch.setattr(tiny.tokenizer, "chat_template", template)
    return tiny


def dropped(conversation):
    return conversation.cache.prompt_state.layers[0].slots.removed_spans_of(1)[0]


def text_of(conversation, span):
    return conversation._loaded.tokenizer.decode(conversation._ids[0, slice(*span)])


def test_dropped_parts_stay_dropped_in_a_saved_conversation(thinks, tmp_path):
    conversation = said(thinks, POLICY)[0]
    freed = conversation.drop("document")
    assert abs(freed["tokens"] - len(thinks.tokenizer(DOCUMENT).input_ids)) <= 2
    assert freed["device_bytes"] > 0 < freed["host_bytes"]
    with pytest.raises(InvalidArgumentError, match="does not contain any"):
        conversation.drop("document")
    conversation.drop("thinking")
    (document, *thoughts) = dropped(conversation).parts
    assert text_of(conversation, document).strip() == DOCUMENT.strip()
    assert len(thoughts) == len(QUESTIONS)
    assert all(text_of(conversation, span).startswith("<think>") for span in thoughts)
    conversation.save(tmp_path / "talk")
    loaded = Conversation.load(tmp_path / "talk", thinks, SHORT, SnapKV())
    assert dropped(loaded) == dropped(conversation)
    for each in (conversation, loaded):
        each.drop("2")
        assert QUESTIONS[1] in text_of(each, dropped(each).parts[-2])
    assert conversation.ask("Who?").token_ids == loaded.ask("Who?").token_ids
    for wrong in ("", "everything", "tools", "9", "-1", "²", "9" * 5000):
        with pytest.raises(InvalidArgumentError, match=r"^drop: expected "):
            conversation.drop(wrong)


def test_refused_drop_without_recall_keeps_the_conversation_usable(tiny):
    conversation = said(tiny, POLICY, recall="none")[0]
    with pytest.raises(InvalidArgumentError, match=r"turns: .* would then store different"):
        conversation.drop("document")
    conversation.ask("Who?")
    whole = said(tiny, SnapKV(400, window_size=16), recall="none")[0]
    whole.drop("document")


def test_drop_of_absent_thinking_names_the_expected_marks(tiny):
    with pytest.raises(InvalidArgumentError, match="does not contain any") as refused:
        said(tiny, POLICY)[0].drop("thinking")
    assert all(mark in str(refused.value) for mark in MARKS)


@pytest.mark.parametrize("begin", MARKS)
@pytest.mark.parametrize("ends", [True, False])
def test_thinking_of_every_model_family_is_found(tiny, begin, ends):
    """A mark may have several tokens, and so may a character."""
    behind = "<|start|>assistant" if begin.startswith("<|channel|>") else ""
    thought = f"{begin}No, 你好: at nine.{MARKS[begin] + behind if ends else ''}"
    text = f"Well: {thought}" + f"At nine. {thought}Yes." * ends
    ids = tiny.tokenizer(text, add_special_tokens=False).input_ids
    spans = thinking(tiny.tokenizer, ids, 10)
    found = [tiny.tokenizer.decode(ids[start - 10 : stop - 10]) for start, stop in spans]
    assert [each.strip() for each in found] == [thought] * (1 + ends)
