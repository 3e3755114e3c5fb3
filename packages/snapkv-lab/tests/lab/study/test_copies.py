"""Where votes fall beside what is copied next, and which heads look it up."""

import json
from dataclasses import replace

import pytest
import torch

from snapkv import DuoAttention, SnapKV
from snapkv.hf.identity import identity_of
from snapkv.hf.known_heads import known_head_scores
from snapkv.ops import ScoreOptions
from snapkv.policies import PromptLayer
from snapkv_lab.study import Heads, Induction, copying, figures, measures
from snapkv_lab.study.copies import DECAYS, copied_attention, said, scores_of
from tests.families import tiny_model

INDUCTION = Induction(
    samples=1, document_tokens=150, items=4, window_size=8, budget=40, kinds=("words",)
)
HEADS = Heads(samples=1, items=4, document_tokens=150, kinds=("digits", "tokens"))


def made_layer(*rows):
    """Query heads that share one KV head; of each the position every query attends to."""
    keys = torch.eye(len(rows[0]))[None, None]
    return PromptLayer(
        queries=torch.stack([torch.eye(len(rows[0]))[attended] for attended in rows])[None] * 40,
        keys=keys,
        values=keys,
        score_options=ScoreOptions(scaling=1.0),
        layer_idx=0,
    )


def test_votes_around_a_position_are_shares_of_all_of_the_heads():
    votes = torch.tensor([[8.0, 0.0, 1.0, 3.0, 0.0, 4.0], [0.0] * 6])
    around = measures.votes_around(votes, 3, 2)
    assert around.tolist() == [[0.0, 1 / 16, 3 / 16, 0.0, 4 / 16], [0.0] * 5]
    assert measures.votes_around(votes, 5, 2)[0].tolist() == [3 / 16, 0.0, 4 / 16, 0.0, 0.0]
    assert measures.votes_around(votes, 0, 2)[0].tolist() == [0.0, 0.0, 8 / 16, 0.0, 1 / 16]


def test_the_base_rate_is_that_of_positions_far_away():
    votes = torch.tensor([[8.0, 1.0, 2.0, 9.0, 9.0, 9.0, 0.0, 2.0]])
    # Of 40 votes, positions 1, 2, 6 and 7 have 5.
    assert measures.base_share(votes, 4, 1, 1).tolist() == pytest.approx([5 / 40 / 4])
    assert measures.base_share(votes, 4, 9, 1).tolist() == [0.0]


def test_how_far_positions_stand_from_the_nearest_vote():
    voted = torch.tensor([[True, False, False, False, True, False, False, False]])
    before, behind = measures.distances_to_voted(voted, torch.tensor([0, 1, 3, 4, 7]), 2)
    assert before.tolist() == [[0, 3, 1, 0, 3]]  # 3 for more than two away, or none
    assert behind.tolist() == [[0, 1, 3, 0, 3]]


def reaches(*pairs):
    counts = torch.zeros(6, 6, dtype=torch.int64)
    for before, behind in pairs:
        counts[before, behind] += 1
    return counts


@pytest.mark.parametrize(
    ("pairs", "share", "expected"),
    [
        ([(5, 1), (5, 2), (5, 3), (5, 4)], 1.0, (0, 4, 1.0)),
        ([(5, 1), (5, 2), (5, 3), (5, 4)], 0.75, (0, 3, 0.75)),
        ([(1, 5), (5, 2)], 1.0, (1, 2, 1.0)),
        ([(2, 4), (3, 2)], 1.0, (3, 0, 1.0)),  # narrower than (0, 4) and (2, 2)
        ([(2, 2), (2, 2)], 0.9, (0, 2, 1.0)),  # as narrow as (2, 0)
        ([(0, 0), (5, 5)], 1.0, (0, 0, 1.0)),  # what has no vote near is lost to any
        ([(5, 5)], 0.5, None),
        ([], 0.5, None),
    ],
)
def test_the_smallest_pair_of_a_worked_example(pairs, share, expected):
    assert measures.smallest_pair(reaches(*pairs), share) == expected


def test_quantiles_are_distances_up_to_which_so_much_lies():
    shares, distances = [0.1, 0.3, 0.0, 0.6], [-2, -1, 0, 1]
    assert [measures.quantile(shares, distances, part) for part in (0.1, 0.4, 0.9)] == [-2, -1, 1]
    assert measures.quantile([0.0], [0], 0.5) is None


def test_what_one_layer_gives_by_hand():
    """Tokens 20 to 23 are hidden; the window is 28 and 29, and votes for 18 and 20.

    Each token of the copy attends to the one that comes next there, but the last to none of them.
    """
    attended = [0] * 28 + [18, 20] + [21, 22, 0]
    copy = copying.Copy(prompt=list(range(30)), answer=[1, 2, 3, 4], start=20)
    study = Induction(window_size=2, budget=10, best_votes=2, document_tokens=128)
    found = study.look(made_layer(attended), copy)
    (head,) = found["heads"]
    assert head["needed"] == 3
    places = {distance - 64: share for distance, share in enumerate(head["votes"]) if share > 0.01}
    assert places == pytest.approx({-2: 0.5, 0: 0.5}, abs=1e-3)
    assert head["base"] == pytest.approx(0.0, abs=1e-3)
    # 20 has a vote of its own; 21 and 22 stand behind it; before all but 20 there is none.
    assert found["reaches"] == {(0, 0): 1, (33, 1): 1, (33, 2): 1}
    # Beside 4 sinks and the window there are four places. Fading gives them to 18 and 20 and what
    # stands behind each; the centred pooling to the lowest of a plateau, 15 to 18.
    assert found["kept"] == {"needed": 3, "centred": 0} | {str(decay): 2 for decay in DECAYS}


@pytest.mark.parametrize("kind", ["digits", "words", "tokens"])
def test_a_copy_stands_where_it_says_and_the_prompt_ends_in_its_start(kind, demo):
    text = demo.tokenizer("The garden is quiet and the path is long. " * 9)["input_ids"]
    options = {"kind": kind, "items": 6, "depth": 0.5}
    copy = copying.hidden_copy(demo.tokenizer, text, **options, seed="1")
    stop = copy.start + len(copy.answer)
    assert copy.prompt[copy.start : stop] == copy.answer
    assert copy.ids.shape[1] == len(copy.prompt) + len(copy.answer) - 1
    lead = copy.prompt[copy.start - 6 : copy.start]
    assert copy.prompt[-6:] == lead
    assert copy.places.tolist() == list(range(copy.start, stop))
    assert copying.hidden_copy(demo.tokenizer, text, **options, seed="1") == copy
    assert copying.hidden_copy(demo.tokenizer, text, **options, seed="2").answer != copy.answer
    if kind == "digits":
        assert demo.tokenizer.decode(copy.answer).strip().isdigit()


@pytest.fixture(scope="module")
def found(demo, tmp_path_factory):
    return INDUCTION.into(demo, tmp_path_factory.mktemp("induction"))


def test_a_run_has_rows_of_distances_heads_decays_and_what_follows(found):
    of = [row["of"] for row in found.rows]
    assert (of.count("distance"), of.count("head"), of[-1]) == (129, 30 * 9, "derived")
    distances = [row for row in found.rows if row["of"] == "distance"]
    assert distances[-1]["votes_up_to"] == pytest.approx(1.0)
    assert max(row["votes_of_highest"] for row in distances) == 1.0
    near = sum(row["votes"] for row in distances if -8 <= row["distance"] <= 0)
    behind = sum(row["votes"] for row in distances if 0 < row["distance"] <= 9)
    assert near > 3 * behind  # the copy begins where the votes are, and goes on behind them
    derived = found.rows[-1]
    assert derived["needed"] > 0
    assert derived["kernel_size"][0] < derived["kernel_size"][1]
    assert derived["kept"] > derived["kept_centred"]


def test_the_folder_holds_the_pooling_beside_the_models_identity(found, demo):
    kept = json.loads((found.folder / "pooling.json").read_text())
    assert kept["model"] == json.loads(json.dumps(identity_of(demo.model)))
    derived = found.rows[-1]
    assert kept["pooling"]["decay"] == derived["decay"]
    assert SnapKV(kernel_size=kept["pooling"]["kernel_size"]).kernel_size == tuple(
        derived["kernel_size"]
    )
    SnapKV(pooling="fading", decay=kept["pooling"]["decay"])


def test_a_run_that_is_continued_reads_nothing_again(found, demo, monkeypatch):
    monkeypatch.setattr(Induction, "looked_at", None)
    assert INDUCTION.into(demo, found.folder).rows == found.rows


def test_the_table_says_what_to_type_and_there_is_a_figure(found, tmp_path):
    table = INDUCTION.table(found.rows)
    assert all(len(line) == len(table.headings) for line in table.rows)
    before, behind = found.rows[-1]["kernel_size"]
    assert f"--kernel-size {before}+{behind} reaches" in table.title
    assert f"--pooling fading --decay {found.rows[-1]['decay']} keeps" in table.title
    figures.save(INDUCTION.figure(found.rows), str(tmp_path / "figure.svg"))
    assert (tmp_path / "figure.svg").read_text().count("<path") > 10


def test_a_random_model_may_need_nothing_and_then_nothing_follows(demo, found):
    heads = [{"layer": 0, "head": 0, "needed": 0, "base": 0.1, "votes": [0.0] * 129}]
    record = {"question": "words", "heads": heads, "reaches": [], "kept": {"needed": 0}}
    rows = INDUCTION.summary([record])
    assert [row["of"] for row in rows] == ["head", "derived"]
    assert rows[-1]["decay"] is rows[-1]["kernel_size"] is None
    assert said(rows[-1], 40) == "no head attends to what is copied, so nothing follows for pooling"
    assert INDUCTION.table(rows).rows == []


def test_the_score_by_hand():
    """Tokens 2, 3, 4 are said again behind token 9, whose query asks for the first of them."""
    copy = copying.Copy(prompt=list(range(10)), answer=[2, 3, 4], start=2)
    nothing = [0] * 12
    on_time = [*nothing[:9], 2, 3, 4]  # a head that looks up what comes next
    once = [*nothing[:9], 0, 3, 0]
    late = [*nothing[:10], 2, 3]  # one that looks at the token itself
    scores = [
        copied_attention(made_layer(*rows), copy).tolist()
        for rows in ([on_time], [once, nothing], [late], [nothing, on_time])
    ]
    expected = torch.tensor([[1.0], [1 / 3], [0.0], [1.0]])
    torch.testing.assert_close(torch.tensor(scores), expected, atol=1e-4, rtol=1e-4)


def record(*scores):
    heads = [{"layer": 3 + 2 * (i // 2), "head": i % 2, "score": s} for i, s in enumerate(scores)]
    return {"sample": "0", "question": "digits", "heads": heads}


def test_rows_are_means_over_prompts_and_shares_of_heads():
    rows = HEADS.summary([record(0.1, 0.3, 0.0, 0.0), record(0.3, 0.9, 0.0, 0.0)])
    assert scores_of(rows) == ((0.2, 0.6), (0.0, 0.0))
    shares = {row["keep_heads"]: row for row in rows if row["of"] == "share"}
    assert (shares[0.5]["heads"], shares[0.5]["lowest"], shares[0.5]["held"]) == (2, 0.2, 1.0)
    assert (shares[0.25]["heads"], shares[0.25]["lowest"]) == (1, 0.6)
    assert shares[0.25]["held"] == pytest.approx(0.75)
    assert shares[0.1]["heads"] == 0
    nothing = HEADS.summary([record(0.0, 0.0)])
    assert {row["held"] for row in nothing if row["of"] == "share"} == {0.0}


def test_a_search_on_the_demo_is_remembered_and_continued(demo, tmp_path, head_scores, monkeypatch):
    packaged = known_head_scores(demo.model)
    findings = HEADS.into(demo, tmp_path / "first")
    scores = known_head_scores(demo.model)
    assert scores == scores_of(findings.rows) != packaged
    assert [len(row) for row in scores] == [3] * 30
    assert str(head_scores) in findings.closing
    assert DuoAttention(tmp_path / "first" / "heads.json").pattern == scores
    best, known = (set(_best(DuoAttention(each, keep_heads=0.1))) for each in (scores, packaged))
    assert len(best & known) >= 6, "two short prompts find most of the nine best heads"
    saved = (tmp_path / "first" / "summary.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in saved] == findings.rows
    table = HEADS.table(findings.rows)
    assert all(len(line) == len(table.headings) for line in table.rows)
    figures.save(HEADS.figure(findings.rows), str(tmp_path / "figure.svg"))

    monkeypatch.setattr(Heads, "looked_at", None)  # nothing is read again
    assert HEADS.into(demo, tmp_path / "first").rows == findings.rows


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
    rows = HEADS.summary([HEADS.looked_at(loaded, copy)])
    scores = scores_of(rows)
    assert (len(scores), len(scores[0])) == shape
    assert all(0 <= score <= 1 for row in scores for score in row)


def test_what_is_found_need_not_be_remembered(demo, tmp_path, head_scores):
    findings = replace(HEADS, remember=False, kinds=("digits",)).into(demo, tmp_path)
    assert f"--set pattern={tmp_path / 'heads.json'}" in findings.closing
    assert not head_scores.exists()
