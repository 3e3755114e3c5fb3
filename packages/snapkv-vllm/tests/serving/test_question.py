"""The number of tokens after a place in a text, compared with the tokenizers' own count."""

import functools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from snapkv_app.models import load
from snapkv_vllm.front.question import count_tokens_from

TEXT = "A fox <end>jumps — 12 times\n\n  over ßöä 狐狸 😀.\r\n<end>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def trained(model, *, normalizer=None, pieces=None, decoder, **own):
    backend = Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer, backend.decoder = normalizer, pieces, decoder
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<end>", *BYTES], **own)
    backend.train_from_iterator([TEXT, "over and over again, a fox jumps"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@functools.cache
def byte_level():
    level, alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.ByteLevel
    own = {"pieces": level, "decoder": decoders.ByteLevel()}
    return trained(models.BPE(), **own, initial_alphabet=alphabet.alphabet())


@pytest.fixture(scope="module")
def tokenizers():
    words = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    spaces = normalizers.Replace(" ", "▁")
    fallback = models.BPE(byte_fallback=True, unk_token=None)
    lower = normalizers.Sequence([spaces, normalizers.Lowercase()])
    return {
        "demo": load("demo").tokenizer,
        "byte-level": byte_level(),
        "spaces-as-signs": trained(fallback, normalizer=spaces, decoder=words),
        "lower-case": trained(fallback, normalizer=lower, decoder=words),
    }


@pytest.mark.parametrize("kind", ["demo", "byte-level", "spaces-as-signs"])
def test_tokens_after_a_place_are_counted_for_all_common_vocabularies(tokenizers, kind):
    tokenizer = tokenizers[kind]
    found = tokenizer.backend_tokenizer.encode(TEXT, add_special_tokens=False)
    for place in range(len(TEXT)):
        behind = sum(end > place for _, end in found.offsets)
        assert count_tokens_from(tokenizer, TEXT, found.ids, place, 1000) == behind


def test_tokenizer_that_changes_the_text_gives_no_count(tokenizers):
    tokenizer = tokenizers["lower-case"]
    ids = tokenizer.backend_tokenizer.encode(TEXT).ids
    assert count_tokens_from(tokenizer, TEXT, ids, 0, 1000) is None


@settings(max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), place=st.integers(0, 99))
def test_last_tokens_of_a_text_are_counted_from_a_place(text, place):
    tokenizer, place = byte_level(), place % len(text)
    found = tokenizer.backend_tokenizer.encode(text)
    ids, behind = found.ids, [end for _, end in found.offsets if end > place]
    assert count_tokens_from(tokenizer, text, ids, place, 1000) == len(behind)
    assert count_tokens_from(tokenizer, text, ids, place, len(behind)) == len(behind)
    assert count_tokens_from(tokenizer, text + "?", ids, place, 1000) is None
    if len(behind) > 1:
        assert count_tokens_from(tokenizer, text, ids, place, len(behind) - 1) is None


@pytest.mark.parametrize("ids", [[], [1, 2], [10**6], [-1]])
def test_tokens_of_another_text_give_no_count(tokenizers, ids):
    assert count_tokens_from(tokenizers["demo"], TEXT, ids, 0, 1000) is None
    assert count_tokens_from(SimpleNamespace(is_fast=False), TEXT, [1], 0, 1000) is None
