"""Must be shown: over 200 prompts, drafts change nothing of the text, on every storage."""

import pytest
import torch

from snapkv import AdaKV, CompressedCache, FullCache, PyramidKV, SnapKV
from snapkv.decoding import CandidateTree, Medusa, SelfSpeculation, load_heads
from snapkv_lab.evaluate.haystack import python_topics
from tests.decoding.heads import random_heads
from tests.decoding.test_medusa import BUSHY, NEW, OPTIONS, PROMPT, STORAGES, new_cache
from tests.families import random_ids, tiny_model

PROMPTS = 200
TREE = CandidateTree.likeliest([(0.4, 0.2, 0.1)] * 3, 12)


@pytest.fixture(scope="module")
def few_words():
    """Prompts out of few tokens, so that random heads are often right."""
    return [random_ids(1, PROMPT - seed % 40, seed=seed) % 11 + 3 for seed in range(PROMPTS)]


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_tiny_model(few_words, storage):
    model, heads = tiny_model("llama"), random_heads(tiny_model("llama"))
    cache, full = new_cache(model, storage), CompressedCache(model, FullCache())
    accepted = 0
    for ids in few_words:
        texts = {}
        for name, custom in (
            ("plain", None),
            ("medusa", Medusa(heads, BUSHY)),
            ("self", SelfSpeculation(3)),
        ):
            cache.reset()
            texts[name] = model.generate(
                ids, past_key_values=cache, custom_generate=custom, **OPTIONS
            )
            accepted += custom.tally.accepted if custom else 0
        full.reset()
        everything = model.generate(ids, past_key_values=full, **OPTIONS)
        assert torch.equal(texts["medusa"], texts["plain"])
        assert torch.equal(texts["self"], everything)
    assert accepted > PROMPTS * NEW / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (SnapKV(48, window_size=16), {}),
        (SnapKV(48, window_size=16), {"storage": "static", "room_tokens": 40}),
        (AdaKV(SnapKV(48, window_size=16)), {}),
        (PyramidKV(48, window_size=16), {}),
        (FullCache(), {}),
    ],
    ids=["dynamic", "static", "ragged", "uneven layers", "full"],
)
def test_demo_model(demo, policy, options):
    """40 prompts on each of five storages."""
    model, heads = demo.model, load_heads("demo", demo.model)
    text_of = demo.tokenizer(python_topics().text[:60_000], verbose=False, return_tensors="pt")
    cache, full = CompressedCache(model, policy, **options), CompressedCache(model, FullCache())
    limits = {"max_new_tokens": 12, "do_sample": False}
    for start in range(0, 40 * 120, 120):
        prompt = text_of.input_ids[:, start : start + 120]

        def text(held, custom=None, prompt=prompt):
            held.reset()
            return model.generate(
                prompt, past_key_values=held, custom_generate=custom, pad_token_id=0, **limits
            )

        assert torch.equal(text(cache, Medusa(heads, TREE)), text(cache))
        assert torch.equal(text(cache, SelfSpeculation(3)), text(full))
