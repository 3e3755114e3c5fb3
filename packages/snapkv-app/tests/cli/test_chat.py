"""`snapkv chat`: a conversation line by line, what it saves, and what it refuses."""

import io
import json

import pytest

SMALL = ("--budget", 48, "--window-size", 16, "--kernel-size", 13, "--max-new-tokens", 6)
ALL = (*SMALL[2:], "--budget", 100_000)
FIRST, LATER = "Where is the key?", "When does the gate open?"


@pytest.fixture
def chat(snapkv, tiny_only, document, monkeypatch):
    """Runs a conversation about the document, given its lines."""

    def run(*lines, options=SMALL):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return snapkv("chat", document, *options)

    return run


def test_each_line_gets_an_answer(chat, tmp_path):
    talk = tmp_path / "talk"
    done = chat(FIRST, "", "/stats", f"/save {talk}", "/quit", "never asked")
    assert done.status == 0
    answer, seen, device, host = done.out.splitlines()
    assert answer
    assert seen.endswith("tokens seen, 48 kept")
    assert device.startswith("device: ")
    assert host.startswith("host: ")
    assert done.err == f"saved {talk}\n"
    again = chat(f"/load {talk}", LATER, "/stats")
    assert again.err.startswith(f"loaded {talk}: ")
    assert "its own documents and budget, not with those of the command line" in again.err
    assert int(again.out.splitlines()[1].split()[0]) > int(seen.split()[0])


@pytest.mark.parametrize("recall", [(), ("--recall", "none")], ids=["host", "none"])
def test_chat_prints_one_json_object_per_line(chat, recall):
    options = ("--max-new-tokens", 4, *recall, "--json")
    first, second, stats = map(
        json.loads, chat(FIRST, LATER, "/stats", options=options).out.splitlines()
    )
    assert first["question"] == FIRST
    assert second["prompt_tokens"] > first["prompt_tokens"]
    budget = 1024 if recall else {"auto": {"lost_vote": 0.004, "least": 32, "most": None}}
    assert first["policy"] == second["policy"]
    assert first["policy"].get("policy", first["policy"])["budget"] == budget
    assert stats["stats"]["seen_tokens"] > second["prompt_tokens"]
    small = chat(FIRST, "/stats", options=(*SMALL, *recall, "--json")).out.splitlines()
    assert (json.loads(small[1])["stats"]["host_bytes"] > 0) == (not recall)
    assert stats["stats"].keys() == second["cache"].keys()


def test_drop_removes_parts_of_the_conversation(chat):
    said = chat(FIRST, "/drop document", "/drop document", "/drop thinking", LATER, "/stats")
    assert said.status == 1
    assert said.out.splitlines()[1].split(", ")[0].endswith("tokens dropped")
    for part in ("document", "thinking"):
        assert said.err.count(f"drop: the conversation does not contain any '{part}'") == 1
    assert said.err.count("Use thinking, document or the number of a turn") == 2
    freed, stats = chat(FIRST, "/drop 1", "/stats", options=(*SMALL, "--json")).out.splitlines()[1:]
    assert 0 < json.loads(freed)["tokens"] == json.loads(stats)["stats"]["dropped_tokens"]


def test_error_ends_the_turn_and_not_the_conversation(chat, tmp_path):
    loads = (f"/load {tmp_path / 'nothing'}", f"/load {tmp_path}")
    done = chat("/sav x", "/save", *loads, "/help", FIRST)
    assert done.status == 1
    assert len(done.out.splitlines()) == 1
    unknown, unnamed, missing, folder, known = done.err.splitlines()
    assert "command: expected one of /stats" in unknown
    assert "Did you mean /save" in unknown
    assert "path: expected the name of a file" in unnamed
    assert "found no file at" in missing
    assert missing.endswith("Use /save FILE to save a conversation.")
    assert f"found a folder at {str(tmp_path)!r}. Use" in folder
    assert known.startswith("/stats")


@pytest.mark.parametrize("line", ["/foo", "/", "/sav x", "/quit now", "//"])
def test_unknown_chat_command_is_reported_with_status_0(chat, line):
    done = chat(line, FIRST)
    assert done.status == 0
    assert len(done.out.splitlines()) == 1
    assert done.err.startswith("snapkv: command: expected one of /stats")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_invalid_text_ends_only_its_turn(snapkv, tiny_only, document, monkeypatch, errors):
    lines = io.BytesIO(b"What \xff?\n" + FIRST.encode() + b"\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(lines, encoding="utf-8", errors=errors))
    done = snapkv("chat", document, *SMALL)
    assert done.status == 1
    assert done.out.strip()
    assert done.err.startswith("snapkv: error: question: expected Unicode text, but got '\\udcff?'")
    assert done.err.count("\n") == 1


def test_save_replaces_an_existing_file_only_with_force(chat, tmp_path):
    other, talk = tmp_path / "other.txt", tmp_path / "talk"
    other.write_text("somebody's work")
    chat(FIRST, f"/save {talk}")
    for path, before in ((other, b"somebody's work"), (talk, talk.read_bytes())):
        done = chat("When?", f"/save {path}")
        assert "already exists" in done.err
        assert "or pass --force to replace it" in done.err
        assert path.read_bytes() == before
        done = chat("When?", f"/save --force {path}", f"/load {path}", "Where?")
        assert f"loaded {path}" in done.err
        assert len(done.out.splitlines()) == 2


def test_save_replaces_only_a_file_of_the_same_conversation(chat, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    saved = chat(FIRST, f"/save {one}", "When?", f"/save {one}", f"/save {two}")
    assert "error" not in saved.err
    done = chat("When?", f"/save {tmp_path / 'three'}", f"/load {one}", f"/save {one}")
    assert "already exists" in done.err


def test_save_never_replaces_a_document(chat, document, tmp_path):
    before, link = document.read_bytes(), tmp_path / "link"
    link.symlink_to(document)
    done = chat(FIRST, f"/save {document}", f"/save --force {link}")
    assert done.err.count("is also one of the input files") == 2
    assert document.read_bytes() == before
