"""An error is raised if a prompt is not read into the cache that was passed with it."""

import copy

import pytest
import torch
import transformers
from transformers import DynamicCache

from snapkv import CacheMismatchError, CompressedCache, FullCache, SnapKV, UnsupportedModelError
from snapkv.hf.cache_argument import passed, with_cache
from tests.families import peaked_model, random_ids, tiny_config, tiny_model

PROMPT, LIMIT = 80, 100
POLICY = SnapKV(36, window_size=8, kernel_size=5)
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}

CALLS = {
    "plain": lambda model, ids, cache: model(ids, past_key_values=cache),
    "generate": lambda model, ids, cache: model.generate(ids, past_key_values=cache, **OPTIONS),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_train_mode_with_gradient_checkpointing_is_refused_before_a_token_is_read(call):
    model, ids = copy.deepcopy(tiny_model("llama")), random_ids(1, PROMPT)
    cache = CompressedCache(model, POLICY)
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
    with torch.no_grad():
        model.train()
        with pytest.raises(UnsupportedModelError, match=r"gradient checkpointing.*model\.eval\(\)"):
            call(model, ids, cache)
        assert cache.report().seen_tokens == 0
        model.eval()
        call(model, ids, cache)
    assert cache.report().kept_tokens <= 36 + 7
    assert cache.report().seen_tokens >= PROMPT


def test_train_mode_without_checkpointing_gives_same_tokens_as_eval_mode():
    model, ids = copy.deepcopy(tiny_model("llama")), random_ids(1, PROMPT)
    expected = model.generate(ids, past_key_values=CompressedCache(model, POLICY), **OPTIONS)
    model.train()
    cache = CompressedCache(model, POLICY)
    assert torch.equal(model.generate(ids, past_key_values=cache, **OPTIONS), expected)


@pytest.fixture(scope="module")
def phi():
    """Return Phi-3, whose rotary embedding differs for texts longer than `LIMIT`."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": LIMIT,
        "factor": 4.0,
        "partial_rotary_factor": 1.0,
    }
    changes = {"partial_rotary_factor": 1.0, "original_max_position_embeddings": LIMIT}
    return peaked_model(tiny_config("phi3", rope_parameters=rope, **changes), "sdpa")


@pytest.mark.parametrize("tokens", [LIMIT - 20, LIMIT + 40])
def test_phi_reads_prompts_shorter_and_longer_than_its_rope_limit(phi, tokens):
    ids = random_ids(1, tokens)
    expected = phi.generate(ids, **OPTIONS)
    full = CompressedCache(phi, FullCache())
    assert torch.equal(phi.generate(ids, past_key_values=full, **OPTIONS), expected)
    cache, plain = CompressedCache(phi, POLICY), CompressedCache(phi, POLICY)
    phi.generate(ids, past_key_values=cache, **OPTIONS)
    phi(ids, past_key_values=plain)
    assert cache.report().seen_tokens == tokens + 7
    assert torch.equal(cache.kept_positions(2)[..., :36], plain.kept_positions(2))


@pytest.mark.parametrize(("first", "turn"), [(LIMIT - 3, 0), (LIMIT - 20, 40)], ids=str)
def test_phi_refuses_to_continue_a_text_across_its_rope_limit(phi, first, turn):
    text, cache = random_ids(1, first), CompressedCache(phi, POLICY)
    if turn:
        text = phi.generate(text, past_key_values=cache, **OPTIONS)
        text = torch.cat([text, random_ids(1, turn)], dim=1)
    with pytest.raises(UnsupportedModelError, match="original_max_position_embeddings=100"):
        phi.generate(text, past_key_values=cache, **OPTIONS)


def test_cache_keyword_is_refused_where_transformers_would_ignore_it():
    model, ids = tiny_model("llama"), random_ids(1, PROMPT)
    cache = CompressedCache(model, POLICY)
    if "past_key_values" in passed(cache):
        with pytest.raises(CacheMismatchError, match="past_key_values=cache"):
            model(ids, cache=cache)
    model(ids, **passed(cache))
    assert cache.report().kept_tokens == 36


def dory(loops):
    """Return a model of a family whose `forward` knows only the new name of the cache."""
    layers = {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    kinds = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    config = transformers.DoryConfig(
        vocab_size=64, num_key_value_heads=2, n_recurrent_loops=loops, **layers, **sizes, **kinds
    )
    return transformers.DoryForCausalLM(config).eval()


needs_dory = pytest.mark.skipif(
    not hasattr(transformers, "DoryConfig"), reason="needs transformers 5.24"
)


@needs_dory
def test_old_cache_keyword_is_refused_where_model_would_ignore_it():
    model, ids = dory(loops=1), random_ids(1, PROMPT) % 64
    cache = CompressedCache(model, POLICY)
    with pytest.raises(CacheMismatchError, match=r"ignores the name.*Pass .* cache=cache"):
        model(ids, past_key_values=cache)
    model(ids, cache=cache)
    assert cache.report().kept_tokens == 36


@needs_dory
def test_model_that_runs_layers_several_times_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="DoryForCausalLM runs some of its layers 2 ti"):
        CompressedCache(dory(loops=2), POLICY)


class ReplacesTheCache:
    """A model whose own code replaces the cache that it receives by a new one."""

    def forward(self, *args, attention_mask=None, **kwargs):
        kwargs = with_cache(kwargs, DynamicCache(config=self.config))
        return super().forward(*args, attention_mask=attention_mask, **kwargs)


@pytest.mark.parametrize(
    "mode", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 30}]
)
def test_a_model_that_replaces_the_cache_is_refused(mode):
    model = copy.deepcopy(tiny_model("llama"))
    model.__class__ = type("OwnCode", (ReplacesTheCache, type(model)), {})
    cache = CompressedCache(model, POLICY)
    with pytest.raises(
        UnsupportedModelError, match=r"read only 0 of the 80 tokens of the prompt into the cache"
    ):
        model.generate(random_ids(1, PROMPT), past_key_values=cache, **OPTIONS, **mode)
    assert not cache.prompt_state.is_announced


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_a_compiled_model_is_refused():
    """The error is raised before any token is stored."""
    model = tiny_model("llama")
    cache = CompressedCache(model, POLICY)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match=r"torch\.compile has"):
        compiled(random_ids(1, PROMPT), past_key_values=cache)
    assert cache.get_seq_length() == 0
    torch.compiler.reset()
