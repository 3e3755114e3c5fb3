"""Training of heads: they learn, a stopped run continues, and another run is refused."""

import json
from typing import ClassVar

import pytest
import torch

from snapkv import InvalidArgumentError
from snapkv_app.models import LoadedModel
from snapkv_lab.medusa import load_heads, training
from snapkv_lab.medusa.training import Exchange
from snapkv_lab.medusa_training import MedusaTraining
from snapkv_lab.rows import read_rows
from tests.families import random_ids, tiny_model
from tests.lab.medusa.heads import random_heads

PLAN = MedusaTraining(num_heads=2, answers=20, passage_tokens=8, max_new_tokens=12, epochs=8)
WORDS = " ".join(f"w{number % 97}" for number in range(400))


class _Words:
    """A tokenizer of whole words."""

    chat_template = unk_token_id = None
    added_tokens_decoder: ClassVar = {}

    def __call__(self, text, return_tensors=None, **_):
        ids = [3 + sum(map(ord, word)) % 120 for word in text.split()]
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}

    def decode(self, ids):
        return " ".join(map(str, ids))


@pytest.fixture
def loaded():
    model = tiny_model("llama")
    return LoadedModel(model=model, tokenizer=_Words(), name="tiny", revision=None)


class _StoppedError(Exception):
    pass


def stop_at(stage, number):
    def progress(what, done, total):
        if what == stage and done >= number:
            raise _StoppedError

    return progress


def ignore(*_):
    pass


def test_heads_learn_a_repeated_pattern(tmp_path):
    """Answers of random tokens can only be learned by heart."""
    model = tiny_model("llama")
    shown = [
        Exchange(
            prompt=tuple(random_ids(1, 9, seed=seed)[0].tolist()),
            answer=tuple(random_ids(1, 12, seed=100 + seed)[0].tolist()),
        )
        for seed in range(4)
    ]
    states = training._States(model, shown)
    plan = MedusaTraining(num_heads=2, epochs=60, step_answers=2, learning_rate=0.01)
    heads = training._Training(states, range(4), tmp_path, plan).run(ignore)
    for accuracies in training.measure_accuracies(heads, states, range(4), ignore):
        assert accuracies[0] > 0.7
        assert sum(accuracies) <= 1.0001
    untrained = training.measure_accuracies(
        random_heads(model, 2, scale=0.0), states, range(4), ignore
    )
    assert max(accuracies[0] for accuracies in untrained) < 0.3


def test_training_writes_loadable_heads_and_does_not_change_the_model(loaded, tmp_path):
    before = {name: weight.clone() for name, weight in loaded.model.named_parameters()}
    heads = training.train_heads(loaded, [WORDS], tmp_path, PLAN, ignore)
    for name, weight in loaded.model.named_parameters():
        assert torch.equal(weight, before[name])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["training"]["epochs"] == PLAN.epochs
    again = load_heads(str(tmp_path), loaded.model)
    assert torch.equal(again.weights, heads.weights.to(torch.bfloat16).float())
    assert again.accuracies == heads.accuracies


@pytest.mark.parametrize(("stage", "number"), [("answering", 16), ("training", 30)])
def test_a_stopped_run_ends_with_the_same_heads(loaded, tmp_path, stage, number):
    whole = training.train_heads(loaded, [WORDS], tmp_path / "whole", PLAN, ignore)
    with pytest.raises(_StoppedError):
        training.train_heads(loaded, [WORDS], tmp_path / "parts", PLAN, stop_at(stage, number))
    with (tmp_path / "parts" / "samples.jsonl").open("a") as file:
        file.write('{"sample": "1')  # cut off in the middle of a line
    parts = training.train_heads(loaded, [WORDS], tmp_path / "parts", PLAN, ignore)
    assert torch.equal(parts.weights, whole.weights)
    assert torch.equal(parts.biases, whole.biases)


def test_training_answers_equal_the_models_greedy_answers(loaded, tmp_path):
    with pytest.raises(_StoppedError):
        training.train_heads(loaded, [WORDS], tmp_path, PLAN, stop_at("training", 0))
    prompts = training._make_prompts(loaded.tokenizer, [WORDS], PLAN)
    for prompt, row in zip(prompts[:5], read_rows(tmp_path / "samples.jsonl"), strict=False):
        ids = torch.tensor([prompt])
        alone = loaded.model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert alone[0, ids.shape[1] :].tolist() == row["answer"]


@torch.no_grad()
def test_head_k_learns_the_token_k_positions_after_the_next():
    model = tiny_model("llama")
    exchange = Exchange(prompt=tuple(random_ids(1, 6)[0].tolist()), answer=(5, 6, 7, 8))
    hidden, labels = training._States(model, [exchange]).pairs([0], 2)
    assert labels.tolist() == [[6, 7], [7, 8], [8, -100], [-100, -100]]
    ids = torch.tensor([[*exchange.prompt, 5, 6, 7]])
    expected = model.model(ids).last_hidden_state[0, 5:]
    torch.testing.assert_close(hidden, expected)


def test_another_run_in_the_folder_is_refused(loaded, tmp_path):
    with pytest.raises(_StoppedError):
        training.train_heads(loaded, [WORDS], tmp_path, PLAN, stop_at("training", 0))
    other = MedusaTraining(**{**vars(PLAN), "epochs": 2})
    with pytest.raises(InvalidArgumentError, match="epochs: 8 there, 2 here"):
        training.train_heads(loaded, [WORDS], tmp_path, other, ignore)
    with pytest.raises(InvalidArgumentError, match="another data"):
        training.train_heads(loaded, [WORDS + " more" * 9], tmp_path, PLAN, ignore)
