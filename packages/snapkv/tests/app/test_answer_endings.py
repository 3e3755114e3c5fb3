"""Where an answer ends, and its stream with it."""

import pytest

from snapkv import FullCache
from snapkv.app.answering import answer
from snapkv.app.prompts import Prompt, question_prompt
from snapkv.app.settings import GenerationSettings

SHORT = GenerationSettings(max_new_tokens=6)
DOCUMENT = "The gate opens at nine. The key is under the blue stone. " * 12


@pytest.fixture(scope="module")
def prompt(demo):
    return question_prompt(
        demo.tokenizer, DOCUMENT, "Where is the key?", answer_start="The key is under the"
    )


def ending(**settings):
    return GenerationSettings(**{"max_new_tokens": 12} | settings)


@pytest.mark.parametrize(
    ("settings", "text", "new_tokens", "reason"),
    [
        ({}, " blue stone.", 4, "stop"),
        ({"min_new_tokens": 3}, " blue stone.", 4, "stop"),
        ({"min_new_tokens": 4, "stop_strings": ("stone",)}, " blue ", 2, "stop"),
        ({"stop_strings": (" stone",)}, " blue", 2, "stop"),
        ({"stop_strings": ("ton", "lue st")}, " b", 2, "stop"),  # within and over tokens
        ({"stop_strings": ("absent",)}, " blue stone.", 4, "stop"),
        ({"stop_strings": ("stone",), "max_new_tokens": 2}, " blue ", 2, "stop"),
        ({"max_new_tokens": 2}, " blue stone", 2, "length"),
    ],
)
def test_settings_end_an_answer_and_its_stream(demo, prompt, settings, text, new_tokens, reason):
    pieces = []
    result = answer(demo, prompt, FullCache(), ending(**settings), on_text=pieces.append)
    assert result.text == "The key is under the" + text
    assert (result.new_tokens, result.finish_reason) == (new_tokens, reason)
    assert "".join(pieces) == result.text


def test_an_answer_does_not_end_before_it_is_long_enough(demo, prompt):
    short = answer(demo, prompt, FullCache(), ending())
    assert short.new_tokens == 4
    long = answer(demo, prompt, FullCache(), ending(min_new_tokens=9))
    assert long.new_tokens >= 9
    assert long.text.startswith(short.text)
    exact = answer(demo, prompt, FullCache(), ending(min_new_tokens=12))
    assert (exact.new_tokens, exact.finish_reason) == (12, "length")


def test_a_stop_string_that_begins_in_the_prompt_is_a_stop(demo):
    """transformers looks at the prompt's end too; the answer then ended, and was not cut off."""
    text = "one two three four five six seven eight one two three four five six seven"
    plain = answer(demo, Prompt(text=text), FullCache(), ending(max_new_tokens=3))
    assert plain.text.startswith(" eight")
    stop = ending(max_new_tokens=3, stop_strings=("seven eight",))
    result = answer(demo, Prompt(text=text), FullCache(), stop)
    assert (result.text, result.new_tokens, result.finish_reason) == (" eight", 1, "stop")


def test_a_token_that_ends_an_answer_stands_beside_the_models_own(demo, prompt):
    (stone,) = demo.tokenizer.encode(" stone")
    result = answer(demo, prompt, FullCache(), ending(stop_token_ids=(stone,)))
    assert result.text.endswith(" blue stone")
    assert (result.new_tokens, result.finish_reason) == (2, "stop")
    (absent,) = demo.tokenizer.encode(" apple")
    result = answer(demo, prompt, FullCache(), ending(stop_token_ids=(absent,)))
    assert result.text.endswith(" blue stone.")  # the model's own end


def test_what_ended_one_answer_does_not_end_the_next(demo, prompt):
    (blue,) = demo.tokenizer.encode(" blue")
    first = answer(demo, prompt, FullCache(), SHORT)
    answer(demo, prompt, FullCache(), ending(stop_token_ids=(blue,), min_new_tokens=1))
    assert answer(demo, prompt, FullCache(), SHORT).text == first.text
