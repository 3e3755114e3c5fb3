"""Heads: their computation, files in every published layout, and refusals with their reason."""

import io
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from snapkv import CompressedCache, InvalidArgumentError, SnapKV
from snapkv_lab.medusa import Medusa, MedusaHeads, load_heads, save_heads
from snapkv_lab.medusa.heads import __file__ as heads_file
from tests.families import VOCABULARY, tiny_model
from tests.lab.medusa.heads import random_heads
from tests.pairs import pairs

D = 64


def own_layout(heads=2, layers=1):
    """Return tensors {k}.{i}.linear.* with a vocabulary matrix per head."""
    tensors = shared_layout(heads, layers)
    for head in range(heads):
        tensors[f"{head}.{layers}.weight"] = torch.randn(VOCABULARY, D)
    return tensors


def shared_layout(heads=2, layers=1):
    return {
        f"{head}.{layer}.linear.{kind}": torch.randn(D, D) if kind == "weight" else torch.randn(D)
        for head in range(heads)
        for layer in range(layers)
        for kind in ("weight", "bias")
    }


def write(folder, tensors, *, pickled=False, **config):
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1} | config
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    return str(folder)


def by_hand(model, tensors, head, layers, h):
    for layer in range(layers):
        turned = tensors[f"{head}.{layer}.linear.weight"] @ h
        h = h + torch.nn.functional.silu(turned + tensors[f"{head}.{layer}.linear.bias"])
    projection = tensors.get(f"{head}.{layers}.weight", model.get_output_embeddings().weight)
    return projection @ h


@pairs(
    layout={"own": own_layout, "shared": shared_layout},
    layers=(1, 2),
    pickled={"safetensors": False, "pt": True},
)
@torch.no_grad()
def test_heads_of_both_layouts_compute_the_documented_formula(tmp_path, layout, layers, pickled):
    model, tensors = tiny_model("llama"), layout(2, layers)
    heads = load_heads(write(tmp_path, tensors, pickled=pickled, medusa_num_layers=layers), model)
    hidden = torch.randn(3, D)
    for row, state in zip(heads(hidden), hidden, strict=True):
        for head in range(2):
            expected = by_hand(model, tensors, head, layers, state)
            torch.testing.assert_close(row[head], expected, rtol=1e-4, atol=1e-3)
    best = heads.guesses(hidden[0])
    assert torch.equal(best[:, 0], heads(hidden[0]).argmax(-1))


@torch.no_grad()
def test_heads_of_zeros_draft_as_the_model_does():
    model = tiny_model("llama")
    hidden = torch.randn(D)
    for logits in MedusaHeads.untrained(model, 3)(hidden):
        torch.testing.assert_close(logits, model.get_output_embeddings()(hidden))


@torch.no_grad()
@pytest.mark.parametrize("layout", [own_layout, shared_layout])
def test_saved_heads_of_both_layouts_are_loaded_unchanged(tmp_path, layout):
    model = tiny_model("llama")
    (tmp_path / "given").mkdir()
    heads = load_heads(write(tmp_path / "given", layout()), model)
    save_heads(heads, tmp_path / "saved", base_model="tiny")
    again = load_heads(str(tmp_path / "saved"), model)
    written = {name: tensor.bfloat16().float() for name, tensor in heads.state_dict().items()}
    assert again.state_dict().keys() == written.keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, written[name]), name


@torch.no_grad()
def test_saved_heads_keep_their_accuracies_and_notes(tmp_path):
    model = tiny_model("llama")
    heads = random_heads(model)
    heads.accuracies = ((0.5, 0.2),) * 3
    save_heads(heads, tmp_path, base_model="tiny", note="by hand")
    again = load_heads(str(tmp_path), model)
    assert again.accuracies == heads.accuracies
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["version"], config["medusa_num_heads"], config["note"]) == ("2", 3, "by hand")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "medusa_lm_head.safetensors",
    ]  # fmt: skip


def test_package_contains_the_heads_of_the_demo_model(demo):
    heads = load_heads("demo", demo.model)
    assert heads.num_heads == 3
    folder = Path(heads_file).parent / "demo_heads"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4 * 2**20
    firsts = [ranks[0] for ranks in heads.accuracies]
    assert firsts == sorted(firsts, reverse=True)
    prompt = demo.tokenizer("Count: one, two, three, one, two, three, " * 4, return_tensors="pt")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    texts, medusa = [], Medusa(heads)
    for custom in (None, medusa):
        cache = CompressedCache(demo.model, SnapKV(32, window_size=16))
        texts.append(
            demo.model.generate(**prompt, past_key_values=cache, custom_generate=custom, **options)
        )
    assert torch.equal(*texts)
    assert medusa.tally.accepted > 0


def _changed(tensors, **changes):
    return {key: value for key, value in (tensors | changes).items() if value is not None}


BROKEN = {
    "too few heads": (shared_layout(1), {}, "2 others such as 1.0.linear.bias, missing instead"),
    "too many heads": (shared_layout(3), {}, "2 others such as 2.0.linear.bias.* of none"),
    "half a vocabulary": (
        _changed(own_layout(), **{"1.1.weight": None}),
        {},
        "1.1.weight, missing",
    ),
    "another layer": (shared_layout(2, 2), {}, "instead of none"),
    "a foreign tensor": (_changed(shared_layout(), x=torch.zeros(1)), {}, "1 others such as x"),
    "another width": (
        _changed(shared_layout(), **{"1.0.linear.weight": torch.zeros(D, 32)}),
        {},
        r"64 hidden units.*1.0.linear.weight, \(64, 32\) instead of \(64, 64\)",
    ),
    "another vocabulary": (
        _changed(own_layout(), **{"0.1.weight": torch.zeros(50, D)}),
        {},
        r"0.1.weight, \(50, 64\) instead of \(128, 64\)",
    ),
    "no count": (shared_layout(), {"medusa_num_heads": None}, "medusa_num_heads: expected a pos"),
    "count of text": (shared_layout(), {"medusa_num_heads": "2"}, "positive integer"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_heads_file_with_missing_or_unknown_tensors_is_refused(tmp_path, fault):
    tensors, config, message = BROKEN[fault]
    with pytest.raises(InvalidArgumentError, match=message):
        load_heads(write(tmp_path, tensors, **config), tiny_model("llama"))


class _Harmful:
    def __reduce__(self):
        return print, ("run!",)


def test_a_pickle_that_runs_code_is_refused(tmp_path, capsys):
    write(tmp_path, {})
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    torch.save(_Harmful(), saved := io.BytesIO())
    for content in (saved.getvalue(), pickle.dumps(_Harmful(), protocol=2), b"garbage", b""):
        (tmp_path / "medusa_lm_head.pt").write_bytes(content)
        with pytest.raises(InvalidArgumentError, match=r"nothing but tensors.*safetensors"):
            load_heads(str(tmp_path), tiny_model("llama"))
    assert capsys.readouterr().out == ""


def test_folders_without_heads_are_refused(tmp_path):
    model = tiny_model("llama")
    for source in (str(tmp_path / "missing"), "./demo", "nowhere", "a/b/c"):
        with pytest.raises(InvalidArgumentError, match="medusa: expected 'demo', a folder"):
            load_heads(source, model)
    for name, content, said in (
        ("notes", "", r"config\.json in .* could not be read"),
        ("config.json", "[]", "no object"),
        ("config.json", '{"medusa_num_heads": 2}', "got neither"),
        ("medusa_lm_head.safetensors", "garbage", "complete safetensors"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(InvalidArgumentError, match=said):
            load_heads(str(tmp_path), model)
