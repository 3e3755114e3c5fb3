"""Spans of prompts that go, stay, or keep a few: answers are those of the library's cache."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from snapkv import CompressedCache, FullCache, SnapKV
from snapkv_vllm.admission.spans import SPANS_FIELD
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import ids_of

PAGE, WINDOW = 32, 8
ROUNDS = 20


@dataclass(frozen=True)
class Asked:
    """A prompt, a budget of 0 for all, and what becomes of spans."""

    tokens: int
    seed: int
    budget: int
    drop: tuple[tuple[int, int], ...]
    protect: tuple[tuple[int, int], ...]

    @classmethod
    def random(cls, draw):
        tokens = draw.choice([40, 96, 150, 300])
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


def masked_answer(model, asked, tokens):
    """Of the model under masks by hand: what the choice of the library leaves is seen, no more.

    The library chooses under a budget with room for the dropped tokens, which it must keep; they
    are then masked away.
    """
    ids, gone = asked.ids, {one for start, end in asked.drop for one in range(start, end)}
    policy = FullCache()
    if asked.budget and asked.budget + len(gone) < len(ids):
        policy = SnapKV(asked.budget + len(gone), window_size=WINDOW)
    options = {"protect": [*asked.drop, *asked.protect]} if isinstance(policy, SnapKV) else {}
    cache = CompressedCache(model, policy, **options)
    row = torch.tensor([ids])
    with torch.no_grad():
        logits = model(row, past_key_values=cache).logits
        layers = range(model.config.num_hidden_layers)
        every = torch.arange(len(ids)).expand(1, model.config.num_key_value_heads, -1)
        kept = [
            every if isinstance(policy, FullCache) else cache.kept_positions(layer).clone()
            for layer in layers
        ]
        visible = [[[p for p in head if p not in gone] for head in one[0].tolist()] for one in kept]
        answer = [int(logits[0, -1].argmax())]
        states = Masked(model, row, visible)
        while len(answer) < tokens:
            answer.append(int(states.step(answer[-1]).argmax()))
    return answer, visible


class Masked:
    """Attention of one sequence, in which each head sees some of the prompt's positions."""

    def __init__(self, model, row, visible):
        from transformers import DynamicCache

        self.model, self.visible, self.prompt = model, visible, row.shape[1]
        self.cache = DynamicCache(config=model.config)
        model(row, past_key_values=self.cache)
        for layer, heads in zip(self.cache.layers, visible, strict=True):
            lengths = {len(head) for head in heads}
            assert len(lengths) == 1
            index = torch.tensor(heads)[None, :, :, None]
            layer.keys = layer.keys.gather(2, index.expand(-1, -1, -1, layer.keys.shape[3]))
            layer.values = layer.values.gather(2, index.expand(-1, -1, -1, layer.values.shape[3]))
        self.seen = self.prompt

    def step(self, token):
        position = torch.tensor([[self.seen]])
        held = self.cache.layers[0].keys.shape[2]
        mask = torch.ones(1, 1, 1, held + 1, dtype=torch.bool)
        self.seen += 1
        return self.model(
            torch.tensor([[token]]),
            past_key_values=self.cache,
            position_ids=position,
            cache_position=position[0],
            attention_mask=mask,
        ).logits[0, -1]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "prefix-caching"])
def engine(small, request):
    with small_engine(
        small, budget=64, max_num_batched_tokens=100, enable_prefix_caching=request.param
    ) as running:
        yield running


def test_answers_equal_those_of_the_library_with_dropped_spans_masked(engine, small):
    draw = random.Random(int(engine.scheduler.cache_config.enable_prefix_caching))
    asked = [Asked.random(draw) for _ in range(ROUNDS)]
    names = {engine.start([one.ids], one.sampling)[0]: one for one in asked}
    answers = {}
    while engine.scheduler.requests:
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
    for name, one in names.items():
        assert answers[name] == masked_answer(small.model, one, 12)[0], one
    engine.require_empty()


def test_kept_tokens_of_spans_are_counted_and_blocks_are_freed(engine):
    ids = ids_of(300)
    entries = [{"start": 10, "end": 260, "do": "drop"}]
    own = {"snapkv_budget": 0, SPANS_FIELD: entries}
    with engine.watching() as watched:
        engine.answers([ids], greedy(4, extra_args=own))
    assert watched.blocks_held == [[2]]
    for kept in watched.of(ids):
        assert kept[0, 0].tolist() == [*range(10), *range(260, 300)]


def test_compressed_span_keeps_its_own_best_tokens(engine, small):
    """What stays of it is what `SnapKV` keeps with all else protected; under no budget for all."""
    ids, span, stays = ids_of(200), (20, 150), 30
    entries = [{"start": 20, "end": 150, "do": "compress", "budget": stays}]
    own = {"snapkv_budget": 0, "snapkv_window_size": WINDOW, SPANS_FIELD: entries}
    with engine.watching() as watched:
        engine.answers([ids], greedy(4, extra_args=own))
    outside = [(0, span[0]), (span[1], 200 - WINDOW)]
    policy = SnapKV(200 - 130 + stays, window_size=WINDOW)
    cache = CompressedCache(small.model, policy, protect=outside)
    with torch.no_grad():
        small.model(torch.tensor([ids]), past_key_values=cache)
    for layer, found in enumerate(watched.of(ids)):
        assert found.tolist() == cache.kept_positions(layer).tolist()


def test_compressed_dropped_and_protected_spans_share_a_request(engine):
    ids = ids_of(300)
    entries = [
        {"start": 20, "end": 100, "do": "compress", "budget": 9},
        {"start": 100, "end": 120, "do": "protect"},
        {"start": 130, "end": 200, "do": "compress", "budget": 5},
        {"start": 250, "end": 296, "do": "drop"},
    ]
    own = {"snapkv_budget": 64, "snapkv_window_size": WINDOW, SPANS_FIELD: entries}
    with engine.watching() as watched:
        engine.answers([ids], greedy(4, extra_args=own))
    for found in watched.of(ids):
        for head in found[0].tolist():
            assert len(head) == 64
            assert [len([p for p in head if a <= p < b]) for a, b in SPANS] == [9, 20, 5, 0]
            assert head[-4:] == [296, 297, 298, 299]


SPANS = ((20, 100), (100, 120), (130, 200), (250, 296))


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
