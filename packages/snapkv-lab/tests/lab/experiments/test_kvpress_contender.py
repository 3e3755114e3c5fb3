"""The real kvpress in its own environment, which `make kvpress` makes."""

import re
import subprocess

import pytest
import torch

from snapkv import CompressedCache, FullCache, SnapKV
from snapkv.kvpress_names import instead_of
from snapkv_app.models import LoadedModel
from snapkv_lab.experiments.kvpress import PYTHON, Kvpress
from snapkv_lab.experiments.texts import PromptCases, ReadText, TextQuestion
from snapkv_lab.experiments.ways import Answers, Ours, Theirs
from tests.families import random_ids, tiny_model
from tests.test_pages import migrations

pytestmark = [
    pytest.mark.kvpress,
    pytest.mark.filterwarnings("ignore"),  # transformers on what is saved
]

POLICY = SnapKV(64, window_size=16, kernel_size=5, pooling="avg")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_kvpress_generates_the_same_tokens_as_snapkv(family):
    """With the same budget the same positions are kept, and the full cache gives other tokens."""
    model, ids = tiny_model(family), random_ids(2, 300)
    cache = CompressedCache(model, POLICY)
    ours = model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False)[:, 300:]
    with Kvpress(PYTHON, model, POLICY) as theirs:
        theirs.read(ids)
        assert theirs.last["kept_tokens"] == 64
        theirs(24)
        assert theirs.last["tokens"] == ours.tolist()
    full = model.generate(ids, max_new_tokens=24, do_sample=False)[:, 300:]
    assert not torch.equal(full, ours)


@pytest.mark.parametrize("between", [[], [5, 6]])
def test_kvpress_scores_an_answer_as_snapkv_does(between):
    """The same selection with equally many bytes gives the same answers, also if asked again."""
    model, ids = tiny_model("llama"), random_ids(1, 200)
    case = TextQuestion(group="g", answer_ids=[3, 7, 9], parts=[[0], [1, 2]], between_ids=between)
    prompt = ReadText(model, ids[0].tolist()).prompt
    asked = PromptCases(prompt, ids, [case, case])
    same = Ours("ours", lambda _: SnapKV(100, window_size=64, kernel_size=5, pooling="avg"))
    whole = Ours("ours", lambda _: FullCache())
    with Kvpress(PYTHON, model) as theirs:
        answers = Answers(
            LoadedModel(model=model, tokenizer=None, name="tiny", revision=None), theirs
        )
        for share, press, ours in ((0.5, "SnapKVPress", same), (1.0, None, whole)):
            here, again = answers.rows(ours, share, asked)
            for there in answers.rows(Theirs("ours", press), share, asked):
                assert there == here | {"nll": pytest.approx(here["nll"], abs=2e-4)}
            assert here == again
            assert here["held"] == share
        (few, _) = answers.rows(Theirs("few", "SnapKVPress", 4), 1 / 8, asked)
        assert few["held"] == pytest.approx(1 / 8, abs=0.02)


def test_error_for_every_press_names_its_replacement():
    run = [PYTHON, "-I", "-c", "import kvpress; print(*kvpress.__all__)"]
    names = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    for name in (name for name in names if name.endswith("Press")):
        assert re.match("Write |Use |There is none: ", instead_of(name)), name


def test_presses_on_the_migration_page_can_be_created():
    theirs = [press for press, _ in migrations()]
    assert len(theirs) > 10
    code = "from kvpress import *\n" + "\n".join(theirs)
    subprocess.run([PYTHON, "-I", "-c", code], check=True)
