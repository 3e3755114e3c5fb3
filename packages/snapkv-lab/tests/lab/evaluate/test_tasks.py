"""What all generated tasks have in common; and lines, instructions and tracking by hand."""

import itertools
import re
from functools import partial

import pytest

from snapkv import SnapKV
from snapkv.errors import InvalidArgumentError, MissingDependencyError
from snapkv_app.answering import answer
from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.haystack import draw_distinct, load_words
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.task import even_percents, fit_sample, needed_tokens
from snapkv_lab.evaluate.tasks import Instructions, Lines

NEW_TOKENS = 7


def sentences(count, text="The grass is green.\n"):
    return Sample(
        name="lines",
        cell={},
        context=text * count,
        question="What is green?",
        answer_start="It is",
        references=("grass",),
        settings=GenerationSettings(max_new_tokens=NEW_TOKENS),
    )


@pytest.mark.parametrize("hint", [None, 40, 500])
def test_fitted_sample_has_no_room_for_another_part(demo, hint):
    sample, parts = fit_sample(sentences, demo.tokenizer, 333, least=1, most=10_000, hint=hint)
    assert needed_tokens(sample, demo.tokenizer) <= 333
    assert sample == sentences(parts)
    if hint in (None, 500):  # a hint below the truth limits what is tried
        assert needed_tokens(sentences(parts + 1), demo.tokenizer) > 333


def test_length_includes_the_answer_and_the_chat_template(demo):
    turn = demo.tokenizer.apply_chat_template(
        [{"role": "user", "content": sentences(3).context + sentences(3).question}],
        add_generation_prompt=True,
        tokenize=False,
    )
    tokens = demo.tokenizer(turn + "It is", add_special_tokens=False)["input_ids"]
    assert needed_tokens(sentences(3), demo.tokenizer) == len(tokens) + NEW_TOKENS


def test_fitted_sample_of_uneven_parts_never_exceeds_its_length(demo):
    def uneven(count):
        return sentences(1, "".join("word " * (1 + i * i % 17) for i in range(count)))

    sample, _ = fit_sample(uneven, demo.tokenizer, 400, least=0, most=1000)
    assert 350 < needed_tokens(sample, demo.tokenizer) <= 400
    search = partial(fit_sample, sentences, demo.tokenizer, 200, most=1000)
    assert search(least=100) is None
    assert search(least=100, hint=200) is None
    assert search(least=0) is not None


def test_percents_words_and_drawn_texts_are_as_documented():
    assert (even_percents(1), even_percents(4)) == ([50], [0, 33, 67, 100])
    nouns, both = load_words("noun"), load_words("noun", "adjective")
    assert (len(nouns), len(load_words("adjective"))) == (6782, 912)
    assert list(both) == sorted({*nouns, *load_words("adjective")})
    texts = iter(["a", "b", "a", "x", "b", "c"])
    assert draw_distinct(lambda: next(texts), 3, besides=["x"]) == ["a", "b", "c"]
    few = itertools.cycle("ab")
    with pytest.raises(InvalidArgumentError, match="got 3, and only 2 could be drawn"):
        draw_distinct(lambda: next(few), 3)


def test_missing_package_error_names_the_install_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    load_words.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"wonderwords.*pip install 'wonderwords"):
        load_words("noun")


# LongEval-Lines.

LINE = re.compile(r"line (\S.*): REGISTER_CONTENT is <(\d{5})>")


def record(context):
    """Return the names and numbers of the lines, in order."""
    head, _, body = context.partition("Now the record start:\n\n")
    assert head.startswith("Below is a record of lines I want you to remember. Each line begins ")
    assert body.endswith(">\n")
    return [LINE.fullmatch(line).groups() for line in body.splitlines()]


def lines_of(demo, **settings):
    return list(Lines(**{"lengths": (400,), "samples_each": 1, **settings}).samples(demo.tokenizer))


def test_lines_record_has_the_published_wording_and_the_last_number_counts(demo):
    (sample,) = lines_of(demo, positions=1)
    (name, value), *_ = [line for line in record(sample.context) if line[1] in sample.references]
    assert sample.question == (
        "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line "
        f"{name}? I need the number."
    )
    assert sample.references == (value,)
    assert sample.prompt(demo.tokenizer, "none", "visible").text == sample.context + sample.question
    assert (sample.settings.max_new_tokens, sample.settings.stop_strings) == (100, ())
    for said, score in ((f"{name} is <{value}>.", 1), (f"11111. No: {value}", 1), (f"{value}6", 0)):
        assert Lines().score(sample, said) == score
    assert Lines().score(sample, "") == 0


def test_requested_line_is_at_its_position(demo):
    made = lines_of(demo, positions=5, samples_each=2)
    assert [s.cell["position"] for s in made] == [0, 0, 25, 25, 50, 50, 75, 75, 100, 100]
    for sample in made:
        values = [value for _, value in record(sample.context)]
        place = values.index(sample.references[0])
        assert place == round(sample.cell["position"] / 100 * (len(values) - 1))


def test_examples_repeat_other_lines_and_cloze_begins_the_requested_line(demo):
    given = {"positions": 3, "examples": 3, "cloze": True, "lengths": (500, 1024)}
    for sample in lines_of(demo, **given):
        length = sample.cell["length"]
        assert length - 40 < needed_tokens(sample, demo.tokenizer) <= length  # a line is 25 tokens
        there = record(sample.context)
        question, *shown = sample.question[1:].split("\n")
        asked = next(name for name, value in there if value in sample.references)
        assert question.endswith(f"in line {asked}? I need the number.")
        repeated = {LINE.fullmatch(line).groups() for line in shown}
        assert len(repeated) == 3
        assert repeated < {line for line in there if line[0] != asked}
        assert sample.answer_start == f"line {asked}: REGISTER_CONTENT is <"
        text = sample.prompt(demo.tokenizer, "none", "visible").text
        assert text.endswith(f"{shown[-1]}\n{sample.answer_start}")


# Instructions before a text.

SMALL = {"lengths": (320,), "samples_each": 1}


def test_every_instruction_is_asked_of_the_same_text_and_checked_without_a_judge(demo):
    task = Instructions(**SMALL)
    samples = list(task.samples(demo.tokenizer))
    assert samples == list(task.samples(demo.tokenizer))
    assert [sample.cell["instruction"] for sample in samples] == ["code", "begin", "end"]
    assert len({sample.context for sample in samples}) == 1
    assert all(sample.references[0] in sample.context for sample in samples)
    ids = samples[0].prompt(demo.tokenizer, "tokenizer", "visible").token_ids(demo.tokenizer)
    assert 250 < ids.shape[1] <= 320
    word, first, mark = (sample.references[0] for sample in samples)
    right = f"{first.title()}, the word is {word}. {mark}"
    assert [task.score(sample, right) for sample in samples] == [1, 1, 1]
    assert [task.score(sample, f"no {mark} no") for sample in samples] == [0, 0, 0]
    cloze = Instructions(cloze=True, **SMALL)
    samples = list(cloze.samples(demo.tokenizer))
    assert samples[1].answer_start == "- Begin your answer with the word"
    assert [cloze.score(one, f" {one.references[0]}.\n") for one in samples] == [1, 1, 1]
    assert [cloze.score(one, f"no {one.references[0]}") for one in samples] == [0, 0, 0]


def test_protected_instructions_are_kept(demo):
    """The window does not know the question, so instructions are evicted unless they are
    protected.
    """
    task = Instructions(protect=True, cloze=True, **SMALL)
    sample = next(iter(task.samples(demo.tokenizer)))
    prompt = sample.prompt(demo.tokenizer, "tokenizer", "hidden")
    policy = SnapKV(budget=96, window_size=16)
    given = answer(demo, prompt, policy, sample.settings, protection=sample.protection)
    ((start, stop),) = given.protected
    kept = demo.tokenizer.decode(prompt.token_ids(demo.tokenizer)[0, start:stop])
    assert kept.strip().startswith("Instructions for your answer:")
    assert sample.references[0] in kept
