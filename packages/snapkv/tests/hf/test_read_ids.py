"""A filled cache continues only the text that it has read and refuses any other text."""

import contextlib
import copy

import pytest
import torch

from snapkv import (
    CacheMismatchError,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    KVzip,
    SnapKV,
)
from snapkv.cache.read_ids import ReadIds
from snapkv.document import Document
from snapkv.hf.cache_argument import cache_among
from snapkv.kvzip import read_context
from snapkv_lab.medusa import Medusa, MedusaHeads
from tests.families import random_ids, tiny_model

PROMPT = 60
POLICY = SnapKV(36, window_size=8, kernel_size=5)
OPTIONS = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}

MODES = {
    "greedy": {},
    "one token": {"max_new_tokens": 1},
    "pieces": {"prefill_chunk_size": 25},
    "pieces, one token": {"prefill_chunk_size": 25, "max_new_tokens": 1},
    "beams": {"num_beams": 2, "num_return_sequences": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1},
    "own decoding": {"custom_generate": Medusa(MedusaHeads.untrained(tiny_model("llama"), 2))},
}


def go_on(model, cache, ids, **options):
    return model.generate(ids, past_key_values=cache, **{**OPTIONS, **options})


def refuses(model, cache, ids, place, row=0, **options):
    """Check that `ids` are refused and that the error names the first differing token."""
    with pytest.raises(
        CacheMismatchError, match=rf"at token {place} of row {row}\. Pass the whole"
    ):
        go_on(model, cache, ids, **options)


def read(mode, ids=None):
    """Return the model, a cache that `generate` filled in this mode, and the resulting ids."""
    model, cache = tiny_model("llama"), CompressedCache(tiny_model("llama"), POLICY)
    torch.manual_seed(0)
    text = go_on(model, cache, random_ids(1, PROMPT) % 9 + 3 if ids is None else ids, **MODES[mode])
    return model, cache, text


def with_turn(text, place=None, row=0):
    """Return the text with a new turn, and with a changed token at `place` if one is given."""
    turn = random_ids(len(text), 20, seed=5)
    whole = torch.cat([text, turn], dim=1)
    if place is not None:
        whole[row, place] += 1
    return whole


@pytest.mark.parametrize("mode", MODES)
def test_different_text_is_refused_and_error_names_first_differing_token(mode):
    model, cache, text = read(mode)
    seen = cache.get_seq_length()
    for place in (0, 31, PROMPT - 1, *((seen - 1,) if mode != "beams" else ())):
        before = cache.report()
        refuses(model, cache, with_turn(text, place), place)
        assert cache.report() == before
        assert not cache.prompt_state.is_announced


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "beams"])
def test_same_text_with_new_turn_is_accepted(mode):
    """Beam search is left out: the cache may hold other beams than those that it returned."""
    model, cache, text = read(mode)
    go_on(model, cache, with_turn(text))
    assert cache.get_seq_length() == text.shape[1] + 20 + 4


def test_beam_rows_continue_the_texts_that_they_have_read():
    model, cache, _ = read("beams")
    (_, known), *_ = cache.prompt_state.read_ids.parts
    go_on(model, cache, with_turn(known[:, : cache.get_seq_length()].long()))
    assert cache.prompt_state.rows == 2


def test_read_ids_can_be_truncated_and_follow_selected_beam_rows():
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    read_ids = ReadIds(((2, ids),))
    (((start, left),),) = (read_ids.truncate(4).parts,)
    assert (start, left.tolist()) == (2, [[1, 2], [4, 5]])
    read_ids.select_rows(torch.tensor([0, 0, 1, 1])).require(2, ids, 5, None)


CHANGED = {
    "a copy": copy.copy,
    "a deep copy": copy.deepcopy,
    "rows": lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1])),
    "repeated": lambda cache: cache.batch_repeat_interleave(2),
    "cropped": lambda cache: cache.crop(-3),
    "dropped": lambda cache: cache.drop([(5, 10)]),
}


@pytest.mark.parametrize("change", CHANGED)
def test_read_ids_follow_copies_row_changes_and_crops_of_cache(change):
    model, cache, text = read("greedy", random_ids(2, PROMPT))
    cache = CHANGED[change](cache) or cache
    if change == "rows":
        text = text[[1, 0, 1]]
    if change == "repeated":
        text = text.repeat_interleave(2, dim=0)
    row = len(text) - 1
    refuses(model, cache, with_turn(text, 31, row), 31, row)
    if change == "cropped":
        other = torch.cat([text[:, : cache.get_seq_length()], random_ids(2, 9, seed=8)], dim=1)
        go_on(model, cache, other)
        refuses(model, cache, with_turn(other, 68), 68)
    else:
        go_on(model, cache, with_turn(text))


def test_loaded_cache_remembers_its_text(tmp_path):
    model, cache, text = read("greedy", random_ids(2, PROMPT))
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", model)
    refuses(model, loaded, with_turn(text, 63, 1), 63, 1)
    go_on(model, loaded, with_turn(text))


def test_tokens_with_unknown_ids_are_not_compared():
    """Plain calls and embeddings bring no ids; ids before and after them are still compared."""
    model, cache, text = read("greedy")
    model(random_ids(1, 7, seed=3), past_key_values=cache)
    seen = cache.get_seq_length()
    whole = torch.cat([text[:, :-1], random_ids(1, 40, seed=3)], dim=1)
    new = go_on(model, cache, whole[:, :-5])
    for place in (31, seen + 2):
        refuses(model, cache, with_turn(new, place), place)
    other = CompressedCache(model, POLICY)
    embeds = model.get_input_embeddings()(whole)
    new = model.generate(inputs_embeds=embeds, past_key_values=other, **OPTIONS)
    go_on(model, other, with_turn(torch.cat([whole, new], dim=1), 31))


def test_new_ids_with_full_mask_are_remembered_at_their_positions():
    model, cache, text = read("greedy")
    whole = with_turn(text)
    new = go_on(model, cache, whole[:, text.shape[1] - 1 :], attention_mask=torch.ones_like(whole))
    whole = torch.cat([whole, new[:, -5:]], dim=1)
    for place in (31, text.shape[1] + 3, whole.shape[1] - 2):
        refuses(model, cache, with_turn(whole, place), place)
    go_on(model, cache, with_turn(whole))


def test_padding_ids_are_not_compared():
    ids, mask = random_ids(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.int64)
    mask[0, :9] = 0
    model, cache = tiny_model("llama"), CompressedCache(tiny_model("llama"), FullCache())
    text = go_on(model, cache, ids, attention_mask=mask)
    mask = torch.cat([mask, torch.ones(2, text.shape[1] + 20 - PROMPT, dtype=torch.int64)], dim=1)
    refuses(model, cache, with_turn(text, 9), 9, attention_mask=mask)
    go_on(model, cache, with_turn(text, 8), attention_mask=mask)


def test_ids_without_a_batch_are_refused_by_their_shape():
    model = tiny_model("llama")
    cache = CompressedCache(model, SnapKV(40, window_size=8))
    with pytest.raises(InvalidArgumentError, match=r"shape \(batch, tokens\), but got \(50,\)"):
        model.generate(random_ids(1, 50)[0], past_key_values=cache, max_new_tokens=2)


def test_question_without_its_conversation_is_refused():
    model, cache, _ = read("greedy")
    question = random_ids(1, 20, seed=5)
    with pytest.raises(CacheMismatchError, match=r"Pass the whole\s+conversation"):
        go_on(model, cache, question)
    cache.reset()
    go_on(model, cache, question)


@pytest.mark.parametrize("read", ["document", "context"])
def test_document_or_context_cache_accepts_only_its_own_text(read):
    model, ids, question = tiny_model("llama"), random_ids(1, 60), random_ids(1, 5, seed=1)
    own = torch.cat([ids, question], dim=1)
    for text, refused in ((own, False), (own.flip(1), True)):
        if read == "document":
            cache = Document(model, ids, SnapKV(36, window_size=8)).inputs([question[0]])
            cache = cache_among(cache)
        else:
            cache = read_context(model, ids, KVzip(40))
        options = {"past_key_values": cache, "max_new_tokens": 2, "do_sample": False}
        expected = pytest.raises(CacheMismatchError, match="at token 0 of row 0")
        with expected if refused else contextlib.nullcontext():
            model.generate(text, **options)
