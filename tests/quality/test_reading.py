"""Compressing a copy of a recorded cache is the same as compressing while the prompt is read."""

import pytest
import torch
from benchmarks.magic_number import make_documents
from benchmarks.reading import read_prompt
from benchmarks.scoring import score_answer
from benchmarks.sinks_and_recent import SinksAndRecent

from snapkv import CompressedCache, CriticalKV, FullCache, Random, SnapKV, StreamingLLM

POLICIES = [
    FullCache(),
    SnapKV(128, window_size=16, kernel_size=13),
    SnapKV(128, window_size=32, kernel_size=1),
    SnapKV(96, window_size=16, kernel_size=5, pooling="avg", group_reduce="none"),
    Random(128, window_size=16),
    SinksAndRecent(128, window_size=16),
    StreamingLLM(128),
    CriticalKV(SnapKV(128, window_size=16)),
]


@pytest.fixture(scope="module")
def documents(demo, haystack):
    return make_documents(demo.tokenizer, haystack, prompt_tokens=256, count=2)


@pytest.fixture(scope="module")
def prompts(demo, documents):
    return [read_prompt(demo.model, document.prompt_ids) for document in documents]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_compressed_copy_equals_a_compressed_prefill_bit_for_bit(
    policy, demo, documents, prompts
):
    for document, prompt in zip(documents, prompts, strict=True):
        copy = prompt.compressed(policy)
        real = CompressedCache(demo.model, policy)
        with torch.inference_mode():
            logits = demo.model(
                torch.tensor([document.prompt_ids]), past_key_values=real, logits_to_keep=1
            ).logits
        assert torch.equal(logits, prompt.last_logits)
        assert copy.report() == real.report()
        for index, (mine, theirs) in enumerate(zip(copy.layers, real.layers, strict=True)):
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)
            assert torch.equal(copy.kept_positions(index), real.kept_positions(index))
        assert score_answer(prompt, copy, document.answer_ids) == score_answer(
            prompt, real, document.answer_ids
        )


def test_methods_do_not_change_the_recording(prompts):
    prompt = prompts[0]
    before = [layer.keys.clone() for layer in prompt.layers]
    for policy in POLICIES:
        prompt.compressed(policy)
    assert all(
        torch.equal(keys, layer.keys) for keys, layer in zip(before, prompt.layers, strict=True)
    )


def test_documents_have_the_length_the_needle_and_digits_of_one_token_each(demo, documents):
    for document in documents:
        assert len(document.prompt_ids) == 256
        text = demo.tokenizer.decode(document.prompt_ids)
        assert f"Special magic number for {document.city} is {document.number}." in text
        assert text.endswith(f"Answer: The special magic number for {document.city} is")
        digits = [demo.tokenizer.decode([token]) for token in document.answer_ids]
        assert digits == [" ", *str(document.number)]


def test_sinks_and_recent_keeps_the_first_four_and_the_last(prompts):
    cache = prompts[0].compressed(SinksAndRecent(64, window_size=16))
    expected = torch.tensor([*range(4), *range(256 - 60, 256)]).expand(1, 3, -1)
    assert all(torch.equal(cache.kept_positions(layer), expected) for layer in range(30))
