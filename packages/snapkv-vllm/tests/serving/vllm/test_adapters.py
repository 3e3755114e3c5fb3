"""LoRA adapters: answers equal those of the library with the adapter merged."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from snapkv import SnapKV
from tests.serving.vllm.engines import greedy, small_engine
from tests.serving.vllm.models import ids_of

BUDGET = 64
TOKENS = 12
RANK, ALPHA = 4, 8
PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Adapter:
    """A random one of all projections: in a folder for vLLM, and merged for the library."""

    def __init__(self, small, folder, number):
        self.folder, self.number = str(folder), number
        self.merged = copy.copy(small)
        self.merged.model, self.merged._answered = copy.deepcopy(small.model), {}
        generator, saved = torch.Generator().manual_seed(number), {}
        for name, part in self.merged.model.named_modules():
            if name.split(".")[-1] in PARTS:
                outputs, inputs = part.weight.shape
                down = torch.randn(RANK, inputs, generator=generator) * 0.1
                up = torch.randn(outputs, RANK, generator=generator) * 0.1
                part.weight.data += ALPHA / RANK * up @ down
                saved[f"base_model.model.{name}.lora_A.weight"] = down
                saved[f"base_model.model.{name}.lora_B.weight"] = up
        save_file(saved, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": PARTS}
        folder.joinpath("adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))

    @property
    def asked_for(self):
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"adapter-{self.number}", self.number, self.folder)


@pytest.fixture(scope="module")
def adapters(small, tmp_path_factory):
    return [Adapter(small, tmp_path_factory.mktemp("adapter"), number) for number in (1, 2)]


@pytest.fixture(scope="module")
def engine(small):
    with small_engine(
        small,
        budget=BUDGET,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        enable_prefix_caching=True,
        max_num_batched_tokens=150,
    ) as running:
        yield running


def test_one_prompt_is_answered_with_each_adapter_and_without(engine, small, adapters):
    """Blocks that were computed with one adapter are not reused with another."""
    ids = ids_of(120, seed=1)
    answers = []
    for adapter in (*adapters, None):
        (output,) = engine.llm.generate(
            [{"prompt_token_ids": ids}],
            greedy(TOKENS),
            use_tqdm=False,
            lora_request=adapter and adapter.asked_for,
        )
        assert output.num_cached_tokens == 0
        answers.append(list(output.outputs[0].token_ids))
    models = [*(adapter.merged for adapter in adapters), small]
    assert answers == [one.answer(ids, SnapKV(BUDGET), TOKENS) for one in models]
    assert len({tuple(answer) for answer in answers}) == 3
