"""The models that people serve: what is kept, what is answered, and what is left alone."""

import contextlib
from functools import cached_property

import pytest
import torch

from snapkv import SnapKV, default_policy
from snapkv.policies.default import by_layer
from snapkv.validation import DEFAULT
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.families import FamilyModel
from tests.serving.vllm.models import ids_of

BUDGET = 64
POLICY = by_layer(default_policy(BUDGET))
FAMILIES = (
    "gemma3_text",
    "gpt_oss",
    "deepseek_v3",
    *(pytest.param(one, marks=pytest.mark.slow) for one in ("gemma2", "cohere2")),
)
LENGTHS = (40, 64, 70, 150, 151, 200, 350)


class Served:
    """A model of a family, and one engine of it with compressed prompts."""

    def __init__(self, folder, family):
        self.family, self.small = family, FamilyModel(folder, family)

    @property
    def options(self):
        """A pool in which requests that generate for long have to make room for each other."""
        latent = self.family == "deepseek_v3"
        return {
            "block_size": 16 if latent else 32,
            "max_num_batched_tokens": 150,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": self.small.blocks_bytes(22 if latent else 12, 32),
        }

    @cached_property
    def engine(self):
        return small_engine(self.small, policy=DEFAULT, budget=BUDGET, **self.options)


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, tmp_path_factory):
    one = Served(tmp_path_factory.mktemp(request.param), request.param)
    with one.engine:
        yield one


def every_cache(runner):
    """The memory of all layers, by name, block by block."""
    layers = runner.vllm_config.compilation_config.static_forward_context
    return {
        f"{name}.{number}": part
        for name, layer in layers.items()
        if hasattr(layer, "kv_cache")
        for number, part in enumerate(
            layer.kv_cache if isinstance(layer.kv_cache, (list, tuple)) else [layer.kv_cache]
        )
    }


@contextlib.contextmanager
def nothing_else_written(engine):
    """Check that compressing writes into the blocks of the kept tokens alone."""
    compressor, checked = engine.runner._compressor, []
    compress = compressor.compress

    def compress_and_check(orders):
        caches = every_cache(engine.runner)
        before = {name: cache.clone() for name, cache in caches.items()}
        compress(orders)
        written = {one for order in orders.values() for move in order.moves for one in move.targets}
        for name, cache in caches.items():
            changed = (cache != before[name]).flatten(1).any(dim=1).nonzero().flatten().tolist()
            assert set(changed) <= written, name
            checked.append(len(changed))

    compressor.compress = compress_and_check
    try:
        yield checked
    finally:
        del compressor.compress


def test_kept_tokens_and_answers_equal_those_of_the_library(served):
    """Twice, so that the second time there are prefixes in the cache to begin with."""
    engine, small = served.engine, served.small
    prompts = [ids_of(length, seed=length) for length in LENGTHS]
    expected = [small.library(prompt, POLICY, 16) for prompt in prompts]
    for _ in range(2):
        with engine.watching() as kept, nothing_else_written(engine) as changed:
            answers = engine.answers(prompts, greedy(16))
        assert sum(changed) > 0
        for prompt, answer, (its_answer, cache) in zip(prompts, answers, expected, strict=True):
            assert answer == its_answer, len(prompt)
            if len(prompt) <= BUDGET:
                continue
            layers = small.compressed_layers
            for layer, keep in zip(layers, kept.of(prompt), strict=True):
                library = cache.kept_positions(layer)[..., :BUDGET]
                assert torch.equal(keep, library.expand_as(keep)), (len(prompt), layer)
    engine.require_empty()


@pytest.mark.parametrize("served", ["deepseek_v3"], indirect=True)
def test_answers_of_preempted_requests_equal_those_of_the_library(served):
    engine, before = served.engine, served.engine.preempted
    prompts = [ids_of(length, seed=length) for length in (300, 120, 260, 180, 90, 340)]
    answers = engine.answers(prompts, greedy(110))
    assert engine.preempted > before
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == served.small.answer(prompt, POLICY, 110), len(prompt)
    engine.require_empty()


def test_answers_equal_those_of_the_full_model_if_nothing_is_dropped(served):
    prompts = [ids_of(length, seed=length) for length in LENGTHS]
    budgets = (0, 64, 100, 150, 512, 0, 0)
    off = [greedy(24, extra_args={"snapkv_budget": own}) for own in budgets]
    whole = [served.small.answer(prompt, SnapKV(512), 24) for prompt in prompts]
    assert served.engine.answers(prompts, off) == whole
