"""`snapkv chat` on the demo model."""

import io
import json

import pytest

SMALL = ("--budget", 48, "--window-size", 16, "--kernel-size", 13, "--max-new-tokens", 6)


@pytest.fixture
def chat(snapkv, demo_only, document, monkeypatch):
    """Runs a conversation about the document, given its lines."""

    def run(*lines, options=SMALL):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return snapkv("chat", document, *options)

    return run


def test_questions_are_answered_line_by_line(chat, tmp_path):
    talk = tmp_path / "talk"
    done = chat("Where is the key?", "", "/stats", f"/save {talk}", "/quit", "never asked")
    assert done.status == 0
    answer, seen, device, host = done.out.splitlines()
    assert answer
    assert seen.endswith("tokens seen, 53 kept")
    assert device.startswith("device: ")
    assert host.startswith("host: ")
    assert done.err == f"saved {talk}\n"
    again = chat(f"/load {talk}", "When does the gate open?", "/stats")
    assert again.err.startswith(f"loaded {talk}: ")
    assert int(again.out.splitlines()[1].split()[0]) > int(seen.split()[0])


def test_json_is_one_object_a_line(chat):
    done = chat("Where is the key?", "When?", "/stats", options=(*SMALL, "--json"))
    first, second, stats = map(json.loads, done.out.splitlines())
    assert first["question"] == "Where is the key?"
    assert second["prompt_tokens"] > first["prompt_tokens"]
    assert stats["stats"]["host_bytes"] > 0


def test_every_step_may_attend_to_pages_of_what_was_evicted(chat):
    """With pages for everything the answers are those of a budget for everything."""
    lines = ("Where is the key?", "When does the gate open?")
    full = (*SMALL[2:], "--budget", 100_000)
    assert (
        chat(*lines, options=(*SMALL, "--recall-pages", 9999)).out == chat(*lines, options=full).out
    )


def test_a_loaded_conversation_attends_to_the_pages_that_are_asked_for_now(chat, tmp_path):
    """With pages for everything it goes on as with a budget for everything."""
    first, talk, full = "Where is the key?", tmp_path / "talk", (*SMALL[2:], "--budget", 100_000)
    later = "When does the gate open?"
    expected = chat(first, later, options=full).out.splitlines()[1]
    paged = (*SMALL, "--recall-pages", 9999)
    chat(first, f"/save {talk}", options=paged)
    assert chat(f"/load {talk}", later, options=paged).out.splitlines() == [expected]
    chat(first, f"/save --force {talk}", options=(*SMALL, "--recall-pages", 1))
    assert chat(f"/load {talk}", later, options=paged).out.splitlines() == [expected]
    refused = chat(f"/load {talk}", options=(*SMALL, "--recall", "none"))
    assert "recall: expected 'host', a folder or nothing" in refused.err


def test_what_goes_wrong_ends_a_turn_and_not_the_conversation(chat, tmp_path):
    lines = ("/sav x", "/save", f"/load {tmp_path / 'nothing'}", "/help", "Where is the key?")
    done = chat(*lines)
    assert done.status == 0
    assert len(done.out.splitlines()) == 1
    unknown, unnamed, missing, known = done.err.splitlines()
    assert "command: expected one of /stats" in unknown
    assert "did you mean /save" in unknown
    assert "path: expected the name of a file" in unnamed
    assert "got no file at" in missing
    assert known.startswith("/stats")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--compare",), "compare: expected it with ask"),
        (("--answer-start", "x"), "answer_start: expected it with ask"),
        (("--medusa", "demo"), "medusa: expected it with ask"),
        (("--assistant", "demo"), "assistant: expected it with ask"),
        (("--prompt-lookup", 4), "prompt_lookup: expected it with ask"),
        (("--self-speculate",), "self_speculate: expected it with ask"),
        (("--policy", "h2o", "--recall", "host"), "policy: expected one that only compresses"),
        (("--recall-pages", 8, "--recall", "none"), "recall_pages: expected --recall host or a"),
        (("--recall-pages", 0), "pages: expected at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(chat, options, said):
    done = chat("Where?", options=options)
    assert done.status == 2
    assert said in done.err


def test_the_input_cannot_be_document_and_questions(snapkv):
    done = snapkv("chat", "-")
    assert done.status == 2
    assert "files: expected files or folders" in done.err


def test_a_file_that_is_there_is_replaced_only_when_asked(chat, tmp_path):
    other, talk = tmp_path / "other.txt", tmp_path / "talk"
    other.write_text("somebody's work")
    chat("Where is the key?", f"/save {talk}")
    saved = talk.read_bytes()
    refused = ("expected a new name, got", "or pass --force to replace it")
    for path, before in ((other, b"somebody's work"), (talk, saved)):
        done = chat("When?", f"/save {path}")
        assert all(text in done.err for text in refused)
        assert path.read_bytes() == before
        done = chat("When?", f"/save --force {path}", f"/load {path}", "Where?")
        assert f"loaded {path}" in done.err
        assert len(done.out.splitlines()) == 2


def test_a_conversation_saves_over_itself_and_not_over_another(chat, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    lines = ("Where is the key?", f"/save {one}", "When?", f"/save {one}", f"/save {two}")
    assert "error" not in chat(*lines).err
    done = chat("When?", f"/save {tmp_path / 'three'}", f"/load {one}", f"/save {one}")
    assert "expected a new name" in done.err


@pytest.mark.parametrize("forced", ["", "--force "])
def test_a_document_is_never_saved_over(chat, document, tmp_path, forced):
    before = document.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(document)
    for path in (document, link):
        done = chat("Where is the key?", f"/save {forced}{path}")
        assert "which is one of the inputs" in done.err
    assert document.read_bytes() == before
