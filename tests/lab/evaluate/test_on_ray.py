"""Workers on Ray: the folder of one process, whoever dies. `make test-sweeps` brings Ray."""

from dataclasses import replace

import pytest

from snapkv.app.models import load
from snapkv.errors import InvalidArgumentError
from snapkv.lab.evaluate.runner import Run
from snapkv.lab.evaluate.store import LOST
from snapkv.lab.evaluate.workers.equipment import Equipment
from snapkv.lab.evaluate.workers.on_ray import OnRay
from tests.lab.evaluate.test_workers import QUESTIONS, TASK, by_key
from tests.lab.evaluate.tiny import METHODS, save_tiny, untimed

pytestmark = pytest.mark.sweeps


@pytest.fixture(scope="module")
def folder(tmp_path_factory, demo):
    return save_tiny(tmp_path_factory.mktemp("model"), demo.tokenizer)


@pytest.fixture(scope="module")
def run(folder):
    return Run(loaded=load(str(folder)), task=TASK, methods=METHODS, questions=QUESTIONS)


@pytest.fixture(scope="module")
def expected(run, tmp_path_factory):
    place = tmp_path_factory.mktemp("serial")
    return run.into(place), place


@pytest.fixture
def equipment(folder):
    return Equipment(load={"name": str(folder)}, task=TASK, template="tokenizer")


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


def assert_same(given, folder, expected):
    results, place = expected
    assert by_key(folder) == by_key(place)
    assert untimed(given.rows) == untimed(results.rows)
    assert (folder / "run.json").read_bytes() == (place / "run.json").read_bytes()


def test_two_workers_leave_the_folder_that_one_process_leaves(run, equipment, expected, tmp_path):
    with OnRay("local", equipment, workers=2) as pool:
        given = replace(run, device=pool.device).into(tmp_path, executor=pool)
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


def test_no_cluster_is_said(equipment):
    with pytest.raises(InvalidArgumentError, match="ray: expected the address of a cluster"):
        OnRay("127.0.0.1:1", equipment)


def test_more_workers_than_places_are_refused(equipment):
    with pytest.raises(InvalidArgumentError, match="workers: expected at most"):
        OnRay("local", equipment, workers=99)


def test_an_error_of_a_worker_is_raised_here(run, folder, tmp_path):
    wrong = Equipment(load={"name": str(folder), "dtype": "int3"}, task=TASK, template="none")
    with (
        pytest.raises(InvalidArgumentError, match="int3"),
        OnRay("local", wrong, workers=1) as pool,
    ):
        run.into(tmp_path, executor=pool)
