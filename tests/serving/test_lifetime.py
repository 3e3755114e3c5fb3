"""A process that ends with another one."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from snapkv.serving.lifetime import VARIABLE, end_together

linux = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="Linux only, as vLLM's engine on Ray"
)

PARENT = f"""
import os, subprocess, sys
os.environ[{VARIABLE!r}] = str(os.getpid())
child = "import time; from snapkv.serving.lifetime import end_together; end_together();"
child += "print('up', flush=True); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child]).wait()
"""


@linux
def test_the_child_of_a_killed_process_ends_too():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"up\n"
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == b""  # ends when the last process that could write is gone


@linux
def test_a_process_whose_companion_has_gone_ends_at_once(monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    code = f"import os; os.environ[{VARIABLE!r}] = '{ended.pid}'\n"
    code += "import time; from snapkv.serving.lifetime import end_together; end_together();"
    code += "time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("named", [None, "itself"])
def test_without_a_companion_nothing_is_watched(monkeypatch, named):
    monkeypatch.delenv(VARIABLE, raising=False)
    if named:
        monkeypatch.setenv(VARIABLE, str(os.getpid()))
    before = threading.active_count()
    end_together()
    assert threading.active_count() == before


def test_where_no_process_can_be_watched_nothing_happens(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    before = threading.active_count()
    end_together()
    assert threading.active_count() == before


@linux
def test_a_process_with_many_open_files_ends_too():
    """Its handle of the companion has a number that `select.select` does not take."""
    ended = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3)"])
    code = f"""
import os, resource, time
from snapkv.serving.lifetime import end_together
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
os.environ[{VARIABLE!r}] = "{ended.pid}"
end_together()
time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=30, check=False)
    ended.wait()
    assert done.returncode == -signal.SIGKILL
