"""Files that were written once load, and their caches go on with the same tokens and positions."""

import pytest

from snapkv import CacheFileError, CompressedCache
from tests.golden import golden, record, saved
from tests.golden.models import golden_model

RECORDED = record.read(saved.EXPECTED)


@pytest.fixture(scope="module")
def compare():
    alike = record.arithmetic() == RECORDED["arithmetic"]
    return record.differences if alike else golden.beyond_rounding


@pytest.mark.parametrize("kind", saved.KINDS)
def test_a_file_of_old_goes_on_as_it_did(kind, compare):
    found = record.noted(saved.loaded(kind))
    assert "error" not in found
    assert not compare(found, RECORDED["cases"][kind])


@pytest.mark.parametrize("kind", ["int4", "packed-int4", "ends", "packed-ends"])
def test_a_file_in_the_codes_of_old_is_refused(kind):
    with pytest.raises(
        CacheFileError, match=r"^path: expected .* in the codes of an earlier version; "
    ):
        CompressedCache.load(saved.FOLDER / f"{kind}.safetensors", golden_model("least"))


def test_a_file_of_rows_with_pads_behind_their_first_token_is_refused():
    with pytest.raises(CacheFileError, match="without padding after their first token"):
        CompressedCache.load(saved.FOLDER / "gaps.safetensors", golden_model("least"))
