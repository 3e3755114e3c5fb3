"""Transcripts: which tokens are whose, and what of them a conversation drops."""

import json

import pytest

from snapkv import InvalidArgumentError
from snapkv.app.transcripts import Transcript

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
