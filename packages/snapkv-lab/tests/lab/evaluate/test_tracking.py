"""A state through a long answer: the same every time, its right answer computed anew, checked."""

import pytest

from snapkv import FullCache, StreamingLLM
from snapkv.app.settings import GenerationSettings
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.runner import Run
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.tasks import Tracking

KINDS = ("copy", "cycle", "ledger")


def made(demo, **settings):
    given = {"answer_tokens": (200,), "items": 6, "samples_each": 1} | settings
    return list(Tracking(**given).samples(demo.tokenizer))


def asked(*steps):
    return Sample(
        name="s",
        cell={"answer_tokens": 16, "kind": "copy"},
        context="",
        question="",
        references=("\n".join(steps),),
        settings=GenerationSettings(),
    )


def body(context):
    """The lines of the state that a prompt begins with."""
    return context.partition("\n\n")[2].splitlines()


def recomputed(kind, lines):
    """What follows from the state of the prompt; only a copy ends."""
    if kind == "copy":
        yield from lines
        return
    balances = {line.split()[0]: line.split()[1:] for line in lines}
    while True:
        for name, numbers in balances.items():
            if kind == "ledger":
                numbers[0] = str(int(numbers[0]) + int(numbers[1]))
            yield " ".join([name, *numbers[:1]])


@pytest.mark.parametrize("cloze", [True], ids=["cloze"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_right_answer_follows_from_the_prompt(demo, kind, cloze):
    (sample,) = made(demo, kinds=(kind,), cloze=cloze)
    assert sample == made(demo, kinds=(kind,), cloze=cloze)[0]
    begun, steps = sample.answer_start.splitlines(), sample.references[0].splitlines()
    right = recomputed(kind, body(sample.context))
    assert [next(right) for _ in range(len(begun) + len(steps))] == begun + steps
    assert len(begun) == (0 if not cloze else 1 if kind == "copy" else 10)
    if kind == "copy":
        assert list(right) == []
    tokens = len(demo.tokenizer(sample.references[0])["input_ids"])
    assert 190 <= tokens <= 210
    assert sample.settings.max_new_tokens == tokens + (16 if cloze else 64)
    prompt = sample.prompt(demo.tokenizer, "none", "visible")
    assert prompt.text.endswith("\n")
    assert ("lines in all" in prompt.text) == (kind != "copy" and not cloze)
    assert "{" not in prompt.text


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Here is the record, 4 lines:\n1. ant 12\n2. **bee**: 34\n- Cat = 56,\n4) dog 78\nend", 1),
        ("ant 12\nbee 34\ncat 57\ndog 78", 0.5),
        ("ant 12\nbee 34\nbee 34\ncat 56\ndog 78", 0.5),
        ("bee 34\ncat 56", 0),
        ("ant 12 bee 34 cat 56 dog 78", 0),
    ],
)
def test_steps_count_up_to_the_first_mistake(answer, score):
    sample = asked("ant 12", "bee 34", "cat 56", "dog 78")
    assert Tracking().score(sample, answer) == score


def test_steps_of_one_word_and_large_numbers():
    assert Tracking().score(asked("ant", "bee"), "The names:\n1. Ant\n2. Bee.\n") == 1
    assert Tracking().score(asked("ant", "bee"), "ant\nwasp\nbee") == 0.5
    assert Tracking().score(asked("ant 1234", "bee 5"), "ant: 1,234\nbee: 5") == 1


@pytest.mark.slow
def test_a_window_loses_names_in_turn_that_the_full_cache_goes_through(demo, tmp_path):
    """A round of names is longer than the window."""
    task = Tracking(
        answer_tokens=(48,), kinds=("cycle",), items=20, samples_each=1, cloze=True, seed=3
    )
    methods = [
        Method(label="full", policy=FullCache()),
        Method(label="window", policy=StreamingLLM(64)),
    ]
    run = Run(loaded=demo, task=task, methods=methods, template="none")
    full, window = run.into(tmp_path / "out").rows
    assert full["score"] > 0.5
    assert window["score"] < 0.5
