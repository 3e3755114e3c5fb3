"""Every row of docs/other-tools.md is tested. `make test-tools` installs the packages it needs."""

import copy
import functools
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    QuantoConfig,
    TorchAoConfig,
    pipeline,
)

from snapkv import (
    CacheMismatchError,
    CompressedCache,
    CriticalKV,
    InvalidArgumentError,
    SnapKV,
    UnsupportedModelError,
)
from snapkv.hf.model_parts import output_weight
from tests.families import kept_of, peaked_model, random_ids, read, tiny_config, tiny_model
from tests.methods import CACHES

PROMPT, BUDGET = 80, 24
SNAP = SnapKV(BUDGET, window_size=8)
METHODS = [SNAP, CriticalKV(SNAP)]  # votes alone, and with what the output projection adds
OPTIONS = {"max_new_tokens": 8, "do_sample": False}
PAGE = Path(__file__).parents[4] / "docs/other-tools.md"


def generated(caller, cached, policy=SNAP, **options):
    """Return the tokens that `caller` generates with a cache that was made for `cached`."""
    cache, ids = CompressedCache(cached, policy), random_ids(1, PROMPT)
    mask = torch.ones_like(ids)
    found = caller.generate(
        input_ids=ids, attention_mask=mask, past_key_values=cache, **OPTIONS, **options
    )
    assert cache.report().kept_tokens < PROMPT
    return found[0, PROMPT:].tolist()


def pipelines(tmp_path, demo):
    pipe = pipeline("text-generation", model=demo.model, tokenizer=demo.tokenizer)
    prompt = "The capital of France is Paris. " * 10 + "The capital of France is"
    cache = CompressedCache(demo.model, SnapKV(48, window_size=16))
    for _ in range(2):
        text = pipe(prompt, max_new_tokens=1, do_sample=False, past_key_values=cache)
        assert "Paris" in text[0]["generated_text"][len(prompt) :]
        assert cache.report().kept_tokens == 48
        with pytest.raises(CacheMismatchError, match=r"or call cache\.reset"):
            pipe([prompt, "Another."], max_new_tokens=1, past_key_values=cache)
        cache.reset()


def continuous_batching(tmp_path, demo):
    model = tiny_model("llama")
    for name in ("past_key_values", "cache"):
        cache = CompressedCache(model, SNAP)
        with pytest.raises(InvalidArgumentError, match="uses its own paged cache"):
            model.generate_batch([[5, 6, 7]], **{name: cache})
    assert "past_key_values" not in inspect.signature(model.init_continuous_batching).parameters


def served(tmp_path, demo):
    """Check that no option takes a cache yet; if one does, the page must be changed."""
    from transformers.cli.chat import Chat
    from transformers.cli.serve import Serve

    for command in (Serve, Chat):
        options = inspect.signature(command.__init__).parameters
        assert len(options) > 3
        assert not [name for name in options if name in ("cache", "past_key_values", "policy")]


def spread(tmp_path, demo):
    model = tiny_model("llama")
    to_disk, apart = functools.partial(disk_offload, offload_dir=tmp_path), {"lm_head": "cpu"}
    apart |= {f"model.{name}": "cpu" for name in ("embed_tokens", "norm", "rotary_emb")}
    apart |= {f"model.layers.{at}": ("cpu", "disk")[at % 2] for at in range(4)}
    some = functools.partial(
        dispatch_model, device_map=apart, main_device="cpu", offload_dir=tmp_path
    )
    for offload in (cpu_offload, to_disk, some):
        offloaded = copy.deepcopy(model)
        offload(offloaded)
        assert any(weight.is_meta for weight in offloaded.parameters())
        for policy in METHODS:
            assert generated(offloaded, offloaded, policy) == generated(model, model, policy)


def adapters(tmp_path, demo):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 64, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    lora = peft.LoraConfig(target_modules=["q_proj", "k_proj", "o_proj"], **settings)
    wrapped = peft.get_peft_model(copy.deepcopy(tiny_model("llama")), lora).eval()
    merged = copy.deepcopy(wrapped).merge_and_unload()
    for policy in METHODS:
        for options in ({}, {"prompt_lookup_num_tokens": 3}):
            expected = generated(merged, merged, policy, **options)
            for cached in (wrapped, wrapped.get_base_model()):
                assert generated(wrapped, cached, policy, **options) == expected
    read(wrapped, SNAP, random_ids(1, PROMPT)).save(tmp_path / "cache")
    CompressedCache.load(tmp_path / "cache", wrapped)
    with wrapped.disable_adapter(), pytest.raises(CacheMismatchError, match="other weights"):
        CompressedCache.load(tmp_path / "cache", wrapped)


def learned_tokens(tmp_path, demo):
    peft = pytest.importorskip("peft")
    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        settings = kind(num_virtual_tokens=4, task_type="CAUSAL_LM")
        wrapped = peft.get_peft_model(copy.deepcopy(tiny_model("llama")), settings)
        for cached in (wrapped, wrapped.get_base_model()):
            with pytest.raises(UnsupportedModelError, match="adapters that do not add tokens"):
                generated(wrapped, cached)


def quantized(package, *configs):
    """Return a test of weights that transformers quantizes while loading."""

    def check(tmp_path, demo):
        pytest.importorskip(package)
        changes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 16}
        peaked = peaked_model(tiny_config("llama", **changes), "sdpa")
        peaked.save_pretrained(tmp_path)
        for config in configs:
            given = {"quantization_config": config(), "dtype": torch.float32, "device_map": "cpu"}
            model = AutoModelForCausalLM.from_pretrained(tmp_path, **given).eval()
            for layer, own in zip(model.model.layers, peaked.model.layers, strict=True):
                assert type(layer.self_attn.o_proj.weight) is not nn.Parameter
                found = output_weight(layer.self_attn.o_proj, torch.float32)
                weight = own.self_attn.o_proj.weight
                assert 0 < (found - weight).norm() < 0.2 * weight.norm()
            assert all(generated(model, model, policy) for policy in METHODS)

    return check


def fp8(tmp_path, demo):
    """Test a checkpoint like those of DeepSeek, with one scale per block of weights."""
    peaked = peaked_model(tiny_config("llama"), "sdpa")
    peaked.save_pretrained(tmp_path)
    coded, weights = {}, load_file(tmp_path / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            rows, columns = weight.shape
            blocks = weight.view(rows // 16, 16, columns // 16, 16)
            scales = blocks.abs().amax((1, 3)) / 448
            weight = (blocks / scales[:, None, :, None]).view(rows, columns)
            weight = weight.to(torch.float8_e4m3fn)
            coded[f"{name}_scale_inv"] = scales
        coded[name] = weight
    save_file(coded, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    own = peaked.state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, own[name], rtol=0.1, atol=0.01)
    for policy in METHODS:
        assert len(generated(model, model, policy)) == OPTIONS["max_new_tokens"]


def untried(tmp_path, demo):
    assert re.search(r"^\| AWQ, GPTQ \| untried \|", PAGE.read_text("utf-8"), re.MULTILINE)


def rollouts(tmp_path, demo):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    kept = []

    def roll(prompts, trainer):
        found = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        model = trainer.accelerator.unwrap_model(trainer.model).eval()
        for prompt in prompts:
            ids = demo.tokenizer(prompt, return_tensors="pt").input_ids
            cache = CompressedCache(model, SnapKV(32, window_size=8))
            options = {"max_new_tokens": 4, "output_scores": True, "return_dict_in_generate": True}
            with torch.no_grad():
                made = model.generate(ids, past_key_values=cache, **options)
            sure = model.compute_transition_scores(
                made.sequences, made.scores, normalize_logits=True
            )
            found["prompt_ids"].append(ids[0].tolist())
            found["completion_ids"].append(made.sequences[0, ids.shape[1] :].tolist())
            found["logprobs"].append(sure[0].tolist())
            kept.append(cache.report().kept_tokens)
        model.train()
        return found

    settings = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        max_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = trl.GRPOTrainer(
        model=copy.deepcopy(demo.model),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["One two three. " * 20] * 2}),
        reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
        processing_class=demo.tokenizer,
        rollout_func=roll,
    )
    trainer.train()
    assert len(kept) == 2
    assert max(kept) < 40


def _torchao():
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


ROWS = {
    "`transformers.pipeline`": pipelines,
    "`generate_batch`, `init_continuous_batching`": continuous_batching,
    "`transformers serve`, `transformers chat`": served,
    "accelerate: `device_map`, offloaded weights": spread,
    "PEFT: LoRA and others that add no tokens": adapters,
    "PEFT: prompt tuning, prefix tuning": learned_tokens,
    "bitsandbytes, 4 and 8 bits": quantized(
        "bitsandbytes",
        lambda: BitsAndBytesConfig(load_in_4bit=True),
        lambda: BitsAndBytesConfig(load_in_8bit=True),
    ),
    "torchao, 8 bits": quantized("torchao", _torchao),
    "quanto, 4 and 8 bits": quantized(
        "optimum.quanto", lambda: QuantoConfig("int4"), lambda: QuantoConfig("int8")
    ),
    "FP8 checkpoints": fp8,
    "AWQ, GPTQ": untried,
    "TRL: GRPO rollouts": rollouts,
}


@pytest.mark.filterwarnings("ignore")  # other packages' own, which are not ours to mend
@pytest.mark.parametrize("tool", ROWS)
def test_tool_behaves_as_documented_in_its_row_of_the_page(tool, tmp_path, demo):
    ROWS[tool](tmp_path, demo)


def test_the_page_lists_exactly_the_tested_tools():
    rows = re.findall(
        r"^\| (.*?) \| (?:works|refused|no|untried) \|", PAGE.read_text("utf-8"), re.M
    )
    assert rows == list(ROWS)


# The same without those packages.


class Adapted(nn.Module):
    """A layer with an adapter, as in PEFT: `weight` leaves out what the adapter adds."""

    disable_adapters = False

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.in_features = base, base.in_features
        self.active_adapters = ["default"]
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("added", torch.randn(base.weight.shape, generator=generator))

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, states):
        added = 0 if self.disable_adapters else states @ self.added.T
        return self.base_layer(states) + added


def test_adapter_of_output_projection_counts_in_scores_and_in_weight_check(tmp_path):
    plain, adapted, merged = (copy.deepcopy(tiny_model("llama")) for _ in range(3))
    for with_adapter, with_sum in zip(adapted.model.layers, merged.model.layers, strict=True):
        made = Adapted(with_adapter.self_attn.o_proj)
        with_adapter.self_attn.o_proj = made
        with_sum.self_attn.o_proj.weight.data += made.added
    policy = CriticalKV(SNAP)
    expected = generated(merged, merged, policy)
    assert generated(adapted, adapted, policy) == expected
    assert generated(plain, plain, policy) != expected
    read(adapted, SNAP, random_ids(1, PROMPT)).save(tmp_path / "cache")
    CompressedCache.load(tmp_path / "cache", adapted)
    for layer in adapted.model.layers:
        layer.self_attn.o_proj.disable_adapters = True
    with pytest.raises(CacheMismatchError, match="other weights"):
        CompressedCache.load(tmp_path / "cache", adapted)


class Packed(nn.Module):
    """A layer whose weights are packed 4-bit codes in buffers, as in AWQ and GPTQ."""

    def __init__(self, base):
        super().__init__()
        self.out_features, self.in_features = base.weight.shape
        scales = base.weight.detach().abs().amax(dim=1, keepdim=True) / 7
        codes = (base.weight.detach() / scales).round().to(torch.int8) + 8
        self.register_buffer("qweight", codes[:, ::2] * 16 + codes[:, 1::2] - 128)
        self.register_buffer("scales", scales)

    def weights(self):
        codes = self.qweight.int() + 128
        both = torch.stack([codes // 16, codes % 16], dim=-1).flatten(1) - 8
        return both * self.scales

    def forward(self, states):
        return nn.functional.linear(states, self.weights().to(states.dtype))


def packed_and_plain(dtype=torch.float32):
    """Return a model with packed weights and one with the same weights unpacked."""
    packed, plain = (copy.deepcopy(tiny_model("llama")).to(dtype) for _ in range(2))
    for name, base in list(packed.named_modules()):
        if name.endswith("_proj"):
            owner, _, own = name.rpartition(".")
            made = Packed(base)
            setattr(packed.get_submodule(owner), own, made)
            plain.get_submodule(name).weight.data = made.weights().to(dtype)
    return packed, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["across-layers", "criticalkv", "int4"])
def test_packed_weights_keep_same_positions_as_unpacked_weights(name, dtype):
    """Keys are stored in the dtype of the hidden states, not in that of the weights."""
    (policy, options), found = CACHES[name], []
    for model in packed_and_plain(dtype):
        cache = CompressedCache(model, policy, **options)
        text = model.generate(random_ids(1, PROMPT), past_key_values=cache, **OPTIONS)
        assert {layer.keys.dtype for layer in cache.layers} == {dtype}
        found.append((text.tolist(), kept_of(cache)))
    assert found[0] == found[1]


def test_loading_a_cache_is_refused_after_packed_weights_change(tmp_path):
    model, _ = packed_and_plain()
    read(model, SNAP, random_ids(1, PROMPT)).save(tmp_path / "cache")
    CompressedCache.load(tmp_path / "cache", model)
    model.model.layers[2].mlp.up_proj.qweight += 1
    with pytest.raises(CacheMismatchError, match="other weights"):
        CompressedCache.load(tmp_path / "cache", model)


def test_prompt_learning_adapters_are_refused():
    model = copy.deepcopy(tiny_model("llama"))
    cache = CompressedCache(model, SNAP)

    class Wrapping:
        active_peft_config = SimpleNamespace(is_prompt_learning=True)

        def prepare(self, *args, **kwargs):
            raise AssertionError

    model.prepare_inputs_for_generation = Wrapping().prepare
    with pytest.raises(UnsupportedModelError, match="adapters that do not add tokens"):
        model.generate(random_ids(1, PROMPT), past_key_values=cache, **OPTIONS)
    assert cache.get_seq_length() == 0
