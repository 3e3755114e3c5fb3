"""The Triton kernels without a GPU: run in triton's interpreter, and compiled for devices.

Each in a process of its own, since triton decides at its import for whom it compiles.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.compile_cases import DEVICES

pytestmark = pytest.mark.triton
ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("cases", ["vote_cases", "ragged_cases", "coded_cases"])
def test_kernels_in_the_interpreter_are_as_accurate_as_the_reference(cases):
    run(f"tests.ops.{cases}", "triton", TRITON_INTERPRET="1")


@pytest.mark.parametrize(
    "capability",
    [pytest.param(one, marks=() if one in (80, 120) else pytest.mark.slow) for one in DEVICES],
)
def test_compiled_kernels_fit_into_registers_and_shared_memory(capability, tmp_path):
    run("tests.ops.compile_cases", str(capability), TRITON_CACHE_DIR=str(tmp_path))


def run(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
