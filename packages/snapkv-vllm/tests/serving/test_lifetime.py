"""Processes that end with the one that started them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from snapkv.errors import InvalidArgumentError
from snapkv_vllm import plugin
from snapkv_vllm.plugin import (
    METRICS_VARIABLE,
    lock_users_folder,
    make_metrics_folder,
    own_metrics_folder,
)

linux = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="Linux only, as vLLM's engine on Ray"
)

# The module alone, which needs nothing of the package, whose torch takes seconds.
PLUGIN = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("plugin", {plugin.__file__!r})
sys.modules["plugin"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""

SERVER = f"""
import multiprocessing, os, resource, time
{PLUGIN}
from plugin import METRICS_VARIABLE, end_with_parent, make_metrics_folder

def worker(files):
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(files)]
    end_with_parent()
    open(os.path.join(os.environ[METRICS_VARIABLE], str(os.getpid())), "w").close()
    print("up", flush=True)
    time.sleep(60)

def engine(context, files):
    end_with_parent()  # before it forks
    context.Process(target=worker, args=(files,), name="VllmWorker-0").start()
    worker(0)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with make_metrics_folder():
        print(os.environ[METRICS_VARIABLE], flush=True)
        arguments = context, int(sys.argv[2])
        context.Process(target=engine, args=arguments, name="EngineCore").start()
        time.sleep(60)
"""


@linux
@pytest.mark.parametrize(("method", "files"), [("spawn", 0), ("fork", 1100)])
def test_killed_web_server_leaves_no_engine_worker_or_folder(tmp_path, method, files):
    """One handle has a number that is too large for `select.select`."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    command = [sys.executable, str(script), method, str(files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as front:
        folder = Path(front.stdout.readline().strip())
        assert [front.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        assert len(list(folder.iterdir())) == 2
        front.send_signal(signal.SIGKILL)
        assert front.stdout.read() == ""  # ends when the last process that could write is gone
    assert not folder.exists()


@linux
def test_process_without_parent_ends_at_once_and_keeps_the_users_folder(tmp_path):
    code = f"""
import multiprocessing, os, subprocess, time
{PLUGIN}
from plugin import end_with_parent
gone = subprocess.Popen([sys.executable, "-c", ""])
gone.wait()
os.environ[{METRICS_VARIABLE!r}] = {str(tmp_path)!r}
multiprocessing.parent_process = lambda: gone
multiprocessing.current_process().name = "EngineCore_DP0"
end_with_parent()
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    assert tmp_path.exists()


@linux
def test_only_processes_of_vllm_watch_their_parent_and_do_so_once():
    code = f"""
import multiprocessing, os, threading
{PLUGIN}
from plugin import end_with_parent
def watching():
    end_with_parent()
    end_with_parent()
    return threading.active_count() - 1
def child(end):
    me = multiprocessing.current_process()
    watches = [watching()]
    me.name = "ApiServer_0"
    watches.append(watching())
    end.send(watches)
receiving, end = multiprocessing.Pipe()
assert watching() == 0
multiprocessing.current_process().name = "EngineCore"
assert watching() == 0
mine = multiprocessing.get_context("fork").Process(target=child, args=(end,), name="Process-1")
mine.start()
print(receiving.recv())
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=30, check=True, capture_output=True)
    assert done.stdout == b"[0, 1]\n"


def test_second_server_in_the_same_metrics_folder_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path / "metrics"))
    for _ in range(2):  # the first has ended
        with (
            lock_users_folder(),
            pytest.raises(InvalidArgumentError, match=r"by another server.*Use a different"),
            lock_users_folder(),
        ):
            pass


def test_metrics_folder_exists_only_inside_its_block(monkeypatch):
    monkeypatch.delenv(METRICS_VARIABLE, raising=False)
    with make_metrics_folder():
        folder = own_metrics_folder()
        assert folder.is_dir()
    assert own_metrics_folder() is None
    assert not folder.exists()
    for users in ("/of/the/user", "/of/the/user/snapkv-metrics-prod"):
        monkeypatch.setenv(METRICS_VARIABLE, users)
        assert own_metrics_folder() is None
