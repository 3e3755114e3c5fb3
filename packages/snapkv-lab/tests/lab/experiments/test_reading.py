"""Compressing a copy of a recorded cache is the same as compressing while the prompt is read."""

import pytest
import torch

from snapkv import H2O, TOVA, CompressedCache, FastGen, FullCache, SnapKV
from snapkv_lab.experiments.contenders import SinksAndRecent, contenders_at
from snapkv_lab.experiments.magic_number import make_documents
from snapkv_lab.experiments.reading import read_prompt, score_answer

POLICIES = [
    FullCache(),
    SnapKV(128, window_size=32, kernel_size=1),
    SnapKV(96, window_size=16, kernel_size=5, pooling="avg", group_reduce="none"),
    SinksAndRecent(128, window_size=16),
    *contenders_at(96).values(),
    FastGen(0.1),
]
PROMPT_TOKENS = 256


@pytest.fixture(scope="module")
def documents(demo, haystack):
    return make_documents(demo.tokenizer, haystack, prompt_tokens=PROMPT_TOKENS, count=2)


@pytest.fixture(scope="module")
def prompt(demo, documents):
    return read_prompt(demo.model, documents[0].prompt_ids, recorded_queries=PROMPT_TOKENS)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_compressed_copy_equals_a_compressed_prefill_bit_for_bit(policy, demo, documents, prompt):
    if "tokenizer" in policy.needs:
        policy = policy.with_tokenizer(demo.tokenizer)
    copy = prompt.compressed(policy)
    real = CompressedCache(demo.model, policy)
    ids = torch.tensor([documents[0].prompt_ids])
    real.expect_tokens(ids)
    with torch.inference_mode():
        logits = demo.model(ids, past_key_values=real, logits_to_keep=1).logits
    assert torch.equal(logits, prompt.last_logits)
    assert copy.report() == real.report()
    for index, (mine, theirs) in enumerate(zip(copy.layers, real.layers, strict=True)):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
        assert torch.equal(copy.kept_positions(index), real.kept_positions(index))
    answer_ids = documents[0].answer_ids
    assert score_answer(prompt, copy, answer_ids) == score_answer(prompt, real, answer_ids)


def test_a_method_that_needs_more_queries_than_were_recorded_is_refused(demo, documents):
    prompt = read_prompt(demo.model, documents[0].prompt_ids)
    with pytest.raises(ValueError, match="expected 256 recorded queries"):
        prompt.compressed(H2O(96))


def test_a_hidden_question_is_read_from_the_compressed_cache(demo, documents):
    document = documents[0]
    text_ids = document.prompt_ids[: -len(document.question_ids)]
    prompt = read_prompt(demo.model, text_ids)
    for policy in (SnapKV(64, window_size=16), TOVA(64)):
        cache, by_hand = prompt.compressed(policy), prompt.compressed(policy)
        score = score_answer(prompt, cache, document.answer_ids, question_ids=document.question_ids)
        nll, right = 0.0, True
        with torch.inference_mode():
            question = torch.tensor([document.question_ids])
            logits = demo.model(question, past_key_values=by_hand).logits[0, -1]
            for index, token in enumerate(document.answer_ids):
                right &= int(logits.argmax()) == token
                nll -= float(logits.log_softmax(-1)[token]) if index else 0.0
                logits = demo.model(torch.tensor([[token]]), past_key_values=by_hand).logits[0, -1]
        assert score.right == right
        assert score.nll == pytest.approx(nll, rel=1e-3)
        assert cache.report().seen_tokens == PROMPT_TOKENS + len(document.answer_ids) - 1


def test_methods_do_not_change_the_recording(demo, prompt):
    before = [layer.keys.clone() for layer in prompt.layers]
    for policy in POLICIES:
        prompt.compressed(policy.with_tokenizer(demo.tokenizer))
    assert all(
        torch.equal(keys, layer.keys) for keys, layer in zip(before, prompt.layers, strict=True)
    )


def test_documents_have_the_length_the_needle_and_digits_of_one_token_each(demo, documents):
    for document in documents:
        assert len(document.prompt_ids) == PROMPT_TOKENS
        text = demo.tokenizer.decode(document.prompt_ids)
        assert f"Special magic number for {document.city} is {document.number}." in text
        question = demo.tokenizer.decode(document.question_ids)
        assert text.endswith(question)
        assert question.startswith("\n\nQuestion: What is the special magic number for")
        assert text.endswith(f"Answer: The special magic number for {document.city} is")
        digits = [demo.tokenizer.decode([token]) for token in document.answer_ids]
        assert digits == [" ", *str(document.number)]


def test_sinks_and_recent_keeps_the_first_four_and_the_last(prompt):
    cache = prompt.compressed(SinksAndRecent(64, window_size=16))
    expected = torch.tensor([*range(4), *range(PROMPT_TOKENS - 60, PROMPT_TOKENS)]).expand(1, 3, -1)
    assert all(torch.equal(cache.kept_positions(layer), expected) for layer in range(30))
