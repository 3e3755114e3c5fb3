"""The study of the gate: its regression against one written out, and the use of the gate."""

from dataclasses import replace

import torch

from snapkv import CompressedCache, KVzap
from snapkv.hf.known_gates import known_gate
from snapkv.policies.gate import features, read_gate
from snapkv_lab.study.gate import KINDS, LAST, RIDGE, SINKS, FitGate, Regression
from tests.gates import drawn_gate
from tests.ops.states import random_layer

SMALL = FitGate(texts=2 * len(KINDS), lengths=(128, 140))


def layers_of(gate, seed, tokens, noise=0.0):
    """Return layers whose scores from a second reading nearly equal those of the gate."""
    made = []
    for depth in range(gate.layers):
        layer = random_layer(seed + depth, prompt_tokens=tokens, query_tokens=0)
        layer = replace(layer, depth=depth, num_layers=gate.layers)
        scores = 0.1 * gate.log_scores(layer)
        drawn = torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed))
        made.append(replace(layer, received=(scores + noise * drawn).exp()))
    return made


def test_regression_equals_ridge_regression_on_standardised_numbers():
    gate, fitted = drawn_gate(layers=2), Regression()
    texts = [layers_of(gate, 10 * n, tokens, noise=0.5) for n, tokens in enumerate((60, 90, 200))]
    for layers in texts:
        fitted.add(layers)
    own = [slice(SINKS, layers[0].keys.shape[2] - LAST) for layers in texts]
    for depth in range(2):
        both = [layers[depth] for layers in texts]
        looked_at = torch.cat([features(x, s)[0] for x, s in zip(both, own, strict=True)], dim=1)
        scores = torch.cat([x.received[0, :, s] for x, s in zip(both, own, strict=True)], dim=1)
        for head in range(2):
            X, y = looked_at[head, :, :-1].double(), scores[head].double().log()
            mean, spread = X.mean(dim=0), X.std(dim=0, correction=0)
            Z = (X - mean) / spread
            inner = Z.T @ Z + RIDGE * len(Z) * torch.eye(Z.shape[1]).double()
            slope = torch.linalg.solve(inner, Z.T @ (y - y.mean())) / spread
            expected = torch.cat([slope, (y.mean() - mean @ slope)[None]])
            torch.testing.assert_close(fitted.weights()[depth, head], expected)


def test_fitted_gate_is_stored_if_requested_and_used_by_the_policy(tiny, gates, tmp_path):
    found = SMALL.measure(tiny, tmp_path / "out")
    assert {row["kind"] for row in found.rows} == set(KINDS)
    assert len(SMALL.table(found.rows).rows) == len(KINDS)
    (stored,) = gates.iterdir()
    assert str(stored) in found.closing
    gate = known_gate(tiny.model)
    assert gate == read_gate(tmp_path / "out" / "gate.safetensors")
    assert CompressedCache(tiny.model, KVzap(40)).policy.gate == gate
    stored.unlink()
    assert "gate=" in replace(SMALL, remember=False).measure(tiny, tmp_path / "own").closing
    assert read_gate(tmp_path / "own" / "gate.safetensors") == gate
    assert known_gate(tiny.model) is None
