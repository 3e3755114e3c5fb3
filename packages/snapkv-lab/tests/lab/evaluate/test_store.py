"""A folder holds one run's answers, whole lines only, and one process adds to it."""

import json
import os
import shutil

import pytest

from snapkv.errors import InvalidArgumentError
from snapkv_lab import rows as rows_module
from snapkv_lab.evaluate.store import LOST, Store

RUN = {"task": {"name": "needle", "seed": 42, "lengths": [1024]}, "model": {"name": "demo"}}


def record(sample, method="full", question="visible"):
    return {
        "sample": sample,
        "method": method,
        "question": question,
        "cell": {"length": 1024},
        "policy": {"name": "full"},
        "status": "ok",
    }


def lines(folder):
    return (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)


def filled(folder, count=3):
    with Store(folder, RUN) as store:
        for number in range(count):
            store.add(record(str(number)))
    return folder


def test_a_folder_of_somebody_else_is_refused_and_stays_as_it_is(tmp_path):
    name = "notes.txt"
    (tmp_path / name).write_text("mine")
    with pytest.raises(InvalidArgumentError, match=rf"results: .*with '{name}' in it; choose"):
        Store(tmp_path, RUN)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "mine")]


def test_a_line_cut_off_anywhere_is_taken_away_and_answered_again(tmp_path):
    filled(tmp_path)
    *whole, last = lines(tmp_path)
    for kept in range(len(last)):
        (tmp_path / "samples.jsonl").write_bytes(b"".join(whole) + last[:kept])
        with Store(tmp_path, RUN) as store:
            assert len(store.records) == 2
            assert lines(tmp_path) == whole
            store.add(record("2"))
        assert lines(tmp_path) == [*whole, last]


@pytest.mark.parametrize("damage", [b"", b"[1]", b'{"sample": "1"', b'{"sample": "1"}'])
def test_a_damaged_line_is_named(tmp_path, damage):
    filled(tmp_path)
    whole = lines(tmp_path)
    (tmp_path / "samples.jsonl").write_bytes(whole[0] + damage + b"\n" + whole[2])
    with pytest.raises(InvalidArgumentError, match=r"samples\.jsonl, line 2, got .*delete"):
        Store(tmp_path, RUN)
    assert len(lines(tmp_path)) == 3  # nothing was repaired behind the user's back


def test_one_process_at_a_time(tmp_path):
    pytest.importorskip("fcntl")
    refused = pytest.raises(InvalidArgumentError, match="no other run is writing to")
    with Store(tmp_path, RUN), refused:
        Store(tmp_path, RUN)
    with Store(tmp_path, RUN) as store:
        assert store.records == []


# Answers that were lost to memory.


def lost(sample):
    return {**record(sample), "status": LOST}


def with_a_loss(folder):
    """Three answers, the second of which was lost."""
    with Store(folder, RUN) as store:
        for each in (record("0"), lost("1"), record("2")):
            store.add(each)
    return folder


def test_what_was_lost_to_memory_is_asked_again_once_and_keeps_its_place(tmp_path):
    wanted = ("1", "full", "visible")
    with Store(with_a_loss(tmp_path), RUN) as store:
        assert wanted not in store
        assert ("0", "full", "visible") in store
        assert ("0", "full", "hidden") not in store
        assert store.records == [record("0"), lost("1"), record("2")]
        store.add(record("1"))
        assert wanted in store
        assert store[wanted] == record("1")
        assert store.records == [record("0"), record("1"), record("2")]
    assert [json.loads(line) for line in lines(tmp_path)] == [record(n) for n in "012"]


def test_a_run_that_is_killed_between_two_answers_of_one_question_loses_neither(tmp_path):
    """Its folder holds both lines then, and perhaps a file that was to take their place."""
    killed = tmp_path / "killed"
    with Store(with_a_loss(tmp_path / "run"), RUN) as store:
        store.add(record("1"))
        shutil.copytree(store.folder, killed)
    (killed / ".samples.jsonl.17").write_text("{")
    assert len(lines(killed)) == 4
    with Store(killed, RUN) as store:
        assert ("1", "full", "visible") in store, "the newer line counts"
        assert store.records == [record("0"), record("1"), record("2")]
    assert [json.loads(line) for line in lines(killed)] == [record(n) for n in "012"]


def test_a_file_that_another_run_has_just_replaced_is_not_written_to(tmp_path, monkeypatch):
    filled(tmp_path)
    path, lock, seen = tmp_path / "samples.jsonl", rows_module._lock, []

    def locked(file, folder):
        seen.append(os.fstat(file.fileno()).st_ino)
        if len(seen) == 1:  # the other run ends between opening and locking
            rows_module.replace_file(path, path.read_text())
        lock(file, folder)

    monkeypatch.setattr(rows_module, "_lock", locked)
    with Store(tmp_path, RUN) as store:
        store.add(record("3"))
    assert len(set(seen)) == 2
    assert [json.loads(line)["sample"] for line in lines(tmp_path)] == ["0", "1", "2", "3"]
