"""`snapkv study`: the options of each study, and rows and figures where the user wants them."""

import json


def test_study_reads_the_users_documents_and_questions(snapkv, tiny_only, document, tmp_path):
    out, figure = tmp_path / "rows", tmp_path / "figure.svg"
    small = ("--document-tokens", "130", "--answer-length", "2")
    study = ("study", "instructions", "--document", document, *small, "--results", out)
    study += ("-q", "Where is the key, and why?", "-q", "When does the gate open?")
    done = snapkv(*study, "--plot", figure, "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["folder"] == str(out)
    assert found["run"]["study"]["documents"] == [str(document)]
    assert found["run"]["study"]["questions"][0] == "Where is the key, and why?"
    assert {row["questions"] for row in found["rows"]} == {"1 and 1", "1 and 2", "2 and 2"}
    assert figure.read_text().startswith("<?xml")
    shown = snapkv(*study)
    assert "1 and 2" in shown.out
    assert str(out) in shown.err.replace("\n", "")


def test_fit_gate_command_writes_the_gate_into_its_folder(snapkv, tiny_only, tmp_path):
    small = ("--texts", "12", "--lengths", "128", "--no-remember")
    done = snapkv("study", "fit-gate", *small, "--results", tmp_path / "out")
    assert done.status == 0, done.err
    assert "rank correlation" in done.out
    gate = tmp_path / "out" / "gate.safetensors"
    assert done.err.splitlines()[-1] == f"--policy kvzap --set gate={gate} uses it"
    assert gate.stat().st_size
