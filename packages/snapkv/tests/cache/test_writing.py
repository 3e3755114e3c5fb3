"""A file is written completely or not at all, and no partial file is left."""

import errno
import os
import resource
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from snapkv.cache.saving import writing
from snapkv.cache.saving.writing import append_line, open_for_lines, replace_file, replacing
from snapkv.errors import OutputError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def limited():
    """Limit files to 1,000 bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("there", [True, False])
def test_failed_write_on_a_full_disk_leaves_only_the_old_file(tmp_path, limited, there):
    page = tmp_path / "page"
    if there:
        page.write_text("old")
    with pytest.raises(
        OutputError, match=r"the file '.*/page' could not be written: File too large"
    ) as error:
        replace_file(page, "x" * 2000)
    assert "\n" not in str(error.value)
    assert names(tmp_path) == (["page"] if there else [])
    assert not there or page.read_text() == "old"


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_failure_in_fsync_or_rename_leaves_no_file(tmp_path, monkeypatch, error, step):
    def fail(*_):
        raise error

    monkeypatch.setattr(writing.os, step, fail)
    with pytest.raises((OutputError, KeyboardInterrupt, MemoryError)):
        replace_file(tmp_path / "page", "new")
    assert names(tmp_path) == []


def test_error_names_a_path_below_a_regular_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"file/page' could not be written: Not a directory"):
        replace_file(tmp_path / "file" / "page", "new")


def test_symbolic_link_stays_a_link_and_its_target_is_written(tmp_path):
    (tmp_path / "link").symlink_to("page")
    for content in ("text: ä", b"\0bytes"):  # new, and in place of an old one
        replace_file(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink()
        written = (tmp_path / "page").read_bytes()
        assert written == (content.encode() if isinstance(content, str) else content)
    assert names(tmp_path) == ["link", "page"]


def test_device_is_written_to_and_never_replaced(tmp_path):
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    with pytest.raises(OutputError, match=r"full' could not be written: No space left on device"):
        replace_file(link, "new")
    replace_file(Path("/dev/null"), "new")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OutputError, match="not a regular file"), replacing(link) as partial:
        partial.touch()


def test_file_with_the_longest_possible_name_is_written(tmp_path):
    name = "n" * 255
    replace_file(tmp_path / name, "new")
    assert names(tmp_path) == [name]


def test_old_partial_files_of_killed_writers_are_removed(tmp_path):
    left = tmp_path / f".page.{'0' * 32}.partial"
    recent = tmp_path / f".page.{'1' * 32}.partial"
    for path in (left, recent):
        path.touch()
    os.utime(left, (time.time() - 7200,) * 2)
    replace_file(tmp_path / "page", "new")
    assert names(tmp_path) == [recent.name, "page"]


def test_line_that_does_not_fit_on_the_disk_is_removed_completely(tmp_path, limited):
    path = tmp_path / "rows" / "rows.jsonl"
    with open_for_lines(path) as file:
        append_line(file, "first", path)
        with pytest.raises(OutputError, match=r"rows\.jsonl' could not be written: File too large"):
            append_line(file, "x" * 2000, path)
        append_line(file, "second", path)
    assert path.read_text() == "first\nsecond\n"


def test_written_file_has_the_permissions_of_a_plain_file(tmp_path):
    (tmp_path / "plain").write_text("")
    with replacing(tmp_path / "cache") as partial:
        save_file({"x": torch.zeros(1)}, partial)
    assert (tmp_path / "cache").stat().st_mode == (tmp_path / "plain").stat().st_mode
