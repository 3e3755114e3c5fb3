"""HotpotQA as it is installed, its index, and the order that meaning gives."""

import math

import pytest
import torch

from snapkv_lab.evaluate.corpora import Index, Passage, load_corpus
from snapkv_lab.evaluate.embeddings import TextEmbeddings

PASSAGES = (
    Passage(title="Rivers", text="The Elbe flows through Hamburg and Dresden."),
    Passage(title="Bridges", text="Dresden has many bridges over rivers. Bridges are old."),
    Passage(title="Hamburg", text="A harbour, and a harbour again."),
    Passage(title="Cats", text="A cat sleeps on a wall."),
    Passage(title="Cats", text="A cat sleeps on a roof."),
)


@pytest.fixture(scope="module")
def reranker():
    return TextEmbeddings()


def test_hotpotqa_has_its_questions_and_two_paragraphs_for_each():
    data = load_corpus("hotpotqa")
    assert (len(data.questions), len(data.passages)) == (7405, 66635)
    assert {len(question.gold) for question in data.questions} == {2}
    assert len(set(data.passages)) == len(data.passages)
    first = data.questions[0]
    assert first.text == "Were Scott Derrickson and Ed Wood of the same nationality?"
    assert [passage.title for passage in first.gold] == ["Scott Derrickson", "Ed Wood"]


def test_the_order_is_that_of_bm25_computed_by_hand():
    """BM25 with Lucene's idf, k1 1.5 and b 0.75; words of one letter do not count."""
    words = [
        ["river", "elb", "flow", "through", "hamburg", "dresden"],
        ["bridg", "dresden", "has", "mani", "bridg", "over", "river", "bridg", "old"],
        ["hamburg", "harbour", "harbour", "again"],
        ["cat", "cat", "sleep", "wall"],
        ["cat", "cat", "sleep", "roof"],
    ]
    mean = sum(map(len, words)) / len(words)

    def rated(document):
        total = 0.0
        for word in ("hamburg", "dresden", "harbour"):
            holding = sum(word in other for other in words)
            times, length = document.count(word), len(document)
            idf = math.log(1 + (len(words) - holding + 0.5) / (holding + 0.5))
            total += idf * times / (times + 1.5 * (0.25 + 0.75 * length / mean))
        return total

    by_hand = sorted(range(5), key=lambda place: -rated(words[place]))
    ranked = Index(PASSAGES).ranked("Hamburg, Dresden, harbour?")
    assert [PASSAGES.index(passage) for passage in ranked] == by_hand


def test_meaning_orders_what_shares_no_word(reranker):
    texts = [f"{passage.title}. {passage.text}" for passage in PASSAGES]
    places = [place for place, _ in reranker.nearest("Where do kittens rest?", texts)]
    assert set(places[:2]) == {3, 4}
    assert sorted(places) == [0, 1, 2, 3, 4]


def test_embeddings_in_a_padded_batch_are_those_of_each_text_alone(reranker):
    """Against the plain definition: the mean of the last states, of length 1, no padding."""
    texts = ["A cat.", "The Elbe flows through Hamburg and Dresden. " * 5, "old", "word " * 400]
    found = reranker.embeddings(texts)
    assert found.shape == (4, 384)
    for text, row in zip(texts, found, strict=True):
        ids = reranker._tokenizer(text, return_tensors="pt")["input_ids"]
        if ids.shape[1] > 256:
            ids = torch.cat([ids[:, :255], ids[:, -1:]], dim=1)  # the end token stays
        with torch.inference_mode():
            mean = reranker._model(input_ids=ids).last_hidden_state[0].mean(dim=0)
        assert torch.allclose(row, mean / mean.norm(), atol=1e-5)
