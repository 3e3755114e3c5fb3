"""Blocks and compressions, checked by a worker that remembers the token in every slot."""

import random

import pytest
import torch

PAGE = 4
BLOCKS = 26
TOKEN_BYTES = 2 * 8 * 4
BLOCKS_OF_A_WINDOW = 10


@pytest.fixture(scope="module")
def limits(request):
    """Whether requests are held to a number of tokens."""
    return getattr(request, "param", False)


@pytest.fixture(scope="module")
def config(folder, limits):
    from snapkv_vllm import Limits

    held_to = Limits(decode_budget=23, decode_policy="tova", evict_every=5)
    return engine_config(folder, 96, limits=held_to if limits else None)


def engine_config(folder, max_model_len, **own):
    """A budget of 12 with a window of 6, steps of 24 tokens."""
    from vllm.engine.arg_utils import EngineArgs

    from snapkv_vllm import engine_args

    method = {"policy": "snapkv", "parameters": {"window_size": 6}, "max_window_size": 6}
    options = engine_args(budget=12, **method, dtype="float32", **own)
    options |= {"max_model_len": max_model_len, "max_num_batched_tokens": 24}
    options |= {"enforce_eager": True, "max_num_seqs": 8, "block_size": 32}
    return EngineArgs(folder, **options).create_engine_config()


def simulation(config, *, caching, ahead, windows=(None,), full_blocks=BLOCKS):
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from snapkv_vllm.blocks import CompressedSpec, register_spec
    from snapkv_vllm.scheduler import scheduler
    from tests.serving.vllm.simulation import SimulatedWorker, Simulation

    register_spec()
    config.scheduler_config.async_scheduling = bool(ahead)
    config.cache_config.enable_prefix_caching = caching
    config.cache_config.block_size = PAGE
    blocks = sum(BLOCKS_OF_A_WINDOW if window else full_blocks for window in windows)
    config.cache_config.num_gpu_blocks = blocks
    sizes = {"block_size": PAGE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    specs = [
        SlidingWindowSpec(**sizes, sliding_window=window) if window else CompressedSpec(**sizes)
        for window in windows
    ]
    made = scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layer-{number}"], spec) for number, spec in enumerate(specs)
            ],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=PAGE,
        hash_block_size=PAGE,
        log_stats=False,
    )
    return Simulation(made, SimulatedWorker(blocks, PAGE, windows), ahead)


RUNS = [  # windows of the groups, prefix caching, steps ahead: every pair of them meets
    ((None,), False, 0),
    ((None,), True, 1),
    ((None, 8), True, 0),
    ((None, 8), False, 1),
    ((8, None), False, 0),
    ((8, None), True, 1),
    ((None, None, 12), True, 0),
    ((None, None, 12), False, 1),
]


@pytest.mark.parametrize(
    "limits", [False, True], ids=["without-limits", "with-limits"], indirect=True
)
@pytest.mark.parametrize(("windows", "caching", "ahead"), RUNS, ids=str)
def test_every_request_reads_its_own_tokens_and_all_blocks_are_freed(
    config, limits, windows, caching, ahead
):
    """Random prompts with shared beginnings, budgets, lengths, arrivals and aborts."""
    draw = random.Random(RUNS.index((windows, caching, ahead)))
    blocks = BLOCKS - 6 * limits  # requests that hold less are to lack some, too
    running = simulation(config, caching=caching, ahead=ahead, windows=windows, full_blocks=blocks)
    scheduler, worker = running.scheduler, running.worker
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    openings = [[draw.randrange(1, 90) for _ in range(40)] for _ in range(3)]
    for number in range(60):
        tokens = draw.choice(openings)[: draw.randrange(1, 40)]
        tokens = tokens + [draw.randrange(1, 90) for _ in range(draw.randrange(1, 20))]
        generate = draw.randrange(1, 36)
        extra_args = {"snapkv_budget": draw.choice([0, 7, 12, 13, 30])}
        if limits:
            extra_args = {"snapkv_budget": draw.choice([7, 12, 13])}
        if draw.random() < 0.3:
            extra_args = {}
        if draw.random() < 0.3 and limits:
            extra_args["snapkv_decode_budget"] = draw.choice([20, 23])
        running.send(f"r{number}", tokens, generate, extra_args)
        for _ in range(draw.randrange(4 if limits else 8)):
            running.step()
            require_promise(scheduler)
        if draw.random() < 0.15:
            running.abort(draw)
    while scheduler.requests:
        running.step()
        require_promise(scheduler)
    running.finish()
    assert worker.compressed["prompt"] > 20
    assert (worker.compressed["generating"] > 20) == limits
    assert running.preempted > 0
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    assert not scheduler._plans
    for manager in scheduler._blocks._managers.values():
        assert not manager.dropped_tokens
        assert not manager.req_to_blocks


def require_promise(scheduler):
    """No request holds more blocks than its plan says."""
    for name, request in scheduler.requests.items():
        most = scheduler._plans[name].max_held(request.num_tokens + 1)
        for manager in scheduler._blocks._managers.values():
            assert len(manager.req_to_blocks.get(name, ())) <= -(-most // PAGE)


def waits(scheduler):
    return scheduler._metrics.get("waits")._value.get()


@pytest.mark.parametrize("ahead", [0, 1], ids=["synchronous", "asynchronous"])
def test_request_waits_for_reserved_blocks_and_is_then_compressed(config, ahead):
    """The other request holds nearly the whole pool."""
    running = simulation(config, caching=True, ahead=ahead)
    scheduler, before = running.scheduler, waits(running.scheduler)
    tokens = list(range(1, 81))
    running.send("first", tokens, 8, {"snapkv_budget": 0})
    for _ in range(5):
        running.step()
    assert "first" in {one.request_id for one in scheduler.running}
    running.send("second", tokens, 8, {"snapkv_budget": 30})
    running.finish()
    assert running.worker.compressed["prompt"] == 1
    assert waits(scheduler) - before == 1


def beside(config, monkeypatch, *, step, first, second, after):
    """Two requests that read `step` tokens a step together, the second begun some steps later.

    The first is compressed, the second stays whole; returns how many were preempted, and waited.
    """
    monkeypatch.setattr(config.scheduler_config, "long_prefill_token_threshold", step)
    running = simulation(config, caching=True, ahead=0)
    before = waits(running.scheduler)
    running.send("first", range(1, first + 1), 4, {"snapkv_budget": 30})
    for _ in range(after):
        running.step()
    running.send("second", [2] * second, 9, {"snapkv_budget": 0})
    running.finish()
    assert running.worker.compressed["prompt"] == 1
    return running.preempted, waits(running.scheduler) - before


@pytest.mark.parametrize("second", [20, 23])
def test_generating_request_gets_its_next_block_during_a_compression(config, monkeypatch, second):
    """Three blocks are free in the step in which the first request keeps eight."""
    found = beside(config, monkeypatch, step=8, first=64, second=second, after=1)
    assert found == (0, 0)


def test_request_preempted_during_a_reservation_waits_for_it(config, monkeypatch):
    """Its next 12 tokens need three blocks; four are free, but two of them are reserved."""
    assert beside(config, monkeypatch, step=12, first=72, second=24, after=2) == (1, 1)


def test_prompt_that_never_fits_is_refused_with_the_blocks_it_needs(config):
    from snapkv.errors import InvalidArgumentError

    running = simulation(config, caching=True, ahead=0)
    scheduler = running.scheduler
    refused = scheduler._metrics.get("refusals", status="500", reason="prompt")._value.get()
    running.send("long", [1] * (BLOCKS * PAGE), 1, {})
    assert scheduler.encoder_cache_mismatch_reqs == {"long"}
    labels = {"status": "500", "reason": "prompt"}
    assert scheduler._metrics.get("refusals", **labels)._value.get() == refused + 1
    with pytest.raises(InvalidArgumentError, match=r"26 blocks, but the cache only has 25\. Use"):
        scheduler._require_blocks(scheduler.requests["long"])


def test_first_blocks_are_kept_if_tokens_are_compressed_in_place(config):
    from snapkv import SnapKV
    from snapkv_vllm.admission.plans import Order, PromptSelector

    blocks = simulation(config, caching=False, ahead=0).scheduler._blocks
    (manager,) = blocks._managers.values()
    order = Order(
        selector=PromptSelector(SnapKV(9, window_size=2)),
        query_tokens=2,
        seen_tokens=23,
        held_tokens=23,
        is_due=True,
        kept_tokens=9,
    )
    mine = manager.block_pool.get_new_blocks(6)
    manager.req_to_blocks["a"] = list(mine)
    (move,) = blocks.compress("a", order)
    assert (move.sources[:3], len(move.sources)) == (move.targets, 6)
    assert manager.req_to_blocks["a"] == mine[:3]
    # 12 slots for 9 tokens: three more tokens cost nothing, the fourth a block
    assert manager.allocate_new_blocks("a", 26, 26) == []
    assert len(manager.allocate_new_blocks("a", 27, 27)) == 1
