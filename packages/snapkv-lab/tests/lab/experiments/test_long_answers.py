"""The quarters of long answers, and what a table shows of them."""

import torch

from snapkv_lab.experiments.long_answers import LONG_ANSWERS, quarter_means


def test_each_quarter_of_an_answer_has_its_own_mean():
    losses = torch.tensor([1.0, 3.0, 0.0, 0.0, 2.0, 2.0, 5.0, 7.0])
    assert quarter_means(losses) == [2.0, 0.0, 2.0, 6.0]


def rows():
    """Yield rows of two texts, where the method loses 0 and then 1 and 3 nats in the last part."""
    for text, last in (("a", 2.0), ("b", 4.0)):
        shape = {"text": text, "group": "passages"}
        yield shape | {"method": "full", "share": "", "right": [1, 1, 1, 1], "nll": [1, 1, 1, 1]}
        yield shape | {
            "method": "default",
            "share": "1/8",
            "right": [1, 1, 0.5, 0],
            "nll": [1, 1, 1, last],
        }


def test_table_shows_loss_above_the_full_caches_for_every_quarter():
    page = LONG_ANSWERS.render(list(rows()))
    assert "| default, 1/8 | 100% | 100% | 50% | 0% |" in page
    assert "| default, 1/8 | +0.00 | +0.00 | +0.00 | +2.00 |" in page
