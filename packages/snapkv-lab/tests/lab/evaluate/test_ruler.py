"""RULER's thirteen tasks: worded as the official ones, of the right length, scored as they are."""

import re
import runpy
from collections import Counter
from dataclasses import replace

import pytest

from snapkv.app.answering import answer
from snapkv.app.settings import GenerationSettings
from snapkv.errors import InvalidArgumentError
from snapkv.packages import package_file
from snapkv.policies import FullCache, SnapKV
from snapkv_lab.evaluate.asking import Method
from snapkv_lab.evaluate.haystack import words
from snapkv_lab.evaluate.runner import Run
from snapkv_lab.evaluate.sample import Sample
from snapkv_lab.evaluate.task import needed_tokens
from snapkv_lab.evaluate.tasks.ruler import GENERATORS, NOISE, Ruler, Wanted, sentences

ESSAY = tuple(" ".join(f"This is sentence {i}." for i in range(200)).split())
KINDS = {
    "vt": "variable_tracking",
    "cwe": "common_words_extraction",
    "fwe": "freq_words_extraction",
}


def puzzle(task, parts, *, length=4096, index=0, seed="seed"):
    wanted = Wanted(length=length, index=index, seed=seed, essay=ESSAY)
    return GENERATORS[task].puzzle(wanted, parts)


def whole(made):
    return f"{made.context}{made.question} {made.answer_start}"


@pytest.fixture(scope="module")
def official():
    """Templates and answer lengths of the official suite, out of the installed package."""
    path = package_file("long_context_eval", "data", "synthetic", "constants.py")
    return runpy.run_path(str(path))["TASKS"]


def pattern(template, **filled):
    """The official template as a regular expression that captures what is filled in."""
    parts = re.split(r"\{(\w+)\}", template.replace("assgined", "assigned"))
    texts = [re.escape(text) for text in parts[::2]]
    groups = [re.escape(filled[name]) if name in filled else "(.*)" for name in parts[1::2]]
    return re.compile("".join(a + b for a, b in zip(texts, [*groups, ""], strict=True)), re.S)


@pytest.mark.parametrize("task", GENERATORS)
def test_the_wording_and_the_answer_length_are_official(official, task):
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
        ("niah_single_1", 1, 1),
        ("niah_single_2", 1, 1),
        ("niah_single_3", 1, 1),
        ("niah_multikey_1", 4, 1),
        ("niah_multikey_2", 13, 1),  # the needle among twelve
        ("niah_multikey_3", 13, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_what_is_hidden_and_what_is_asked_for(task, needles, references):
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


def test_several_keys_are_listed_as_in_a_sentence():
    question = puzzle("niah_multiquery", 300).question
    assert re.fullmatch(
        r"\nWhat are all the special magic numbers for (\S+, ){3}and \S+ mentioned in the provided "
        r"text\?",
        question,
    )


def test_noise_is_whole_lines_around_the_needle():
    lines = puzzle("niah_single_1", 9).context.split("\n")[1:]
    assert len(lines) == 10
    assert Counter(lines)[NOISE] == 9


def test_needles_stand_between_the_sentences_of_an_essay():
    made = puzzle("niah_multikey_1", 400)
    text = made.context.partition("afterwards.\n")[2]
    left = re.sub(r"One of the special magic numbers for .*? is: \d{7}\. ?", "", text).split()
    assert left == list(ESSAY[:400])


def test_a_short_essay_is_repeated():
    made = puzzle("niah_single_2", 2 * len(ESSAY) + 3)
    assert made.context.count("This is sentence 7.") == 2
    assert made.context.count("This is sentence 0.") >= 2


def test_sentences_end_at_their_marks():
    text = 'One. Two?  "Three!" Four 3.5 (five.) Six'
    assert sentences(text) == ["One.", "Two?", '"Three!"', "Four 3.5 (five.)", "Six"]


def test_vt_has_a_solved_example_and_one_chain_of_five_in_order():
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


@pytest.mark.parametrize(
    ("length", "example", "repeats"), [(1024, (20, 3, 1), (6, 1)), (4096, (40, 10, 3), (30, 3))]
)
def test_cwe_repeats_ten_words_more_often_and_shows_a_solved_list(length, example, repeats):
    made = puzzle("cwe", 50, length=length)
    solved, asked = re.split(r"\n(?=Below)", made.context)
    shown, answers = solved.split(
        "\nQuestion: What are the 10 most common words in the above list?"
    )
    known = "|".join(sorted(map(re.escape, words("noun", "adjective", "verb")), key=len)[::-1])

    def counts(text):
        return Counter(re.findall(rf"\d+\. ({known})(?= \d+\. |$)", text))

    assert counts(asked) == dict.fromkeys(made.references, repeats[0]) | {
        word: repeats[1] for word in counts(asked) if word not in made.references
    }
    assert len(counts(asked)) == 50
    count, often, seldom = example
    in_example = counts(shown)
    assert len(in_example) == count
    common = [word for word, times in in_example.items() if times == often]
    assert sorted(common) == sorted(counts(answers.partition("are:")[2]))
    assert sum(in_example.values()) == 10 * often + (count - 10) * seldom


def test_fwe_words_follow_the_square_law():
    made = puzzle("fwe", 1000, length=2048)
    text = re.search(r"coded words\. (.*)$", made.context, re.S).group(1).split()
    counts = Counter(text)
    # 1000 / (pi^2 / 6) = 607.9, then a quarter, a ninth, a sixteenth, ...
    assert [counts[word] for word in ("...", *made.references)] == [607, 151, 67, 37]
    assert counts.most_common(6)[4:] == [(w, n) for w, n in counts.most_common() if n in (24, 16)]
    assert all(re.fullmatch("[a-z]{6}", word) for word in counts if word != "...")


def test_fwe_has_no_ties_at_the_third_word():
    least = GENERATORS["fwe"].least
    for parts in range(least, least + 300):
        made = puzzle("fwe", parts, length=1024)
        counts = Counter(made.context.split())
        others = {w: n for w, n in counts.items() if re.fullmatch("[a-z]{6}", w)}
        top = [word for word, _ in Counter(others).most_common(3)]
        assert set(top) == set(made.references)
        assert Counter(others).most_common(4)[3][1] < min(others[w] for w in made.references)


@pytest.mark.parametrize(("task", "own", "near"), [("qa_1", 1, 38), ("qa_2", 2, 8)])
def test_qa_takes_the_documents_of_the_question_first(task, own, near):
    alone, some, many = (puzzle(task, parts) for parts in (0, near, near + 30))
    for made, others in ((alone, 0), (some, near), (many, near + 30)):
        assert len(re.findall(r"^Document \d+:$", made.context, re.M)) == own + others
        assert f"Document {own + others}:\n" in made.context

    def documents(made):
        return set(re.split(r"\n\nDocument \d+:\n", made.context)[1:])

    assert documents(alone) < documents(some) < documents(many)


def test_qa_answers_are_in_the_documents():
    for index in (0, 10, 50):
        made = puzzle("qa_1", 3, index=index)
        assert all(reference in made.context for reference in made.references)
        assert len(set(made.references)) == len(made.references)


def test_every_task_fills_its_length_and_never_exceeds_it(demo):
    made = list(Ruler(lengths=(1024,), samples_each=2).samples(demo.tokenizer))
    assert [sample.cell["task"] for sample in made] == [t for t in GENERATORS for _ in range(2)]
    for sample in made:
        assert 700 < needed_tokens(sample, demo.tokenizer) <= 1024
    assert len({sample.name for sample in made}) == len(made)
    assert len({sample.context for sample in made}) == len(made)


def test_the_same_samples_every_time_and_others_for_another_seed(demo):
    def made(seed):
        tasks = ("niah_single_1", "vt", "fwe")
        return list(
            Ruler(tasks=tasks, lengths=(900,), samples_each=1, seed=seed).samples(demo.tokenizer)
        )

    assert made(42) == made(42)
    assert all(a.context != b.context for a, b in zip(made(42), made(43), strict=True))


def test_a_question_whose_documents_are_too_long_is_passed_over(demo):
    made = list(Ruler(tasks=("qa_1",), lengths=(400,), samples_each=12).samples(demo.tokenizer))
    numbers = [int(sample.name.rpartition("/")[2]) for sample in made]
    assert len(numbers) == 12
    assert numbers == sorted(set(numbers))
    assert numbers[-1] > 11


@pytest.mark.parametrize(
    ("task", "references", "prediction", "expected"),
    [
        ("niah_multivalue", ("111", "222", "333", "444"), "111, 222 and 333.", 0.75),
        ("vt", ("ABCDE", "FGHIJ"), "abcde", 0.5),
        ("cwe", ("fax", "set"), "1. Fax 2. set", 1.0),
        ("niah_single_1", ("1234567",), "123456", 0.0),
        ("qa_1", ("in the 10th century", "10th century"), "The 10th Century.", 1.0),
        ("qa_2", ("yes", "no"), "perhaps", 0.0),
    ],
)
def test_scores_are_the_official_ones(task, references, prediction, expected):
    sample = Sample(
        name="x",
        cell={"task": task, "length": 4096},
        context="",
        question="",
        references=references,
        settings=GenerationSettings(),
    )
    assert Ruler().score(sample, prediction) == expected


def test_the_question_can_be_hidden_and_the_example_stays(demo):
    for sample in Ruler(lengths=(1024,), samples_each=1).samples(demo.tokenizer):
        for template in ("none", "tokenizer"):
            prompt = sample.prompt(demo.tokenizer, template, "hidden")
            cut = prompt.context_characters
            assert prompt.text[cut:].startswith(sample.question.strip())
            assert prompt.text[:cut].rstrip().endswith(sample.context[-50:].strip())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ("niah",)}, r"tasks: expected some of niah_single_1, .*, got niah;"),
        ({"tasks": ()}, "tasks: .* got none;"),
        ({"samples_each": 0}, "samples_each: expected at least 1, got 0"),
        ({"lengths": ()}, "lengths: expected at least 1, got 0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Ruler(**settings)


@pytest.mark.parametrize("task", ["cwe", "vt", "fwe", "qa_2", "niah_multikey_3"])
def test_a_length_without_room_is_an_error(demo, task):
    ruler = Ruler(tasks=(task,), lengths=(150,), samples_each=1)
    with pytest.raises(
        InvalidArgumentError, match=f"lengths: expected room for a sample of {task}"
    ):
        list(ruler.samples(demo.tokenizer))


def test_more_samples_than_questions_are_an_error():
    with pytest.raises(InvalidArgumentError, match=r"samples_each: .* 5928 questions of squad"):
        puzzle("qa_1", 0, index=5928)


def test_the_model_finds_the_needle_in_the_noise(demo):
    (sample,) = Ruler(tasks=("niah_single_1",), lengths=(512,), samples_each=1).samples(
        demo.tokenizer
    )
    short = replace(sample, settings=GenerationSettings(max_new_tokens=10))
    prompt = short.prompt(demo.tokenizer, "none", "visible")
    for policy in (FullCache(), SnapKV(budget=192, window_size=16, kernel_size=13)):
        given = answer(demo, prompt, policy, short.settings)
        assert Ruler().score(sample, given.text) == 1.0


@pytest.mark.slow
def test_thirteen_tasks_at_2k(demo, tmp_path):
    run = Run(
        loaded=demo,
        task=Ruler(lengths=(2048,), samples_each=1),
        methods=[
            Method(label="full", policy=FullCache()),
            Method(label="snapkv", policy=SnapKV(budget=512)),
        ],
        template="none",
    )
    results = run.into(tmp_path)
    assert len(results.rows) == 26
    assert all(row["status"] == "ok" and row["prompt_tokens"] < 2048 for row in results.rows)
    scores = {(r["cell"]["task"], r["method"]): r["score"] for r in results.rows}
    assert scores["niah_single_1", "full"] == 1.0
