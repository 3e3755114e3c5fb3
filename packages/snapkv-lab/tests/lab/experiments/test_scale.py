"""The fleet on paper in its small form, and the bytes that it stands on."""

import pytest

from snapkv_lab.experiments.scale import SCALE


@pytest.fixture(scope="module")
def rows():
    few = {"rates": 2, "replicas": 1, "turns": 2, "arriving_seconds": 60.0}
    return list(SCALE.complete(SCALE.given(small=True, parts=("plan", "fleet"), **few)))


def test_rows_of_a_small_form_have_the_columns_of_the_stored_ones(rows):
    assert {frozenset(row) for row in rows} <= {frozenset(row) for row in SCALE.known()}
    assert SCALE.render(rows).count("\n## ") == 4


def test_blocks_and_bytes_by_hand(rows):
    """80 layers with 8 heads of 128 numbers, keys and values in 2 bytes; a pool of 8 GPUs."""
    token_bytes, weights = 80 * 8 * 128 * 2 * 2, 2 * 70_553_706_496
    pool = (8 * 80 * 10**9 * 9 // 10 - weights) // (16 * token_bytes)
    stock, ours = rows[:2]
    assert stock["cache_bytes"] == 131_072 * token_bytes
    assert ours["cache_bytes"] == 2048 * token_bytes
    assert stock["blocks"] == {"read": 8192, "held": 8192, "pool": pool}
    assert ours["blocks"] == {"read": 8192, "held": 128, "pool": pool}
