"""Bodies that name a document, worked by hand: a token per character."""

import asyncio

import pytest

from snapkv_vllm.documents.catalogue import SharedDocument
from snapkv_vllm.documents.refused import RefusedError
from snapkv_vllm.documents.rewriting import (
    common_prefix,
    document_of,
    ids_of_messages,
    ids_of_text,
    rewritten,
)
from tests.serving.documents.fakes import BEGIN, DOUBLE, END, ROLES, CharacterPrompts

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "ab"}
XARGS = {"vllm_xargs": {"snapkv_document": "contract", "session": "mine"}}
A, B, Q, LINE = ord("a"), ord("b"), ord("Q"), ord("\n")
TEXT_IDS = (BEGIN, A, B)
CHAT_IDS = (ROLES["system"], LINE, A, B, END, ROLES["user"])


def made_of(prompt=None, messages=None, prompts=None):
    prompts = prompts or CharacterPrompts()
    if messages is None:
        return asyncio.run(ids_of_text(prompt, prompts))
    return asyncio.run(ids_of_messages(messages, prompts))


def document(messages=None):
    return SharedDocument(
        document_id="0123abcd",
        tenant="",
        name="contract",
        token_ids=TEXT_IDS if messages is None else CHAT_IDS,
        messages=messages,
        kept_tokens=3,
        bytes=30,
    )


def sent_on(path, body, prompts=None):
    named = document((SYSTEM,) if path == CHAT else None)
    return asyncio.run(rewritten({**XARGS, **body}, path, named, prompts or CharacterPrompts()))


def test_a_text_begins_with_its_special_tokens_and_given_ids_stay():
    assert made_of("ab") == TEXT_IDS
    assert made_of([7, 8, 9]) == (7, 8, 9)


@pytest.mark.parametrize("prompt", [None, "", [], 7, True, [True], [1.0], ["ab"], [[1]], {}])
def test_a_document_is_one_text_that_is_not_empty(prompt):
    with pytest.raises(RefusedError, match=r"^prompt: expected a text or its token ids, got "):
        made_of(prompt)


def test_a_tokenizer_that_ends_texts_is_refused():
    with pytest.raises(RefusedError, match="whose last of 4 tokens says that it ends"):
        made_of("ab", prompts=CharacterPrompts(ends=True))


def test_a_chat_begins_with_what_all_questions_leave_as_it_is():
    """The line break behind the role may grow into another token, so it is the question's."""
    assert made_of(messages=[SYSTEM]) == CHAT_IDS


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "ab",
        [7],
        ["ab"],
        [{"role": "user", "content": [{"type": "image_url"}]}],
        [{"role": "stranger", "content": "ab"}],
    ],
    ids=str,
)
def test_a_document_of_messages_is_text_that_the_template_knows(messages):
    with pytest.raises(RefusedError, match=r"^messages: expected "):
        made_of(messages=messages)


def test_parts_of_text_are_text():
    parts = [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]
    assert made_of(messages=parts)[0] == ROLES["user"]


def test_a_template_that_puts_questions_first_is_refused():
    class Backwards(CharacterPrompts):
        async def render(self, body):
            return (await super().render(body))[-4::-1]

    with pytest.raises(RefusedError, match="a chat template that puts them first"):
        made_of(messages=[SYSTEM], prompts=Backwards())


@pytest.mark.parametrize(
    ("sequences", "found"),
    [
        ([[1, 2, 3], [1, 2, 4]], [1, 2]),
        ([[1, 2], [1, 2, 3], [1, 2]], [1, 2]),
        ([[1], [2]], []),
        ([[], [1]], []),
    ],
)
def test_the_common_prefix_is_the_longest_one(sequences, found):
    assert common_prefix(sequences) == found


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("Q", [[*TEXT_IDS, Q]]),
        ("\n\nQ", [[*TEXT_IDS, DOUBLE, Q]]),
        ([5, 6], [[*TEXT_IDS, 5, 6]]),
        (["Q", "a"], [[*TEXT_IDS, Q], [*TEXT_IDS, A]]),
        ([[5], [6, 7]], [[*TEXT_IDS, 5], [*TEXT_IDS, 6, 7]]),
    ],
    ids=str,
)
def test_a_prompt_goes_on_as_ids_behind_the_documents(prompt, ids):
    body = {"prompt": prompt, "temperature": 0, "stream": True, "model": "demo"}
    found = sent_on(COMPLETIONS, body)
    engines = {"vllm_xargs": {"snapkv_document": "0123abcd", "session": "mine"}}
    assert found == {**body, **engines, "prompt": ids}


@pytest.mark.parametrize("prompt", [None, "", [], [""], ["Q", ""], [[]], ["Q", True], 7, {}])
def test_no_question_is_refused(prompt):
    with pytest.raises(RefusedError, match=r"^prompt: expected a question behind the document"):
        sent_on(COMPLETIONS, {"prompt": prompt})


def test_so_many_questions_at_once_as_few_bytes_can_ask_are_refused(monkeypatch):
    monkeypatch.setattr("snapkv_vllm.documents.rewriting._MOST_TOGETHER", 3 * len(TEXT_IDS))
    assert len(sent_on(COMPLETIONS, {"prompt": ["Q"] * 3})["prompt"]) == 3
    with pytest.raises(RefusedError, match=r"at most 3 questions at once, .* got 4; send"):
        sent_on(COMPLETIONS, {"prompt": ["Q"] * 4})
    monkeypatch.setattr("snapkv_vllm.documents.rewriting._MOST_TOGETHER", 1)
    assert len(sent_on(COMPLETIONS, {"prompt": "Q"})["prompt"]) == 1


def test_messages_go_on_behind_the_documents_with_the_ids_of_them_all():
    question = {"role": "user", "content": "Q"}
    found = sent_on(CHAT, {"messages": [question], "stream": True})
    assert found["messages"] == [SYSTEM, question]
    assert found["vllm_xargs"]["snapkv_document"] == "0123abcd"
    ids = [*CHAT_IDS, LINE, Q, END, ROLES["assistant"]]
    assert found["kv_transfer_params"] == {"prompt_token_ids": ids}


def test_spaces_before_a_question_do_not_hurt():
    found = sent_on(CHAT, {"messages": [{"role": "user", "content": "\nQ"}]})
    ids = [*CHAT_IDS, DOUBLE, Q, END, ROLES["assistant"]]
    assert found["kv_transfer_params"] == {"prompt_token_ids": ids}


def test_a_chat_whose_text_is_wanted_is_left_for_the_server_to_render():
    body = {"messages": [{"role": "user", "content": "Q"}], "return_prompt_text": True}
    assert "kv_transfer_params" not in sent_on(CHAT, body)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "assistant", "content": "Q"}]},
        {"messages": [{"role": "user", "content": "Q"}], "tools": [{}]},
    ],
    ids=str,
)
def test_a_chat_that_begins_otherwise_is_refused(body):
    with pytest.raises(RefusedError, match="a chat whose first 6 tokens are the document's"):
        sent_on(CHAT, body)


@pytest.mark.parametrize("messages", [None, [], "Q"])
def test_a_chat_has_messages(messages):
    with pytest.raises(RefusedError, match=r"^messages: expected a question behind the document"):
        sent_on(CHAT, {"messages": messages})


def test_messages_that_the_server_refuses_are_left_to_it():
    strange = {"role": "stranger", "content": "Q"}
    found = sent_on(CHAT, {"messages": [strange]})
    assert found["messages"] == [SYSTEM, strange]
    assert "kv_transfer_params" not in found


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (COMPLETIONS, {"prompt_logprobs": 1}, "prompt_logprobs: expected none with a document"),
        (COMPLETIONS, {"prompt_embeds": "x"}, "prompt_embeds: expected none with a document"),
        (COMPLETIONS, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens: expected none"),
        (CHAT, {"truncate_prompt_tokens": -1}, "truncate_prompt_tokens: expected none"),
        (CHAT, {"kv_transfer_params": {}}, "kv_transfer_params: expected none"),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, "echo: expected none with a document"),
        (CHAT, {"echo": True, "top_logprobs": 2}, "echo: expected none with a document"),
        (CHAT, {"model": "law"}, "model: expected the model that reads documents, got 'law'"),
    ],
)
def test_what_a_document_cannot_give_is_refused_by_name(path, body, words):
    question = {"prompt": "Q", "messages": [{"role": "user", "content": "Q"}]}
    with pytest.raises(RefusedError, match=words):
        sent_on(path, {**question, **body}, CharacterPrompts(adapters=("law",)))


def test_a_document_of_the_other_kind_is_refused_with_the_right_endpoint():
    prompts = CharacterPrompts()
    for path, named, right in (
        (CHAT, document(), COMPLETIONS),
        (COMPLETIONS, document((SYSTEM,)), CHAT),
    ):
        with pytest.raises(RefusedError, match=f"send the request to {right},"):
            asyncio.run(rewritten(XARGS, path, named, prompts))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_named_document_is_found(path):
    assert document_of(XARGS, path) == "contract"


@pytest.mark.parametrize(
    "body",
    [None, [], 7, {}, {"vllm_xargs": None}, {"vllm_xargs": {"a": 1}}, {"sampling_params": 7}],
)
def test_most_bodies_name_none(body):
    assert document_of(body, "/anywhere") is None


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (XARGS, "/v1/responses"),
        (XARGS, "/v1/completions/"),
        ({"sampling_params": {"extra_args": XARGS["vllm_xargs"]}}, "/inference/v1/generate"),
        ({"sampling_params": {"extra_args": XARGS["vllm_xargs"]}}, COMPLETIONS),
        ({**XARGS, "sampling_params": {"extra_args": XARGS["vllm_xargs"]}}, COMPLETIONS),
    ],
    ids=str,
)
def test_a_document_named_elsewhere_is_refused(body, path):
    with pytest.raises(RefusedError, match="snapkv_document: expected inside vllm_xargs at /v1/"):
        document_of(body, path)
