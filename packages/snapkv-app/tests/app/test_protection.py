"""Protected texts, first tokens and system messages, found in the prompt by its tokenizer."""

import re

import pytest

from snapkv import H2O, FullCache, SnapKV, StreamingLLM
from snapkv.errors import BudgetTooSmallError, InvalidArgumentError, InvalidTypeError
from snapkv_app.answering import answer
from snapkv_app.conversation import Conversation
from snapkv_app.prompts import Prompt, question_prompt, text_prompt
from snapkv_app.protection import Protection
from snapkv_app.settings import GenerationSettings

DOCUMENT = "The gate opens at nine. " * 8 + "The code word is pelican. " + "Boats leave. " * 20
FEW = GenerationSettings(max_new_tokens=2)


def _text_of(spans, prompt, tokenizer):
    ids = prompt.token_ids(tokenizer)[0]
    return [tokenizer.decode(ids[start:stop]) for start, stop in spans]


def test_every_occurrence_of_a_text_is_protected(demo):
    prompt = text_prompt(demo.tokenizer, "a pelican, pelicans and no gull; the Pelican")
    spans = Protection(texts=("pelican",)).spans(prompt, SnapKV(), demo.tokenizer)
    assert len(spans) == 2
    assert all("pelican" in text for text in _text_of(spans, prompt, demo.tokenizer))
    spans = Protection(texts=("no gull",), first_tokens=2).spans(prompt, SnapKV(), demo.tokenizer)
    assert spans[0] == (0, 2)
    assert _text_of(spans[1:], prompt, demo.tokenizer) == [" no gull"]


def test_system_message_added_by_the_template_is_found(demo):
    prompt = question_prompt(demo.tokenizer, DOCUMENT, "Which word?")
    spans = Protection(system=True).spans(prompt, SnapKV(), demo.tokenizer)
    (text,) = _text_of(spans, prompt, demo.tokenizer)
    assert text.startswith("<|im_start|>system")
    assert "helpful AI assistant" in text
    assert "gate" not in text


class _Template:
    """The demo tokenizer with another chat template."""

    def __init__(self, tokenizer, template):
        self._tokenizer, self._template = tokenizer, template

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, *args, **options):
        return self._tokenizer(*args, **options)

    def apply_chat_template(self, turns, **options):
        return self._tokenizer.apply_chat_template(turns, chat_template=self._template, **options)


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("before", "message"),
    [("", ""), ("<|endoftext|>", ""), ("Be brief.", "Be brief."), ("user: ", "user: ")],
)
def test_template_without_a_system_message_protects_none(demo, before, message):
    tokenizer = _Template(demo.tokenizer, before + TURNS)
    prompt = question_prompt(tokenizer, DOCUMENT, "Which word?")
    assert prompt.text[: prompt.system_characters] == message
    if not message:
        assert Protection(system=None).spans(prompt, SnapKV(), tokenizer) == []
        with pytest.raises(InvalidArgumentError, match="protect_system"):
            Protection(system=True).spans(prompt, SnapKV(), tokenizer)


def test_unprotectable_system_message_warns_or_fails_on_request(demo, capsys):
    prompt = question_prompt(demo.tokenizer, DOCUMENT, "Which word?")
    ratio = SnapKV(keep_ratio=0.02, window_size=8)
    small, moving = "expected", r"StreamingLLM\(budget=100, .* counts positions"
    for policy, problem in (
        (SnapKV(budget=20, window_size=8), small),
        (ratio, small),
        (StreamingLLM(100), moving),
        (H2O(20), small),
    ):
        assert Protection(system=None).spans(prompt, policy, demo.tokenizer) == []
        said = capsys.readouterr().err
        assert re.match(f"snapkv: warning: the system message is not protected: {problem}", said)
        assert said.count("\n") == 1
        with pytest.raises(InvalidArgumentError, match=f"protect: {problem}"):
            Protection(system=True).spans(prompt, policy, demo.tokenizer)
    assert Protection(system=None).spans(prompt, FullCache(), demo.tokenizer) == []
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("quantize", [None, "int4"])
@pytest.mark.parametrize("group_reduce", ["mean", "none"])
def test_system_message_protected_by_default_fits_budget_in_bytes(
    tiny, capsys, quantize, group_reduce
):
    prompt = question_prompt(tiny.tokenizer, DOCUMENT, "Which word?")
    default, asked = (Protection(system=system) for system in (None, True))
    found = set()
    for budget in ("8%", "60%", "2kB", "6kB", "12kB", "20kB", "60kB"):
        policy = SnapKV(budget, window_size=16, group_reduce=group_reduce)
        try:
            given = answer(tiny, prompt, policy, FEW, protection=default, quantize=quantize)
        except BudgetTooSmallError:  # for the window
            continue
        found.add(bool(given.protected))
        assert ("is not protected" in capsys.readouterr().err) is not bool(given.protected)
        if given.protected:
            answer(tiny, prompt, policy, FEW, protection=asked, quantize=quantize)
    assert found == {False, True}


@pytest.mark.parametrize(
    ("asked", "policy", "message"),
    [
        ({}, SnapKV("1B"), r"expected at least [\d,]{5,} bytes"),
        ({"first_tokens": 40}, SnapKV(budget=24, window_size=8), "at most 16 tokens.* got 40"),
        (
            {"first_tokens": 40},
            StreamingLLM(100),
            r"protect: StreamingLLM\(budget=100, .* in the cache .*\. Set positions='original'",
        ),
    ],
)
def test_requested_protection_that_does_not_fit_is_the_only_message(
    tiny, capsys, asked, policy, message
):
    prompt = question_prompt(tiny.tokenizer, DOCUMENT, "Which word?")
    with pytest.raises(InvalidArgumentError, match=message):
        answer(tiny, prompt, policy, FEW, protection=Protection(system=None, **asked))
    assert capsys.readouterr().err == ""


def test_protected_text_missing_from_the_prompt_is_refused(demo):
    prompt = Prompt(text=DOCUMENT)
    with pytest.raises(InvalidArgumentError, match=r"the prompt does not contain the text 'g\.te'"):
        Protection(texts=("g.te",)).spans(prompt, SnapKV(), demo.tokenizer)
    with pytest.raises(InvalidArgumentError, match="empty"):
        Protection(texts=(" ",))
    with pytest.raises(InvalidTypeError, match="protect_first"):
        Protection(first_tokens=1.5)

    class Slow:
        is_fast = False

    with pytest.raises(InvalidArgumentError, match="Slow"):
        Protection(texts=("gate",)).spans(prompt, SnapKV(), Slow())


def test_answer_reports_the_protected_texts(tiny):
    prompt = question_prompt(tiny.tokenizer, DOCUMENT, "Which word?")
    protection = Protection(texts=("pelican",), system=None)
    policy = SnapKV(budget=64, window_size=8)
    given = answer(tiny, prompt, policy, FEW, protection=protection)
    assert "pelican" in "".join(_text_of(given.protected[1:], prompt, tiny.tokenizer))
    assert given.protected[0][0] == 0
    assert answer(tiny, prompt, policy, FEW).protected == []


@pytest.mark.parametrize("recall", ["host", "none"])
def test_conversation_keeps_protected_texts_through_its_turns(tiny, recall, tmp_path):
    protection = Protection(texts=("pelican",), system=None)
    policy = SnapKV(budget=64, window_size=8)
    talk = Conversation(tiny, policy, FEW, document=DOCUMENT, recall=recall, protection=protection)
    first = talk.ask("Which word?")
    second = talk.ask("When does the gate open?")
    assert first.protected == second.protected != []
    talk.save(tmp_path / "talk")
    for one in (talk, Conversation.load(tmp_path / "talk", tiny, FEW, policy)):
        for index in one.cache.compressed_layers:
            for head in one.cache.kept_positions(index)[0]:
                held = set(head.tolist())
                assert all(held >= set(range(*span)) for span in first.protected)
