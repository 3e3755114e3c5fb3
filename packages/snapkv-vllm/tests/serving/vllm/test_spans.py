"""Spans of prompts that are dropped or compressed: kept tokens equal those of the library."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from snapkv import CompressedCache, FullCache, SnapKV
from snapkv_vllm.admission.spans import SPANS_FIELD
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import ids_of

WINDOW = 8


@dataclass(frozen=True)
class Asked:
    """A prompt, a budget of 0 for all, and what becomes of spans."""

    tokens: int
    seed: int
    budget: int
    drop: tuple[tuple[int, int], ...]
    protect: tuple[tuple[int, int], ...]

    @classmethod
    def random(cls, draw, tokens):
        cuts = sorted(draw.sample(range(tokens), 6))
        pieces = list(zip(cuts[::2], cuts[1::2], strict=True))
        drop = tuple(piece for piece in pieces if draw.random() < 0.7)
        protect = tuple(piece for piece in pieces if piece not in drop)
        protect = tuple((start, min(end, start + 10)) for start, end in protect)
        return cls(tokens, draw.randrange(3), draw.choice([0, 40, 64, 200]), drop, protect)

    @property
    def ids(self):
        return ids_of(self.tokens, seed=self.seed)

    @property
    def sampling(self):
        entries = [{"start": a, "end": b, "do": "drop"} for a, b in self.drop]
        entries += [{"start": a, "end": b, "do": "protect"} for a, b in self.protect]
        own = {"snapkv_budget": self.budget, "snapkv_window_size": WINDOW, SPANS_FIELD: entries}
        return greedy(12, extra_args=own)

    def library_keeps(self, model):
        """The positions of each head and layer, by the library and without what is dropped.

        The library chooses under a budget with room for the dropped tokens, which it must keep.
        """
        gone = {one for start, end in self.drop for one in range(start, end)}
        policy, options = FullCache(), {}
        if self.budget and self.budget + len(gone) < self.tokens:
            policy = SnapKV(self.budget + len(gone), window_size=WINDOW)
            options = {"protect": [*self.drop, *self.protect]}
        cache = read(model, self.ids, policy, **options)
        every = torch.arange(self.tokens).expand(1, model.config.num_key_value_heads, -1)
        for layer in range(model.config.num_hidden_layers):
            kept = every if isinstance(policy, FullCache) else cache.kept_positions(layer)
            yield [[p for p in head if p not in gone] for head in kept[0].tolist()]


def read(model, ids, policy, **options):
    """The library's cache behind a prompt."""
    cache = CompressedCache(model, policy, **options)
    with torch.no_grad():
        model(torch.tensor([ids]), past_key_values=cache)
    return cache


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "prefix-caching"])
def engine(small, request):
    with small_engine(
        small, budget=64, max_num_batched_tokens=100, enable_prefix_caching=request.param
    ) as running:
        yield running


def test_kept_tokens_equal_those_of_the_library_without_dropped_spans(engine, small):
    draw = random.Random(int(engine.scheduler.cache_config.enable_prefix_caching))
    asked = [Asked.random(draw, tokens) for tokens in range(40, 300, 13)]
    with engine.watching() as watched:
        engine.answers([one.ids for one in asked], [one.sampling for one in asked])
    for one in asked:
        expected = list(one.library_keeps(small.model))
        if max(map(len, expected[0])) < one.tokens:
            assert watched.of(one.ids) == expected, one
    assert watched.prompts > len(asked) // 2
    engine.require_empty()


def test_blocks_of_dropped_spans_are_freed(engine):
    entries = [{"start": 10, "end": 260, "do": "drop"}]
    own = {"snapkv_budget": 0, SPANS_FIELD: entries}
    with engine.watching() as watched:
        engine.answers([ids_of(300)], greedy(4, extra_args=own))
    assert watched.blocks_held == [[2]]


def test_compressed_span_keeps_its_own_best_tokens(engine, small):
    """The reference is `SnapKV` with all other tokens protected and no budget for the prompt."""
    ids, span, stays = ids_of(200), (20, 150), 30
    entries = [{"start": 20, "end": 150, "do": "compress", "budget": stays}]
    own = {"snapkv_budget": 0, "snapkv_window_size": WINDOW, SPANS_FIELD: entries}
    with engine.watching() as watched:
        engine.answers([ids], greedy(4, extra_args=own))
    outside = [(0, span[0]), (span[1], 200 - WINDOW)]
    policy = SnapKV(200 - 130 + stays, window_size=WINDOW)
    cache = read(small.model, ids, policy, protect=outside)
    for layer, found in enumerate(watched.of(ids)):
        assert found == cache.kept_positions(layer)[0].tolist()


@pytest.mark.parametrize(
    "span", [(0, 300), (290, 301), (400, 500)], ids=["the last token", "its end", "beyond"]
)
def test_spans_beyond_the_prompt_end_the_request_and_drop_nothing(engine, span):
    asked = Asked(300, 0, 64, (span,), ())
    alone = engine.answers([asked.ids], replace(asked, drop=()).sampling)
    (output,) = engine.outputs([asked.ids], asked.sampling)
    assert output.outputs[0].finish_reason == "error"
    assert engine.answers([asked.ids], replace(asked, drop=()).sampling) == alone
    engine.require_empty()
