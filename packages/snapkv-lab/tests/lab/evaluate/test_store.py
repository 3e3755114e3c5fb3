"""A folder holds the answers of one run in complete lines, and one process adds to it."""

import json

import pytest

from snapkv.errors import InvalidArgumentError
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


def test_folder_with_other_files_is_refused_and_left_unchanged(tmp_path):
    name = "notes.txt"
    (tmp_path / name).write_text("mine")
    with pytest.raises(InvalidArgumentError, match=rf"results: .* holds '{name}', .*\. Choose"):
        Store(tmp_path, RUN)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "mine")]


def test_incomplete_line_is_removed_and_answered_again(tmp_path):
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
def test_error_names_the_damaged_line(tmp_path, damage):
    filled(tmp_path)
    whole = lines(tmp_path)
    (tmp_path / "samples.jsonl").write_bytes(whole[0] + damage + b"\n" + whole[2])
    with pytest.raises(InvalidArgumentError, match=r"samples\.jsonl, line 2, but got .*delete"):
        Store(tmp_path, RUN)
    assert len(lines(tmp_path)) == 3  # nothing was repaired behind the user's back


def test_store_refuses_a_second_process(tmp_path):
    pytest.importorskip("fcntl")
    refused = pytest.raises(InvalidArgumentError, match="another run is writing to")
    with Store(tmp_path, RUN), refused:
        Store(tmp_path, RUN)
    with Store(tmp_path, RUN) as store:
        assert store.records == []


def test_answer_lost_to_memory_counts_in_this_run_and_is_repeated_by_the_next(tmp_path):
    wanted, lost = ("1", "full", "visible"), record("1") | {"status": LOST}
    with Store(tmp_path, RUN) as store:
        store.add(record("0"))
        store.add(lost)
        assert wanted in store
        assert store.records == [record("0"), lost]
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(json.dumps(lost) + "\n")  # as earlier releases did
    with Store(tmp_path, RUN) as store:
        assert ("0", "full", "visible") in store
        assert ("0", "full", "hidden") not in store
        assert wanted not in store
        store.add(record("1"))
        assert store[wanted] == record("1")
    with Store(tmp_path, RUN) as store:
        assert store.records == [record("0"), record("1")]
