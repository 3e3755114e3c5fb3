"""Transcripts: which tokens are whose, and what of them a conversation drops."""

import json

import pytest

from snapkv import InvalidArgumentError, SnapKV
from snapkv.app.conversation import Conversation
from snapkv.app.transcripts import Transcript, thinking
from tests.app.test_conversation import DOCUMENT, POLICY, QUESTIONS, SHORT

CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "gate"}'}}
MESSAGES = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "When does the gate open?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "The gate opens at nine. " * 4},
    {"role": "assistant", "content": "<think>It says nine.</think>At nine."},
    {"role": "user", "content": [{"type": "text", "text": "And the key?"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "The key is under the blue stone. " * 4},
    {"role": "assistant", "content": "Under the stone."},
]


def test_every_part_is_found_in_the_tokens(tiny):
    prompt, parts = Transcript.of(MESSAGES).asking("Which stone?").prompt(tiny.tokenizer)
    ids = prompt.token_ids(tiny.tokenizer)[0]
    assert [part.role for part in parts] == [message["role"] for message in MESSAGES] + ["user"]
    text = [tiny.tokenizer.decode(ids[slice(*part.span)]) for part in parts]
    assert "".join(text) + "<|im_start|>assistant\n" == prompt.text
    for message, own in zip(MESSAGES, text, strict=False):
        if isinstance(message["content"], str):
            assert message["content"].strip() in own
    assert text[2].count("<tool_call>") == 1  # which this template does not write by itself
    assert prompt.system_characters == len(text[0])


def test_a_call_is_written_whatever_else_names_its_tool(tiny):
    """That the name stood somewhere in the text counted as if the template had written the call."""
    said = [{"role": "user", "content": "Please look at the gate."}, *MESSAGES[2:4]]
    prompt, parts = Transcript.of(said).prompt(tiny.tokenizer)
    assert '"arguments": {"at": "gate"}' in prompt.text
    ids = prompt.token_ids(tiny.tokenizer)[0]
    assert tiny.tokenizer.decode(ids[slice(*parts[2].span)]).count("<tool_call>") == 1


def test_a_template_that_writes_calls_has_them_once(tiny, monkeypatch):
    monkeypatch.setattr(
        tiny.tokenizer,
        "chat_template",
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
        "{% for call in message['tool_calls'] %}<call>{{ call['function']['name'] }}{% endfor %}\n"
        "{% endfor %}",
    )
    prompt, _ = Transcript.of(MESSAGES).prompt(tiny.tokenizer)
    assert prompt.text.count("<call>look") == 2
    assert "<tool_call>" not in prompt.text


def test_a_template_that_rewrites_what_was_said_has_its_contents_found(tiny, monkeypatch):
    monkeypatch.setattr(
        tiny.tokenizer,
        "chat_template",
        "{{ messages|length }} messages{% for message in messages %}\n{{ message['role'] }}: "
        "{{ message['content'] }}{% endfor %}",
    )
    prompt, parts = Transcript.of(MESSAGES).prompt(tiny.tokenizer)
    ids = prompt.token_ids(tiny.tokenizer)[0]
    assert (
        tiny.tokenizer.decode(ids[slice(*parts[3].span)]).strip() == MESSAGES[3]["content"].strip()
    )


def talk(tiny, **options):
    conversation = Conversation(
        tiny, options.pop("policy", POLICY), SHORT, transcript=Transcript.of(MESSAGES), **options
    )
    conversation.ask("Which stone?")
    return conversation


def dropped(conversation):
    return conversation.cache.reading.layers[0].slots.erased_spans(1)[0]


def test_tool_results_thinking_and_turns_are_dropped_and_stay_so_in_a_file(tiny, tmp_path):
    conversation = talk(tiny)
    _, parts = Transcript.of(MESSAGES).asking("Which stone?").prompt(tiny.tokenizer)
    tools = [part.span for part in parts if part.role == "tool"]
    freed = conversation.drop("tools")
    assert freed["tokens"] == sum(stop - start for start, stop in tools)
    assert freed["device_bytes"] > 0 < freed["host_bytes"]
    assert dropped(conversation).parts == tuple(tools)
    with pytest.raises(InvalidArgumentError, match="expected something that was said and is not"):
        conversation.drop("tools")
    thought = conversation.drop("thinking")["tokens"]
    assert 0 < thought < parts[4].span[1] - parts[4].span[0]
    conversation.save(tmp_path / "talk")
    loaded = Conversation.load(tmp_path / "talk", tiny, SHORT, SnapKV())
    assert dropped(loaded) == dropped(conversation)
    for each in (conversation, loaded):
        each.drop("2")
        assert dropped(each).parts[-1] == (parts[5].span[0], parts[8].span[1])
        each.drop("3")
    assert conversation.ask("Who?").token_ids == loaded.ask("Who?").token_ids
    for wrong in ("", "everything", "9", "-1", "²", "9" * 5000):
        with pytest.raises(InvalidArgumentError, match=r"^drop: expected "):
            conversation.drop(wrong)


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_old_tool_results_are_cleared_before_the_answer(tiny, kept):
    conversation = talk(tiny, clear_tool_results=kept)
    _, parts = Transcript.of(MESSAGES).asking("Which stone?").prompt(tiny.tokenizer)
    tools = [part.span for part in parts if part.role == "tool"]
    assert dropped(conversation).parts == tuple(tools[: max(0, len(tools) - kept)])


def test_a_conversation_about_a_document_drops_it_and_an_interrupted_turn_drops_nothing(tiny):
    conversation = Conversation(tiny, POLICY, SHORT, document=DOCUMENT)
    conversation.ask(QUESTIONS[0])
    tokens = conversation.drop("document")["tokens"]
    assert abs(tokens - len(tiny.tokenizer(DOCUMENT).input_ids)) <= 2

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conversation.ask(QUESTIONS[1], on_text=interrupt)
    assert dropped(conversation).tokens == tokens
    conversation.ask(QUESTIONS[1])
    assert conversation.report()["dropped_tokens"] == tokens


def test_without_recall_what_cannot_be_dropped_is_refused_and_the_conversation_goes_on(tiny):
    conversation = talk(tiny, recall="none")
    with pytest.raises(InvalidArgumentError, match="turns: expected spans of which every head"):
        conversation.drop("tools")
    conversation.ask("Who?")
    whole = talk(tiny, recall="none", policy=SnapKV(400, window_size=16))
    whole.drop("tools")


def test_thinking_is_found_where_the_template_begins_it(tiny):
    ids = tiny.tokenizer(
        "<think>\nno\n</think>yes [THINK]again", add_special_tokens=False
    ).input_ids
    spans = thinking(tiny.tokenizer, ids, 10)
    texts = [tiny.tokenizer.decode(ids[start - 10 : stop - 10]) for start, stop in spans]
    assert len(texts) == 2
    assert texts[0].startswith("<think>")
    assert "</think>" in texts[0]
    assert texts[1].endswith("again")


WRONG = [
    "[]",
    '{"a": 1}',
    "{",
    '{"messages": 3}',
    '["hello"]',
    '[{"role": "friend", "content": "x"}]',
    '[{"role": "user", "content": {"a": 1}}]',
    '[{"role": "user", "content": 0}]',
    '[{"role": "user", "content": "a\\ud800"}]',
    '[{"role": "user", "content": [{"type": "text", "text": null}]}]',
    '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]',
    '{"messages": [{"role": "user", "content": "x"}], "tools": {"type": "function"}}',
    json.dumps([{"role": "user", "content": "x"}] * 2001),
    '[{"role": "assistant", "tool_calls": [3]}]',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_transcript_is_refused_in_a_line(tmp_path, text):
    path = tmp_path / "messages.json"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"^transcript.*: expected .*; ") as refused:
        Transcript.read(path)
    assert "\n" not in str(refused.value)
    assert "got None" not in str(refused.value)
    with pytest.raises(InvalidArgumentError, match=r"^transcript: expected a JSON file"):
        Transcript.read(tmp_path / "nothing")


def test_an_object_with_tools_is_read(tmp_path, tiny):
    path = tmp_path / "messages.json"
    path.write_text(json.dumps({"messages": MESSAGES, "tools": [{"type": "function"}]}))
    assert len(Transcript.read(path).messages) == len(MESSAGES)
    prompt, parts = Transcript.read(path).prompt(tiny.tokenizer)
    assert parts[-1].span[1] <= prompt.token_ids(tiny.tokenizer).shape[1]
