"""Which heads retrieve: the score by hand, and a search on the demo model."""

import json
from dataclasses import replace

import pytest
import torch

from snapkv import DuoAttention, InvalidArgumentError
from snapkv.hf.known_heads import known_head_scores
from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer
from snapkv_lab.study import Heads, copying, figures
from snapkv_lab.study.heads import copied_attention, scores_of
from tests.families import tiny_model

SMALL = Heads(samples=1, items=4, document_tokens=150, kinds=("digits", "tokens"))


def made_layer(rows, **options):
    """Query heads that share one KV head; of each the position every query attends to."""
    slots = len(rows[0])
    keys = torch.eye(slots)[None, None]
    queries = torch.stack([torch.eye(slots)[attended] for attended in rows])[None] * 40
    return PromptLayer(
        queries=queries,
        keys=keys,
        values=keys,
        score_options=ScoreOptions(scaling=1.0),
        layer_idx=0,
        **options,
    )


def test_the_score_by_hand():
    """Tokens 2, 3, 4 are said again behind token 9, whose query asks for the first of them."""
    copy = copying.Copy(prompt=list(range(10)), answer=[2, 3, 4], start=2)
    nothing = [0] * 12
    on_time = [*nothing[:9], 2, 3, 4]  # a head that looks up what comes next
    once = [*nothing[:9], 0, 3, 0]
    late = [*nothing[:10], 2, 3]  # one that looks at the token itself
    scores = [
        copied_attention(made_layer(rows), copy).tolist()
        for rows in ([on_time], [once, nothing], [late], [nothing, on_time])
    ]
    expected = torch.tensor([[1.0], [1 / 3], [0.0], [1.0]])
    torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-4, rtol=1e-4)


def record(*scores):
    heads = [{"layer": 3 + 2 * (i // 2), "head": i % 2, "score": s} for i, s in enumerate(scores)]
    return {"sample": "0", "question": "digits", "heads": heads}


def test_rows_are_means_over_prompts_and_shares_of_heads():
    rows = SMALL.summary([record(0.1, 0.3, 0.0, 0.0), record(0.3, 0.9, 0.0, 0.0)])
    assert scores_of(rows) == ((0.2, 0.6), (0.0, 0.0))
    shares = {row["keep_heads"]: row for row in rows if row["of"] == "share"}
    assert (shares[0.5]["heads"], shares[0.5]["lowest"], shares[0.5]["held"]) == (2, 0.2, 1.0)
    assert (shares[0.25]["heads"], shares[0.25]["lowest"]) == (1, 0.6)
    assert shares[0.25]["held"] == pytest.approx(0.75)
    assert shares[0.1]["heads"] == 0
    nothing = SMALL.summary([record(0.0, 0.0)])
    assert {row["held"] for row in nothing if row["of"] == "share"} == {0.0}


def test_a_search_on_the_demo_is_remembered_and_continued(demo, tmp_path, head_scores, monkeypatch):
    packaged = known_head_scores(demo.model)
    findings = SMALL.into(demo, tmp_path / "first")
    scores = known_head_scores(demo.model)
    assert scores == scores_of(findings.rows) != packaged
    assert [len(row) for row in scores] == [3] * 30
    assert str(head_scores) in findings.closing
    assert DuoAttention(tmp_path / "first" / "heads.json").pattern == scores
    best, known = (set(_best(DuoAttention(each, keep_heads=0.1))) for each in (scores, packaged))
    assert len(best & known) >= 6, "two short prompts find most of the nine best heads"
    saved = (tmp_path / "first" / "summary.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in saved] == findings.rows
    table = SMALL.table(findings.rows)
    assert all(len(line) == len(table.header) for line in table.lines)
    figures.save(SMALL.figure(findings.rows), str(tmp_path / "figure.svg"))

    monkeypatch.setattr(Heads, "looked_at", None)  # nothing is read again
    assert SMALL.into(demo, tmp_path / "first").rows == findings.rows


def _best(policy):
    rows = policy.retrieval_heads
    return [(i, j) for i, row in enumerate(rows) for j, whole in enumerate(row) if whole]


@pytest.mark.parametrize(
    ("family", "shape"), [("gemma3_text", (2, 2)), ("deepseek_v3", (4, 1)), ("qwen3", (4, 2))]
)
def test_scores_are_those_of_the_heads_that_the_cache_stores(demo, family, shape, tmp_path):
    tiny = tiny_model(family)
    loaded = replace(demo, model=tiny)
    copy = copying.Copy(prompt=list(range(3, 60)), answer=[7, 8, 9], start=5)
    rows = SMALL.summary([SMALL.looked_at(loaded, copy)])
    scores = scores_of(rows)
    assert (len(scores), len(scores[0])) == shape
    assert all(0 <= score <= 1 for row in scores for score in row)


def test_what_is_found_need_not_be_remembered(demo, tmp_path, head_scores):
    findings = replace(SMALL, remember=False, kinds=("digits",)).into(demo, tmp_path)
    assert f"--set pattern={tmp_path / 'heads.json'}" in findings.closing
    assert not head_scores.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "samples: expected at least 1"),
        ({"items": 0}, "items: expected at least 1"),
        ({"kinds": ("letters",)}, "kinds: expected one of digits, words, tokens"),
        ({"document_tokens": 5}, "document_tokens: expected at least 128"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Heads(**settings)
