"""Functions asked for by what they do: which there are, the samples, and the score."""

import random
import textwrap

import pytest

from snapkv.errors import InvalidArgumentError
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.tasks import Functions
from snapkv_lab.evaluate.tasks.conversations import _files, drawn_functions

SMALL = {"package": "toolbox", "lengths": (500,), "questions": 3, "samples_each": 4}

FIRST = '''
def shorten(text, most):
    """Cut a long line where a word ends.

    More about it.
    """
    # A comment.
    words = text.split()

    while len(" ".join(words)) > most:
        words.pop()
    return " ".join(words)

class Box:
    def volume(self):
        """How much room there is inside of it."""
        sides = (self.width, self.height)
        area = sides[0] * sides[1]
        return area * self.depth

    @property
    def weight(self):
        """What it weighs together with all its contents."""
        one = self.own
        two = self.contents
        return one + two
'''

LEFT_OUT = '''
def named():
    """A function that is named, and says its own name."""
    one = 1
    two = 2
    return one + two

def silent():
    one = 1
    two = 2
    return one + two

def terse():
    """Too few words."""
    one = 1
    two = 2
    return one + two

def short():
    """It has fewer lines than anybody would ask for."""
    return 1

def outer():
    """The one around another, with a text long enough."""
    def inner():
        """The one within another, with a text long enough."""
        one = 1
        return one
    return inner

def only():
    """Nothing but these words about what is not there."""

def endless(number):
    """Goes on and on for more lines than an answer should have."""
''' + "".join(f"    number += {place}\n" for place in range(40))

MANY = "".join(
    f'''
def {verb}_{noun}({noun}):
    """Take every {noun} of the shelf, and see how one would {verb} it."""
    found = []
    for place, one in enumerate({noun}):
        found.append((place, one.{verb}()))
    return found
'''
    for verb in ("turn", "lift", "clean")
    for noun in ("hammer", "wrench", "drill", "ladder")
)  # fmt: skip


@pytest.fixture
def toolbox(tmp_path, monkeypatch):
    """A package of that name; returns its folder."""
    folder = tmp_path / "toolbox"
    files = {"__init__": "", "boxes": FIRST, "left_out": LEFT_OUT, "many": MANY}
    files |= {"broken": "def (:", "tests/made": FIRST.replace("shorten", "tested")}
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(text.replace("see how one would", "see how to"))
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_functions_are_those_that_a_docstring_describes_without_it_and_comments(toolbox):
    found = {one.name: one for one in drawn_functions("toolbox", random.Random(0))}
    rest = {name for name in found if "_" not in name}
    assert rest == {"shorten", "volume", "outer"}
    assert found["shorten"].description == "Cut a long line where a word ends."
    assert found["shorten"].file == "boxes.py"
    assert found["shorten"].code == textwrap.dedent(
        """\
        def shorten(text, most):
            words = text.split()
            while len(' '.join(words)) > most:
                words.pop()
            return ' '.join(words)"""
    )
    assert found["outer"].code.startswith("def outer():\n    def inner():\n")
    assert not any("\n\n" in one.code for one in found.values()), "which ends an answer"
    assert found["volume"].code.startswith("def volume(self):\n    sides = (self.width")


def test_every_question_is_about_a_function_of_the_text(demo, toolbox):
    task = Functions(cloze=True, **SMALL)
    samples = list(task.samples(demo.tokenizer))
    assert samples == list(task.samples(demo.tokenizer))
    assert len({sample.context for sample in samples}) > 1
    known = {one.code: one for one in drawn_functions("toolbox", random.Random(0))}
    for sample in samples:
        there = {code for code in known if code in sample.context}
        assert 3 <= len(there) < 15
        assert "\n\n# many.py\n\ndef " in sample.context
        assert [turn.cell for turn in sample.turns] == [
            {"turn": turn, "length": 500} for turn in (1, 2, 3)
        ]
        assert len({turn.references for turn in sample.turns}) == 3
        for turn in sample.turns:
            asked = known[turn.references[0]]
            assert asked.description in turn.question
            assert asked.description in turn.plain_question
            assert asked.name not in turn.question + turn.plain_question
            assert turn.answer_start == f"def {asked.name}"
            assert {asked.code, *turn.details["others"]} == there
            assert asked.description not in sample.context
            tokens = demo.tokenizer(asked.code)["input_ids"]
            assert len(tokens) < turn.settings.max_new_tokens < len(tokens) + 64
        ids = sample.prompt(demo.tokenizer, "tokenizer", "visible").token_ids(demo.tokenizer)
        assert 300 < ids.shape[1] + sample.settings.max_new_tokens <= 500


CODE = "def volume(self):\n    sides = (self.width, self.height)\n    return sides[0] * sides[1]"
OTHER = "def surface(self):\n    sides = (self.width, self.height)\n    return sides[0] + sides[1]"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (f"Here it is:\n\n```python\n{CODE}\n```\nIt multiplies.", 1),
        (f"{OTHER}\n\n{CODE}", 0),
        (f"{CODE} # both", 1),
        (f"{CODE} # both sides", 0),
        (OTHER, 0),
        ("", 0),
    ],
)
def test_an_answer_must_be_most_like_the_right_function_and_alike_enough(answer, score):
    sample = Sample(
        name="one",
        cell={},
        context="",
        question="",
        references=(CODE,),
        settings=None,
        details={"others": (OTHER,)},
    )
    assert Functions().score(sample, answer) == score


def test_files_that_cannot_be_read_are_left_out(toolbox):
    before = list(drawn_functions("toolbox", random.Random(0)))
    (toolbox / ".#boxes.py").symlink_to("nowhere")
    (toolbox / "folder.py").mkdir()
    (toolbox / "deep.py").write_text("x = " + "-" * 20_000 + "1")
    _files.cache_clear()
    assert sorted(one.name for one in drawn_functions("toolbox", random.Random(0))) == sorted(
        one.name for one in before
    )


def test_a_package_that_is_not_there_or_has_too_little_is_refused(demo, toolbox):
    for name in ("no_such_package", "", "os.path", "../toolbox"):
        with pytest.raises(InvalidArgumentError, match=f"package: expected stdlib.* got '{name}'"):
            list(Functions(package=name).samples(demo.tokenizer))
    (toolbox / "many.py").unlink()
    with pytest.raises(InvalidArgumentError, match="got toolbox with 3; name another"):
        list(Functions(package="toolbox").samples(demo.tokenizer))
