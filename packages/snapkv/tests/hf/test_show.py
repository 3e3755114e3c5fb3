"""`cache.show` makes a page that shows which tokens of the text a cache keeps."""

import base64
import copy
import itertools

import pytest
import torch

from snapkv import CompressedCache, SnapKV
from snapkv.errors import CacheMismatchError, InvalidArgumentError, InvalidTypeError
from tests.families import call, kept_of, random_ids, read, tiny_model
from tests.methods import CACHES

PROMPT, NEW = 90, 4
POLICY = SnapKV(40, window_size=8)


class Numbers:
    """A tokenizer that decodes each token to its number."""

    def decode(self, ids, **options):
        del options
        return "".join(f"<{number}>" for number in ids)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def generated(model, policy=POLICY, **options):
    cache = CompressedCache(model, policy, **options)
    more = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return cache, model.generate(random_ids(1, PROMPT), past_key_values=cache, **more)


def counts_of(page):
    data = page.data()
    raw = base64.b64decode(data["methods"][0]["stops"][0]["counts"])
    return torch.frombuffer(bytearray(raw), dtype=torch.uint16).tolist()


@pytest.mark.parametrize("name", ["snapkv", "adakv", "across-layers", "h2o", "int8", "recall"])
def test_show_counts_heads_that_keep_each_token_after_generate(model, name):
    policy, options = CACHES[name]
    cache, output = generated(model, policy, **options)
    page, seen = cache.show(Numbers()), PROMPT + NEW - 1
    assert page.pieces == [f"<{number}>" for number in output[0, :seen].tolist()]
    expected = [0] * seen
    for row, *_ in kept_of(cache):
        for position in itertools.chain(*row):
            expected[position] += position >= 0
    assert counts_of(page) == expected
    assert cache.show(Numbers(), output).data() == page.data()
    (stop,) = page.methods[0].stops
    assert stop.answer == {"text": "".join(page.pieces[PROMPT:])}
    mean = sum(expected[:PROMPT]) / stop.heads
    assert stop.sentences[0].startswith(f"The cache keeps {mean:,.0f} of 90 prompt tokens per head")
    assert "snapkv inspect" in stop.sentences[1]


def test_show_requires_input_ids_after_plain_calls(model):
    ids = random_ids(1, PROMPT)
    cache = read(model, POLICY, ids)
    with pytest.raises(InvalidArgumentError, match=r"first 0 of its 90 tokens.*as input_ids"):
        cache.show(Numbers())
    page = cache.show(Numbers(), ids[0])
    assert page.pieces == [f"<{number}>" for number in ids[0].tolist()]
    assert page.methods[0].stops[0].answer is None


def test_show_accepts_one_row_of_padded_batch_and_omits_padding(model):
    ids = random_ids(2, PROMPT)
    ids[1, :30] = 0
    mask = (ids != 0).long()
    cache = CompressedCache(model, POLICY)
    model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2, pad_token_id=0
    )
    with pytest.raises(
        InvalidArgumentError, match=r"one row of the batch .* got 2 rows\. Select one"
    ):
        cache.show(Numbers())
    row = copy.copy(cache)
    row.batch_select_indices(torch.tensor([1]))
    page = row.show(Numbers())
    assert page.pieces[:60] == [f"<{number}>" for number in ids[1, 30:].tolist()]
    assert counts_of(page)[52:60] == [page.methods[0].stops[0].heads] * 8  # the window


def test_show_refuses_unread_prompt_wrong_ids_and_dropped_spans(model):
    cache = CompressedCache(model, POLICY)
    with pytest.raises(CacheMismatchError, match=r"only 0 tokens of it\. Pass the cache to model"):
        cache.show(Numbers())
    cache.expect_prompt(PROMPT)
    call(model, cache, random_ids(1, 30))
    with pytest.raises(
        CacheMismatchError, match="has not read a whole prompt yet, but only 30 tokens"
    ):
        cache.show(Numbers())
    cache, output = generated(model)
    changed = output.clone()
    changed[0, 7] += 1
    for given, error, said in (
        ((None,), InvalidTypeError, "tokenizer: expected the tokenizer of the model, but got None"),
        ((Numbers(), [1, 2]), InvalidTypeError, r"expected a \(1, tokens\) tensor of integers"),
        ((Numbers(), output[:, :40]), InvalidArgumentError, "one row of at least the 93 tokens"),
        ((Numbers(), output.repeat(2, 1)), InvalidArgumentError, "one row of at least the 93 tok"),
        ((Numbers(), changed), CacheMismatchError, "at token 7 of row 0"),
    ):
        with pytest.raises(error, match=said):
            cache.show(*given)
    cache.drop([(10, 20)])
    with pytest.raises(CacheMismatchError, match="some spans of it have been dropped"):
        cache.show(Numbers())
