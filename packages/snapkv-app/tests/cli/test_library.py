"""`snapkv library` and `ask --library`: add, ask, check, remove, and failures."""

import errno
import json
import os
import re
import shlex
import time

import pytest
import safetensors.torch

from snapkv.cache.saving.records import from_record, record_of
from snapkv_app.cli.notes import SAME
from tests.library.conftest import TEXTS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def here(here):
    """A folder with three documents below `papers`."""
    (here / "papers").mkdir()
    for name, text in TEXTS.items():
        (here / "papers" / f"{name}.txt").write_text(text)
    return here


@pytest.fixture
def added(snapkv, tiny_only, here):
    done = snapkv("library", "add", "papers", "--to", "lib")
    assert done.status == 0, done.err
    return here


def whats(done):
    return {each["name"]: each["what"] for each in json.loads(done.out)["documents"]}


def test_added_documents_are_printed_and_listed(snapkv, added):
    again = snapkv("library", "add", "papers", "--to", "lib")
    assert again.out.count("skipped") == 3
    assert "library: lib" in again.err
    listed = snapkv("library", "list", "lib")
    assert all(f"papers/{name}.txt" in listed.out for name in TEXTS)
    assert "full()" in listed.out
    rows = json.loads(snapkv("library", "list", "lib", "--json").out)["documents"]
    assert [row["name"] for row in rows] == sorted(f"papers/{name}.txt" for name in TEXTS)
    assert all(row["tokens"] > 0 and row["source"].endswith(row["name"]) for row in rows)


def test_changed_files_are_read_again_and_deleted_ones_dropped(snapkv, added):
    (added / "papers/lease.txt").write_text("There is no lease any more.")
    (added / "papers/loan.txt").unlink()
    (added / "papers/new.txt").write_text("Something new.")
    done = snapkv("library", "add", "papers", "--to", "lib", "--json")
    assert done.status == 0
    assert whats(done) == {
        "papers/garden.txt": "skipped",
        "papers/lease.txt": "changed",
        "papers/new.txt": "read",
        "papers/loan.txt": "dropped",
    }
    assert "3 documents, all" in snapkv("library", "check", "lib").out


def test_adding_a_deleted_file_drops_only_its_document(snapkv, added):
    (added / "papers/loan.txt").unlink()
    (added / "papers/lease.txt").unlink()
    done = snapkv("library", "add", "papers/loan.txt", "--to", "lib", "--json")
    assert (done.status, whats(done)) == (0, {"papers/loan.txt": "dropped"})
    rows = json.loads(snapkv("library", "list", "lib", "--json").out)["documents"]
    assert [row["name"] for row in rows] == ["papers/garden.txt", "papers/lease.txt"]


def test_unreadable_files_are_named_and_the_others_are_added(snapkv, tiny_only, here):
    (here / "papers/long.txt").write_text("word " * 2000)
    (here / "empty.txt").write_text("")
    done = snapkv("library", "add", "empty.txt", "papers", "absent.txt", "--to", "lib")
    assert done.status == 1
    assert "not read: empty.txt: file: empty.txt contains no text" in done.err
    assert "not read: absent.txt: file: expected an existing file" in done.err
    assert "not read: papers/long.txt: document: 'papers/long.txt' and the prefix" in done.err
    assert done.out.count("failed") == 3
    assert "3 documents, all" in snapkv("library", "check", "lib").out


def test_answer_names_its_sources(snapkv, added):
    ask = ("ask", "--library", "lib", "-q", "What does the bank lend?", "--max-new-tokens", 3)
    done = snapkv(*ask, "--documents", 1)
    assert done.status == 0
    assert done.out.strip()
    assert "source: papers/loan.txt, lines 1-2\n" in done.err
    assert "prompt tokens" in done.err
    record = json.loads(snapkv(*ask, "--json").out)
    assert record["sources"][0]["name"] == "papers/loan.txt"
    assert record["sources"][0]["passage"] == TEXTS["loan"]
    assert record["runs"][0]["new_tokens"] == 3
    assert (record["recompute"], record["warnings"]) == (0.2, [])


def test_recomputing_all_tokens_equals_reading_in_full(snapkv, added):
    question = "Roses, the bank, the lease?"
    ask = ("ask", "--library", "lib", "-q", question, "--max-new-tokens", 8)
    whole = ("--policy", "full", "--recompute", 1)
    done = snapkv(*ask, *whole, "--check", 8)
    assert done.status == 0, done.err
    assert "check: the first 8 tokens are the full cache's" in done.err
    compared = snapkv(*ask, *whole, "--compare")
    assert SAME in compared.out
    assert "source: " in compared.out
    small = ("--recompute", 0, "--policy", "snapkv", "--budget", 40, "--compare")
    compared = snapkv(*ask, *small)
    assert "--recompute 1" in compared.out or SAME in compared.out


LOAN = ("ask", "--library", "lib", "-q", "What does the bank lend?", "--max-new-tokens", 3)


def rewritten_in_place(path):
    """Another text of the same length, with the file's modification time set back."""
    before = path.stat()
    path.write_text(TEXTS["loan"].replace("forty", "fifty"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced_by_an_old_file(path):
    other = path.with_name("old")
    other.write_text("The bank lends nothing.")
    os.utime(other, (0, 0))
    other.rename(path)


CHANGES = {
    "appended": (lambda path: path.write_text(TEXTS["loan"] + " No more."), "has changed since"),
    "in-place": (rewritten_in_place, "has changed since it was read"),
    "replaced": (replaced_by_an_old_file, "has changed since it was read"),
    "deleted": (lambda path: path.unlink(), "was deleted or moved since it was read"),
    "emptied": (lambda path: path.write_text(""), "cannot be compared with what was read"),
    "binary": (lambda path: path.write_bytes(b"\0\1\2"), "cannot be compared with what was read"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be compared with what was"),
}
UNCHANGED = {
    "touched": lambda path: os.utime(path, (0, 0)),
    "written-again": lambda path: path.write_text(TEXTS["loan"]),
    "other-documents": lambda path: path.with_name("garden.txt").write_text("No roses."),
}


@pytest.fixture(params=[0, 10], ids=["just-written", "written-before"])
def aged(request, snapkv, tiny_only, here, monkeypatch):
    """A library of files that were written just before they were read, or long before."""
    now = time.time_ns() + request.param * 10**9
    monkeypatch.setattr("snapkv_app.library.records.time.time_ns", lambda: now)
    assert snapkv("library", "add", "papers", "--to", "lib").status == 0
    monkeypatch.undo()
    monkeypatch.chdir(here)
    return here


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("more", [("--json",), ("--compare",)], ids=str)
def test_changed_file_is_refused_before_the_answer(refused, added, nothing_is_loaded, more, change):
    make, said = CHANGES[change]
    make(added / "papers/loan.txt")
    line = refused(*LOAN, "--documents", 1, *more)
    assert f"papers/loan.txt {said}" in line
    assert ".)" not in line
    assert "Run snapkv library add papers/loan.txt --to lib, or use --allow-changed" in line


@pytest.mark.parametrize("change", ["in-place", "replaced"])
def test_change_is_noticed_whatever_the_modification_time(refused, aged, change):
    CHANGES[change][0](aged / "papers/loan.txt")
    assert "papers/loan.txt has changed since" in refused(*LOAN, "--documents", 1)


@pytest.mark.parametrize("change", UNCHANGED)
def test_rewritten_file_with_the_same_text_is_accepted(snapkv, added, change):
    UNCHANGED[change](added / "papers/loan.txt")
    record = json.loads(snapkv(*LOAN, "--documents", 1, "--json").out)
    assert record["warnings"] == []
    assert record["sources"][0]["name"] == "papers/loan.txt"


@pytest.mark.parametrize("change", CHANGES)
def test_allow_changed_accepts_a_changed_file(snapkv, added, change):
    CHANGES[change][0](added / "papers/loan.txt")
    done = snapkv(*LOAN, "--documents", 1, "--allow-changed", "--json")
    assert done.status == 0, done.err
    (warning,) = json.loads(done.out)["warnings"]
    assert warning.startswith(f"papers/loan.txt {CHANGES[change][1]}")
    shown = snapkv(*LOAN, "--documents", 1, "--allow-changed")
    assert f"warning: {warning}\n" in shown.err


@pytest.mark.parametrize(("name", "folder"), [("it's a loan.txt", "."), ("-loan.txt", "papers")])
def test_suggested_command_reads_the_changed_file_again(
    snapkv, refused, tiny_only, here, monkeypatch, name, folder
):
    (here / "papers/loan.txt").rename(here / name)
    snapkv("library", "add", "--to", "my lib", "--", "papers", name)
    (here / name).write_text("The bank lends fifty thousand crowns.")
    (here / "papers/lease.txt").unlink()
    monkeypatch.chdir(here / folder)
    ask = ("ask", "--library", here / "my lib", "-q", "bank lease?", "--max-new-tokens", 2)
    said = refused(*ask)
    assert "papers/lease.txt was deleted or moved since it was read" in said
    (command,) = re.findall("Run snapkv (.*), or use", said)
    assert snapkv(*shlex.split(command)).status == 0
    sources = json.loads(snapkv(*ask, "--json").out)["sources"]
    assert [source["passage"] for source in sources] == ["The bank lends fifty thousand crowns."]


COMMANDS = (
    ("library", "list", "lib"),
    ("library", "check", "lib"),
    ("library", "limit", "lib", "1GiB"),
    ("library", "remove", "lib", "a"),
    ("ask", "--library", "lib", "-q", "bank?"),
)


@pytest.mark.parametrize("end", [KeyboardInterrupt, MemoryError])
def test_library_interrupted_at_its_first_document_says_how_to_continue(
    snapkv, refused, tiny_only, here, monkeypatch, end
):
    meanwhile = []

    def interrupted(*_):
        meanwhile.extend(refused(*own) for own in COMMANDS[:2])
        raise end

    monkeypatch.setattr("snapkv_app.library.reader.Reader.read", interrupted)
    assert snapkv("library", "add", "papers", "--to", "lib").status in (1, 130)
    assert len(meanwhile) == 2
    assert all(
        f"process {os.getpid()} is changing it now. Wait until" in said for said in meanwhile
    )
    monkeypatch.undo()
    monkeypatch.chdir(here)
    for command in COMMANDS:
        said = refused(*command)
        assert "library: no document in the folder 'lib' was read completely" in said
        assert "Run the same command snapkv library add again, or delete the folder" in said


def test_document_from_a_pipe_is_not_compared_with_a_file(snapkv, tiny_only, here):
    reading, writing = os.pipe()
    os.write(writing, b"The bank lends wool.")
    os.close(writing)
    name = f"/dev/fd/{reading}"
    assert snapkv("library", "add", name, "--to", "lib").status == 0
    os.close(reading)
    record = json.loads(snapkv(*LOAN, "--json").out)
    assert (record["sources"][0]["name"], record["warnings"]) == (name, [])


def test_records_of_version_0_3_0_are_compared_by_their_text(snapkv, refused, added):
    for file in (added / "lib/documents").iterdir():
        body = {**from_record(file.read_text())}
        assert body.pop("stamp") is not None
        file.write_text(record_of(body))
    assert json.loads(snapkv(*LOAN, "--json").out)["warnings"] == []
    rewritten_in_place(added / "papers/loan.txt")
    assert "papers/loan.txt has changed since" in refused(*LOAN)


def test_documents_beyond_the_positions_are_left_out_by_name(snapkv, refused, tiny_only, here):
    (here / "papers/loan.txt").write_text(TEXTS["loan"] + " word" * 700)
    (here / "papers/lease.txt").write_text("A bank. " + " word" * 700)
    snapkv("library", "add", "papers", "--to", "lib")
    done = snapkv("ask", "--library", "lib", "-q", "bank?", "--max-new-tokens", 3)
    assert done.status == 0
    assert done.err.count("source: ") == 1
    assert "left out, since the model has no positions" in done.err
    none = refused("ask", "--library", "lib", "-q", "bank?", "--max-new-tokens", 1000)
    assert "an answer of up to 1,000 do not fit into the 1,024 positions of the model" in none


def test_question_without_a_known_word_is_refused_with_a_remedy(refused, added, nothing_is_loaded):
    assert "snapkv library list lib" in refused("ask", "--library", "lib", "-q", "zebra?")


@pytest.mark.parametrize(
    "options",
    [
        ("--policy", "adakv", "--set", "policy=kvzip", "--keep-ratio", 0.5, "--bits", "int8"),
        ("--policy", "snapkv", "--budget", 48, "--window-size", 8),
    ],
    ids=["adakv", "snapkv"],
)
def test_documents_are_compressed_as_the_options_say(snapkv, refused, tiny_only, here, options):
    add = ("library", "add", "papers", "--to", "lib")
    done = snapkv(*add, *options)
    assert done.status == 0, done.err
    assert ("warning: policy: snapkv keeps the tokens that" in done.err) == ("snapkv" in options)
    assert snapkv(*add, *options).out.count("skipped") == 3
    assert ("int8" in snapkv("library", "list", "lib").out) == ("--bits" in options)
    said = refused(*add, "--policy", "kvzip", "--keep-ratio", 0.9)
    assert "policy: the documents of this library were read with " in said
    assert "got kvzip(keep_ratio=0.9" in said
    assert "Remove this option, or add the documents to a different library" in said


def test_parameter_alone_changes_the_policy_after_compressed_documents(
    snapkv, refused, tiny_only, here
):
    small = ("--policy", "snapkv", "--budget", 48, "--window-size", 8)
    assert snapkv("library", "add", "papers", "--to", "lib", *small).status == 0
    asked = ("ask", "--library", "lib", "-q", "Rent in May?", "--max-new-tokens", 1, "--json")
    assert json.loads(snapkv(*asked).out)["runs"][0]["method"] == "full"
    assert "decay=0.9" in refused(*asked, "--decay", 0.9)
    fewer = json.loads(snapkv(*asked, "--budget", 40).out)["runs"][0]
    assert (fewer["method"], fewer["kept_tokens"]) == ("snapkv, fading", 40)


def test_budget_in_bytes_quantizes_uncompressed_documents(snapkv, added):
    asked = ("ask", "--library", "lib", "-q", "Rent in May?", "--max-new-tokens", 1, "--json")
    coded, exact = (
        json.loads(snapkv(*asked, "--budget", "50%", *more).out)["runs"][0]["cache"]
        for more in ((), ("--exact-bits",))
    )
    assert list(coded["bits"]) == ["8/4"]
    assert list(exact["bits"]) == ["32"]
    assert coded["held_bytes"] <= exact["held_bytes"] <= exact["full_bytes"] / 2


def test_damaged_file_is_named_with_status_1(snapkv, added):
    file = sorted((added / "lib/caches").iterdir())[0]
    file.write_bytes(file.read_bytes()[:-9])
    checked = snapkv("library", "check", "lib")
    assert checked.status == 1
    assert str(file.relative_to(added)) in checked.out


def test_name_that_is_not_utf8_is_recognised_kept_and_removed(snapkv, tiny_only, here):
    odd = os.fsdecode(b"notes/\xff.txt")
    (here / "notes").mkdir()
    for name in (odd, "notes/plain.txt"):
        (here / name).write_text("The vault opens with 4471.", "utf-8")
    assert snapkv("library", "add", "notes", "--to", "lib").status == 0
    assert "skipped" in snapkv("library", "add", odd, "--to", "lib").out
    (here / odd).write_bytes(b"gr\xfc\xdfe")
    done = snapkv("library", "add", "notes", "--to", "lib")
    assert "kept: notes/\\xff.txt: its file exists, but was not read" in done.err
    assert snapkv("library", "remove", "lib", odd).out == "removed: notes/\\xff.txt\n"


def test_remove_accepts_names_and_refuses_unknown_ones(snapkv, refused, added):
    done = snapkv("library", "remove", "lib", "papers/loan.txt", added / "papers/lease.txt")
    assert done.out == "removed: papers/loan.txt\nremoved: papers/lease.txt\n"
    said = refused("library", "remove", "lib", "papers/garten.txt")
    assert "Did you mean papers/garden.txt?" in said
    said = refused("library", "remove", "lib", "nowhere")
    assert (
        "name: the library does not have a document with the name 'nowhere'. Run snapkv library"
        in said
    )
    assert (added / "papers/loan.txt").exists()
    garden = added / "papers" / ".." / "papers" / "garden.txt"
    assert snapkv("library", "remove", "lib", garden).out == "removed: papers/garden.txt\n"
    said = refused("ask", "--library", "lib", "-q", "roses")
    assert "library: the library 'lib' does not contain any documents. Run" in said


def test_method_that_reads_twice_is_refused_for_questions(refused, added):
    said = refused("ask", "--library", "lib", "-q", "The bank?", "--policy", "kvzip")
    assert "Compress the documents by it when they are added" in said


def test_model_and_dtype_of_the_library_are_the_defaults(snapkv, added, tiny_only):
    tiny_only.clear()
    asked = ("ask", "--library", "lib", "-q", "bank", "--max-new-tokens", 1)
    snapkv(*asked)
    snapkv(*asked, "--model", "other")
    assert [call["name"] for call in tiny_only] == ["tiny", "other"]
    assert {call["dtype"] for call in tiny_only} == {"float32"}


def test_limit_and_evicted_documents_are_printed(snapkv, refused, added):
    listed = json.loads(snapkv("library", "list", "lib", "--json").out)
    sizes = {row["name"]: row["bytes"] for row in listed["documents"]}
    snapkv("ask", "--library", "lib", "-q", "roses", "--documents", 1, "--max-new-tokens", 1)
    bound = f"{max(sizes.values())}B"
    said = refused("library", "limit", "lib", bound)
    assert "would evict 2 of the 3 documents. Set evict=True" in said
    done = snapkv("library", "limit", "lib", bound, "--evict")
    assert done.out == "evicted: papers/lease.txt\nevicted: papers/loan.txt\n"
    assert "; at most " in snapkv("library", "list", "lib").out
    (added / "papers/new.txt").write_text("Something new.")
    done = snapkv("library", "add", "papers/new.txt", "--to", "lib")
    assert done.status == 1
    assert "max_bytes: the limit is 8.5 KiB, but the last used document and" in done.err
    assert snapkv("library", "limit", "lib", "none").status == 0
    assert snapkv("library", "add", "papers", "--to", "lib").out.count("read") >= 3
    wrong = refused("library", "limit", "lib", "12")
    assert "For example, use snapkv library limit lib 80GB" in wrong


def test_full_disk_is_reported_in_one_line_and_earlier_documents_stay(
    snapkv, tiny, here, monkeypatch
):
    real, calls = safetensors.torch.save_file, []

    def save_file(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    done = snapkv("library", "add", "papers", "--to", "lib")
    assert done.status == 1
    assert "snapkv: error: output: the cache could not be written to" in done.err
    assert "No space left" in done.err
    assert done.err.count("\n") == 1
    assert "2 documents, all" in snapkv("library", "check", "lib").out
    again = snapkv("library", "add", "papers", "--to", "lib")
    assert (again.out.count("skipped"), again.out.count("read")) == (2, 1)
    assert not [path for path in (here / "lib").rglob("*.partial")]
