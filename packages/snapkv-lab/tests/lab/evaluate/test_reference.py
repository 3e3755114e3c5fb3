"""The loss of the references after a full cache and after compressed ones."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from snapkv import H2O, FullCache, KVzip, SnapKV
from snapkv.errors import OutOfMemoryError
from snapkv.hf.cache import CompressedCache
from snapkv.kvzip import read_for_policy
from snapkv_app import likelihood as reference_module
from snapkv_app.answering import answer_ids
from snapkv_app.conversation import joined
from snapkv_app.likelihood import References
from snapkv_app.prefills import Exact, LayerByLayer
from snapkv_app.prompts import Prompt
from snapkv_app.settings import GenerationSettings
from snapkv_lab.evaluate.asking import Answerer, Method, SampleJob
from snapkv_lab.evaluate.runner import Run
from snapkv_lab.evaluate.tasks import Turns
from tests.lab.evaluate.tiny import METHODS, Keys, records, tiny_loaded, untimed

FULL = METHODS[0]
REFERENCE = "under the blue stone, behind the gate"


@dataclass(frozen=True, kw_only=True)
class TwoReferences(Keys):
    """A task with two right answers to every question."""

    references: tuple[str, ...] = (REFERENCE, "the blue stone")

    def samples(self, tokenizer):
        for sample in super().samples(tokenizer):
            settings = GenerationSettings(max_new_tokens=5, min_new_tokens=2)
            yield replace(sample, references=self.references, settings=settings)


def records_with_loss(folder, **given):
    """Return the records of a run with losses, whose answers equal those of a run without."""
    Run(**given).evaluate(folder / "plain")
    Run(**given, reference_loss=True).evaluate(folder / "loss")
    found = records(folder / "loss")
    without = [{k: v for k, v in one.items() if k != "loss"} for one in untimed(found)]
    assert without == untimed(records(folder / "plain"))
    return found


def plain_loss(model, ids, own):
    """Compute the loss without a cache, in one pass."""
    whole = torch.tensor([[*ids, *own]])
    with torch.no_grad():
        logits = model(whole).logits[0]
    return float(cross_entropy(logits[len(ids) - 1 : -1], whole[0, len(ids) :]))


def generated_loss(loaded, ids, own, cache, context_tokens=None, prefill=None):
    """Compute the loss with `generate`, which may only choose the reference's tokens."""
    with (prefill or Exact()).installed(loaded.model):
        if context_tokens is not None:
            read_for_policy(loaded.model, loaded.tokenizer, ids[:, :context_tokens], cache)
        out = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=len(own),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            prefix_allowed_tokens_fn=lambda _, said: [own[len(said) - ids.shape[1]]],
            output_logits=True,
            return_dict_in_generate=True,
        )
    assert out.sequences[0, ids.shape[1] :].tolist() == own
    return float(cross_entropy(torch.cat(out.logits), torch.tensor(own)))


# The tokens of a reference.


@pytest.mark.parametrize(
    ("prompt", "reference", "expected"),
    [
        (Prompt(text="Where is it?\nAnswer:"), "under it", " under it"),
        (Prompt(text="Where is it?\nAnswer:\n"), "under it", "under it"),
        (Prompt(text="Where is it? It is "), "under it", "under it"),
        (Prompt(text="The number is: 1"), "23", " 23"),
    ],
)
def test_reference_is_tokenized_as_a_continuation_of_the_prompt(tiny, prompt, reference, expected):
    (own,) = References.after(prompt, [reference], tiny).token_ids
    before = prompt.token_ids(tiny.tokenizer)[0].tolist()
    said = tiny.tokenizer.decode([*before, *own])
    assert said == tiny.tokenizer.decode(before) + expected
    whole = tiny.tokenizer(prompt.text + expected)["input_ids"]
    assert ([*before, *own] == whole) == (prompt.text[-1] != " ")


# The loss behind a cache.


@pytest.mark.parametrize(
    ("policy", "way", "question"),
    [
        (H2O(40), Exact(), "hidden"),
        (KVzip(40, window_size=4, chunk_tokens=64), Exact(), "hidden"),
        (FullCache(), Exact(), "visible"),
        (SnapKV(40), LayerByLayer(chunk_tokens=32), "visible"),
    ],
    ids=lambda each: each if isinstance(each, str) else getattr(each, "name", "pages"),
)
def test_reference_loss_equals_that_of_generation(tiny, tmp_path, policy, way, question):
    """The reference with the lower loss counts. If nothing is evicted, it equals that of
    one pass.
    """
    template, space = ("none", " ") if question == "hidden" else ("tokenizer", "")
    own = Method(label="own", policy=policy, prefill=way)
    task = TwoReferences(sentences=(14,), each=1)
    given = {"loaded": tiny, "task": task, "methods": [own], "questions": (question,)}
    (record,) = records_with_loss(tmp_path, **given, template=template)
    (sample,) = task.samples(tiny.tokenizer)
    prompt = sample.prompt(tiny.tokenizer, template, question)
    ids, context = prompt.token_ids(tiny.tokenizer), prompt.context_tokens(tiny.tokenizer)
    (method,) = Run(**given).methods
    losses = []
    for text in sample.references:
        tokens = tiny.tokenizer(space + text)["input_ids"]
        cache = CompressedCache(tiny.model, tiny.completed(method.policy))
        generated = generated_loss(tiny, ids, tokens, cache, context, way)
        losses.append((generated, plain_loss(tiny.model, ids[0].tolist(), tokens)))
    expected, full = min(losses)
    assert record["loss"] == pytest.approx(expected, abs=2e-5)
    assert losses[0][0] != pytest.approx(losses[1][0], abs=1e-3)
    keeps_all = isinstance(policy, FullCache)
    assert (abs(record["loss"] - full) < 1e-4) == keeps_all, "something was dropped"


@pytest.mark.parametrize(
    ("policy", "later"),
    [(SnapKV(48), "compress"), (FullCache(), "append")],
    ids=lambda each: each if isinstance(each, str) else getattr(each, "name", "pages"),
)
def test_every_turn_has_the_loss_of_its_own_reference(tiny, tmp_path, policy, later):
    task = Turns(cloze=True, lengths=(200,), questions=3, samples_each=1)
    method = Method(label="own", policy=policy, later=later)
    given = {"loaded": tiny, "task": task, "methods": [method], "template": "none"}
    found = records_with_loss(tmp_path, **given)
    (sample,) = task.samples(tiny.tokenizer)
    prompt = sample.prompt(tiny.tokenizer, "none", "visible")
    for number, (turn, record) in enumerate(zip(sample.turns, found, strict=True)):
        cache, said = CompressedCache(tiny.model, policy, **method.cache_options), None
        for earlier in sample.turns[: number + 1]:  # the conversation anew, up to this turn
            ids = prompt.token_ids(tiny.tokenizer)
            if said is not None:
                asked = earlier.later_turn(tiny.tokenizer, "none")
                ids = joined(tiny, said, asked, earlier.settings, is_chat=False)
            if earlier is not turn:
                _, said = answer_ids(tiny, ids, cache, earlier.settings)
        own = tiny.tokenizer(f" {turn.references[0]}")["input_ids"]
        expected = generated_loss(tiny, ids, own, cache)
        assert record["loss"] == pytest.approx(expected, abs=1e-4)
        if isinstance(policy, FullCache):
            assert expected == pytest.approx(plain_loss(tiny.model, ids[0].tolist(), own), abs=1e-4)


def test_reference_beyond_the_models_positions_has_no_loss(demo, tmp_path):
    task = TwoReferences(sentences=(8,), references=("the blue stone " * 40, "the blue stone"))
    (sample, *_) = task.samples(demo.tokenizer)
    prompt = sample.prompt(demo.tokenizer, "tokenizer", "visible")
    loaded = tiny_loaded(demo.tokenizer, positions=prompt.token_ids(demo.tokenizer).shape[1] + 10)
    run = Run(loaded=loaded, task=task, methods=METHODS[:2], reference_loss=True)
    results = run.evaluate(tmp_path)
    assert {(one["status"], one["loss"]) for one in records(tmp_path)} == {("ok", None)}
    assert {(row["loss"], row["loss_interval"]) for row in results.rows} == {(None, None)}
    assert [row["loss_difference"] for row in results.rows] == [None, None]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_loss_that_is_not_a_number_is_none(tiny, tmp_path, monkeypatch, bad):
    """Logits may overflow, and a minimum with such a loss would depend on the order."""
    real = reference_module._loss

    def loss(loaded, end, token_ids):
        found = real(loaded, end, token_ids)
        return bad if len(token_ids) > 5 else found

    monkeypatch.setattr(reference_module, "_loss", loss)
    task = TwoReferences()
    results = Run(loaded=tiny, task=task, methods=[FULL], reference_loss=True).evaluate(tmp_path)
    assert {(one["status"], one["loss"]) for one in records(tmp_path)} == {("ok", None)}
    assert {row["loss"] for row in results.rows} == {None}


def test_running_out_of_memory_at_a_reference_loses_only_that_record(tiny, monkeypatch):
    real, calls = References.loss, []

    def loss(self, *given):
        calls.append(given)
        if len(calls) == 1:
            raise OutOfMemoryError("full")
        return real(self, *given)

    monkeypatch.setattr(References, "loss", loss)
    asked = SampleJob(
        sample=next(Keys().samples(tiny.tokenizer)),
        question="visible",
        methods=METHODS,
        task=Keys(),
        template="none",
        reference_loss=True,
    )
    status = [record["status"] for record in Answerer(loaded=tiny).records(asked)]
    assert status == ["out of memory", "ok", "ok"]
