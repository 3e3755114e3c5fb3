"""A budget that the votes choose, with everything that a cache can be told beside it."""

import contextlib

import pytest
import torch

from snapkv import (
    AutoBudget,
    CompressedCache,
    Document,
    InvalidArgumentError,
    SnapKV,
    default_policy,
)
from snapkv.prefill import layer_by_layer
from tests.families import random_ids, tiny_model
from tests.pairs import pairs

WINDOW, LEAST = 8, 4


class Watched(SnapKV):
    """Holds every choice against the rule, which is said here once more, head by head."""

    def select(self, layer):
        selection = super().select(layer)
        shares = self.score(layer) / self.summed_weights(layer)
        slots = layer.keys.shape[2]
        for row, length in enumerate(layer.row_lengths):
            prefix, auto = max(0, length - WINDOW), self.budget
            own = shares[row, :, shares.shape[-1] - prefix :]
            above = own > auto.lost_vote
            above[:, : self.sink_tokens] = True
            most = prefix if auto.most is None else auto.most - WINDOW
            voted = int(above.sum(dim=-1).max()) if prefix else 0
            number = min(max(voted, LEAST), most, prefix)
            if selection is None:
                assert number == prefix
                continue
            for head, kept in enumerate(selection.keep_indices[row]):
                chosen = {slot - (slots - length) for slot in kept.tolist()}
                chosen = {place for place in chosen if place >= 0}
                assert len(chosen) == number + min(WINDOW, length)
                if voted <= most:
                    assert set(above[head].nonzero()[:, 0].tolist()) <= chosen
        CHOICES.append(layer.depth)
        return selection


CHOICES = []
READINGS = {
    "at once": lambda model: contextlib.nullcontext(),
    "layer by layer": lambda model: layer_by_layer(model, chunk_tokens=32),
}


@pairs(
    turns={"append": {}, "recall": {"recall": "host"}},
    quantize=(None, "int8"),
    reading=READINGS,
    pads=(0, 21),
    pooling={
        "fading": {"pooling": "fading"},
        "max": {},
        "forward": {"kernel_size": (0, 4), "group_reduce": "sum"},
    },
    lost_vote=(0.006, 0.02),
    most=(None, 72),
)
def test_what_is_kept_is_what_the_rule_says(
    turns, quantize, reading, pads, pooling, lost_vote, most
):
    auto = AutoBudget(lost_vote=lost_vote, least=LEAST, most=most)
    model = tiny_model("llama")
    policy = Watched(auto, window_size=WINDOW, **pooling)
    cache = CompressedCache(model, policy, quantize=quantize, **turns)
    ids, CHOICES[:] = random_ids(2, 150), []
    mask = torch.ones_like(ids)
    mask[0, :pads] = 0
    with reading(model):
        for _ in range(2):
            asked = {"past_key_values": cache, "max_new_tokens": 3, "do_sample": False}
            ids = model.generate(ids, attention_mask=mask, **asked)
            ids = torch.cat([ids, random_ids(2, 20, seed=2)], dim=1)
            mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    first, later = list(range(len(cache.layers))), CHOICES[len(cache.layers) :]
    assert CHOICES[: len(first)] == first
    assert later == first if turns else set(later) <= set(first)  # where nothing was dropped
    if most is not None and turns:
        assert cache.report().kept_tokens <= most + 3


@pytest.mark.parametrize("budget", ["auto", AutoBudget(lost_vote=0.02, least=4)])
def test_questions_on_a_document_are_answered_as_if_read_together(budget):
    model, policy = tiny_model("llama"), default_policy(budget, window_size=WINDOW)
    text, questions = random_ids(1, 90), [random_ids(1, n, seed=n)[0].tolist() for n in (9, 12)]
    document = Document(model, text, policy)
    for question in questions:
        inputs = document.inputs([question])
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
        ids = torch.cat([text, torch.tensor([question])], dim=1)
        alone = CompressedCache(model, policy)
        model.generate(ids, past_key_values=alone, max_new_tokens=3, do_sample=False)
        cache = inputs["past_key_values"]
        for layer in cache.compressed_layers:
            assert torch.equal(cache.kept_positions(layer), alone.kept_positions(layer))


def test_without_recall_later_turns_cannot_choose_how_much():
    with pytest.raises(InvalidArgumentError, match=r"recall='host'"):
        CompressedCache(tiny_model("llama"), SnapKV("auto"), turns="compress")


def test_who_names_no_policy_gets_the_default_one():
    model = tiny_model("llama")
    assert CompressedCache(model).policy == default_policy()
    assert Document(model, random_ids(1, 30))._cache.policy == default_policy()


@pytest.mark.parametrize(("implementation", "pieces"), [("sdpa", (5, 7)), ("eager", (12,))])
def test_a_layer_that_has_dropped_nothing_reads_a_turn_behind_one_that_has(implementation, pieces):
    """The model's one mask is then too narrow for it; sdpa without pads is given none."""
    model = tiny_model("cohere", implementation)
    policy = SnapKV("auto", window_size=32, pooling="fading")
    alone, batch = CompressedCache(model, policy), CompressedCache(model, policy)
    mask = torch.ones(2, 60, dtype=torch.int64)
    first = random_ids(1, 60, seed=3).repeat(2, 1)
    with torch.no_grad():
        model(first[:1], past_key_values=alone)
        model(first, attention_mask=mask, past_key_values=batch)
        for turn, parts in enumerate(((10,), pieces)):
            end = alone.get_seq_length() + sum(parts)
            for cache in (alone, batch):
                cache.expect_prompt(end)
            text = random_ids(1, sum(parts), seed=4 + turn).repeat(2, 1)
            for piece in text.split(list(parts), dim=1):
                mask = torch.cat([mask, torch.ones_like(piece)], dim=1)
                own = model(piece[:1], past_key_values=alone).logits
                both = model(piece, attention_mask=mask, past_key_values=batch).logits
                torch.testing.assert_close(both[:1], own, atol=1e-5, rtol=1e-4)
            if not turn:
                kept = [alone.kept_positions(layer).shape[-1] for layer in range(4)]
                assert kept == [69, 69, 70, 70]
