"""A killed add leaves only complete documents and loses no earlier one."""

import itertools
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from snapkv import FullCache, LibraryError
from snapkv.hf.cache_argument import cache_among
from snapkv_app import Library
from snapkv_app.library import folder
from snapkv_app.models import load
from tests.lab.evaluate.tiny import save_tiny
from tests.library.conftest import TEXTS

DOCUMENTS = 12

ADDERS = """
import os, sys, torch
torch.set_num_threads(1)
from snapkv_app import Library
from snapkv_app.models import load
from tests.library.test_killed import killed_at, texts
loaded = load(sys.argv[1], device="cpu")
print("ready", flush=True)
for line in sys.stdin:
    number, change, folder = line.split(maxsplit=2)
    said, say = os.pipe()
    if (child := os.fork()) == 0:
        changes = killed_at(int(change))
        Library(folder.strip()).add(loaded.model, loaded.tokenizer, texts(int(number)))
        os.write(say, str(next(changes) - 1).encode())
        os._exit(0)
    os.close(say)
    status = os.waitpid(child, 0)[1]
    print(status, os.read(said, 20).decode() or 0, flush=True)
    os.close(said)
"""
"""For every line on standard input (a round, a change and a folder) a process that adds the round's
texts and is killed at that change to the folder (0: never). Printed: how it ended, and how often it
changed the folder."""


def texts(number):
    """Every round a third of the documents has another text."""
    last = {place: number - (number - place) % 3 for place in range(DOCUMENTS)}
    return [(f"d{place}", f"Text {place} of round {last[place]}.") for place in range(DOCUMENTS)]


def killed_at(change):
    """From here on this process is killed at its change-th change to a folder; counts them."""
    counted = itertools.count(1)

    def seen(event, args):
        changes = event in {"os.rename", "os.remove", "os.mkdir"}
        changes |= event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and next(counted) == change:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(seen)
    return counted


@pytest.fixture(scope="module")
def loaded(tmp_path_factory, demo):
    folder = save_tiny(tmp_path_factory.mktemp("model"), demo.tokenizer)
    return load(str(folder), device="cpu")


@pytest.fixture(scope="module")
def forker(loaded):
    """The process whose children add."""
    root = Path(__file__).parents[4]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(root)]))
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", ADDERS, loaded.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as parent:
        assert parent.stdout.readline() == "ready\n"
        yield parent
        parent.stdin.close()


@pytest.fixture
def adders(tmp_path, forker):
    """What starts a process that adds; and what waits for its end, and says how it ended and how
    often it changed the folder."""

    def start(number, killed_at=0):
        forker.stdin.write(f"{number} {killed_at} {tmp_path / 'library'}\n")
        forker.stdin.flush()

    return start, lambda: tuple(map(int, forker.stdout.readline().split()))


def named(library):
    return {record.name: record.text for record in library.documents}


def require_whole(library, number, before):
    """Every document is whole, old or new, and none that was there is gone."""
    assert library.verify() == []
    now, new = named(library), dict(texts(number))
    assert before.keys() <= now.keys()
    assert all(text in (new[name], before.get(name)) for name, text in now.items())
    return now


def require_clean(library, number):
    assert named(library) == dict(texts(number))
    assert library.verify() == []
    files = {path.name for path in library.path.rglob("*") if path.is_file()}
    own = {record.cache for record in library.documents}
    own |= {f"{record.key}.json" for record in library.documents}
    own |= {file.name for file in (library.path / "asked").glob("*")}
    assert files - {"words.sqlite"} == own | {"library.json", "library.lock"}


@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_add_loses_nothing_and_the_next_one_continues(tmp_path, loaded, adders, kills):
    start, ended = adders
    start(0)
    status, changes = ended()
    assert (status, changes > DOCUMENTS) == (0, True)
    library = Library(tmp_path / "library", on_notice=pytest.fail)
    now, draw = named(library), random.Random(kills)
    for number in range(1, kills + 1):
        start(number, killed_at=draw.randint(1, changes // 3))
        assert ended()[0] == signal.SIGKILL
        now = require_whole(library, number, now)
    start(kills + 1)
    assert ended()[0] == 0
    require_clean(library, kills + 1)


def test_other_processes_ask_during_an_add(tmp_path, loaded, adders):
    start, ended = adders
    start(0)
    assert ended()[0] == 0
    library = Library(tmp_path / "library", on_notice=pytest.fail)
    for number in range(1, 4):
        start(number)
        for _ in range(4):
            hits = library.search("round text", 3)
            inputs = library.inputs(
                loaded.model, loaded.tokenizer, "Which?", hits, policy=FullCache(), recompute=0
            )
            assert inputs["input_ids"].shape[1] > cache_among(inputs).get_seq_length()
            assert loaded.tokenizer.decode(inputs["input_ids"][0]).count("of round") == 3
        assert ended()[0] == 0
    require_clean(library, 3)


def test_second_add_is_refused_and_names_the_first_process(library, tiny):
    with (
        library._folder.changing(),
        pytest.raises(LibraryError, match=f"process {os.getpid()} is changing it now"),
    ):
        Library(library.path).add(tiny.model, tiny.tokenizer, TEXTS.items())
    assert Library(library.path).add(tiny.model, tiny.tokenizer, TEXTS.items())


def test_lock_is_held_on_a_full_disk():
    with open("/dev/full", "ab", buffering=0) as lock:
        folder._write_unless_full(lock, b"1")
        with pytest.raises(OSError, match="No space left"):
            lock.write(b"1")


def test_damaged_file_is_not_repaired_during_another_add(library, tiny, notices):
    hits = library.search("rent", 1)
    record = next(record for record in library.documents if record.name == "lease")
    file = library.path / "caches" / record.cache
    file.write_bytes(file.read_bytes()[:-1])
    with library._folder.changing():
        library.inputs(tiny.model, tiny.tokenizer, "Rent?", hits)
    assert "cannot be replaced" in notices[1]
    assert len(library.verify()) == 1
