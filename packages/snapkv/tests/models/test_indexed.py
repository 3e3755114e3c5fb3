"""Models whose indexer chooses what a query attends to are refused by name."""

import pytest

from snapkv import CompressedCache, FullCache, UnsupportedModelError
from tests.matrix.shrinking import MODELS, tiny

INDEXED = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "mistral_large4", "qwen4_exp_text")


@pytest.mark.parametrize("family", [family for family in INDEXED if family in MODELS])
def test_indexed_attention_is_refused_in_one_line(family):
    with pytest.raises(UnsupportedModelError, match=r"^model: .* with DynamicIndexedLayer") as said:
        CompressedCache(tiny(family), FullCache())
    assert "\n" not in str(said.value)
