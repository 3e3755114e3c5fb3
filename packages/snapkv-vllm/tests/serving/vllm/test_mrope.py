"""Models whose positions have several dimensions (M-RoPE), with text alone, where all are one."""

import pytest
import torch

from snapkv import SnapKV
from tests.serving.vllm.engines import require_same_as_library, small_engine
from tests.serving.vllm.models import SmallModel, ids_of

BUDGET, TOKENS = 64, 12
ARCHITECTURE = "LlamaOfThreeDimensions"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A Llama that vLLM turns by three positions a token, which the library knows as one."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    class Turned(LlamaForCausalLM):
        supports_mrope = True

        def get_mrope_input_positions(self, input_tokens, mm_features):
            return torch.arange(len(input_tokens)).expand(3, -1), 0

    ModelRegistry.register_model(ARCHITECTURE, Turned)
    model = SmallModel(tmp_path_factory.mktemp("turned"))
    rope = model.model.config.rope_parameters
    turning = {"rope_type": "default", "mrope_section": [4, 6, 6], **rope}
    model.rewrite_config(architectures=[ARCHITECTURE], rope_parameters=turning)
    return model


def test_text_prompts_of_mrope_models_are_compressed_as_by_the_library(small):
    prompts = [ids_of(length, seed=length) for length in (40, 65, 150, 181, 302)]
    options = {"max_num_batched_tokens": 150, "enable_prefix_caching": True}
    with small_engine(small, budget=BUDGET, **options) as engine:
        assert engine.runner.vllm_config.model_config.uses_mrope
        for _ in range(2):
            require_same_as_library(engine, small, prompts, SnapKV(BUDGET), TOKENS)
