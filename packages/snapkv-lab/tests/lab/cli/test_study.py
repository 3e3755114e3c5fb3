"""`snapkv study`: options out of each study, rows and figures where the user says."""

import json


def test_a_study_of_own_documents_and_questions(snapkv, tiny_only, document, tmp_path):
    out, figure = tmp_path / "rows", tmp_path / "figure.svg"
    small = ("--document-tokens", "130", "--answer-length", "2")
    done = snapkv(
        *("study", "instructions", "--document", document, *small, "--results", out),
        *("-q", "Where is the key, and why?", "-q", "When does the gate open?"),
        *("--plot", figure, "--json"),
    )
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["folder"] == str(out)
    assert found["run"]["study"]["documents"] == [str(document)]
    assert found["run"]["study"]["questions"][0] == "Where is the key, and why?"
    assert {row["questions"] for row in found["rows"]} == {"1 and 1", "1 and 2", "2 and 2"}
    assert figure.read_text().startswith("<?xml")
    shown = snapkv(
        *("study", "instructions", "--document", document, *small, "--results", out),
        *("-q", "Where is the key, and why?", "-q", "When does the gate open?"),
    )
    assert "1 and 2" in shown.out
    assert str(out) in shown.err.replace("\n", "")


def test_the_study_of_heads_says_what_it_has_stored_and_ask_goes_by_it(
    snapkv, demo_only, document, tmp_path, head_scores
):
    small = ("--samples", "1", "--document-tokens", "150", "--items", "4", "--kinds", "digits")
    done = snapkv("study", "heads", *small, "--results", tmp_path / "out")
    assert done.status == 0, done.err
    assert "keep_heads" in done.out
    *_, rows, last = done.err.splitlines()
    assert rows == f"rows: {tmp_path / 'out'}"
    (stored,) = head_scores.iterdir()
    assert last == f"--policy duo-attention goes by these scores from now on: stored in {stored}"
    scores = json.loads((tmp_path / "out" / "heads.json").read_text())["scores"]
    assert json.loads(stored.read_text())["scores"] == scores
    asked = ("ask", document, "-q", "Where is the key?", "--max-new-tokens", 3, "--json")
    duo = ("--policy", "duo-attention", "--set", "recent_tokens=16", "--set", "sink_tokens=4")
    answers = []
    for pattern in ((), ("--set", f"pattern={tmp_path / 'out' / 'heads.json'}")):
        done = snapkv(*asked, *duo, *pattern)
        assert done.status == 0, done.err
        (own,) = json.loads(done.out)["runs"]
        assert own["policy"]["pattern"] == scores
        assert own["cache"]["held_bytes"] < own["cache"]["full_bytes"]
        answers.append(own["text"])
    assert answers[0] == answers[1]


def test_a_gate_is_in_the_folder_of_the_run(snapkv, tiny_only, tmp_path):
    small = ("--texts", "12", "--lengths", "128", "--no-remember")
    done = snapkv("study", "fit-gate", *small, "--results", tmp_path / "out")
    assert done.status == 0, done.err
    assert "rank correlation" in done.out
    gate = tmp_path / "out" / "gate.safetensors"
    assert done.err.splitlines()[-1] == f"--policy kvzap --set gate={gate} goes by it"
    assert gate.stat().st_size
