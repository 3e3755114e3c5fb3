"""From which layer on tokens may be left out: the rule by hand, and a search on the demo model."""

import json
import re
from dataclasses import replace

import pytest
import torch

from snapkv.prefill.early_layer import known_early_layer
from snapkv_lab import drawing
from snapkv_lab.study import EarlyLayer, copying
from tests.ops.states import worked_layer

SMALL = EarlyLayer(
    samples=2, document_tokens=150, digits=4, keep_ratio=0.4, budget=40, tries=1, rivals=1
)


def test_rivals_stand_in_order_at_equal_distances_and_differ(demo):
    ids = demo.tokenizer("The garden is quiet and the path is long. " * 12)["input_ids"]
    options = {"count": 10, "digits": 5, "seed": "1"}
    found = copying.with_rivals(demo.tokenizer, ids, **options)
    lines = [line for line in demo.tokenizer.decode(found).splitlines() if "secret" in line]
    codes = [re.fullmatch(r"The secret code of the (.+) is (\d{5})\.", line) for line in lines]
    names, numbers = zip(*(code.groups() for code in codes), strict=True)
    assert names[0] == "library"
    assert names[-1] == "museum 2"
    assert len(set(names)) == len(set(numbers)) == 10
    assert copying.with_rivals(demo.tokenizer, ids, **options) == found
    assert copying.with_rivals(demo.tokenizer, ids, count=0, digits=5, seed="1") == ids


def test_a_copy_stands_where_it_says_and_the_prompt_ends_in_its_start(demo):
    text = demo.tokenizer("The garden is quiet and the path is long. " * 9)["input_ids"]
    options = {"digits": 6, "depth": 0.5}
    copy = copying.hidden_copy(demo.tokenizer, text, **options, seed="1")
    assert [copy.prompt[place] for place in copy.places] == copy.answer
    assert copy.prompt[-6:] == copy.prompt[copy.start - 6 : copy.start]
    assert demo.tokenizer.decode(copy.answer).strip().isdigit()
    assert copying.hidden_copy(demo.tokenizer, text, **options, seed="1") == copy
    assert copying.hidden_copy(demo.tokenizer, text, **options, seed="2").answer != copy.answer


def made_layer(attended):
    """One head; the query of each token attends to one position before it, and to nothing else."""
    eye = torch.eye(len(attended))[None, None]
    return worked_layer(eye, queries=eye[:, :, attended] * 40)


def test_what_votes_let_go_on_of_a_number_by_hand():
    """Half of 40% of 40 tokens before the window is 8: four sinks, and four that a vote lifts."""
    study = replace(SMALL, keep_ratio=0.4)
    layer = made_layer([0] * 40 + [20] * 16)

    def share(start):
        copy = copying.Copy(prompt=list(range(56)), answer=[1, 2, 3, 4], start=start)
        return study.share_that_goes_on(copy, layer)

    assert [share(20), share(22), share(18), share(30)] == [1.0, 0.5, 0.5, 0.0]


def test_prompts_are_of_four_lengths_in_turn(demo):
    study = replace(SMALL, samples=5, rivals=0)
    texts = [("garden", "The garden is quiet and the path is long. " * 200)]
    first, *shorter = [len(study._copy(demo, texts, number).prompt) for number in range(5)]
    text = len(demo.tokenizer(texts[0][1], add_special_tokens=False)["input_ids"])
    said = first - text
    assert shorter == [text // 2 + said, text // 4 + said, text // 8 + said, first]


def reading(layer, number, *, loss, right=True, exact_right=True, ms=60.0):
    return {
        "sample": str(number),
        "method": "early-layer",
        "question": f"layer {layer}",
        "layer": layer,
        "exact": {"loss": 0.1, "right": exact_right, "ms": 100.0},
        "selective": {"loss": loss, "right": right, "ms": ms},
    }


def of_votes(**shares):
    """A record of the votes of a model of six layers; layers 2 and 4 let all go on."""
    goes_on = [[1, 0.5], [2, 1.0], [3, 0.0], [4, 1.0], [5, 1.0], [6, 1.0]]
    return {"sample": "0", "question": "votes", "goes_on": goes_on} | shares


@pytest.mark.parametrize(
    ("own", "found"),
    [
        ([reading(2, 0, loss=0.1), reading(2, 1, loss=0.2)], 2),  # 0.05 above, as allowed
        ([reading(2, 0, loss=0.1), reading(2, 1, loss=0.21)], None),
        ([reading(2, 0, loss=0.1), reading(2, 1, loss=0.1, right=False)], None),
        ([reading(2, 0, loss=0.1), reading(2, 1, loss=0.1, right=False, exact_right=False)], 2),
        ([reading(2, 0, loss=0.1, exact_right=False)], None),  # nothing to compare with
        ([reading(2, 0, loss=0.9), reading(4, 0, loss=0.1)], 4),
        ([], None),
    ],
)
def test_the_rule_by_hand(own, found):
    rows = SMALL.summary([of_votes(), *own])
    assert rows[-1] == {"of": "found", "layer": found}
    assert [row["goes_on"] for row in rows if row["of"] == "votes"] == [0.5, 1.0, 0.0, 1.0, 1.0]


def test_a_row_has_the_ratio_of_the_medians():
    own = [reading(2, number, loss=0.1, ms=ms) for number, ms in enumerate((10, 70, 400))]
    (row,) = (row for row in SMALL.summary([of_votes(), *own]) if row["of"] == "reading")
    assert row["time"] == 0.7
    assert (row["prompts"], row["right"], row["exact_right"], row["lost"]) == (3, 1, 1, 0)


def test_only_layers_whose_votes_find_the_number_are_tried_up_to_three_quarters():
    records = [of_votes()]
    assert SMALL._tried(records, 7) == [2]
    assert replace(SMALL, tries=9)._tried(records, 7) == [2, 4, 5]
    assert replace(SMALL, tries=9)._tried(records, 6) == [2, 4]
    assert replace(SMALL, layers=(3, 1, 3))._tried(records, 7) == [1, 3]


def test_a_search_on_the_demo_is_remembered_and_continued(
    demo, tmp_path, early_layers, monkeypatch
):
    findings = SMALL.measure(demo, tmp_path / "first")
    *rows, found = findings.rows
    assert [row["layer"] for row in rows if row["of"] == "votes"] == list(range(1, 30))
    tried = [row["layer"] for row in rows if row["of"] == "reading"]
    assert len(tried) == 1
    assert found["layer"] in (None, *tried)
    assert known_early_layer(demo.model) == (found["layer"] or 18)  # which the package knows
    assert str(early_layers if found["layer"] else "nothing is stored") in findings.closing
    saved = (tmp_path / "first" / "summary.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in saved] == findings.rows
    table = SMALL.table(findings.rows)
    assert all(len(line) == len(table.headings) for line in table.rows)
    drawing.save(SMALL.figure(findings.rows), tmp_path / "figure.svg", drawing.PLAIN)

    monkeypatch.setattr(EarlyLayer, "answered", None)  # nothing is read again
    assert SMALL.measure(demo, tmp_path / "first").rows == findings.rows


def test_a_search_ends_with_the_first_layer_that_is_enough_and_need_not_be_remembered(
    demo, tmp_path, early_layers, monkeypatch
):
    def read(study, loaded, copies, layer, number):
        return reading(layer, number, loss=0.1)

    monkeypatch.setattr(EarlyLayer, "_look", lambda *_: of_votes())
    monkeypatch.setattr(EarlyLayer, "_read", read)
    findings = replace(SMALL, layers=(3, 5), remember=False).measure(demo, tmp_path)
    assert [row["layer"] for row in findings.rows if row["of"] == "reading"] == [3]
    assert findings.closing == "3 layers are enough; that is not stored"
    assert not early_layers.exists()
