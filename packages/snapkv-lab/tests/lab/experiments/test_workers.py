"""The measurement of two workers beside one, small: what a row says, and the page of it."""

import pytest

from snapkv.app.models import load
from snapkv_lab.experiments import workers
from snapkv_lab.experiments.environment import describe_environment
from tests.lab.evaluate.tiny import save_tiny


@pytest.mark.slow
def test_a_small_grid_gives_a_row_and_a_page(tmp_path, demo):
    loaded = load(str(save_tiny(tmp_path, demo.tokenizer)), device="cpu")
    small = {"lengths": (300, 320), "depths": 2, "budget": 64, "rounds": 2}
    (row,) = workers.measure(loaded, **small)
    assert (row["prompts"], row["answers"], row["threads_each"]) == (4, 8, 1)
    assert row["one_ms"]["p50"] > 0
    low, high = (row["one_ms"][f"p{a}"] / row["two_ms"][f"p{b}"] for a, b in ((20, 80), (80, 20)))
    assert low - 0.01 <= row["speedup"]["p50"] <= high + 0.01
    named = {"model": loaded.description(), "environment": describe_environment()}
    page = workers.EXPERIMENT.render([row | named])
    assert f"| 300, 320 | 8 | {row['one_ms']['p50'] / 1000:.1f} |" in page
    assert f"| {row['speedup']['p50']:.2f} |" in page


def test_other_answers_of_two_workers_are_no_result(monkeypatch, demo):
    def other(run, pool):
        return lambda: (1.0, [{"prediction": len(pool._workers)}])

    monkeypatch.setattr(workers, "_evaluation", other)
    monkeypatch.setattr(workers, "_load_in", lambda *_: None)
    with pytest.raises(ValueError, match="the same answers of one worker and of two"):
        list(workers.measure(demo, lengths=(300,), depths=1))
