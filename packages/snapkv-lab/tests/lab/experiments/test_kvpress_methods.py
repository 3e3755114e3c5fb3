"""Methods beside kvpress's presses on the same tensors; `make kvpress` installs it."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from snapkv import LagKV
from snapkv.kvpress_names import instead_of
from snapkv.policies.criticalkv import projected_norms
from snapkv.policies.kvzip import most_attention
from snapkv_lab.experiments.kvpress import PYTHON
from tests.ops.states import output_weight, random_layer
from tests.test_pages import migrations

pytestmark = pytest.mark.kvpress

_SCORES = Path(__file__).with_name("kvpress_scores.py")


@pytest.fixture
def press(tmp_path):
    """The scores that a press gives to tensors, (B, Hkv, T) float32."""

    def score(name, options, **states):
        given, found = tmp_path / "given", tmp_path / "found"
        tensors = {label: tensor.contiguous() for label, tensor in states.items()}
        save_file(tensors, given, metadata={"options": json.dumps(options)})
        subprocess.run([PYTHON, "-I", _SCORES, name, given, found], check=True)
        return load_file(found)["scores"]

    return score


def test_an_import_of_a_press_says_what_to_write_instead():
    listed = "import kvpress; print(*kvpress.__all__)"
    run = [PYTHON, "-I", "-c", listed]
    names = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    for name in (name for name in names if name.endswith("Press")):
        assert re.match("write |use |there is no: ", instead_of(name)), name


def test_the_presses_that_the_page_replaces_can_be_made():
    theirs = [press for press, _ in migrations()]
    assert len(theirs) > 10
    code = "from kvpress import *\n" + "\n".join(theirs)
    subprocess.run([PYTHON, "-I", "-c", code], check=True)


@pytest.mark.parametrize("tokens", [300, 288, 47])
@pytest.mark.parametrize("cross_scoring", [False, True])
def test_lagkv_ranks_and_rates_as_there(press, tokens, cross_scoring):
    layer = random_layer(tokens, batch=2, prompt_tokens=tokens, query_tokens=1, head_dim=16)
    policy = LagKV(100, window_size=1, lag_size=32, sink_tokens=6, cross_scoring=cross_scoring)
    options = {"n_sink": 6, "lag_size": 32, "cross_scoring": cross_scoring}
    theirs = press("lagkv", options, keys=layer.keys, values=layer.values)
    ours = policy.score(layer)
    rated = 6 + max(0, (tokens - 6) // 32 - 1) * 32
    if cross_scoring or rated == 6:
        torch.testing.assert_close(ours[..., 6:rated], theirs[..., 6:rated])
    else:  # a rank, and what decides among equal ones
        ranks = (ours[..., 6:rated] * 32).floor() / 32
        torch.testing.assert_close(ranks, theirs[..., 6:rated])
    if rated > 6:
        assert bool((theirs[..., rated:] == 1).all())
        assert float(theirs[..., 6:rated].max()) < 1
    else:  # too short for a lag: the newest, in both
        assert bool((theirs[..., 6:].diff() > 0).all())
    assert bool((ours[..., rated:].diff() > 0).all())
    assert float(ours[..., rated:].min()) > 1


def test_kvzip_plus_scores_a_text_in_one_piece_as_there(press):
    layer = random_layer(4, prompt_tokens=150, query_tokens=60, head_dim=16)
    weight = output_weight(4 * 16, hidden=4 * 16)
    layer = replace(layer, output_weight=weight)
    states = {"queries": layer.queries, "keys": layer.keys, "values": layer.values}
    theirs = press("kvzip+", {}, **states, output_weight=weight)
    ours = most_attention(
        layer,
        90,
        query_norms=layer.queries.transpose(1, 2).flatten(2).norm(dim=-1),
        value_norms=projected_norms(layer, 90, lambda added: added.norm(dim=-1)),
    )
    torch.testing.assert_close(ours, theirs)
    assert not torch.allclose(ours, most_attention(layer, 90))
