"""What single experiments measure: by hand, or held against what is known."""

import pytest
import torch

from snapkv import FullCache, SnapKV, StreamingLLM
from snapkv.app.models import LoadedModel
from snapkv.app.prefills import Exact, Selective
from snapkv.decoding import MedusaHeads, save_heads
from snapkv_lab.experiments import medusa, selective
from snapkv_lab.experiments.measuring import Turns
from snapkv_lab.experiments.streaming import stream
from snapkv_lab.measure.timing import Spent
from tests.families import random_ids, tiny_model


def test_turns_take_a_time_at_its_word_and_time_all_else():
    work = {"spent": lambda: Spent(wall_ms=8, cpu_ms=2), "own": lambda: 4.0, "else": lambda: None}
    turns = Turns(work, rounds=3)
    assert list(turns) == list(work)
    assert turns.samples("spent", "cpu_ms") == [2, 2, 2]
    assert turns.ms("own", 1) == {"p20": 4, "p50": 4, "p80": 4}
    assert turns.ratio("spent", "own")["p50"] == 2
    assert 0 < turns.ms("else", 6)["p50"] < 4


def test_all_tokens_going_on_is_exact_reading_and_fewer_are_not(random_document):
    loaded = LoadedModel(model=tiny_model("llama"), tokenizer=None, name="tiny", revision=None)
    question = selective.Question(
        prompt=torch.tensor([random_document.prompt_ids]),
        answer=torch.tensor([random_document.answer_ids]),
    )
    ways = (Exact(), *(Selective(layer=2, keep_ratio=r, least_tokens=0) for r in (1.0, 0.1)))
    policy = SnapKV(32, window_size=8)
    exact, whole, part = selective.quality(loaded, {"made": [question] * 2}, ways, policy)
    assert (exact["prompts"], exact["prompt_tokens"]) == (2, 150)
    assert exact["loss"] == whole["loss"] != part["loss"]
    ids, ways = torch.arange(60)[None], (ways[0], ways[2])
    exact, part = selective.times(loaded.model, ids, ways, 2, policy)
    assert exact["ratio"] == {"p50": 1, "min": 1, "max": 1}
    assert len(part["samples_ms"]) == 2


def test_questions_have_their_answers_in_the_prompt_and_end_where_it_begins(tiny):
    given = selective.SELECTIVE.given(small=True, loaded=tiny)
    for task, asked in selective.questions(given).items():
        for each in asked:
            text, answer = (tiny.tokenizer.decode(ids[0]) for ids in (each.prompt, each.answer))
            assert answer.strip().isdigit(), task
            place = text.index(answer)
            assert text.endswith(text[place - 12 : place]), (task, text[-30:])


def test_chunks_do_not_matter_where_nothing_is_dropped():
    model, ids = tiny_model("llama"), random_ids(1, 100)[0].tolist()
    small, large = (stream(model, FullCache(), ids, chunk) for chunk in (7, 99))
    assert small == pytest.approx(large, rel=1e-3, abs=1e-3)
    assert len(small) == 99
    roomy = stream(model, StreamingLLM(128), ids, 7)
    assert roomy == pytest.approx(small)


@pytest.mark.slow
def test_the_benchmark_of_drafts_measures_every_contender(tiny, tmp_path):
    save_heads(MedusaHeads.untrained(tiny.model, 2), tmp_path, base_model="tiny")
    own = medusa.DRAFTS
    given = own.given(small=True, loaded=tiny, heads=str(tmp_path), parts=("float32",))
    everything = list(own.complete(given))
    assert {frozenset(row) for row in everything} == {frozenset(row) for row in own.known()}
    passes, rows = everything[:4], everything[4:]
    assert [(row["cache"], row["tokens"]) for row in passes] == [
        ("full cache", 1), ("full cache", 3), ("SnapKV", 1), ("SnapKV", 3),
    ]  # fmt: skip
    assert all(row["against_one"]["p50"] == 1 for row in passes if row["tokens"] == 1)
    assert all(row["same_tokens"] == 6 for row in rows)
    plain, with_heads, kept, both, drafted = rows
    assert plain["acceptance_length"] == kept["acceptance_length"] == 1.0
    assert kept["held_bytes"] == both["held_bytes"] < plain["held_bytes"]
    assert drafted["held_bytes"] == kept["held_bytes"] + plain["held_bytes"]
    assert with_heads["faster_than"].keys() == {"plain, full cache"}
    assert f"{both['ms_per_token']['p50']:.1f}" in own.render(everything)


def test_times_of_another_text_do_not_count():
    runs = {"a": [medusa.Decoded((1,), 1.0)], "b": [medusa.Decoded((2,), 1.0)]}
    both = [medusa.Contender(name=name, policy=FullCache(), like="a") for name in "ab"]
    with pytest.raises(AssertionError, match="b to give the text of a"):
        medusa.require_same_texts(both, runs)


def test_the_form_for_a_gpu_says_that_acceptance_is_set():
    sizes = {"lengths": (96,), "budget": 36, "tokens": 12, "rounds": 2}
    rows = list(medusa.figure_9(tiny_model("llama"), **sizes))
    assert [row["contender"] for row in rows] == [
        "plain, full cache", "Medusa, full cache", "plain, snapkv@36", "Medusa, snapkv@36",
    ]  # fmt: skip
    assert all(row["acceptance"] == "set, not measured" for row in rows)
    assert rows[0]["acceptance_length"] == 1.0
    assert rows[1]["acceptance_length"] > 1.2
