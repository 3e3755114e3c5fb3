"""The installed HotpotQA, its index, and the order by meaning."""

import pytest
import torch

from snapkv_lab.evaluate.corpora import Passage, PassageIndex, load_corpus
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


def test_each_hotpotqa_question_has_two_paragraphs_that_answer_it():
    data = load_corpus("hotpotqa")
    assert (len(data.questions), len(data.passages)) == (7405, 66635)
    assert {len(question.gold) for question in data.questions} == {2}
    assert len(set(data.passages)) == len(data.passages)
    first = data.questions[0]
    assert first.text == "Were Scott Derrickson and Ed Wood of the same nationality?"
    assert [passage.title for passage in first.gold] == ["Scott Derrickson", "Ed Wood"]


def test_passages_are_ranked_by_the_stems_of_title_and_text():
    """BM25 ranks a rare word twice in a short text first, then two words, then one among many."""
    ranked = PassageIndex(PASSAGES).rank("Hamburg, Dresden, harbours?")
    titles = [passage.title for passage in ranked]
    assert titles == ["Hamburg", "Rivers", "Bridges", "Cats", "Cats"]


def test_embeddings_order_texts_that_share_no_word(reranker):
    texts = [f"{passage.title}. {passage.text}" for passage in PASSAGES]
    places = reranker.nearest("Where do kittens rest?", texts)
    assert set(places[:2]) == {3, 4}
    assert sorted(places) == [0, 1, 2, 3, 4]


def test_embeddings_in_a_padded_batch_equal_those_of_each_text_alone(reranker):
    """The reference is the plain definition: the mean of the last states, scaled to length 1."""
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
