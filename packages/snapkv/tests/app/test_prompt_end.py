"""The end of a prompt is told of once, by its own cache, and nothing stays behind in the model."""

import gc
import weakref

import pytest
import torch

from snapkv import CompressedCache, SnapKV
from snapkv.app.answering import answer
from snapkv.app.prompt_end import telling_of_prompt_end
from snapkv.app.prompts import Prompt
from snapkv.app.settings import GenerationSettings
from tests.lab.evaluate.tiny import tiny_loaded

PROMPT = Prompt(text="The key is under the blue stone. " * 12 + "Where is the key?")
SETTINGS = GenerationSettings(max_new_tokens=3, min_new_tokens=3)


@pytest.fixture(scope="module")
def tiny(demo):
    return tiny_loaded(demo.tokenizer)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at_end", [True, False], ids=["as it is told", "behind"])
def test_nothing_stays_in_the_model_where_an_answer_is_interrupted(tiny, error, at_end):
    told = []

    def interrupt(given):
        told.append(given)
        raise error

    where = {"on_prompt_end": interrupt if at_end else told.append}
    where |= {} if at_end else {"on_text": lambda text: interrupt(text) if text else None}
    with pytest.raises(error):
        answer(tiny, PROMPT, SnapKV(40), SETTINGS, **where)
    assert told
    assert not tiny.model._forward_hooks
    assert not tiny.model._forward_hooks_with_kwargs
    assert answer(tiny, PROMPT, SnapKV(40), SETTINGS).new_tokens == 3


def test_an_end_is_told_of_once_and_let_go(tiny):
    told = []
    answer(tiny, PROMPT, SnapKV(40), SETTINGS, on_prompt_end=told.append)
    (end,) = told
    prompt_tokens = PROMPT.token_ids(tiny.tokenizer).shape[1]
    assert end.cache.get_seq_length() == prompt_tokens  # the answer is not in it
    stored = weakref.ref(end.cache)
    del end
    told.clear()
    gc.collect()
    assert stored() is None


def test_what_another_cache_reads_meanwhile_is_not_the_end(tiny):
    ids = PROMPT.token_ids(tiny.tokenizer)
    cache, other = (CompressedCache(tiny.model, SnapKV(40)) for _ in range(2))
    told = []
    with torch.no_grad():
        tiny.model(ids, past_key_values=cache)
        with telling_of_prompt_end(tiny.model, cache, ids.shape[1], told.append):
            tiny.model(ids[:, :50], past_key_values=other)
            tiny.model(ids[:, :50])
    assert not told
