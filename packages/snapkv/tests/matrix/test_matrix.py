"""No model answers wrong: the most used ones here, every other one under the marker `families`."""

import pytest
import torch
import transformers

from snapkv import CompressedCache, FullCache, SnapKV, UnsupportedModelError
from snapkv.plan.footprint import footprint_of_loaded
from tests.matrix.__main__ import DOCS, known, row, shown
from tests.matrix.cells import Text
from tests.matrix.shrinking import MODELS, tiny

MOST_USED = (
    "deepseek_v2", "deepseek_v3", "falcon_h1", "gemma3_text", "gemma4_text", "glm4", "glm4_moe",
    "gpt_oss", "granitemoehybrid", "kimi_linear", "llama", "llama4_text", "minimax_m2",
    "ministral3", "mistral", "phi3", "qwen3", "qwen3_5_text", "qwen3_next", "smollm3",
)  # fmt: skip
KNOWN = known()
SEEING = ("gemma3", "gemma4", "llava", "mllama", "qwen2_5_vl", "qwen3_5", "qwen3_vl")
OFTEN = [model for model in MODELS if model in (*MOST_USED, *SEEING)]
REST = [pytest.param(model, marks=pytest.mark.families) for model in MODELS if model not in OFTEN]


@pytest.mark.filterwarnings("ignore")  # those of transformers about tiny configs
@pytest.mark.parametrize("model", [*OFTEN, *REST])
def test_a_model_is_right_or_refused(model):
    found = row(model)
    cells = [*found.get("cells", {}).items(), *found.get("images", {}).items()]
    assert [(name, cell) for name, cell in cells if "wrong" in cell] == []
    if transformers.__version__ == KNOWN[0]["transformers"]:
        before = next(each for each in KNOWN if each["model"] == model)
        assert found == {name: before[name] for name in before if name != "transformers"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [name for name in MOST_USED if name in MODELS])
@torch.no_grad()
def test_plan_and_report_count_what_grows(model):
    """On the meta device and on tensors, and the share of the whole that grows."""
    try:
        cache = CompressedCache(tiny(model), FullCache())
    except UnsupportedModelError:
        pytest.skip("refused by name in this transformers")
    footprint = footprint_of_loaded(tiny(model))
    tiny(model)(Text.drawn(40).ids, past_key_values=cache)
    report = cache.report()
    assert report.held_bytes == report.full_bytes == footprint.cache_bytes(40, 40)
    assert len(report["layers"]) == footprint.layers
    assert report["growing_layers"] == len(footprint.full_layers)
    grows = 40 * footprint.token_bytes
    assert report["growing_share"] == pytest.approx(grows / footprint.cache_bytes(40, 40))
    assert ("layers grow" in str(report)) == (grows < footprint.cache_bytes(40, 40))
    half = CompressedCache(tiny(model), SnapKV("50%", window_size=4))  # of what grows
    tiny(model)(Text.drawn(40).ids, past_key_values=half)
    report = half.report()
    kept = footprint.cache_bytes(int(report.kept_tokens), 40)
    assert report["growing_held_share"] == 0.5
    assert report.held_bytes == kept


def test_the_page_is_that_of_the_rows():
    if transformers.__version__ == KNOWN[0]["transformers"]:
        assert (DOCS / "families.md").read_text(encoding="utf-8") == shown(KNOWN)


def test_the_most_used_models_are_compressed():
    """And all that is refused of them stands in the page."""
    rows = {each["model"]: each for each in KNOWN}
    assert [model for model in MOST_USED if "cells" not in rows[model]] == []
    assert [model for model in SEEING if "images" not in rows[model]] == []
