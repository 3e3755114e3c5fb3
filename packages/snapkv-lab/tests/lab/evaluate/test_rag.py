"""The three experiments with retrieved documents: prompts and scores."""

import gzip
import itertools
import json
import re

import pytest

from snapkv_lab.evaluate.corpora import Corpus, PassageIndex, load_corpus
from snapkv_lab.evaluate.tasks import RagCitation, RagPipeline, RagPosition, rag
from snapkv_lab.evaluate.tasks.rag import cited_numbers, contains_phrase


@pytest.fixture(scope="module")
def corpus():
    """The first fifty questions of HotpotQA with their published paragraphs."""
    whole = load_corpus("hotpotqa")
    return Corpus(questions=whole.questions[:50], passages=whole.passages[:498])


@pytest.fixture(scope="module")
def index(corpus):
    return PassageIndex(corpus.passages)


@pytest.fixture
def small(monkeypatch, corpus, index):
    """Let the tasks use the small corpus."""
    monkeypatch.setattr(rag, "load_corpus", lambda _: corpus)
    monkeypatch.setattr(rag, "corpus_index", lambda _: index)
    return corpus


def shown(sample):
    """Return the documents of a prompt as (number, title, text)."""
    pattern = r"^Document: (.*) \[(\d+)\]\n(.*)$"
    found_ones = re.findall(pattern, sample.context, re.MULTILINE)
    return [(int(number), title, text) for title, number, text in found_ones]


def question_of(sample, corpus):
    identifier = sample.name.rpartition("/")[2]
    return next(question for question in corpus.questions if question.name == identifier)


@pytest.mark.parametrize(
    ("text", "phrases", "is_found"),
    [
        ("THE CHIEF, of a Protocol", ["chief of protocol"], True),
        ("In 1999.", ["199"], False),
        ("in Greenwich Village New York City", ["Greenwich Village, New York City"], True),
        ("3677 seated", ["3,677 seated"], True),
        ("", ["The The"], False),
    ],
)
def test_phrase_matches_whole_words_without_punctuation_and_articles(text, phrases, is_found):
    assert contains_phrase(text, phrases) is is_found


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("It was Berlin [3][7].", {3, 7}),
        ("[3, 5, and 7]", {3, 5, 7}),
        ("[Document 3] and [documents 5; 7]", {3, 5, 7}),
        ("The answer comes from documents [3, 7", {3, 7}),
        ("In 1999, document 3 says so, and Documents 5, 6 and 8.", {3, 5, 6, 8}),
        ("Document 3 says so [4].", {4}),
        ("In 1999 there were 3 of them.", set()),
    ],
)
def test_citations_are_numbers_in_brackets_or_after_the_word_document(text, numbers):
    assert cited_numbers(text) == numbers


@pytest.mark.parametrize(
    ("prediction", "score"),
    [("[{0}, {1}]", 1.0), ("[{0}]", 2 / 3), ("[{0}, 77]", 1 / 2), ("[77, 78]", 0.0)],
)
def test_citations_are_scored_by_f1(small, prediction, score):
    task = RagCitation(documents=(5,), samples_each=2)
    sample = next(task.samples(None))
    said = prediction.format(*sample.references)
    assert task.score(sample, said) == pytest.approx(score)


def test_citation_numbers_are_those_of_the_gold_documents_among_near_ones(small, index):
    task = RagCitation(documents=(10, 30), samples_each=20)
    samples = list(task.samples(None))
    places = set()
    for sample in samples:
        documents, question = shown(sample), question_of(sample, small)
        assert [number for number, *_ in documents] == [*range(1, sample.cell["documents"] + 1)]
        gold = {title for number, title, _ in documents if str(number) in sample.references}
        assert gold == {passage.title for passage in question.gold}
        near = [p.title for p in index.rank(question.text)][: len(documents) + 2]
        assert {title for _, title, _ in documents} - gold <= set(near)
        places.update(map(int, sample.references))
    assert len(samples) == 40
    assert len(places) > 20, "gold documents stand anywhere"
    assert samples == list(task.samples(None)), "the same every time"


def test_gold_documents_move_while_the_order_of_others_stays(small):
    task = RagPosition(documents=(5, 9), samples_each=3)
    samples = list(task.samples(None))
    assert len({sample.name for sample in samples}) == len(samples) == 2 * 3 * 3
    first_gold = {"beginning": (0, 0), "middle": (1, 3), "end": (3, 7)}
    others = {}
    for sample in samples:
        count, place = sample.cell["documents"], sample.cell["position"]
        question = question_of(sample, small)
        titles = [title for _, title, _ in shown(sample)]
        start = first_gold[place][count > 5]
        assert len(titles) == count
        assert titles[start : start + 2] == [passage.title for passage in question.gold]
        rest = titles[:start] + titles[start + 2 :]
        assert others.setdefault((count, question.name), rest) == rest
        assert sample.references == question.answers
    for (count, name), rest in others.items():
        assert rest == others[9, name][: count - 2], "more documents are the same and further ones"


def test_pipeline_reads_the_first_reranked_documents(small, index):
    task = RagPipeline(documents=(3, 6), retrieve=12, samples_each=2)
    samples = list(task.samples(None))
    assert [sample.cell["documents"] for sample in samples] == [3, 6, 3, 6]
    for few, more in zip(samples[::2], samples[1::2], strict=True):
        question = question_of(few, small)
        retrieved = [p.title for p in itertools.islice(index.rank(question.text), 12)]
        titles = [[title for _, title, _ in shown(sample)] for sample in (few, more)]
        assert titles[0] == titles[1][:3]
        assert set(titles[1]) <= set(retrieved)
        assert titles[1] != retrieved[:6], "reranking changes the order"


def document(title, **changed):
    fields = {"id": "1", "title": title, "text": f"About {title}.", "hasanswer": False}
    return fields | {"isgold": False} | changed


def line(**changed):
    documents = [
        document("A"),
        document("Gold", isgold=True, hasanswer=True),
        document("Answer", hasanswer=True),
        document("B"),
        document("C"),
    ]
    return {"question": "Who?", "answers": ["Ann", "Ann B."], "ctxs": documents} | changed


def test_questions_from_a_file_replace_those_of_hotpotqa(tmp_path):
    file = tmp_path / "rows.jsonl.gz"
    lines = [json.dumps(line()), "", json.dumps(line(question="What?"))]
    file.write_bytes(gzip.compress("\n".join(lines).encode()))
    task = RagPosition(documents=(4,), samples_each=2, data=str(file))
    samples = list(task.samples(None))
    assert {sample.name for sample in samples[:2]} == {"4/beginning/line 1", "4/beginning/line 3"}
    titles = {s.cell["position"]: [title for _, title, _ in shown(s)] for s in samples}
    assert titles == {
        "beginning": ["Gold", "A", "B", "C"],
        "middle": ["A", "Gold", "B", "C"],
        "end": ["A", "B", "C", "Gold"],
    }, "documents in which an answer stands are not among the others"
    assert task.score(samples[0], "It was Ann, of course.") == 1
    assert task.score(samples[0], "It was Anna.") == 0
    assert (task.describe()["corpus"], task.describe()["data"]) == (None, file.name)
