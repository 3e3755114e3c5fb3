"""KVzap: worked scores, scores by plain loops, files of gates, and refusals."""

import math
import random

import pytest
import torch

from snapkv import (
    AdaKV,
    CompressedCache,
    InvalidArgumentError,
    InvalidTypeError,
    KVzap,
    UnsupportedModelError,
)
from snapkv.hf.identity import digest_of
from snapkv.hf.known_gates import known_gate, remember_gate
from snapkv.policies.gate import Gate, read_gate
from tests.families import kept_of, random_ids, read, tiny_model
from tests.gates import drawn_gate
from tests.ops.states import pad_left, random_layer, rotate, worked_layer


def test_scores_equal_a_worked_example():
    """Two tokens precede a window of one; keys have two numbers without rotation, values one."""
    weights = [1, 10, 100, 0, 1000, 0, 2, 3, 4, 5, 6]  # keys, squares, value, norms, places, 1
    layer = worked_layer(
        keys=torch.tensor([[[[3.0, 4.0], [0.0, 2.0], [9.0, 9.0]]]]),
        values=torch.tensor([[[[1.0], [-0.5], [9.0]]]]),
        rotation=lambda states, _: states.float(),
    )
    gate = Gate.of(torch.tensor(weights)[None, None], 2, 1)
    first = 3 + 40 + 900 + 1000 + 0 * math.log(5) + 2 * math.log(1)
    first += 3 * math.log(1) + 4 * 0 / 3 + 5 * math.log(3) + 6
    second = 0 + 20 + 0 - 500 + 0 * math.log(2) + 2 * math.log(0.5)
    second += 3 * math.log(2) + 4 * 1 / 3 + 5 * math.log(2) + 6
    policy = KVzap(2, window_size=1, sink_tokens=0, gate=gate)
    assert policy.score(layer)[0, 0].tolist() == pytest.approx([first, second])
    assert policy.select(layer).keep_indices.tolist() == [[[0, 2]]]


def plain_scores(gate, layer):
    """Compute the scores of an unpadded row by plain loops, (heads, T)."""
    T = layer.keys.shape[2]
    keys = rotate(layer.keys, -torch.arange(T)[None])[0].tolist()
    values, weights = layer.values[0].tolist(), gate.weights[layer.depth].tolist()
    scores = []
    for own_keys, own_values, own in zip(keys, values, weights, strict=True):
        scores.append([])
        for i, (key, value) in enumerate(zip(own_keys, own_values, strict=True)):
            seen = [*key, *(x * x for x in key), *value]
            seen += [math.log(math.hypot(*key)), math.log(math.hypot(*value))]
            seen += [math.log(i + 1), i / T, math.log(T - i), 1.0]
            scores[-1].append(sum(w * x for w, x in zip(own, seen, strict=True)))
    return scores


def test_scores_of_padded_rows_in_pieces_equal_those_of_plain_loops(monkeypatch):
    monkeypatch.setattr("snapkv.policies.gate._AT_ONCE", 7)
    gate = drawn_gate(layers=1)
    rows = [random_layer(seed, prompt_tokens=n, query_tokens=0) for seed, n in ((3, 20), (4, 9))]
    together = gate.log_scores(pad_left(rows, query_tokens=0, extra=2))
    for row, layer in enumerate(rows):
        expected = torch.tensor(plain_scores(gate, layer))
        found = together[row, :, -layer.keys.shape[2] :]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_gate_is_read_from_its_file_and_a_damaged_file_is_refused(tmp_path):
    gate, path = drawn_gate(layers=2, heads=1, size=2, model="ab"), tmp_path / "gate"
    content = gate.as_file()
    path.write_bytes(content)
    assert KVzap(gate=path).gate == gate == KVzap(gate=str(path)).gate
    draw = random.Random(0)
    for at in range(0, len(content), 3):
        changed = bytearray(content)
        changed[at] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(InvalidArgumentError, match="gate: "):
            read_gate(path)
    for cut in (0, 7, 100, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(
            InvalidArgumentError, match=r"gate: .*is not a valid gate, or it is damaged"
        ):
            read_gate(path)


def test_invalid_gates_are_refused(tmp_path, monkeypatch):
    for given, error, said in (
        (tmp_path / "none", InvalidArgumentError, "could not be read"),
        (tmp_path, InvalidArgumentError, "could not be read"),
        (7, InvalidTypeError, "of type int"),
        ({"layers": 1}, InvalidArgumentError, "the saved gate is not a valid gate"),
    ):
        with pytest.raises(error, match=f"^gate: .*{said}"):
            KVzap(gate=given)
    with pytest.raises(InvalidArgumentError, match="expected 24 bytes for"):
        Gate(layers=1, heads=1, key_size=2, value_size=2, data=b"12")
    with pytest.raises(InvalidArgumentError, match="finite"):
        Gate.of(torch.full((1, 1, 12), 1e9), 2, 2)
    (tmp_path / "large").write_bytes(drawn_gate().as_file())
    monkeypatch.setattr("snapkv.policies.gate.MOST_BYTES", 100)
    with pytest.raises(InvalidArgumentError, match="more than 100 bytes"):
        read_gate(tmp_path / "large")


def test_selection_without_a_gate_or_with_one_of_other_sizes_is_refused():
    layer = random_layer(0, prompt_tokens=20, query_tokens=0)
    for gate in (drawn_gate(1, 3), drawn_gate(1, 2, 4), drawn_gate(2)):
        with pytest.raises(InvalidArgumentError, match=r"gate: expected \(.* of the model"):
            KVzap(8, window_size=2, gate=gate).select(layer)
    with pytest.raises(InvalidArgumentError, match="gate: expected a gate that was"):
        KVzap(8, window_size=2).select(layer)


def test_model_uses_its_own_gate_and_refuses_those_of_other_models(gates, tmp_path):
    model, other = tiny_model("llama"), tiny_model("qwen2")
    with pytest.raises(UnsupportedModelError, match="Run `snapkv study fit-gate"):
        CompressedCache(model, AdaKV(KVzap(24, window_size=4)))
    gate = drawn_gate(model=digest_of(model))
    assert remember_gate(gate).parent == gates
    assert known_gate(model) == gate
    assert known_gate(other) is None
    with pytest.raises(InvalidArgumentError, match="got the gate of another"):
        CompressedCache(other, KVzap(24, gate=gate, window_size=4))


@pytest.mark.parametrize("around", [lambda p: p, AdaKV], ids=["alone", "adakv"])
def test_saved_cache_contains_its_gate(gates, tmp_path, around):
    model, ids = tiny_model("llama"), random_ids(1, 60)
    stored = remember_gate(drawn_gate(model=digest_of(model)))
    cache = read(model, around(KVzap(24, window_size=4)), ids)
    cache.save(tmp_path / "cache")
    stored.unlink()
    loaded = CompressedCache.load(tmp_path / "cache", model)
    assert loaded.policy == cache.policy
    assert len(str(loaded.policy.describe())) < 400
    assert kept_of(loaded) == kept_of(cache)


def test_demo_model_has_a_gate(demo):
    gate = known_gate(demo.model)
    assert gate is not None
    assert CompressedCache(demo.model, KVzap(40, window_size=8)).policy.gate == gate
