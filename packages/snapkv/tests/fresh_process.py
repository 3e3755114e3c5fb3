"""Run Python in a new process, offline, with deprecation warnings as errors."""

import os
import subprocess
import sys


def run_python(*arguments, folder):
    """What it prints; an error of it fails the test."""
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
