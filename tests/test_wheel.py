"""What is installed is what is here."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import snapkv

SOURCE = Path(snapkv.__file__).parent
ROOT = Path(__file__).parent.parent


def test_the_wheel_has_every_file_of_the_package(tmp_path):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("snapkv/")}
    here = {
        f"snapkv/{path.relative_to(SOURCE).as_posix()}"
        for path in SOURCE.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert packed == here
    assert "snapkv/lab/report/page.html" in packed
