"""Files of metrics on a disk with and without free space."""

import json
import shlex
import signal
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapkv_vllm.metric_files import WrittenCounts

KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@given(
    counts=st.lists(st.tuples(KEYS, st.floats(allow_nan=False), st.floats(0, 1e10)), max_size=20),
    again=st.lists(st.tuples(KEYS, st.floats(allow_nan=False)), max_size=5),
)
def test_written_files_can_be_read_by_prometheus_client(tmp_path_factory, counts, again):
    """Any keys can be read, and a later process with the same number continues the files."""
    from prometheus_client.mmap_dict import MmapedDict

    path = str(tmp_path_factory.mktemp("counts") / "counter_1.db")
    expected = {key: (value, time) for key, value, time in counts}
    written = WrittenCounts(path)
    for key, value, time in counts:
        written.write_value(key, value, time)
    found = {key: tuple(own) for key, *own, _ in MmapedDict.read_all_values_from_file(path)}
    assert found == expected
    written.close()
    later, theirs = WrittenCounts(path), MmapedDict(path)
    for key, value in again:
        assert later.read_value(key) == expected.get(key, (0.0, 0.0))
        expected[key] = value, 0.0
        later.write_value(key, *expected[key])
    theirs.close()
    found = {key: tuple(own) for key, *own, _ in MmapedDict.read_all_values_from_file(path)}
    assert found == expected
    later.close()


# On a small disk.


def on_a_small_disk(folder, script, *arguments, size="512k"):
    """Run a script with a folder of so many bytes, which is mounted for its process alone."""
    folder.mkdir(exist_ok=True)
    path = folder.parent / "script.py"
    path.write_text(textwrap.dedent(script))
    mount = f"mount -t tmpfs -o size={size} none {shlex.quote(str(folder))}"
    own = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    try:
        tried = subprocess.run([*own, mount], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("a small disk is mounted with unshare, which this system does not have")
    if tried.returncode:
        pytest.skip(f"this system does not let the test mount a small disk: {tried.stderr}")
    run = shlex.join([sys.executable, str(path), str(folder), *arguments])
    return subprocess.run(
        [*own, f"{mount} && exec {run}"], capture_output=True, text=True, check=False, timeout=120
    )


COUNTING = """
    import json, os, sys

    folder, free_bytes, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    from prometheus_client import CollectorRegistry, Counter, Histogram
    from prometheus_client.multiprocess import MultiProcessCollector
    from snapkv_vllm import metric_files

    if kind == "written":
        metric_files.write_without_mapping()
        metric_files._SECONDS_BETWEEN_TRIES = 0.0

    def read():
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return {
            sample.labels["who"]: sample.value
            for metric in registry.collect()
            for sample in metric.samples
            if sample.name == "asked_total"
        }

    with open(os.path.join(folder, "others"), "wb", buffering=0) as others:
        while True:  # other files take the disk but for so many bytes
            try:
                others.write(bytes(4096))
            except OSError:
                break
        others.truncate(others.tell() - free_bytes)
    asked = Counter("asked", "Requests.", ["who"])
    took = Histogram("took", "Seconds.")
    for number in range(600):
        asked.labels(str(number)).inc()
        took.observe(number)
    asked.labels("0").inc()
    full = read()
    os.remove(os.path.join(folder, "others"))
    asked.labels("599").inc()
    print(json.dumps([full, read(), sorted(os.listdir(folder))]))
"""


@pytest.mark.parametrize("free_bytes", [0, 8192, 40960])
def test_full_disk_ends_no_process_and_counts_appear_later(tmp_path, free_bytes):
    """The disk is full from the start, when a file is created, or when a file grows."""
    ran = on_a_small_disk(tmp_path / "full", COUNTING, str(free_bytes), "written", size="1m")
    assert ran.returncode == 0, ran.stderr
    full, freed, files = json.loads(ran.stdout)
    assert len(full) < 600
    assert bool(full) == bool(free_bytes)
    if full:
        assert full["0"] == 2.0
        assert {value for who, value in full.items() if who != "0"} <= {1.0}
    assert freed == {str(number): 1.0 for number in range(600)} | {"0": 2.0, "599": 2.0}
    assert all(name.endswith(".db") for name in files)
    said = [line for line in ran.stderr.splitlines() if "Metrics are missing from" in line]
    assert 1 <= len(said) <= 2  # once for each file
    assert str(tmp_path / "full") in said[0]


def test_prometheus_client_alone_is_ended_by_a_full_disk(tmp_path):
    """If this fails, `metric_files` has become unnecessary."""
    ran = on_a_small_disk(tmp_path / "full", COUNTING, "4096", "mapped", size="1m")
    assert ran.returncode == -signal.SIGBUS


STARTING = """
    import os, sys, tempfile

    folder, kind = sys.argv[1:]
    if kind == "own":
        tempfile.tempdir = folder
    else:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    from snapkv.errors import InvalidArgumentError
    from snapkv_vllm.plugin import METRICS_VARIABLE, lock_users_folder, make_metrics_folder

    try:
        with make_metrics_folder() if kind == "own" else lock_users_folder():
            print("started")
    except InvalidArgumentError as error:
        print(error)
    print(os.listdir(folder), METRICS_VARIABLE in os.environ)
"""


@pytest.mark.parametrize("kind", ["own", "user's"])
def test_server_does_not_start_without_space_for_metrics(tmp_path, kind):
    folder = tmp_path / "full"
    ran = on_a_small_disk(folder, STARTING, kind, size="64k")
    assert ran.returncode == 0, ran.stderr
    said, left = ran.stdout.splitlines()
    assert said.startswith("PROMETHEUS_MULTIPROC_DIR: 1.0 MiB of metrics could not be written to")
    assert f"'{folder}" in said
    assert "No space left on device" in said
    assert left == f"[] {kind != 'own'}"
