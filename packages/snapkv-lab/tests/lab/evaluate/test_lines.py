"""LongEval-Lines: the record, the line that is asked for, and what counts as an answer."""

import re

import pytest

from snapkv.errors import InvalidArgumentError
from snapkv_lab.evaluate.task import needed_tokens
from snapkv_lab.evaluate.tasks import lines
from snapkv_lab.evaluate.tasks.lines import Lines

LINE = re.compile(r"line (\S.*): REGISTER_CONTENT is <(\d{5})>")


def record(context):
    """Names and numbers of the lines, in order."""
    head, _, body = context.partition("Now the record start:\n\n")
    assert head.startswith("Below is a record of lines I want you to remember. Each line begins ")
    assert body.endswith(">\n")
    return [LINE.fullmatch(line).groups() for line in body.splitlines()]


def samples(demo, **settings):
    return list(Lines(**{"lengths": (400,), "samples_each": 1, **settings}).samples(demo.tokenizer))


def test_a_record_is_worded_as_published(demo):
    sample = samples(demo, positions=1)[0]
    (name, value), *_ = [line for line in record(sample.context) if line[1] in sample.references]
    assert sample.context.startswith(
        "Below is a record of lines I want you to remember. Each line begins with 'line <line "
        "index>' and contains a '<REGISTER_CONTENT>' at the end of the line as a numerical value. "
        "For each line index, memorize its corresponding <REGISTER_CONTENT>. At the end of the "
        "record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of a certain line "
        "index. Now the record start:\n\nline "
    )
    assert sample.question == (
        "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line "
        f"{name}? I need the number."
    )
    assert sample.references == (value,)
    assert sample.prompt(demo.tokenizer, "none", "visible").text == sample.context + sample.question
    assert sample.settings.max_new_tokens == 100
    assert sample.settings.stop_strings == ()


def test_names_are_never_repeated(demo, monkeypatch):
    few = ["red-hat", "red-hat", "odd-cow", "red-hat", "low-sun", "odd-cow", "big-jar"]
    draws = iter(few * 100)
    monkeypatch.setattr(lines, "all_fitted", lambda builds, *_, **__: [next(builds)(4)])
    monkeypatch.setattr("snapkv_lab.evaluate.tasks.lines.word_key", lambda _: next(draws))
    (sample,) = samples(demo, positions=1)
    assert [name for name, _ in record(sample.context)] == [
        "red-hat",
        "odd-cow",
        "low-sun",
        "big-jar",
    ]


def test_the_asked_line_stands_at_its_position(demo):
    made = samples(demo, positions=5, samples_each=2)
    assert [s.cell["position"] for s in made] == [0, 0, 25, 25, 50, 50, 75, 75, 100, 100]
    for sample in made:
        values = [value for _, value in record(sample.context)]
        place = values.index(sample.references[0])
        assert place == round(sample.cell["position"] / 100 * (len(values) - 1))


@pytest.mark.parametrize("settings", [{"cloze": True, "examples": 3}])
def test_a_prompt_with_its_answer_fills_its_length_and_never_exceeds_it(demo, settings):
    for sample in samples(demo, lengths=(500, 1024), positions=3, **settings):
        length = sample.cell["length"]
        assert length - 40 < needed_tokens(sample, demo.tokenizer) <= length  # a line is 25 tokens


def test_examples_repeat_other_lines_and_the_cloze_begins_the_asked_one(demo):
    (sample,) = samples(demo, positions=1, examples=3, cloze=True, lengths=(600,))
    lines = record(sample.context)
    question, *shown = sample.question[1:].split("\n")
    asked = next(name for name, value in lines if value in sample.references)
    assert question.endswith(f"in line {asked}? I need the number.")
    repeated = [LINE.fullmatch(line).groups() for line in shown]
    assert len(set(repeated)) == 3
    assert set(repeated) < {line for line in lines if line[0] != asked}
    assert sample.answer_start == f"line {asked}: REGISTER_CONTENT is <"
    text = sample.prompt(demo.tokenizer, "none", "visible").text
    assert text.endswith(f"{shown[-1]}\n{sample.answer_start}")


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("The <REGISTER_CONTENT> in line odd-cow is <12345>.", 1.0),
        ("It is 11111. No: 12345", 1.0),
        ("123456", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_whole_number_is_the_answer(demo, prediction, expected):
    (sample,) = samples(demo, positions=1)
    object.__setattr__(sample, "references", ("12345",))
    assert Lines().score(sample, prediction) == expected


def test_a_length_without_room_for_the_question_is_an_error(demo):
    with pytest.raises(InvalidArgumentError, match="room for the question, the answer and 4 lines"):
        samples(demo, lengths=(200,), examples=3)
