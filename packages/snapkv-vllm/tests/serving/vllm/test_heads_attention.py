"""Heads as sequences on vLLM's own kernels: beside a plain batch, and against a plain softmax."""

from types import SimpleNamespace

import pytest
import torch

from snapkv_vllm.heads import HeadPlaces
from tests.serving.heads import held_tokens, spread
from tests.serving.vllm.conftest import SECOND_RUNNER

GROUP, HEADS, SIZE, PAGE, BLOCKS, WIDTH = 2, 3, 64, 32, 64, 8
PROMPT = 200
NAMES = ["layer.0", "layer.1"]


def cpu_parts():
    from vllm.v1.attention.backends.cpu_attn import (
        CPUAttentionBackendImpl,
        CPUAttentionMetadataBuilder,
    )

    builder = CPUAttentionMetadataBuilder.__new__(CPUAttentionMetadataBuilder)
    more = {"num_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_dim": SIZE, "isa": "vec"}
    more |= {"dtype": torch.float32, "window_size": -1, "kv_cache_dtype": "auto"}
    more |= {"is_cross_attention": False, "is_encoder_only_attention": False}
    vars(builder).update(more, layer_names=NAMES)
    return CPUAttentionBackendImpl, builder


def triton_parts():
    from vllm.v1.attention.backends.triton_attn import (
        TritonAttentionImpl,
        TritonAttentionMetadataBuilder,
    )

    builder = TritonAttentionMetadataBuilder.__new__(TritonAttentionMetadataBuilder)
    # No sequence is split, so that the plain batch adds in the same order; ours never are.
    more = {"seq_threshold_3D": 0, "num_par_softmax_segments": 16, "max_seqs_64_segments": 0}
    more |= dict.fromkeys(("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum"))
    more |= {"rswa_window": None}
    vars(builder).update(more, layer_names=NAMES)
    return TritonAttentionImpl, builder


@pytest.fixture(scope="module")
def config(small):
    from vllm.engine.arg_utils import EngineArgs

    given = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512}
    return EngineArgs(small.folder, **given).create_engine_config()


PARTS = {"cpu": cpu_parts} | ({"triton": triton_parts} if SECOND_RUNNER else {})
LAYOUTS = [("cpu", False), *(("triton", tokens_first) for tokens_first in (False, True))]


@pytest.fixture(
    params=[one for one in LAYOUTS if one[0] in PARTS],
    ids=lambda one: f"{one[0]}-{'tokens' if one[1] else 'heads'}-first",
)
def parts(request, config, monkeypatch):
    """What makes engines of one of vLLM's backends, with or without heads of their own lengths."""
    from vllm.config import set_current_vllm_config

    backend, tokens_first = request.param
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with set_current_vllm_config(config):
        yield lambda: Attending(*PARTS[backend](), tokens_first)


class Attending:
    """Two layers of a backend, their caches, and the builder of their metadata."""

    def __init__(self, implementation, builder, tokens_first):
        self.builder, self.heads = builder, None
        caches = torch.zeros(len(NAMES), BLOCKS, HEADS, PAGE, 2 * SIZE)
        if tokens_first:
            caches = caches.transpose(2, 3).contiguous().transpose(2, 3)
        named = zip(NAMES, caches, strict=True)
        self.layers = {name: self._layer(implementation, cache) for name, cache in named}

    def _layer(self, implementation, cache):
        impl = implementation(HEADS * GROUP, SIZE, SIZE**-0.5, HEADS, None, None, "auto")
        one = torch.ones(1)
        scales = {"_k_scale_float": 1.0, "_v_scale_float": 1.0, "_k_scale": one, "_v_scale": one}
        return SimpleNamespace(impl=impl, isa="vec", kv_cache=cache, **scales)

    def with_heads(self, *, across_layers=False):
        """From now on, some requests' heads may hold their own numbers of tokens."""
        from snapkv_vllm.heads import HeadsAttention

        self.heads, self.pools = HeadsAttention(across_layers=across_layers), len(NAMES)
        if across_layers:
            self.pools = 1  # of heads that share pages
        for name, layer in self.layers.items():
            self.heads.patch_layer(name, layer)
        self.heads.patch_builder(self.builder)
        return self

    def step(self, rows):
        """One step; of each row (name, tables, seen, held, queries, keys, values).

        Queries are (layers, tokens, Hq, D), keys and values (layers, tokens, Hkv, D).
        """
        from vllm.v1.attention.backend import CommonAttentionMetadata

        counts = [row.queries.shape[1] for row in rows]
        ends = torch.tensor(counts).cumsum(0)
        slots = [slot for row, count in zip(rows, counts, strict=True) for slot in row.new(count)]
        seen = torch.tensor([row.seen for row in rows], dtype=torch.int32)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int()
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seen,
            seq_lens_cpu_upper_bound=seen.clone(),
            num_reqs=len(rows),
            num_actual_tokens=int(ends[-1]),
            max_query_len=max(counts),
            max_seq_len=int(seen.max()),
            block_table_tensor=torch.stack([row.table for row in rows]),
            slot_mapping=torch.tensor(slots),
        )
        if self.heads is not None:
            self.heads.begin_step([row.name for row in rows], ends.tolist())
        metadata = self.builder.build(0, common)
        answers = []
        for number, layer in enumerate(self.layers.values()):
            queries, keys, values = (
                torch.cat([states[number] for states in of])
                for of in zip(*((row.queries, row.keys, row.values) for row in rows), strict=True)
            )
            output = torch.full_like(queries, float("nan"))
            layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, common.slot_mapping)
            call = (layer, queries, keys, values, layer.kv_cache, metadata)
            layer.impl.forward(*call, output=output)
            answers.append(output.split(counts))
        if self.heads is not None:
            self.heads.end_step()
        return answers


class Row:
    """A request: its blocks, how many tokens it has seen, and the states of its newest tokens."""

    def __init__(self, name, blocks, seen):
        self.name, self.seen = name, seen
        self.table = torch.zeros(WIDTH, dtype=torch.int32)
        self.table[: len(blocks)] = torch.tensor(blocks)

    def new(self, count):
        """The slots of the newest tokens, as a runner knows them."""
        table = self.table.long()
        found = torch.arange(self.seen - count, self.seen)
        return (table[(found // PAGE).clamp(max=WIDTH - 1)] * PAGE + found % PAGE).tolist()

    def go_on(self, count):
        self.seen += count
        self.queries = torch.randn(len(NAMES), count, HEADS * GROUP, SIZE)
        self.keys, self.values = (torch.randn(len(NAMES), count, HEADS, SIZE) for _ in range(2))


def put(engine, row, states):
    """Store (layers, Hkv, tokens, 2 * D) where a plain request has them."""
    tokens = states.shape[2]
    for name, of_layer in zip(NAMES, states, strict=True):
        write(engine, name, row.table, of_layer, tokens)


def put_apart(engine, row, states, kept):
    """The same, of every head the last `kept`, where a request has them that holds them apart."""
    pools = kept.reshape(engine.pools, -1)
    blocks = -(-held_tokens(int(pools.float().mean(1).max()), PROMPT, PAGE) // PAGE)
    laid = HeadPlaces(pools, PAGE)
    laid = spread(laid, states.reshape(*pools.shape, -1, 2 * SIZE), blocks * PAGE)
    laid = laid.reshape(*kept.shape, *laid.shape[2:])
    for number, name in enumerate(NAMES):
        write(engine, name, row.table, laid[number], blocks * PAGE)
        engine.heads.record_kept(row.name, name, kept[number], PROMPT)


def write(engine, name, table, states, tokens):
    layer = engine.layers[name]
    slots = (table.long()[:, None] * PAGE + torch.arange(PAGE)).flatten()[:tokens]
    keys, values = (part.transpose(0, 1).contiguous() for part in states.chunk(2, dim=-1))
    type(layer.impl).do_kv_cache_update(layer.impl, layer, keys, values, layer.kv_cache, slots)


def steps_of(engine):
    """Few where Triton's interpreter runs the kernels."""
    return 4 if "cpu" in type(engine.builder).__module__ else 1


@pytest.mark.parametrize(
    ("ours", "counts"),
    [
        ((0, 1, 2, 3), (1, 1, 1, 1)),
        ((0, 1, 2, 3), (3, 1, 4, 2)),
        ((0, 1), (1, 1, 1, 5)),
        ((1, 3), (5, 1, 1, 3)),
    ],
    ids=str,
)
def test_attention_of_heads_with_equal_counts_is_bit_equal_to_a_plain_batch(parts, ours, counts):
    """Whoever else is in the batch, with one new token or several, over ends of pages."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    kept = 62
    plain, beside = parts(), parts().with_heads()
    of_plain = [Row(f"p{n}", range(5 * n, 5 * n + 5), kept) for n in range(4)]
    of_beside = [
        Row(f"r{n}", range(63 - 5 * n, 58 - 5 * n, -1), PROMPT if n in ours else kept)
        for n in range(4)
    ]
    for n, rows in enumerate(zip(of_plain, of_beside, strict=True)):
        states = torch.randn(len(NAMES), HEADS, kept, 2 * SIZE)
        put(plain, rows[0], states)
        if n in ours:
            put_apart(beside, rows[1], states, torch.full((len(NAMES), HEADS), kept))
        else:
            put(beside, rows[1], states)
    torch.set_num_threads(1)
    try:
        for _ in range(steps_of(beside)):
            for one, other, count in zip(of_plain, of_beside, counts, strict=True):
                one.go_on(count)
                other.seen += count
                other.queries, other.keys, other.values = one.queries, one.keys, one.values
            for mine, stock in zip(beside.step(of_beside), plain.step(of_plain), strict=True):
                for n in range(4):
                    assert torch.equal(mine[n], stock[n]), n
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("kept", "across_layers"),
    [([[3, 130, 56], [63, 64, 62]], False), ([[3, 130, 20], [63, 100, 62]], True)],
    ids=["of a layer", "of all layers"],
)
def test_heads_with_different_counts_attend_to_their_own_tokens(parts, kept, across_layers):
    """Of which those of a layer share its pages, or those of all layers."""
    torch.manual_seed(0)
    engine, kept = parts().with_heads(across_layers=across_layers), torch.tensor(kept)
    row, other = Row("ours", (7, 40, 3, 12, 33), PROMPT), Row("other", (1, 2), 40)
    states = torch.randn(len(NAMES), HEADS, 130, 2 * SIZE)
    put_apart(engine, row, states, kept)
    put(engine, other, torch.randn(len(NAMES), HEADS, 40, 2 * SIZE))
    held = [[states[i, h, 130 - n :] for h, n in enumerate(of)] for i, of in enumerate(kept)]
    for count in (1, 3, 30, 1)[-steps_of(engine) :]:
        row.go_on(count)
        other.go_on(1)
        for number, answers in enumerate(engine.step([other, row])):
            new = torch.cat([row.keys, row.values], dim=-1)[number].transpose(0, 1)
            for head in range(HEADS):
                mine = held[number][head] = torch.cat([held[number][head], new[head]])
                queries = row.queries[number][:, head * GROUP : (head + 1) * GROUP]
                expected = softmax_over(queries, mine)
                found = answers[1][:, head * GROUP : (head + 1) * GROUP]
                assert torch.allclose(found.double(), expected, atol=2e-6)


def softmax_over(queries, states):
    """(tokens, G, D) in float64; the last token sees all states, the one before all but one."""
    keys, values = states.double().chunk(2, dim=-1)
    scores = queries.double() @ keys.T * SIZE**-0.5
    behind = torch.arange(len(keys)) - (len(keys) - len(queries))
    scores.masked_fill_(behind > torch.arange(len(queries))[:, None, None], float("-inf"))
    return scores.softmax(dim=-1) @ values


def test_ended_request_leaves_no_state_in_attention(parts):
    engine = parts().with_heads()
    engine.heads.record_kept("a", "layer.0", torch.tensor([1, 2, 3]), PROMPT)
    assert list(engine.heads._kept) == ["a"]
    engine.heads.forget("a")
    assert list(engine.heads._kept) == []
