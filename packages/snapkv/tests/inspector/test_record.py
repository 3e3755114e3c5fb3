"""What the page shows is what the cache did: on the demo model and on all families."""

import base64
import itertools
from typing import ClassVar

import pytest
import torch
from transformers import DynamicCache

from snapkv import (
    H2O,
    AdaKV,
    CompressedCache,
    FastGen,
    FullCache,
    KeyDiff,
    PromptThenDecode,
    PyramidKV,
    SnapKV,
    StreamingLLM,
)
from snapkv.app.models import LoadedModel
from snapkv.app.observing import observed
from snapkv.app.prompts import Prompt, question_prompt
from snapkv.app.settings import GenerationSettings
from snapkv.inspector import inspect_prompt
from snapkv.inspector.leave_out import SINK_TOKENS, leave_out
from snapkv.inspector.record import token_texts
from snapkv.library.records import Text
from tests.families import FAMILIES, IMPLEMENTATIONS, random_ids, tiny_model

FILLER = "The garden is quiet, the path is long and the wall is old. "
FACT = "The key to the garden gate is under the blue stone. "
DOCUMENT = FILLER * 10 + FACT + FILLER * 10
QUESTION = "Where is the key to the garden gate?"
POLICIES = [
    SnapKV(96, window_size=16),
    PyramidKV(96, window_size=16),
    AdaKV(SnapKV(96, window_size=16)),
    KeyDiff(96),
    H2O(96),
    StreamingLLM(96),
    FastGen(0.9),
    PromptThenDecode(prompt=SnapKV(96, window_size=16), decode=H2O(128)),
    FullCache(),
]


@pytest.fixture(scope="module")
def prompt(demo):
    start = "The key to the garden gate is under the"
    return question_prompt(demo.tokenizer, DOCUMENT, QUESTION, answer_start=start)


@pytest.fixture(scope="module")
def inspection(demo, prompt):
    policies = [(policy.name, policy) for policy in POLICIES]
    settings = GenerationSettings(max_new_tokens=3)
    documents = [Text(name="garden.txt", text=DOCUMENT.strip("\n"))]
    budgets = [(tokens, SnapKV(tokens, window_size=16)) for tokens in (20, 96)]
    return inspect_prompt(
        demo, prompt, policies, settings, checks=24, budgets=budgets, documents=documents
    )


def unpacked(layer, tokens):
    heads = len(layer["kept_tokens"])
    data = torch.frombuffer(bytearray(base64.b64decode(layer["bits"])), dtype=torch.uint8)
    bits = (data.view(heads, -1, 1) >> torch.arange(8)) & 1
    return bits.flatten(1)[:, :tokens].bool()


@pytest.mark.parametrize("number", range(len(POLICIES)), ids=[p.name for p in POLICIES])
def test_the_kept_tokens_are_those_of_a_real_cache(demo, prompt, inspection, number):
    ids = prompt.token_ids(demo.tokenizer)
    cache = CompressedCache(demo.model, POLICIES[number].with_tokenizer(demo.tokenizer))
    cache.expect_tokens(ids)
    with torch.inference_mode():
        demo.model(ids, past_key_values=cache, logits_to_keep=1)
    method = inspection.methods[number]
    assert [layer["layer"] for layer in method.layers] == cache.compressed_layers
    for layer in method.layers:
        kept = cache.kept_positions(layer["layer"])[0]
        shown = unpacked(layer, ids.shape[1])
        assert layer["kept_tokens"] == shown.sum(-1).tolist()
        for head, positions in zip(shown, kept, strict=True):
            assert head.nonzero()[:, 0].tolist() == positions[positions >= 0].tolist()


def test_votes_and_cuts_are_there_where_a_method_has_them(inspection):
    shown = {m.label: m.layers[3] for m in inspection.methods}
    for name in ("snapkv", "pyramidkv", "adakv", "prompt-then-decode"):
        assert shown[name]["votes"] is not None, name
        assert all(0 <= cut <= 255 for cut in shown[name]["cuts"]), name
    assert shown["keydiff"]["scores"] is not None
    assert shown["keydiff"]["votes"] is None
    assert not shown["keydiff"]["logarithmic"]
    assert shown["h2o"]["scores"] is not None
    assert shown["streaming-llm"]["scores"] is None
    assert shown["full"]["scores"] is None


def test_answers_are_those_of_the_caches(inspection):
    assert inspection.full.text.endswith("blue stone.")
    labels = [method.label for method in inspection.methods]
    assert labels == [policy.name for policy in POLICIES]
    assert inspection.methods[-1].answer.text == inspection.full.text


def test_the_part_with_the_fact_is_what_the_answer_needs(demo, prompt, inspection):
    spans = inspection.leave_out.spans
    worst = max(spans, key=lambda span: span.loss)
    assert worst.changed
    assert "blue" in "".join(inspection.pieces[worst.start : worst.stop])
    assert spans[0].start == SINK_TOKENS
    assert all(one.stop == other.start for one, other in itertools.pairwise(spans))


def test_the_sentence_names_the_place_and_says_how_much_was_kept(inspection):
    said = {method.label: inspection.sentence(method) for method in inspection.methods}
    assert inspection.needed[0].endswith("% into garden.txt")
    assert said["full"].startswith(f"The answer needs {inspection.needed[0]}")
    assert len(inspection.places) == len(inspection.leave_out.spans)
    assert said["full"].endswith("; all of it was kept, in 100% of the cache.")
    assert "none of it was kept" in said["streaming-llm"]
    assert inspection.data()["methods"][0]["sentence"] == said["snapkv"]


def test_the_heads_that_tell_have_a_picture_of_their_own_layer(demo, prompt, inspection):
    shown = {method.label: method.heat for method in inspection.methods}
    assert shown["snapkv"].share > 0.1
    assert shown["snapkv"].rows == 16
    assert shown["snapkv"].order is not None
    assert shown["snapkv"].best_tokens == 80
    assert shown["h2o"].order is None  # it keeps recent tokens, too
    assert shown["streaming-llm"] is shown["full"] is None


def test_a_cache_gives_the_full_answer_the_likelihood_that_a_forward_pass_does(
    demo, prompt, inspection
):
    """The curve and the full cache, against one pass over prompt and answer, cache by cache."""
    ids = prompt.token_ids(demo.tokenizer)
    answer = torch.tensor([inspection.full.token_ids])

    def likelihood(policy):
        cache = CompressedCache(demo.model, policy)
        with torch.inference_mode():
            first = demo.model(ids, past_key_values=cache, logits_to_keep=1).logits
            behind = demo.model(answer[:, :-1], past_key_values=cache).logits
        likely = torch.cat([first, behind], dim=1)[0].float().log_softmax(-1)
        return likely.gather(1, answer[0, :, None]).mean().exp().item()

    assert inspection.full_likelihood == pytest.approx(likelihood(FullCache()), rel=1e-3)
    assert [point.budget for point in inspection.curve] == [20, 96]
    for point in inspection.curve:
        policy = SnapKV(point.budget, window_size=16)
        assert point.likelihood == pytest.approx(likelihood(policy), rel=1e-3)
    assert inspection.curve[1].answer.text == inspection.methods[0].answer.text
    assert inspection.curve[0].likelihood < inspection.curve[1].likelihood


def test_without_checks_and_budgets_nothing_is_claimed(demo, prompt):
    settings = GenerationSettings(max_new_tokens=2)
    found = inspect_prompt(demo, prompt, [("snapkv", POLICIES[0])], settings, checks=0)
    assert found.sentence(found.methods[0]).startswith("What the answer needs was not measured;")
    data = found.data()
    assert data["spans"] == data["curve"] == []
    assert data["full_likelihood"] is data["methods"][0]["heat"] is None
    assert data["methods"][0]["kept"] is None
    assert data["growing_share"] == 1


def test_the_pieces_are_the_text(demo):
    text = "Ünïcode 😀 and <script>alert(1)</script>\n\tnäxt 钥匙"
    prompt = Prompt(text=text)
    pieces = token_texts(demo.tokenizer, prompt)
    assert "".join(pieces) == text
    assert len(pieces) == prompt.token_ids(demo.tokenizer).shape[1]


def test_a_tokenizer_that_knows_no_places_decodes_token_by_token():
    class Slow:
        is_fast = False
        chat_template = unk_token_id = None
        added_tokens_decoder: ClassVar = {}

        def __call__(self, text, **options):
            del text, options
            return {"input_ids": [1, 2]}

        def decode(self, ids):
            return f"<{ids[0]}>"

    assert token_texts(Slow(), Prompt(text="ab")) == ["<1>", "<2>"]


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_hidden_in_every_family_and_the_cache_stays(family):
    """Against a prompt whose keys of that part are masked by an ordinary attention mask."""
    model = tiny_model(family, IMPLEMENTATIONS[family][0])
    loaded = LoadedModel(model=model, tokenizer=None, name=family, revision=None)
    ids = random_ids(1, 100)
    reading = observed(loaded, ids, 8, lambda layer: layer.layer_idx)
    assert list(reading.seen) == reading.cache.compressed_layers
    before = [layer.keys.clone() for layer in reading.cache.layers]
    options = {"checks": 3, "answer_tokens": 4, "keep_last_tokens": 8}
    found = leave_out(model, reading.cache, reading.last_logits, **options)
    assert [(span.start, span.stop) for span in found.spans] == [(4, 33), (33, 62), (62, 92)]
    again = leave_out(model, reading.cache, reading.last_logits, **options)
    assert again == found
    for layer, keys in zip(reading.cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
    generated = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert found.answer_ids == tuple(generated[0, 100:].tolist())
    assert any(span.loss != 0 for span in found.spans)


def test_hiding_changes_exactly_the_likelihood_that_a_mask_changes():
    """The loss of a span, computed once more by attention over all other keys and nothing else."""
    model = tiny_model("llama")
    loaded = LoadedModel(model=model, tokenizer=None, name="llama", revision=None)
    ids = random_ids(1, 60)
    reading = observed(loaded, ids, 8, lambda layer: None)
    found = leave_out(
        model, reading.cache, reading.last_logits, checks=2, answer_tokens=3, keep_last_tokens=8
    )
    answer = torch.tensor([found.answer_ids])
    span = found.spans[0]

    def likelihood(drop):
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(ids, past_key_values=cache)
            for layer in cache.layers if drop else ():
                keep = [i for i in range(60) if not span.start <= i < span.stop]
                layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
            logits = model(
                answer[:, :-1], past_key_values=cache, position_ids=torch.arange(60, 62)[None]
            ).logits[0]
        return logits.log_softmax(-1).gather(1, answer[0, 1:, None]).mean().item()

    assert span.loss == pytest.approx(likelihood(False) - likelihood(True), abs=1e-5)


def test_an_answer_of_one_token_is_not_checked():
    model = tiny_model("llama")
    loaded = LoadedModel(model=model, tokenizer=None, name="llama", revision=None)
    reading = observed(loaded, random_ids(1, 60), 8, lambda layer: None)
    found = leave_out(
        model, reading.cache, reading.last_logits, checks=9, answer_tokens=1, keep_last_tokens=8
    )
    assert found.spans == ()
