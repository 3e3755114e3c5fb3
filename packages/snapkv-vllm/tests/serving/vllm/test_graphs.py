"""Compressing steps replay no CUDA graph, and replayed graphs read the stored lengths.

There is no GPU here: what is looked at is what the runners decide by, and which buffers attention
was given.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from snapkv import SnapKV
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import ids_of

BUDGET = 64
CHUNK = 150
WINDOW_OF_ONE = {"snapkv_window_size": 1}


@pytest.fixture(scope="module")
def engine(small):
    options = {"max_num_batched_tokens": CHUNK, "enable_prefix_caching": True}
    with small_engine(small, budget=BUDGET, **options) as running:
        yield running


@contextlib.contextmanager
def steps_of(engine, second_runner):
    """Per step: the tokens of each request, whether it carried orders, whether graphs may replay.

    The runners ask for themselves whether all requests decode; with CUDA graphs of whole steps it
    is the answer that decides.
    """
    runner, steps = engine.runner, []
    name = "gather_batch_req_state" if second_runner else "_is_uniform_decode"
    decide, execute = getattr(runner, name), runner.execute_model

    def execute_and_note(scheduler_output, *args, **kwargs):
        if scheduler_output.total_num_scheduled_tokens:
            tokens = sorted(scheduler_output.num_scheduled_tokens.values())
            steps.append([tokens, bool(scheduler_output.snapkv_orders), []])
        return execute(scheduler_output, *args, **kwargs)

    def decide_and_note(*args, **kwargs):
        decided = decide(*args, **kwargs)
        steps[-1][2].append(bool(decided[1] if second_runner else decided))
        return decided

    setattr(runner, name, decide_and_note)
    runner.execute_model = execute_and_note
    try:
        yield steps
    finally:
        delattr(runner, name)
        del runner.execute_model


def run(engine, second_runner, prompts, extra_args, tokens=5):
    with steps_of(engine, second_runner) as steps:
        answers = engine.answers(prompts, greedy(tokens, extra_args=extra_args))
    for tokens, orders, uniform in steps:
        assert uniform, "the runner no longer asks"
        assert not (orders and any(uniform)), tokens
    return answers, steps


def test_decode_step_without_orders_may_replay_a_graph(engine, second_runner):
    _, steps = run(engine, second_runner, [ids_of(40, seed=90)], {})
    assert steps[0] == [[40], False, [False]]
    assert [uniform for _, _, (uniform,) in steps[1:]] == [True] * 4


@pytest.mark.parametrize("extra_args", [{}, WINDOW_OF_ONE], ids=["window", "window-of-one"])
def test_last_chunk_of_one_token_is_compressed_correctly(engine, small, second_runner, extra_args):
    """The last chunk of 151 tokens has one token, like a decode step of vLLM."""
    prompt = ids_of(CHUNK + 1, seed=91 + len(extra_args))
    (answer,), steps = run(engine, second_runner, [prompt], extra_args)
    assert [tokens for tokens, _, _ in steps[:2]] == [[CHUNK], [1]]
    assert [orders for _, orders, _ in steps[:3]] == [not extra_args, True, False]
    window = extra_args.get("snapkv_window_size", 32)
    assert answer == small.answer(prompt, SnapKV(BUDGET, window_size=window), 5)


def make_triton_builder(*layer_names):
    """vLLM's builder without a device, and without what it needs to split long sequences."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

    builder = object.__new__(TritonAttentionMetadataBuilder)
    sizes = ("seq_threshold_3D", "num_par_softmax_segments", "max_seqs_64_segments")
    scratch = ("softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum")
    more = {"rswa_window": None, "layer_names": layer_names}
    vars(builder).update(dict.fromkeys((*sizes, *scratch), 0) | more)
    return builder


def make_metadata(counts, seen, tables, slots):
    """Metadata of a batch in which each request has seen tokens, of which some are new."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = torch.tensor(seen, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths.clone(),
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=512,
        block_table_tensor=tables,
        slot_mapping=torch.tensor(slots),
    )


def test_graph_capture_of_triton_attention_reads_stored_lengths():
    """vLLM's own code runs on CPU tensors; its capture sets the lengths in our buffer to one."""
    from snapkv_vllm.kept_lengths import KeptLengths

    builder, held = make_triton_builder(), KeptLengths(4, torch.device("cpu"))
    held.patch_builder(builder)
    batch = make_metadata([1, 1], [200, 100], torch.zeros(2, 16, dtype=torch.int32), [0, 0])
    captured = builder.build_for_cudagraph_capture(batch)
    assert captured.seq_lens.tolist() == [1, 1]
    assert batch.seq_lens.tolist() == [200, 100]
    held.begin_step(["a", "b"], {"a": 150})
    stepped = builder.build(0, batch, fast_build=True)
    assert captured.seq_lens.tolist() == stepped.seq_lens.tolist() == [50, 100]
    assert (stepped.max_seq_len, captured.max_seq_len) == (100, 512)


def test_wrong_number_of_recorded_queries_is_refused():
    from snapkv_vllm.compressor import QueryRecorder

    recorder, heard = QueryRecorder(), []
    recorder.attach("first", SimpleNamespace(add_query_listener=lambda one: heard.append(one)))
    recorder.rows_of_requests = {"a": slice(2, 5)}
    heard[0](torch.randn(5, 4, 8))
    assert recorder.take_queries("a", "first", 3).shape == (1, 4, 3, 8)
    for window in (2, 4):
        with pytest.raises(
            RuntimeError, match=f"a: expected {window} captured queries in first, but got 3"
        ):
            recorder.take_queries("a", "first", window)
    with pytest.raises(RuntimeError, match="3 captured queries in second, but got 0"):
        recorder.take_queries("a", "second", 3)
