"""RULER's thirteen tasks: official wording, length and scores."""

import re
import runpy
from collections import Counter
from types import SimpleNamespace

import pytest

from snapkv_app.packages import package_file
from snapkv_lab.evaluate.haystack import load_words
from snapkv_lab.evaluate.task import needed_tokens
from snapkv_lab.evaluate.tasks.ruler import GENERATORS, NOISE, PuzzleRequest, Ruler

ESSAY = tuple(" ".join(f"This is sentence {i}." for i in range(200)).split())
KINDS = {
    "vt": "variable_tracking",
    "cwe": "common_words_extraction",
    "fwe": "freq_words_extraction",
}


def puzzle(task, parts, *, length=4096, index=0, seed="seed"):
    wanted = PuzzleRequest(length=length, index=index, seed=seed, essay=ESSAY)
    return GENERATORS[task].puzzle(wanted, parts)


def whole(made):
    return f"{made.context}{made.question} {made.answer_start}"


@pytest.fixture(scope="module")
def official():
    """Templates and answer lengths of the official suite, from the installed package."""
    path = package_file("long_context_eval", "data", "synthetic", "constants.py")
    return runpy.run_path(str(path))["TASKS"]


def pattern(template, **filled):
    """Return the official template as a regular expression that captures what is filled in."""
    parts = re.split(r"\{(\w+)\}", template.replace("assgined", "assigned"))
    texts = [re.escape(text) for text in parts[::2]]
    groups = [re.escape(filled[name]) if name in filled else "(.*)" for name in parts[1::2]]
    return re.compile("".join(a + b for a, b in zip(texts, [*groups, ""], strict=True)), re.S)


@pytest.mark.parametrize(
    "task", ["niah_single_1", "niah_single_3", "niah_multiquery", "vt", "cwe", "fwe", "qa_2"]
)
def test_ruler_uses_the_official_wording_and_answer_lengths(official, task):
    kind = KINDS.get(task, task.split("_")[0])
    made = puzzle(task, 120)
    template = official[kind]["template"] + official[kind]["answer_prefix"]
    filled = {}
    if kind == "niah":
        value = "uuids" if task in ("niah_single_3", "niah_multikey_3") else "numbers"
        if len(made.references) == 1:  # the official singular
            for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is")):
                template = template.replace(plural, singular)
            value = value[:-1]
        filled["type_needle_v"] = value
    if kind == "variable_tracking":
        filled["num_v"] = "5"
    assert pattern(template, **filled).search(whole(made))
    assert GENERATORS[task].new_tokens == official[kind]["tokens_to_generate"]


@pytest.mark.parametrize(
    ("task", "needles", "references"),
    [
        ("niah_single_3", 1, 1),
        ("niah_multikey_3", 13, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_niah_hides_the_documented_numbers_of_keys_and_values(task, needles, references):
    made = puzzle(task, 12 if task in ("niah_multikey_2", "niah_multikey_3") else 300)
    found = re.findall(r"One of the special magic (\w+) for (\S.*?) is: ([\w-]+)\.", made.context)
    assert len(found) == needles
    kind = "uuids" if task in ("niah_single_3", "niah_multikey_3") else "numbers"
    assert {hidden[0] for hidden in found} == {kind}
    asked = {value for _, key, value in found if key in made.question and key in made.answer_start}
    assert asked == set(made.references)
    assert len(made.references) == references
    keys = Counter(key for _, key, _ in found)
    assert set(keys.values()) == ({4} if task == "niah_multivalue" else {1})


def test_needles_stand_between_the_sentences_of_an_essay():
    made = puzzle("niah_multikey_1", 400)
    text = made.context.partition("afterwards.\n")[2]
    left = re.sub(r"One of the special magic numbers for .*? is: \d{7}\. ?", "", text).split()
    assert left == list(ESSAY[:400])


def test_vt_prompt_has_a_solved_example_and_one_chain_of_five_assignments():
    made = puzzle("vt", 30)
    example, asked = made.context.split("\n\n\n\n")
    assert example.count(NOISE) == 10
    assert asked.count(NOISE) == 30
    steps = re.findall(r"VAR ([A-Z]{5}) = (?:VAR ([A-Z]{5}) |(\d{5}))", asked)
    names = [name for name, _, _ in steps]
    assert names == list(made.references)
    assert [source for _, source, _ in steps[1:]] == names[:-1]
    assert steps[0][2] in made.question
    assert re.search(r"they are:  ([A-Z]{3} ){4}[A-Z]{3}$", example)


def test_cwe_repeats_ten_words_more_often_and_shows_a_solved_list():
    made, (count, often, seldom), repeats = puzzle("cwe", 50), (40, 10, 3), (30, 3)
    solved, asked = re.split(r"\n(?=Below)", made.context)
    shown, answers = solved.split(
        "\nQuestion: What are the 10 most common words in the above list?"
    )
    known = "|".join(sorted(map(re.escape, load_words("noun", "adjective", "verb")), key=len)[::-1])

    def counts(text):
        return Counter(re.findall(rf"\d+\. ({known})(?= \d+\. |$)", text))

    assert counts(asked) == dict.fromkeys(made.references, repeats[0]) | {
        word: repeats[1] for word in counts(asked) if word not in made.references
    }
    assert len(counts(asked)) == 50
    in_example = counts(shown)
    assert len(in_example) == count
    common = [word for word, times in in_example.items() if times == often]
    assert sorted(common) == sorted(counts(answers.partition("are:")[2]))
    assert sum(in_example.values()) == 10 * often + (count - 10) * seldom


def test_fwe_has_no_ties_at_the_third_word():
    least = GENERATORS["fwe"].least
    for parts in range(least, least + 60):
        made = puzzle("fwe", parts, length=1024)
        counts = Counter(made.context.split())
        others = {w: n for w, n in counts.items() if re.fullmatch("[a-z]{6}", w)}
        top = [word for word, _ in Counter(others).most_common(3)]
        assert set(top) == set(made.references)
        assert Counter(others).most_common(4)[3][1] < min(others[w] for w in made.references)


def test_qa_shows_the_documents_of_the_question_before_others():
    own, near = 2, 8
    alone, some, many = (puzzle("qa_2", parts) for parts in (0, near, near + 30))
    for made, others in ((alone, 0), (some, near), (many, near + 30)):
        assert len(re.findall(r"^Document \d+:$", made.context, re.M)) == own + others
        assert f"Document {own + others}:\n" in made.context

    def documents(made):
        return set(re.split(r"\n\nDocument \d+:\n", made.context)[1:])

    assert documents(alone) < documents(some) < documents(many)


def test_every_task_fills_its_length_and_never_exceeds_it(demo):
    made = list(Ruler(lengths=(1024,), samples_each=2).samples(demo.tokenizer))
    assert [sample.cell["task"] for sample in made] == [t for t in GENERATORS for _ in range(2)]
    for sample in made:
        assert 700 < needed_tokens(sample, demo.tokenizer) <= 1024
    assert len({sample.name for sample in made}) == len(made)
    assert len({sample.context for sample in made}) == len(made)


def test_question_with_too_long_documents_is_skipped(demo):
    made = list(Ruler(tasks=("qa_1",), lengths=(400,), samples_each=12).samples(demo.tokenizer))
    numbers = [int(sample.name.rpartition("/")[2]) for sample in made]
    assert len(numbers) == 12
    assert numbers == sorted(set(numbers))
    assert numbers[-1] > 11


@pytest.mark.parametrize(
    ("task", "references", "prediction", "expected"),
    [
        ("niah_multivalue", ("111", "222", "333", "444"), "111, 222 and 333.", 0.75),
        ("niah_single_1", ("1234567",), "123456", 0.0),
        ("qa_1", ("in the 10th century", "10th century"), "The 10th Century.", 1.0),
        ("qa_2", ("yes", "no"), "perhaps", 0.0),
    ],
)
def test_ruler_scores_equal_the_official_ones(task, references, prediction, expected):
    sample = SimpleNamespace(cell={"task": task}, references=references)
    assert Ruler().score(sample, prediction) == expected
