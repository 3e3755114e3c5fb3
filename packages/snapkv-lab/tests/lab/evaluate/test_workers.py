"""Questions dealt out to workers: nothing is lost or comes twice, the records are the same."""

import pytest

from snapkv.errors import OutOfMemoryError
from snapkv_lab.evaluate.asking import Asked
from snapkv_lab.evaluate.store import LOST, key
from snapkv_lab.evaluate.workers.base import (
    MOST_TRIES,
    Worker,
    WorkerEndedError,
    WorkerNotLoadedError,
    WorkerPool,
)
from tests.lab.evaluate.tiny import METHODS, Keys

TASK = Keys(each=3)


class Scripted(Worker):
    """Answers in the order in which it was asked, or ends, as it is told."""

    def __init__(self, ends=lambda asked: False, places=99, unloaded=0, has_room=lambda: True):
        self.ends, self.places, self.has_room = ends, places, has_room
        self.unloaded = unloaded
        self.begun, self.ended, self.asked = [], 0, []

    @property
    def has_place(self):
        return self.places > 0 and self.has_room()

    def begin(self, asked):
        self.begun.append(asked)
        self.asked.append(asked)

    def records(self):
        asked = self.asked.pop(0)
        if self.unloaded:
            self.unloaded -= 1
            raise WorkerNotLoadedError("it was killed")
        if self.ends(asked):
            self.places -= 1
            raise WorkerEndedError
        return [asked.record(asked.sample, method) | {"status": "ok"} for method in asked.methods]

    def end(self):
        self.ended += 1
        self.asked.clear()


class Deterministic(WorkerPool):
    """Whoever began first is ready first."""

    def ready(self, busy):
        return busy[:1]


@pytest.fixture(scope="module")
def work(demo):
    samples = list(TASK.samples(demo.tokenizer))
    given = {"question": "visible", "methods": METHODS, "task": TASK, "template": "tokenizer"}
    return [Asked(sample=one, **given) for one in samples]


def keys(given):
    return sorted(map(key, given))


def wanted(work):
    return sorted((a.sample.name, m.label, a.question) for a in work for m in a.methods)


def is_long(asked):
    return asked.sample.cell["sentences"] == 16


def test_the_longest_come_first_and_each_once(work):
    workers = [Scripted(), Scripted()]
    with Deterministic(workers, "cpu") as pool:
        given = list(pool.answers(work))
    assert keys(given) == wanted(work)
    begun = sorted(
        (a for worker in workers for a in worker.begun), key=lambda a: -len(a.sample.context)
    )
    assert begun[0] in (workers[0].begun[0], workers[1].begun[0])
    for worker in workers:
        lengths = [len(asked.sample.context) for asked in worker.begun]
        assert lengths == sorted(lengths, reverse=True)
        assert worker.ended == 1


def test_a_question_that_ended_a_worker_is_asked_again_of_one_method_at_a_time(work):
    worker = Scripted(ends=lambda asked: asked.tries == 0 and asked.sample is work[0].sample)
    given = list(Deterministic([worker], "cpu").answers(work))
    assert keys(given) == wanted(work)
    assert {record["status"] for record in given} == {"ok"}
    again = [asked for asked in worker.begun if asked.tries]
    assert [[method.label for method in asked.methods] for asked in again] == [
        [method.label] for method in METHODS
    ]


def test_a_question_that_ends_every_worker_is_lost_and_the_rest_goes_on(work):
    worker = Scripted(ends=lambda asked: METHODS[0] in asked.methods and is_long(asked))
    given = {
        key(record): record["status"] for record in Deterministic([worker], "cpu").answers(work)
    }
    assert sorted(given) == wanted(work)
    longer = {asked.sample.name for asked in work if is_long(asked)}
    assert 0 < len(longer) < len(work)
    for (sample, method, _), status in given.items():
        lost = sample in longer and method == METHODS[0].label
        assert status == (LOST if lost else "ok")
    assert max(asked.tries for asked in worker.begun) == MOST_TRIES - 1


def test_no_place_for_any_worker_is_said(work):
    gone = Scripted(ends=lambda asked: True, places=1)
    with pytest.raises(
        OutOfMemoryError, match=r"at least one that has a place.*no machine has room"
    ):
        list(Deterministic([gone], "cpu").answers(work))


def test_a_worker_that_ends_before_it_has_the_model_leaves_the_question_as_it_is(work):
    slow = Scripted(unloaded=MOST_TRIES - 1)
    given = list(Deterministic([slow], "cpu").answers(work))
    assert keys(given) == wanted(work)
    assert {record["status"] for record in given} == {"ok"}
    assert {asked.tries for asked in slow.begun} == {0}


def test_none_that_gets_the_model_is_said_and_no_question_is_lost(work):
    never = [Scripted(unloaded=99), Scripted(unloaded=99)]
    with pytest.raises(OutOfMemoryError, match="as having the model, got none: it was killed"):
        list(Deterministic(never, "cpu").answers(work))
    assert [len(worker.begun) for worker in never] == [MOST_TRIES] * 2


def test_answers_that_nobody_waited_for_are_not_taken_for_those_of_the_next_run(work):
    with Deterministic([Scripted(), Scripted()], "cpu") as pool:
        next(pool.answers(work))
        assert keys(pool.answers(work)) == wanted(work)
