"""How workers find a model that is a folder on this machine."""

from snapkv_lab.cli import workers
from snapkv_lab.cli.workers import WorkerOptions
from tests.lab.evaluate.tiny import save_tiny


def test_workers_get_the_absolute_path_of_a_model_folder(demo, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("snapkv_lab.evaluate.on_ray.OnRay", lambda *given: made.append(given))
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model", demo.tokenizer)
    workers.start_workers(WorkerOptions(model="model", workers=2), "auto")
    ((address, load, count),) = made
    assert (address, count) == ("auto", 2)
    assert load["name"] == str(tmp_path / "model")
    assert "device" not in load
