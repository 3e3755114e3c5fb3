"""Caches of one byte for a number: votes see what attention does, and bytes move as they are.

Answers are not compared with the library's: a byte is another one where a number differs in its
last digit, and the answer with it.
"""

import contextlib
from dataclasses import dataclass, field

import pytest
import torch

from snapkv import AdaKV, SnapKV, default_policy
from snapkv.errors import UnsupportedModelError
from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer
from snapkv_vllm.admission.limits import Limits, Sessions
from snapkv_vllm.admission.names import PREFIX, SESSION
from snapkv_vllm.admission.spans import SPANS_FIELD
from snapkv_vllm.layers import attention_layers
from snapkv_vllm.layouts import CpuLayout, NumberFormat
from tests.policies.reading import columns_kept
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import ids_of
from tests.serving.vllm.test_heads import of_prompt

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="vLLM stores numbers in one byte only on processors with AVX-512",
)

BUDGET, CHUNK = 64, 150
MINUS_ZERO = 0x80
CODED = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALES = {"fp8_e4m3": (0.37, 2.9), "fp8_e5m2": (2.9, 0.37)}
"""Of keys, times the number of the layer, and of values."""


def stored(states, byte_dtype, scale):
    """The bytes of numbers, as vLLM's kernel for CPUs rounds: towards zero, and never to -0."""
    most = torch.finfo(byte_dtype).max
    scaled = (states * (1 / scale)).clamp(-most, most)
    nearest = scaled.to(byte_dtype)
    is_over = nearest.float().abs() > scaled.abs()
    stepped = nearest.view(torch.uint8) - is_over.byte()
    return stepped.where(stepped != MINUS_ZERO, 0)


@dataclass
class Seen:
    """What one layer was given to store, and the queries it attended with, token by token."""

    scales: tuple[float, float]
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)

    def bytes_of(self, byte_dtype):
        """(Hkv, T, D) of keys, and of values."""
        halves = zip((self.keys, self.values), self.scales, strict=True)
        return [stored(torch.cat(one), byte_dtype, by).transpose(0, 1) for one, by in halves]

    def decode_keys(self, byte_dtype):
        return self.bytes_of(byte_dtype)[0].view(byte_dtype).float() * self.scales[0]


@contextlib.contextmanager
def recording_engine(small, name, **options):
    """An engine whose layers have scales, as a checkpoint would bring them, and what they see."""
    options = {"budget": BUDGET, "max_num_batched_tokens": CHUNK} | options
    with small_engine(small, kv_cache_dtype=name, **options) as engine:
        layers = []
        for index, layer in enumerate(attention_layers(engine.runner.vllm_config).values()):
            assert layer.kv_cache.dtype == torch.uint8
            scales = SCALES[name][0] * (index + 1), SCALES[name][1]
            layer._k_scale.fill_(scales[0])
            layer._v_scale.fill_(scales[1])
            layer._k_scale_float, layer._v_scale_float = scales
            layers.append(Seen(scales))
            record(layer.impl, layers[-1])
        yield engine, layers


def record(impl, seen):
    update, forward = impl.do_kv_cache_update, impl.forward

    def update_and_record(layer, key, value, cache, slots):
        seen.keys.append(key[: len(slots)].clone())
        seen.values.append(value[: len(slots)].clone())
        update(layer, key, value, cache, slots)

    def forward_and_record(layer, query, *args, **more):
        seen.queries.append(query.clone())
        return forward(layer, query, *args, **more)

    impl.do_kv_cache_update, impl.forward = update_and_record, forward_and_record


@pytest.mark.parametrize("tokens", [97, 181, 302])
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("fp8_e4m3", SnapKV(BUDGET)),
        ("fp8_e5m2", AdaKV(SnapKV(BUDGET))),
        ("fp8_e5m2", default_policy(BUDGET)),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_kept_tokens_equal_those_of_the_library_on_decoded_fp8_keys(
    recorded, small, policy, name, tokens
):
    """Of prompts in one chunk, and with windows that lie across two."""
    engine, layers = recorded(name, policy.name)
    prompt = ids_of(tokens, seed=tokens)
    for seen in layers:
        for states in (seen.keys, seen.values, seen.queries):
            states.clear()
    with engine.watching() as kept:
        engine.answers([prompt], greedy(1))
    attended = [
        PromptLayer(
            queries=torch.cat(seen.queries).transpose(0, 1)[None, :, -policy.query_tokens :],
            keys=keys,
            values=keys,
            score_options=ScoreOptions(scaling=keys.shape[-1] ** -0.5),
            layer_idx=depth,
            depth=depth,
            num_layers=len(layers),
        )
        for depth, seen in enumerate(layers)
        for keys in [seen.decode_keys(CODED[name])[None]]
    ]
    for expected, keep in zip(columns_kept(policy, attended), kept.of(prompt), strict=True):
        assert of_prompt(keep, prompt) == of_prompt(expected, prompt)


@pytest.fixture(scope="module")
def recorded(small):
    """Makes the engine for a format and a method, one at a time."""
    with contextlib.ExitStack() as running:
        made = {}

        def engine_for(name, policy):
            if (name, policy) not in made:
                running.close()
                made.clear()
                engine = recording_engine(small, name, policy=policy)
                made[name, policy] = running.enter_context(engine)
            return made[name, policy]

        yield engine_for


@pytest.mark.parametrize("name", CODED)
def test_kept_tokens_have_the_bytes_that_were_stored(small, name):
    """Also behind evictions from the answer, which see the keys as attention does."""
    limits = Limits(decode_budget=96, decode_policy="r-kv", evict_every=16)
    with recording_engine(small, name, limits=limits) as (engine, layers):
        held = [torch.arange(0).expand(small.kv_heads, 0)] * len(layers)
        compressor, seen_tokens = engine.runner._compressor, 0
        keep_indices = compressor._select_tokens

        def keep_and_compare(run, request, order, keys):
            nonlocal seen_tokens
            keep = keep_indices(run, request, order, keys)
            fresh = torch.arange(seen_tokens, order.seen_tokens).expand(small.kv_heads, -1)
            for at, (one, states) in enumerate(zip(keep, keys, strict=True), start=run.depth):
                held[at] = torch.cat([held[at], fresh], dim=-1)
                every = layers[at].decode_keys(CODED[name])
                assert torch.equal(states, every.gather(1, rows_of(held[at], states)))
                held[at] = held[at].gather(1, one.expand(small.kv_heads, -1))
            if run.depth + len(keep) == len(layers):
                seen_tokens = order.seen_tokens
            return keep

        compressor._select_tokens = keep_and_compare
        engine.start([ids_of(300)], greedy(90))
        compressions = 0
        while compressions < 4:
            before = seen_tokens
            engine.step()
            compressions += seen_tokens != before
        engine.step()
        manager = engine.scheduler._blocks._managers[0]
        (blocks,) = manager.req_to_blocks.values()
        numbers = [block.block_id for block in blocks]
        for run in compressor._runs:
            at = run.to_cache_blocks(numbers, engine.block_tokens)
            found = run.layout.read_keys(at, held[0].shape[1])
            every = torch.arange(held[0].shape[1]).expand(len(found), 1, -1)
            halves = zip(found, run.layout.read_values(at, every), strict=True)
            for layer, (keys, values) in enumerate(halves, start=run.depth):
                theirs = layers[layer].bytes_of(CODED[name])
                for mine, every_byte in zip((keys, values), theirs, strict=True):
                    assert torch.equal(mine, every_byte.gather(1, rows_of(held[layer], mine)))


@pytest.mark.parametrize("name", CODED)
def test_history_has_the_bytes_that_were_stored(small, name):
    """Also what a second turn goes on from, and a span that it drops."""
    sessions = Sessions(most_bytes=small.blocks_bytes(4, 32))
    options = {"sessions": sessions, "parameters": {"window_size": 8}}
    with recording_engine(small, name, **options) as (engine, layers):
        ids, last = [], dict[int, int]()  # by position where it was computed last
        computed, not_read = (
            0,
            engine.scheduler.sessions._metrics.get("session_tokens_not_read")._value,
        )
        for turn in range(3):
            ids += ids_of(160 if not turn else 70, seed=turn)
            said = {"start": 150, "end": 158, "do": "protect"}
            gone = {"start": 152, "end": 158, "do": "drop"}
            entries = [said] if not turn else [said | {"end": 152}, gone]
            own = {PREFIX + SESSION: "one", SPANS_FIELD: entries}
            before = not_read.get()
            ids += engine.answers([ids], greedy(12, extra_args=own))[0]
            (history,) = engine.scheduler.sessions._held
            lent = int(not_read.get() - before)
            assert bool(turn) == bool(lent)
            for position in range(lent, len(ids) - 1):  # what an answer ends with is not read
                last[position] = computed
                computed += 1
            stays = range(150, 152 if turn else 158)
            require_bytes(engine, layers, history, last, stays, CODED[name])
            assert computed == sum(len(one) for one in layers[0].keys)


def require_bytes(engine, layers, history, last, stays, byte_dtype):
    """Every layer holds of its positions the bytes that were computed last."""
    compressor, seen = engine.runner._compressor, len(history.tokens)
    noted = compressor.positions._positions[history.first_block]
    numbers = [block.block_id for block in history.blocks[0]]
    for run in compressor._runs:
        at = run.to_cache_blocks(numbers, engine.block_tokens)
        for layer, kept in enumerate((noted[one] for one in run.layers), start=run.depth):
            behind = torch.arange(history.compressed.tokens, seen)
            positions = torch.cat([kept.long(), behind.expand(len(kept), -1)], dim=1)
            assert positions.shape[1] == history.held_tokens
            of_span = [one for one in positions.unique().tolist() if 150 <= one < 158]
            assert of_span == list(stays)
            order = positions.apply_(last.__getitem__)
            one = run.layout.select_layers(slice(layer - run.depth, layer - run.depth + 1))
            every = torch.arange(history.held_tokens).expand(1, 1, -1)
            found = one.read_keys(at, history.held_tokens), one.read_values(at, every)
            for mine, theirs in zip(found, layers[layer].bytes_of(byte_dtype), strict=True):
                states = mine[0].where(mine[0] != MINUS_ZERO, 0)  # of single tokens
                assert torch.equal(states, theirs.gather(1, rows_of(order, states)))


def rows_of(positions, states):
    return positions.unsqueeze(-1).expand(-1, -1, states.shape[-1])


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize(
    ("block_tokens", "head_size", "dtype"),
    [(32, 64, torch.float32), (128, 32, torch.bfloat16), (32, 128, torch.float16)],
)
def test_every_byte_is_moved_unchanged(block_tokens, head_size, dtype, name):
    form = NumberFormat(dtype, CODED[name], name)
    every = torch.arange(256, dtype=torch.uint8)
    every = every[every.view(form.byte_dtype).float().isfinite() & (every != MINUS_ZERO)]
    tokens = 2 * block_tokens + 5
    keys, values = every[torch.randint(len(every), (2, 1, 3, tokens, head_size))]
    cache = torch.zeros(6, 3, block_tokens, 2 * head_size, dtype=torch.uint8)
    layout, blocks = CpuLayout([cache], "vec", form), torch.tensor([4, 1, 5])
    slots = torch.cat([block * block_tokens + torch.arange(block_tokens) for block in blocks])
    layout.write(slots[:tokens], keys, values)
    assert torch.equal(layout.read_keys(blocks, tokens), keys)
    assert torch.equal(layout.read_values(blocks, torch.arange(tokens)[None, None]), values)
    assert not cache[[0, 2, 3]].any()


def test_other_cache_formats_are_refused_by_name(small):
    with pytest.raises(UnsupportedModelError, match=r"int8_per_token_head is not supp.* fp8_e5m2"):
        small_engine(small, budget=BUDGET, kv_cache_dtype="int8_per_token_head")
