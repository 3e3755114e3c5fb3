"""Run Python code in a new process, offline and with deprecation warnings as errors."""

import os
import subprocess
import sys


def run_python(*arguments, folder):
    """Run code and return what it prints; fail the test if it raises an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
