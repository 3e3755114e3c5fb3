"""Ctrl-C at any moment: one short line, status 130, no traceback."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

LINE = "snapkv: interrupted\n"
CONTINUES = "snapkv: interrupted; the same command continues where it stopped\n"
EVAL = ("eval", "needle", "--lengths", "300")
SCRIPT = "import sys; from snapkv_app.cli import main; sys.exit(main())"

STUB = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
except BaseException:  # as libraries do
    pass
raise ImportError("half of it was there")
"""


def start(
    arguments,
    folder,
    *,
    how=("-m", "snapkv_app"),
    start_new_session=False,
    interrupt=signal.SIG_DFL,  # as in a terminal
    **environment,
):
    return subprocess.Popen(
        preexec_fn=lambda: signal.signal(signal.SIGINT, interrupt),
        args=[sys.executable, *how, *arguments],
        cwd=folder,
        start_new_session=start_new_session,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("how", "library", "arguments", "line"),
    [
        (("-m", "snapkv_app"), "typer", ("generate", "-p", "x"), LINE),
        (("-c", SCRIPT), "torch", EVAL, CONTINUES),
    ],
    ids=["typer", "script torch"],
)
def test_interrupt_during_an_import_prints_one_line(tmp_path, how, library, arguments, line):
    """The imported module may handle the interrupt in any way."""
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs" / f"{library}.py").write_text(STUB)
    path = os.pathsep.join([str(tmp_path / "stubs"), os.environ.get("PYTHONPATH", "")])
    process = start(arguments, tmp_path, how=how, PYTHONPATH=path)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, "", line)


@pytest.mark.parametrize("seconds", [0.3, 2])
def test_interrupt_at_any_moment_prints_one_line(tmp_path, seconds):
    process = start(EVAL, tmp_path)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    if seconds < 1 and process.returncode != 130:  # Python had not come to `snapkv/__main__.py`
        assert set(re.findall(r".*/snapkv/([^\"]*)\"", errors)) <= {"__init__.py"}
        return
    assert (process.returncode, out) == (130, "")
    assert errors in (CONTINUES, LINE)


def test_ignored_interrupt_stays_ignored(tmp_path):
    process = start(("policies",), tmp_path, interrupt=signal.SIG_IGN)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.startswith("default: ")
