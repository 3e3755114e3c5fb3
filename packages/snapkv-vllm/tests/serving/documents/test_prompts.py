"""What documents begin prompts with, and requests that name one, worked by hand."""

import asyncio
from types import SimpleNamespace

import pytest

from snapkv_vllm.documents import prompts as room
from snapkv_vllm.documents.catalogue import SharedDocument
from snapkv_vllm.documents.prefix import CachedPrefix
from snapkv_vllm.names import RefusedError
from tests.serving.documents.fakes import BEGIN, DOUBLE, END, ROLES, CharacterPrompts

SYSTEM = {"role": "system", "content": "ab"}
A, B, Q, LINE = ord("a"), ord("b"), ord("Q"), ord("\n")
TEXT_IDS = (BEGIN, A, B)
CHAT_IDS = (ROLES["system"], LINE, A, B, END, ROLES["user"])
ASKED = {"role": "user", "content": "Q"}


def ids_of(prompt=None, messages=None, prompts=None):
    prompts = prompts or CharacterPrompts()
    if messages is None:
        return asyncio.run(prompts.ids_of_text(prompt))
    rendered, ids = asyncio.run(prompts.ids_of_messages(messages))
    assert rendered == ids, "no text has control words"
    return ids


def document(messages=None):
    ids = TEXT_IDS if messages is None else CHAT_IDS
    return SharedDocument(
        document_id="0123abcd",
        tenant="",
        name="contract",
        prefix=CachedPrefix(token_ids=ids, kept_tokens=3, reused_tokens=3),
        rendered_ids=ids,
        messages=messages,
        bytes=30,
    )


def rendered(kind, named=None, **body):
    """What vLLM is given to render of a request, and what it renders."""
    prompts, xargs = CharacterPrompts(), {"snapkv_document": "contract", "session": "mine"}
    request = SimpleNamespace(**{"vllm_xargs": xargs, "echo": False, **body})

    async def render(request):
        if kind == "prompt":
            return request.prompt
        _, ids = await prompts.render(request.messages)
        return request.messages, [{"type": "token", "prompt_token_ids": ids}]

    if named is None:
        named = document([SYSTEM] if kind == "messages" else None)
    made = asyncio.run(prompts.render_after(named, request, kind, render))
    assert request.vllm_xargs == {"snapkv_document": "0123abcd", "session": "mine"}
    return made


def test_a_text_begins_with_its_special_tokens_and_given_ids_stay():
    assert ids_of("ab") == TEXT_IDS
    assert ids_of([7, 8, 9]) == (7, 8, 9)
    with pytest.raises(RefusedError, match="whose last of 4 tokens says that it ends"):
        ids_of("ab", prompts=CharacterPrompts(ends=True))


@pytest.mark.parametrize("prompt", [None, "", [], True, [True], [1.0], ["ab"], {}])
def test_a_document_is_one_text_that_is_not_empty(prompt):
    with pytest.raises(RefusedError, match=r"^prompt: expected a text or its token ids, got "):
        ids_of(prompt)


def test_a_chat_begins_with_what_all_questions_leave_as_it_is():
    """The line break behind the role may grow into another token, so it is the question's."""
    assert ids_of(messages=[SYSTEM]) == CHAT_IDS
    parts = [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]
    assert ids_of(messages=parts)[0] == ROLES["user"]


@pytest.mark.parametrize(
    "messages",
    [[], "ab", [7], [{**ASKED, "content": [{"type": "image_url"}]}], [{**ASKED, "role": "x"}]],
    ids=str,
)
def test_a_document_of_messages_is_text_that_the_template_knows(messages):
    with pytest.raises(RefusedError, match=r"^messages: expected "):
        ids_of(messages=messages)


def test_a_template_that_puts_questions_first_is_refused():
    class Backwards(CharacterPrompts):
        async def render(self, messages):
            _, ids = await super().render(messages)
            return None, ids[-4::-1]

    with pytest.raises(RefusedError, match="a chat template that puts them first"):
        ids_of(messages=[SYSTEM], prompts=Backwards())


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
    assert rendered("prompt", prompt=prompt) == ids


@pytest.mark.parametrize("prompt", [None, "", [], ["Q", ""], [[]]])
def test_no_question_is_refused(prompt):
    with pytest.raises(RefusedError, match=r"^prompt: expected a question after the document"):
        rendered("prompt", prompt=prompt)


def test_so_many_questions_at_once_as_few_bytes_can_ask_are_refused(monkeypatch):
    monkeypatch.setattr(room, "_MOST_TOGETHER", 3 * len(TEXT_IDS))
    assert len(rendered("prompt", prompt=["Q"] * 3)) == 3
    with pytest.raises(RefusedError, match=r"at most 3 questions at once, .* got 4; send"):
        rendered("prompt", prompt=["Q"] * 4)
    monkeypatch.setattr(room, "_MOST_TOGETHER", 1)
    assert len(rendered("prompt", prompt="Q")) == 1


@pytest.mark.parametrize(("question", "ids"), [("Q", [LINE, Q]), ("\nQ", [DOUBLE, Q])])
def test_messages_go_on_behind_the_documents(question, ids):
    asked = {"role": "user", "content": question}
    messages, (made,) = rendered("messages", messages=[asked])
    assert messages == [SYSTEM, asked]
    assert made["prompt_token_ids"] == [*CHAT_IDS, *ids, END, ROLES["assistant"]]


def test_a_chat_that_begins_otherwise_or_asks_nothing_is_refused():
    with pytest.raises(RefusedError, match="a chat whose first 6 tokens are the document's"):
        rendered("messages", messages=[{"role": "assistant", "content": "Q"}])
    with pytest.raises(RefusedError, match=r"^messages: expected a question after the document"):
        rendered("messages", messages=[])


def test_what_a_document_cannot_give_is_refused_by_name():
    with pytest.raises(RefusedError, match=r"^echo: expected none with snapkv_document, "):
        rendered("prompt", prompt="Q", echo=True, logprobs=1)


@pytest.mark.parametrize(
    ("kind", "named", "right"),
    [
        ("messages", document(), "/v1/completions"),
        ("prompt", document([SYSTEM]), "/v1/chat/completions"),
    ],
)
def test_a_document_of_the_other_kind_is_refused_with_the_right_endpoint(kind, named, right):
    with pytest.raises(RefusedError, match=f"send the request to {right},"):
        rendered(kind, named, prompt="Q", messages=[ASKED])
