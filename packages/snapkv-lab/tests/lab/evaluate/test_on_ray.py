"""Workers on Ray: the folder of one process, whoever dies. `make test-sweeps` brings Ray."""

from dataclasses import replace

import pytest

from snapkv.app.models import load
from snapkv.errors import InvalidArgumentError
from snapkv_lab.evaluate.runner import Run
from snapkv_lab.evaluate.store import LOST, key
from snapkv_lab.evaluate.workers import on_ray
from snapkv_lab.evaluate.workers.base import Equipment, WorkerEndedError, WorkerNotLoadedError
from snapkv_lab.evaluate.workers.on_ray import OnRay
from tests.lab.evaluate.test_runner import records
from tests.lab.evaluate.test_workers import TASK
from tests.lab.evaluate.tiny import METHODS, save_tiny, untimed

pytestmark = pytest.mark.sweeps


@pytest.fixture(scope="module")
def folder(tmp_path_factory, demo):
    return save_tiny(tmp_path_factory.mktemp("model"), demo.tokenizer)


@pytest.fixture(scope="module")
def run(folder):
    return Run(
        loaded=load(str(folder)), task=TASK, methods=METHODS, questions=("visible", "hidden")
    )


@pytest.fixture(scope="module")
def expected(run, tmp_path_factory):
    place = tmp_path_factory.mktemp("serial")
    return run.into(place), place


@pytest.fixture
def equipment(folder):
    return Equipment(load={"name": str(folder)})


@pytest.fixture
def cluster():
    """Two nodes on the loopback of this machine."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    second = nodes.add_node(num_cpus=1, num_gpus=0)
    nodes.wait_for_nodes()
    yield nodes, second
    ray.shutdown()
    nodes.shutdown()


def by_key(folder):
    return {key(record): record for record in untimed(records(folder))}


def assert_same(given, folder, expected):
    results, place = expected
    assert by_key(folder) == by_key(place)
    assert untimed(given.rows) == untimed(results.rows)
    assert (folder / "run.json").read_bytes() == (place / "run.json").read_bytes()


def test_two_workers_leave_the_folder_that_one_process_leaves(run, equipment, expected, tmp_path):
    with OnRay("local", equipment, workers=2) as pool:
        there = replace(run, loaded=replace(run.loaded, answers_on=pool.device))
        given = there.into(tmp_path, executor=pool)
    assert_same(given, tmp_path, expected)


def test_killed_workers_change_nothing(run, equipment, expected, tmp_path):
    import ray

    with OnRay("local", equipment, workers=2) as pool:
        killed = []

        def kill(description, done, total):
            if done and done % 9 == 0:
                worker = next(w for w in pool._workers if w._actor is not None)
                ray.kill(worker._actor)
                killed.append(done)

        given = run.into(tmp_path, kill, executor=pool)
        if any(LOST in row["failed"] for row in given.rows):
            given = run.into(tmp_path, executor=pool)
    assert len(killed) >= 3
    assert_same(given, tmp_path, expected)


def test_a_node_that_is_gone_leaves_its_questions_to_the_other(
    run, equipment, expected, cluster, tmp_path
):
    nodes, second = cluster
    gone = []
    with OnRay(nodes.address, equipment) as pool:
        assert len(pool._workers) == 2

        def lose(description, done, total):
            if done == 4 and not gone:
                nodes.remove_node(second, allow_graceful=False)
                gone.append(done)

        given = run.into(tmp_path, lose, executor=pool)
        if any(LOST in row["failed"] for row in given.rows):
            given = run.into(tmp_path, executor=pool)
    assert gone
    assert_same(given, tmp_path, expected)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "lokal", "head:", ""])
def test_no_cluster_is_said(equipment, address):
    with pytest.raises(InvalidArgumentError, match="ray: expected local, auto or the address of"):
        OnRay(address, equipment)


NODES = [{"CPU": 4.0, "node:a": 1.0}, {"node:head": 1.0}, {"CPU": 2.0}]
WITH_GPUS = [*NODES, {"CPU": 1.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 2.0}]


@pytest.mark.parametrize(
    ("nodes", "workers", "count"),
    [(NODES, None, 2), (NODES, 6, 6), (WITH_GPUS, None, 3), (WITH_GPUS, 1, 1)],
    ids=["nodes with processors", "as many as asked for", "a processor for each GPU", "one"],
)
def test_workers_are_as_many_as_have_a_place(equipment, monkeypatch, nodes, workers, count):
    monkeypatch.setattr(on_ray, "_join", lambda *_: None)
    monkeypatch.setattr(on_ray, "_nodes", lambda: nodes)
    pool = OnRay("local", equipment, workers)
    assert len(pool._workers) == count
    assert pool.device == ("cuda:0" if nodes is WITH_GPUS else "cpu")
    with pytest.raises(InvalidArgumentError, match="workers: expected at most"):
        OnRay("local", equipment, 7)


@pytest.mark.parametrize("name", ["OutOfMemoryError", "NodeDiedError", "ActorUnschedulableError"])
@pytest.mark.parametrize(("at", "error"), [(1, WorkerNotLoadedError), (2, WorkerEndedError)])
def test_whatever_ends_an_actor_is_no_fault_of_the_run(equipment, monkeypatch, name, at, error):
    import ray

    actor, calls = on_ray._Actor(equipment, "cpu", {}, lambda: 1), []

    def get(ref):
        calls.append(ref)
        if len(calls) == at:
            raise getattr(ray.exceptions, name)("many lines\n\nand the reason\n")

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", lambda actor: None)  # it would start a cluster
    actor._actor = object()
    with pytest.raises(WorkerEndedError, match=r"and the reason$") as raised:
        actor.records()
    assert raised.type is error
    assert not actor.is_begun
