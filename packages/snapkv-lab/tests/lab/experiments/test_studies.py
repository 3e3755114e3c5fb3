"""The measurements of single experiments, compared with results by hand."""

import pytest

from snapkv import FullCache
from snapkv_lab.experiments import medusa
from snapkv_lab.experiments.measuring import InterleavedTimings
from snapkv_lab.medusa import MedusaHeads, save_heads


def test_interleaved_timings_use_returned_floats_and_time_other_work():
    work = {"twice": lambda: 8.0, "own": lambda: 4.0, "else": lambda: None}
    turns = InterleavedTimings(work, rounds=3)
    assert list(turns) == list(work)
    assert turns.ms("own", 1) == {"p20": 4, "p50": 4, "p80": 4}
    assert turns.ratio("twice", "own")["p50"] == 2
    assert 0 < turns.ms("else", 6)["p50"] < 4


@pytest.mark.slow
def test_the_benchmark_of_drafts_measures_every_contender(tiny, tmp_path):
    save_heads(MedusaHeads.untrained(tiny.model, 2), tmp_path, base_model="tiny")
    own = medusa.DRAFTS
    context = own.context(small=True, loaded=tiny, heads=str(tmp_path), parts=("float32",))
    rows = list(own.measure_rows(context))
    assert {frozenset(row) for row in rows} == {frozenset(row) for row in own.results()}
    assert all(row["same_tokens"] == 6 for row in rows)
    plain, with_heads, kept, both = rows
    assert plain["acceptance_length"] == kept["acceptance_length"] == 1.0
    assert kept["held_bytes"] == both["held_bytes"] < plain["held_bytes"]
    assert with_heads["faster_than"].keys() == {"plain, full cache"}
    assert f"{both['ms_per_token']['p50']:.1f}" in own.render(rows)


def test_drafts_that_change_the_text_are_refused():
    runs = {"a": [medusa.Decoded((1,), 1.0)], "b": [medusa.Decoded((2,), 1.0)]}
    both = [medusa.DraftContender(name=name, policy=FullCache(), like="a") for name in "ab"]
    with pytest.raises(AssertionError, match="b to give the text of a"):
        medusa.require_same_texts(both, runs)
