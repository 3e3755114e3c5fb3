"""Workers on Ray and their failures, on a simulated Ray and on the real one.

`make test-sweeps` installs the real one.
"""

from types import SimpleNamespace

import pytest

from snapkv.errors import InvalidArgumentError, OutOfMemoryError
from snapkv_app.models import load
from snapkv_lab.evaluate import on_ray
from snapkv_lab.evaluate.asking import SampleJob
from snapkv_lab.evaluate.on_ray import MOST_TRIES, OnRay
from snapkv_lab.evaluate.runner import Run
from snapkv_lab.evaluate.store import LOST, record_key
from tests.lab.evaluate.tiny import METHODS, Keys, records, save_tiny, untimed

TASK = Keys(each=3)


# Played: whoever was asked first is ready first.


class EndedError(Exception):
    """The error that Ray raises for an actor that has ended."""


class RaisedError(Exception):
    """The error that Ray raises for an error inside an actor."""


class Actor:
    """An actor that loads and answers, or ends, as its cluster decides."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.load = SimpleNamespace(remote=lambda: lambda: cluster.load(self))
        self.records = SimpleNamespace(remote=lambda asked: lambda: cluster.answer(asked))


class Played:
    """The part of Ray that is used, as one object that is both the module and the cluster."""

    exceptions = SimpleNamespace(RayError=EndedError, RayTaskError=RaisedError)

    def __init__(self, *nodes, unloaded=0, ends=lambda asked: False):
        self.there, self.unloaded, self.ends = list(nodes), unloaded, ends
        self.begun, self.asked, self.killed = [], [], []

    def is_initialized(self):
        return True

    def nodes(self):
        return [{"Alive": True, "Resources": node} for node in self.there]

    def remote(self, **needs):
        def made(*given):
            self.begun.append(Actor(self))
            return self.begun[-1]

        return lambda kind: SimpleNamespace(remote=made)

    def wait(self, refs, **how):
        return refs[:1], refs[1:]

    def get(self, ref):
        return ref()

    def kill(self, actor):
        self.killed.append(actor)

    def load(self, actor):
        if self.unloaded:
            self.unloaded -= 1
            raise EndedError("many lines\n\nit was killed\n")

    def answer(self, asked):
        self.asked.append(asked)
        if self.ends(asked):
            raise EndedError
        return [asked.record(asked.sample, method) | {"status": "ok"} for method in asked.methods]


@pytest.fixture
def played(monkeypatch):
    """Open the workers of a simulated cluster."""

    def made(*nodes, workers=None, **script):
        cluster = Played(*nodes or [{"CPU": 2.0}], **script)
        monkeypatch.setattr(on_ray, "_ray", lambda: cluster)
        return cluster, OnRay("local", {}, workers)

    return made


@pytest.fixture(scope="module")
def work(demo):
    samples = list(TASK.samples(demo.tokenizer))
    given = {"question": "visible", "methods": METHODS, "task": TASK, "template": "tokenizer"}
    return [SampleJob(sample=one, **given) for one in samples]


def wanted(work):
    return sorted((a.sample.name, m.label, a.question) for a in work for m in a.methods)


def is_long(asked):
    return asked.sample.cell["sentences"] == 16


def test_longest_questions_come_first_and_all_actors_end(work, played):
    cluster, pool = played(workers=2)
    with pool:
        given = list(pool.answers(work))
    assert sorted(map(record_key, given)) == wanted(work)
    lengths = [len(asked.sample.context) for asked in cluster.asked]
    assert lengths == sorted(lengths, reverse=True)
    assert len(cluster.begun) == len(cluster.killed) == 2


def test_question_that_ended_a_worker_is_repeated_with_one_method_at_a_time(work, played):
    cluster, pool = played(ends=lambda asked: asked.tries == 0 and asked.sample is work[0].sample)
    given = list(pool.answers(work))
    assert sorted(map(record_key, given)) == wanted(work)
    assert {record["status"] for record in given} == {"ok"}
    again = [asked for asked in cluster.asked if asked.tries]
    assert [asked.methods for asked in again] == [(method,) for method in METHODS]


def test_question_that_ends_every_worker_is_recorded_as_lost_and_others_are_answered(work, played):
    cluster, pool = played(ends=lambda asked: METHODS[0] in asked.methods and is_long(asked))
    given = {record_key(record): record["status"] for record in pool.answers(work)}
    assert sorted(given) == wanted(work)
    longer = {asked.sample.name for asked in work if is_long(asked)}
    for (sample, method, _), status in given.items():
        lost = sample in longer and method == METHODS[0].label
        assert status == (LOST if lost else "ok")
    assert max(asked.tries for asked in cluster.asked) == MOST_TRIES - 1


def test_error_says_that_no_machine_has_room_for_a_worker(work, played):
    cluster, pool = played(ends=lambda asked: cluster.there.clear() or True)
    with pytest.raises(OutOfMemoryError, match=r"no worker could start.*no machine has room"):
        list(pool.answers(work))


def test_worker_that_ends_before_loading_does_not_count_as_a_try(work, played):
    cluster, pool = played(unloaded=MOST_TRIES - 1)
    assert sorted(map(record_key, pool.answers(work))) == wanted(work)
    assert {asked.tries for asked in cluster.asked} == {0}


def test_error_says_that_no_worker_loads_the_model_and_no_question_is_lost(work, played):
    cluster, pool = played(workers=2, unloaded=99)
    with pytest.raises(OutOfMemoryError, match="start and load the model: it was killed"):
        list(pool.answers(work))
    assert len(cluster.begun) - 2 <= 2 * MOST_TRIES == 99 - cluster.unloaded
    assert not cluster.asked


def test_question_of_a_worker_that_waits_for_a_lost_node_is_asked_again(work, played):
    cluster, pool = played({"CPU": 1.0}, {"CPU": 1.0})
    waits = []

    def wait(refs, *, timeout, **how):
        if not waits and timeout:  # the first look finds nothing, and the second node gone
            waits.append(cluster.there.pop())
            return [], refs
        return ([], refs) if timeout == 0 else (refs[:1], refs[1:])

    cluster.wait = wait
    assert sorted(map(record_key, pool.answers(work))) == wanted(work)
    assert len(cluster.killed) == 1


def test_abandoned_answers_are_not_mixed_into_the_next_run(work, played):
    _, pool = played(workers=2)
    with pool:
        next(pool.answers(work))
        assert sorted(map(record_key, pool.answers(work))) == wanted(work)


NODES = [{"CPU": 4.0, "node:a": 1.0}, {"node:head": 1.0}, {"CPU": 2.0}]
WITH_GPUS = [*NODES, {"CPU": 1.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 2.0}]


@pytest.mark.parametrize(
    ("nodes", "workers", "count"),
    [(NODES, None, 2), (NODES, 6, 6), (WITH_GPUS, None, 3), (WITH_GPUS, 1, 1)],
    ids=["nodes with processors", "as many as asked for", "a processor for each GPU", "one"],
)
def test_number_of_workers_is_limited_by_the_cluster(played, nodes, workers, count):
    _, pool = played(*nodes, workers=workers)
    assert (pool._count, pool.device) == (count, "cuda:0" if nodes is WITH_GPUS else "cpu")
    with pytest.raises(InvalidArgumentError, match="workers: expected at most"):
        played(*nodes, workers=7)


# The real one.


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


@pytest.mark.sweeps
def test_killed_workers_and_a_lost_node_do_not_change_the_results(demo, cluster, tmp_path):
    """The folder equals that of a run in one process."""
    import ray

    model = save_tiny(tmp_path / "model", demo.tokenizer)
    settings = ("visible", "hidden")
    run = Run(loaded=load(str(model)), task=TASK, methods=METHODS, questions=settings)
    alone, together = tmp_path / "alone", tmp_path / "together"
    expected = run.evaluate(alone)
    nodes, second = cluster
    killed = []
    with OnRay(nodes.address, {"name": str(model)}) as pool:
        assert pool._count == 2

        def lose(description, done, total):
            if done == 4 and not killed:
                nodes.remove_node(second, allow_graceful=False)
            if (done and done % 9 == 0) or (done == 4 and not killed):
                ray.kill((pool._busy + pool._idle)[0]._actor)
                killed.append(done)

        given = run.evaluate(together, lose, executor=pool)
        if any(LOST in row["failed"] for row in given.rows):
            given = run.evaluate(together, executor=pool)
    assert len(killed) >= 3
    answers = [sorted(untimed(records(folder)), key=record_key) for folder in (alone, together)]
    assert answers[0] == answers[1]
    assert untimed(given.rows) == untimed(expected.rows)
    assert (together / "run.json").read_bytes() == (alone / "run.json").read_bytes()
