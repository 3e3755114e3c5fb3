"""One document and many questions: each answer is as if both had been read together."""

import pytest
import torch

from snapkv import (
    AdaKV,
    CacheFileError,
    CompressedCache,
    Document,
    ExpectedAttention,
    InvalidArgumentError,
    InvalidTypeError,
    SnapKV,
    default_policy,
)
from snapkv.hf.cache_argument import cache_among
from snapkv.prefill import layer_by_layer
from tests.families import random_ids, tiny_model

TOKENS, BUDGET, WINDOW = 90, 40, 8
POLICY = SnapKV(BUDGET, window_size=WINDOW)


def text(tokens=TOKENS):
    return random_ids(1, tokens)


def asked(*lengths):
    return [random_ids(1, length, seed=1 + i)[0].tolist() for i, length in enumerate(lengths)]


def answered(model, inputs):
    ids = inputs["input_ids"]
    return model.generate(**inputs, max_new_tokens=5, do_sample=False)[:, ids.shape[1] :]


def read_together(model, questions, policy=POLICY, document=None):
    """Read the document together with each question; return the answers and caches."""
    found = []
    for question in questions:
        ids = torch.cat([text() if document is None else document, torch.tensor([question])], 1)
        cache = CompressedCache(model, policy)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found.append((answered(model, {**inputs, "past_key_values": cache}), cache))
    return found


def assert_as_if_read_together(model, inputs, expected):
    answers, cache = answered(model, inputs), cache_among(inputs)
    for row, (answer, alone) in enumerate(expected):
        assert torch.equal(answers[row : row + 1], answer)
        for layer in cache.compressed_layers:
            kept, wanted = cache.kept_positions(layer)[row], alone.kept_positions(layer)[0]
            for own, other in zip(kept, wanted, strict=True):
                assert torch.equal(own[own >= 0], other[other >= 0])


@pytest.mark.parametrize(
    ("lengths", "chunk_tokens"), [((20, 12, 9), None), ((3, 1, 5), 25), ((30, 2), 25)]
)
def test_questions_of_different_lengths_match_document_read_with_each(lengths, chunk_tokens):
    model, questions = tiny_model("qwen3"), asked(*lengths)
    document = Document(model, text(), POLICY, chunk_tokens=chunk_tokens)
    inputs = document.inputs(questions)
    shared = cache_among(inputs).layers[0].offloaded.pieces
    assert all(states.shape[0] == 1 for piece in shared for states in piece.stored.tensors)
    assert_as_if_read_together(model, inputs, read_together(model, questions))


@pytest.mark.parametrize(
    "policy", [AdaKV(POLICY), SnapKV("30%", window_size=WINDOW)], ids=["adakv", "bytes"]
)
def test_other_policies_select_separately_for_each_question(policy):
    model, questions = tiny_model("llama"), asked(20, 11)
    inputs = Document(model, text(), policy).inputs(questions)
    assert_as_if_read_together(model, inputs, read_together(model, questions, policy))
    with pytest.raises(InvalidArgumentError, match="queries of earlier turns are not stored"):
        Document(model, text(), ExpectedAttention(BUDGET, window_size=WINDOW))


@pytest.mark.parametrize("tokens", [5, 30, 60, 140])
def test_all_question_tokens_vote_with_default_policy(tokens):
    """The result equals that of one reading in which the length of the question is known."""
    model, (question,) = tiny_model("llama"), asked(tokens)
    inputs = Document(model, text(), default_policy(BUDGET)).inputs([question])
    ids = torch.cat([text(), torch.tensor([question])], 1)
    kept = []
    for question_tokens in (tokens, None):
        cache = CompressedCache(model, default_policy(BUDGET))
        cache.expect_question(question_tokens)
        answer = answered(model, {"input_ids": ids, "past_key_values": cache})
        kept.append([cache.kept_positions(layer).tolist() for layer in cache.compressed_layers])
        if question_tokens:
            assert_as_if_read_together(model, inputs, [(answer, cache)])
    assert kept[0] != kept[1]  # else it says nothing


def test_questions_leave_document_unchanged_and_conversation_can_follow():
    model, document = tiny_model("llama"), Document(tiny_model("llama"), text(), POLICY)
    before = document.host_bytes
    first = document.inputs(asked(20))
    answer = model.generate(**first, max_new_tokens=5, do_sample=False)
    follow_up = torch.cat([answer, random_ids(1, 15, seed=9)], 1)
    cache = cache_among(first)
    model.generate(follow_up, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert cache.report().kept_tokens == BUDGET + 2
    assert document.host_bytes == before
    assert_as_if_read_together(model, document.inputs(asked(20)), read_together(model, asked(20)))


def test_document_can_be_read_layer_by_layer_saved_and_loaded(tmp_path):
    model = tiny_model("llama")
    with layer_by_layer(model, chunk_tokens=25):
        document = Document(model, text(), POLICY)
    assert not document._cache.report().held_bytes
    document.save(tmp_path / "one")
    loaded = Document.load(tmp_path / "one", model)
    assert torch.equal(loaded.input_ids, document.input_ids)
    for one in (document, loaded):
        expected = read_together(model, asked(20, 7))
        assert_as_if_read_together(model, one.inputs(asked(20, 7)), expected)
    CompressedCache(model, POLICY, recall="host").save(tmp_path / "two")
    with pytest.raises(InvalidArgumentError, match=r"path: .* a saved cache and not a document"):
        Document.load(tmp_path / "two", model)
    with pytest.raises(CacheFileError):
        Document.load(tmp_path / "three", model)


def test_invalid_document_or_questions_are_refused():
    model = tiny_model("llama")
    with pytest.raises(InvalidTypeError, match="input_ids: expected a tensor of integers"):
        Document(model, "text", POLICY)
    with pytest.raises(InvalidTypeError, match=r"input_ids: .*got torch\.float32"):
        Document(model, text().float(), POLICY)
    with pytest.raises(InvalidTypeError, match="model: expected a PreTrainedModel of transformers"):
        Document("llama", text(), POLICY)
    with pytest.raises(InvalidArgumentError, match="input_ids: expected one"):
        Document(model, random_ids(2, 9), POLICY)
    document = Document(model, text(), POLICY)
    for questions in ([], [[]], [[[1]]]):
        with pytest.raises(InvalidArgumentError, match="questions: expected a list of token"):
            document.inputs(questions)
    for questions in (["Why?"], [[1.0]], [[1, None]], [[[1], [2, 3]]]):
        with pytest.raises(
            InvalidTypeError, match="questions: expected a list of token ids for each"
        ):
            document.inputs(questions)
    hybrid = Document(tiny_model("gemma3_text"), text(), POLICY)
    with pytest.raises(InvalidArgumentError, match="questions: expected an equal length"):
        hybrid.inputs(asked(20, 12))
