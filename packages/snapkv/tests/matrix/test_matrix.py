"""No model gives wrong results.

One model of each kind is tested here, every other model only with the marker `families`.
"""

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache

from snapkv import CompressedCache, FullCache, SnapKV, UnsupportedModelError
from snapkv.cache.report import tensor_bytes, token_bytes
from snapkv.hf.build import grows, plain_layers
from snapkv.hf.cache_argument import passed
from snapkv_app.plan.advice import footprint_of_loaded
from snapkv_app.plan.footprint import FAMILIES
from tests.matrix.__main__ import DOCS, known, row, shown
from tests.matrix.cells import Text
from tests.matrix.shrinking import MODELS, tiny

MOST_USED = (
    "deepseek_v2", "deepseek_v3", "falcon_h1", "gemma3_text", "gemma4_text", "glm4", "glm4_moe",
    "gpt_oss", "granitemoehybrid", "kimi_linear", "llama", "llama4_text", "minimax_m2",
    "ministral3", "mistral", "phi3", "qwen3", "qwen3_5_text", "qwen3_next", "smollm3",
)  # fmt: skip
KNOWN = known()
GROWING = (
    "deepseek_v3", "gemma3_text", "gemma4_text", "kimi_linear", "llama", "qwen3_next",
)  # fmt: skip
KINDS = (
    "deepseek_v3", "deepseek_v32", "falcon_h1", "gemma3_text", "gemma4_text", "glm4", "gpt_oss",
    "granitemoehybrid", "kimi_linear", "llama", "llama4_text", "phi3", "qwen3_next",
    "gemma3", "mllama", "qwen2_5_vl", "qwen3_vl",
)  # fmt: skip
"""One model of each kind of attention and images; `deepseek_v32` is refused for its indexer."""
SEEING = ("gemma3", "gemma4", "llava", "mllama", "qwen2_5_vl", "qwen3_5", "qwen3_vl")
REST = [pytest.param(model, marks=pytest.mark.families) for model in MODELS if model not in KINDS]


@pytest.mark.filterwarnings("ignore")  # those of transformers about tiny configs
@pytest.mark.parametrize("model", [*(model for model in KINDS if model in MODELS), *REST])
def test_model_gives_right_results_or_is_refused(model):
    found = row(model)
    cells = [*found.get("cells", {}).items(), *found.get("images", {}).items()]
    assert [(name, cell) for name, cell in cells if "wrong" in cell] == []
    if transformers.__version__ == KNOWN[0]["transformers"]:
        before = next(each for each in KNOWN if each["model"] == model)
        assert found == {name: before[name] for name in before if name != "transformers"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [name for name in GROWING if name in MODELS])
@torch.no_grad()
def test_plan_and_report_count_bytes_of_growing_layers(model):
    """The bytes equal those of `DynamicCache`; a plan knows the sizes or refuses the family."""
    try:
        cache = CompressedCache(tiny(model), FullCache())
    except UnsupportedModelError:
        pytest.skip("refused by name in this transformers")
    own = DynamicCache(config=tiny(model).config)
    own.layers = plain_layers(tiny(model))
    for each in (cache, own):
        tiny(model)(Text.drawn(40).ids, **passed(each))
    growing = [layer for layer in own.layers if grows(layer)]
    whole, token = sum(map(tensor_bytes, own.layers)), sum(map(token_bytes, growing)) // 40
    if tiny(model).config.get_text_config(decoder=True).model_type in FAMILIES:
        footprint = footprint_of_loaded(tiny(model))
        assert footprint.cache_bytes(40, 40) == whole
        assert footprint.layers == len(own.layers)
        assert footprint.token_bytes == token
    else:
        with pytest.raises(
            UnsupportedModelError,
            match=r"^model: the sizes of models of the family '\w+' are not known",
        ):
            footprint_of_loaded(tiny(model))
    report = cache.report()
    assert report.held_bytes == report.full_bytes == whole
    assert len(report["layers"]) == len(own.layers)
    assert report["growing_layers"] == len(growing)
    assert report["growing_share"] == pytest.approx(40 * token / whole)
    assert ("layers grow" in str(report)) == (40 * token < whole)
    half = CompressedCache(tiny(model), SnapKV("50%", window_size=4))  # of what grows
    tiny(model)(Text.drawn(40).ids, **passed(half))
    report = half.report()
    assert report["growing_held_share"] == 0.5
    assert report.held_bytes == whole - (40 - int(report.kept_tokens)) * token


def test_families_page_matches_recorded_rows():
    if transformers.__version__ == KNOWN[0]["transformers"]:
        assert (DOCS / "families.md").read_text(encoding="utf-8") == shown(KNOWN)


def test_the_most_used_models_are_compressed():
    """Models that accept images must also have results for images."""
    rows = {each["model"]: each for each in KNOWN}
    assert [model for model in MOST_USED if "cells" not in rows[model]] == []
    assert [model for model in SEEING if "images" not in rows[model]] == []
