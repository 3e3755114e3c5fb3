"""Later turns: which tokens they vote on, and when they are refused."""

import pytest
import torch

from snapkv import (
    AdaKV,
    AutoBudget,
    CacheMismatchError,
    CompressedCache,
    ExpectedAttention,
    InvalidArgumentError,
    PyramidKV,
    SnapKV,
)
from snapkv.cache import layer_group
from tests.cache.rows import Rows
from tests.families import CLOSE, call, peaked_model, random_ids, tiny_config, tiny_model
from tests.methods import METHODS
from tests.oracle import masked_decode_logits

DOCUMENT, BUDGET, WINDOW = 90, 40, 8
POLICY = SnapKV(BUDGET, window_size=WINDOW, kernel_size=5)


def turn(model, cache, ids):
    cache.expect_prompt(cache.get_seq_length() + ids.shape[1])
    return call(model, cache, ids)


def test_later_turn_votes_on_the_stored_slots_with_the_policy():
    model, shown, select = tiny_model("llama"), [], SnapKV.select
    cache = CompressedCache(model, POLICY, turns="compress")
    call(model, cache, random_ids(1, DOCUMENT))

    class Shown(SnapKV):
        def select(self, layer):
            shown.append((layer, select(POLICY, layer)))
            return shown[-1][1]

    before = cache.kept_positions(1)
    cache.layers[1].policy = Shown(BUDGET, window_size=WINDOW)
    turn(model, cache, random_ids(1, 5, 1))
    (layer, selection), columns = shown[0], torch.arange(DOCUMENT, DOCUMENT + 5).expand(1, 2, -1)
    assert layer.keys.shape[2] == BUDGET + 5
    assert layer.queries.shape[2] == WINDOW  # three of them of the turn before
    stored = torch.cat([before, columns], dim=-1)
    assert torch.equal(cache.kept_positions(1), stored.gather(2, selection.keep_indices))


def test_turn_is_refused_if_the_method_needs_queries_of_an_uncompressed_prompt():
    """Both prompts would be selected from together, but the queries of the first are gone."""
    model = tiny_model("llama")
    cache = CompressedCache(model, ExpectedAttention(40, window_size=8))
    call(model, cache, random_ids(1, 33))
    said = "expected-attention needs the queries of earlier turns .* at 45 tok"
    with pytest.raises(InvalidArgumentError, match=said):
        cache.expect_prompt(45)
    cut = CompressedCache(model, ExpectedAttention(40, window_size=8))
    call(model, cut, random_ids(1, 60))
    cut.expect_prompt(72)
    call(model, cut, random_ids(1, 12))
    assert cut.report().kept_tokens == 52


PICK = {"window_size": 8, "kernel_size": 5}
KEPT_WHOLE = {
    "snapkv": METHODS["snapkv"],
    "adakv": METHODS["adakv"],
    "pyramidkv": METHODS["pyramidkv"],
    "adakv-auto": AdaKV(SnapKV(AutoBudget(lost_vote=0.012, least=4), **PICK)),
    "snapkv-auto": SnapKV(AutoBudget(lost_vote=0.016, least=4), **PICK),
}


@pytest.mark.parametrize("name", KEPT_WHOLE)
def test_turn_is_refused_if_only_some_rows_have_kept_everything(name):
    """Alone, that row would be compressed at the end of the turn, unlike the other rows."""
    prompt = random_ids(2, 60, 1)
    prompt[0] = prompt[0, 0]
    rows = Rows(KEPT_WHOLE[name], {}, [40, 0] if name in METHODS else [0, 0])
    rows.turn(prompt, 60, random_ids(2, 2, 2))
    kept = [rows.cache.kept_positions(layer) for layer in rows.cache.compressed_layers]
    with pytest.raises(CacheMismatchError, match=r"1 of the 2 rows have kept .*\. Use a separate"):
        rows.cache.expect_prompt(70)
    rows.read(random_ids(2, 1, 3))  # an answer goes on
    for layer, before in zip(rows.cache.compressed_layers, kept, strict=True):
        assert torch.equal(rows.cache.kept_positions(layer)[..., :-1], before)


@pytest.mark.parametrize("waiting_bytes", [0, 1 << 30])
def test_turn_after_a_prompt_kept_whole_by_some_layers_equals_the_oracle(
    waiting_bytes, monkeypatch
):
    """Layers that kept the prompt whole compress it with the turn; the others append the turn.

    The next token is accepted: the pass does not count as interrupted.
    """
    monkeypatch.setattr(layer_group, "MOST_BYTES", {"cpu": waiting_bytes})
    model, ids = peaked_model(tiny_config("llama", num_hidden_layers=8), "sdpa"), random_ids(1, 70)
    cache = CompressedCache(model, PyramidKV(59, window_size=WINDOW))
    call(model, cache, ids[:, :60])
    whole = [layer.slots.kept is None for layer in cache.layers]
    assert whole == [True] * 2 + [False] * 6
    expected = masked_decode_logits(model, cache, ids[:, :60], ids[:, 60:])
    torch.testing.assert_close(turn(model, cache, ids[:, 60:]), expected, **CLOSE)
    assert cache.layers[1].state.lost_mass is not None
    call(model, cache, random_ids(1, 1, 1))
