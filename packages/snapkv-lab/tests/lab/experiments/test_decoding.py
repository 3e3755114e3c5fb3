"""The benchmark of Fig. 9: its small form runs, and its rows make its page."""

import pytest

from snapkv.decoding import MedusaHeads, save_heads
from snapkv_lab.experiments import medusa, medusa_gpu
from tests.families import tiny_model

ENVIRONMENT = dict.fromkeys(("processor", "threads", "torch", "transformers", "commit"), "")


@pytest.mark.slow
def test_the_small_form_measures_every_contender(demo, tmp_path, monkeypatch):
    save_heads(MedusaHeads.untrained(demo.model, 2), tmp_path, base_model="demo")
    monkeypatch.setattr(medusa, "load", lambda _, dtype: demo)
    sizes = medusa.Sizes(
        lengths={"float32": (96,)},
        budget=48,
        tokens=6,
        rounds=2,
        pass_tokens=(1, 3),
        pass_prompt_tokens=96,
        pass_rounds=2,
    )
    everything = list(medusa.measure(sizes, str(tmp_path), "float32"))
    rows = [row for row in everything if row["benchmark"] == "medusa"]
    passes = [row for row in everything if row["benchmark"] == "pass"]
    assert [(row["cache"], row["tokens"]) for row in passes] == [
        ("full cache", 1), ("full cache", 3), ("SnapKV", 1), ("SnapKV", 3),
    ]  # fmt: skip
    assert all(row["against_one"]["p50"] == 1 for row in passes if row["tokens"] == 1)
    assert all(row["same_tokens"] == 6 for row in rows)
    assert [row["contender"] for row in rows] == [
        "plain, full cache",
        "Medusa, full cache",
        "plain, SnapKV",
        "Medusa, SnapKV",
        "self-speculation, SnapKV drafts",
    ]
    plain, with_heads, kept, both, drafted = rows
    assert all(95 <= row["prompt_tokens"] <= 97 for row in rows)
    assert plain["acceptance_length"] == kept["acceptance_length"] == 1.0
    assert drafted["acceptance_length"] > 1.0
    assert kept["held_bytes"] == both["held_bytes"] < plain["held_bytes"]
    assert drafted["held_bytes"] == kept["held_bytes"] + plain["held_bytes"]
    assert with_heads["faster_than"].keys() == {"plain, full cache"}
    page = medusa.EXPERIMENT.render([row | {"environment": ENVIRONMENT} for row in everything])
    assert f"{both['ms_per_token']['p50']:.1f}" in page


def test_times_of_another_text_do_not_count():
    ran = medusa.Decoded(tokens=(1,), ms_per_token=1.0, acceptance_length=1.0, held_bytes=1)
    other = medusa.Decoded(tokens=(2,), ms_per_token=1.0, acceptance_length=1.0, held_bytes=1)
    one = medusa.Contender(name="a", policy=None, like="a")
    two = medusa.Contender(name="b", policy=None, like="a")
    with pytest.raises(AssertionError, match="b to give the text of a"):
        medusa._require_same_texts([one, two], {"a": [ran], "b": [other]})


def test_the_form_for_a_gpu_says_that_acceptance_is_set():
    rows = list(
        medusa_gpu.figure_9(tiny_model("llama"), lengths=(96,), budget=36, tokens=12, rounds=2)
    )
    assert [row["contender"] for row in rows] == [
        "plain, full cache", "Medusa, full cache", "plain, snapkv@36", "Medusa, snapkv@36",
    ]  # fmt: skip
    assert all(row["acceptance"] == "set, not measured" for row in rows)
    assert rows[0]["acceptance_length"] == 1.0
    assert rows[1]["acceptance_length"] > 1.2
