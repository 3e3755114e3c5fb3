"""The study of pooling: many poolings as rows of one batch are what each is alone."""

from dataclasses import replace
from itertools import groupby

import pytest
import torch

from snapkv import FullCache
from snapkv_lab.experiments.pooling import (
    EXPERIMENT,
    MAIN,
    PARTS,
    POOLINGS,
    Part,
    figure,
    question_row,
)
from snapkv_lab.experiments.pooling_cases import Case, Maker, Text
from snapkv_lab.experiments.pooling_reading import (
    FadingBothWays,
    FadingSoFar,
    ReadText,
    RunThenFading,
    SinksStill,
    lost_mass,
    scored_full,
)
from snapkv_lab.experiments.pooling_rows import (
    COLUMNS,
    Count,
    answers_of,
    count,
    loss_above_full,
    paired,
)
from snapkv_lab.experiments.reading import read_prompt, score_answer


@pytest.fixture(scope="module")
def make(demo):
    return Maker(demo.tokenizer)


@pytest.fixture(scope="module")
def text(make):
    return make.needles(360, 0, turns=True)


@pytest.fixture(scope="module")
def read(demo, text):
    return ReadText(demo.model, text.ids)


def test_the_lost_mass_is_what_the_kept_positions_do_not_have():
    votes = torch.tensor([[[4.0, 0, 0, 0, 3.0, 2.0, 1.0]]])
    kept = torch.tensor([[[0, 4]], [[4, 5]], [[0, 6]]])
    assert lost_mass(votes, kept)[:, 0].tolist() == pytest.approx([0.3, 0.5, 0.5])
    assert lost_mass(votes, kept, 4)[:, 0].tolist() == pytest.approx([1 / 2, 1 / 6, 5 / 6])


def test_a_question_behind_a_branch_is_read_as_if_it_were_one_prompt(demo, text, read):
    question = text.cases[0].question_ids
    branch = read.asked(question)
    whole = read_prompt(demo.model, [*text.ids, *question])
    torch.testing.assert_close(branch.last_logits, whole.last_logits, atol=1e-3, rtol=1e-4)
    for one, other in zip(branch.layers, whole.layers, strict=True):
        torch.testing.assert_close(one.queries, other.queries, atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(one.keys, other.keys, atol=1e-3, rtol=1e-4)


def test_rows_of_a_batch_answer_as_each_setting_does_alone(text, read):
    named = (
        "2+10",
        "fading 0.90, back 0.5",
        "0+12, sinks still",
        "fading 0.90, 20 far",
        "fading 0.935, 4 sinks",
    )
    settings = [(16, name) for name in named] + [(8, "centred 7"), (32, "fading 0.90")]
    part = Part(name="test", settings=settings, shares=(16, 4), texts=lambda _: iter([text]))
    case = text.cases[1]
    prompt = read.asked(case.question_ids)
    answers = question_row(read, text, 1, part)["answers"]
    # A 16th of this prompt has room for the windows of 8 and 16 tokens.
    assert len(answers) == 2 * len(settings) - 1
    for share, budget, window, name, right, nll, *_ in answers:
        assert budget == prompt.prompt_tokens // share
        policy = POOLINGS[name](budget, window)
        alone = score_answer(prompt, prompt.compressed(policy), list(case.answer_ids))
        assert right == [int(alone.right)]
        assert nll == pytest.approx(alone.nll / (len(case.answer_ids) - 1), abs=1e-3)


def test_the_lost_mass_of_a_row_is_that_of_what_its_policy_keeps(text, read):
    setting = (16, "fading 0.90")
    part = Part(name="test", settings=[setting], shares=(4,), texts=lambda _: iter([text]))
    [answer] = question_row(read, text, 0, part)["answers"]
    prompt = read.asked(text.cases[0].question_ids)
    policy = POOLINGS["fading 0.90"](answer[1], 16)
    lost = []
    for states in prompt.layers:
        shown = replace(states, queries=states.queries[:, :, -16:])
        kept, votes = policy.select(shown).keep_indices[..., :-16], policy.votes(shown)
        lost.append(1 - votes.gather(-1, kept).sum(-1) / votes.sum(-1))
    of_heads = torch.cat(lost)
    expected = [of_heads.mean(), of_heads.mean(-1).max(), of_heads.max()]
    assert answer[6:9] == pytest.approx([float(number) for number in expected], abs=1e-4)


def test_a_hidden_and_a_second_question_are_read_over_what_was_kept(demo, text, read):
    hidden, second = text.cases[-2:]
    assert (hidden.setting, second.setting) == ("hidden", "second")
    for case in (hidden, second):
        prompt = read.asked(case.question_ids)
        alone = score_answer(
            prompt,
            prompt.compressed(FullCache()),
            list(case.answer_ids),
            question_ids=case.between_ids,
        )
        scored = scored_full(prompt, case)
        assert scored.right == [alone.right]
        assert scored.nll == pytest.approx(alone.nll / (len(case.answer_ids) - 1), abs=1e-3)
    assert read.asked(hidden.question_ids).prompt_tokens == len(text.ids)


def test_where_the_full_cache_has_nothing_right_no_setting_is_asked(text, read):
    wrong = Case(
        group="wrong", setting="visible", question_ids=[], answer_ids=[5, 5, 5], parts=[range(3)]
    )
    asked = Text(name="wrong", ids=text.ids, cases=[wrong])
    assert question_row(read, asked, 0, MAIN)["answers"] == []


def test_poolings_of_the_study_lift_what_they_say():
    votes = torch.zeros(1, 1, 12)
    votes[..., 0], votes[..., 6] = 8.0, 1.0
    near = FadingSoFar(64, pooling="fading", decay=0.5, reach=2)._pooled(votes)
    assert near[0, 0].tolist() == [8, 4, 2, 0, 0, 0, 1, 0.5, 0.25, 0, 0, 0]
    both = FadingBothWays(64, pooling="fading", decay=0.5, before=0.25)._pooled(votes)
    assert both[0, 0, :8].tolist() == [8, 4, 2, 1, 0.5, 0.25, 1, 0.5]
    still = SinksStill(64, pooling="fading", decay=0.5)._pooled(votes)
    assert still[0, 0].tolist() == [8, 0, 0, 0, 0, 0, 1, 0.5, 0.25, 0.125, 0.0625, 0.03125]
    run = RunThenFading(64, pooling="fading", decay=0.5, run=2)._pooled(votes)
    assert run[0, 0].tolist() == [8, 0, 0, 0, 0, 0, 1, 1, 1, 0.5, 0.25, 0.125]


def test_every_pooling_of_a_part_has_a_name():
    for part in PARTS.values():
        assert {name for _, name in part.settings} <= POOLINGS.keys()
        assert len(set(part.settings)) == len(part.settings)


def test_texts_hold_the_answers_to_their_questions(demo, make):
    decode = demo.tokenizer.decode
    for text in (
        make.needles(400, 1, turns=False),
        make.lines(512, 0, questions=2),
        make.quotes(512, 0, questions=2),
        make.rag(6, 0, questions=2),
        next(make.ruler("niah_single_1", 512, 1)),
    ):
        for case in text.cases:
            assert decode(case.answer_ids).strip() in " ".join(decode(text.ids).split()), text.name
            [part] = case.parts
            assert list(part) == list(range(1, len(case.answer_ids)))


def test_of_several_values_each_is_a_part_behind_its_first_token(demo, make):
    [case] = next(make.ruler("niah_multivalue", 512, 1)).cases
    values = demo.tokenizer.decode(case.answer_ids).split(",")
    parts = [demo.tokenizer.decode([case.answer_ids[i] for i in part]) for part in case.parts]
    assert [value.strip(" :")[1:] for value in values] == parts
    assert len(parts) == 4


def _made_rows():
    """Two questions of one group and one text of which only the loss is measured."""
    settings = [(16, "centred 7"), (16, "fading 0.90")]
    rights = {
        "a": ([1], {4: [[0], [1]], 2: [[1], [1]]}),
        "b": ([1], {4: [[1], [1]], 2: [[1], [0]]}),
    }
    rights["c"] = ([], {4: [[], []], 2: [[], []]})
    environment = {"processor": "p", "threads": 1, "torch": "t", "transformers": "v", "commit": "c"}
    model = {"name": "demo", "dtype": "float32", "attn_implementation": "sdpa", "device": "cpu"}
    yield {"run": "main", "model": model, "environment": environment}
    for text, (full, of_shares) in rights.items():
        yield {
            "part": "main",
            "text": text,
            "question": 0,
            "group": "numbers" if full else "prose",
            "setting": "visible",
            "prompt_tokens": 1000,
            "answer_tokens": 5,
            "full": {"right": full, "nll": 0.5},
            "answers": [
                [share, 1000 // share, *setting, right, 0.75, *[0.25] * (len(COLUMNS) - 6)]
                for share, of_settings in of_shares.items()
                for setting, right in zip(settings, of_settings, strict=True)
            ],
        }


def test_counts_are_of_what_the_full_cache_has_right():
    answers = list(answers_of(_made_rows()))
    assert len(answers) == 12
    at_4 = {
        setting: list(own)
        for setting, own in groupby(
            sorted((a for a in answers if a.share == 4), key=lambda a: a.setting),
            key=lambda a: a.setting,
        )
    }
    centred, fading = at_4[16, "centred 7"], at_4[16, "fading 0.90"]
    assert (count(centred), count(fading)) == (Count(right=1, of=2), Count(right=2, of=2))
    assert loss_above_full(centred) == 0.25
    assert paired(answers, (16, "fading 0.90"), (16, "centred 7")) == (1, 1)


def test_an_interval_is_wilsons():
    low, high = Count(right=5, of=10).interval()
    assert (round(low, 3), round(high, 3)) == (0.237, 0.763)
    assert Count(right=0, of=0).interval() == (0, 1)
    assert Count(right=4, of=4).interval()[1] == 1


def test_the_page_is_made_of_rows():
    rows = list(_made_rows())
    page = EXPERIMENT.render(rows)
    assert "| window 16, centred 7 | 0.50 of 2 (0.09 to 0.91), +0.25 |" in page
    assert "## Group numbers: 2 questions, full cache, 2 of 2 right, loss 0.50" in page
    assert "## Group prose: 1 questions, full cache, loss 0.50" in page
    assert figure(rows).axes
