"""Documents are read once and found by the words of a question, as a whole or as passages."""

import copy
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from snapkv import (
    H2O,
    AcrossLayers,
    AdaKV,
    CompressedCache,
    FullCache,
    InvalidArgumentError,
    InvalidTypeError,
    KVCodes,
    KVzip,
    LibraryError,
    SnapKV,
    StreamingLLM,
    default_policy,
)
from snapkv.hf.cache_argument import cache_among
from snapkv_app import Library
from snapkv_app.library.folder import Folder
from snapkv_app.models import LoadedModel
from tests.families import tiny_model
from tests.lab.evaluate.tiny import tiny_loaded
from tests.library.conftest import TEXTS


def whats(outcomes):
    return [outcome.what for outcome in outcomes]


def caches(library):
    return sorted((library.path / "caches").iterdir())


def damage(path, at=-40):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def answered(loaded: LoadedModel, inputs):
    with torch.no_grad():
        return loaded.model.generate(**inputs, max_new_tokens=4, do_sample=False)


def test_added_documents_have_their_text_and_size(library):
    records = library.documents
    assert [record.name for record in records] == sorted(TEXTS)
    for record in records:
        assert record.text == TEXTS[record.name]
        assert record.size == len(record.text)
        assert record.chunks == ((0, len(record.text)),)
        assert record.bytes == (library.path / "caches" / record.cache).stat().st_size
    assert library.verify() == []


def test_second_add_reads_only_new_and_changed_documents(library, tiny):
    texts = TEXTS | {"lease": "There is no lease.", "new": "A new text."}
    before = caches(library)
    seen = []
    outcomes = library.add(
        tiny.model, tiny.tokenizer, texts.items(), on_progress=lambda *each: seen.append(each)
    )
    assert whats(outcomes) == ["changed", "skipped", "skipped", "read"]
    assert seen == [(name, place, 4) for place, name in enumerate(texts)]
    assert len(set(caches(library)) & set(before)) == 2
    assert len(caches(library)) == 4
    assert {record.name: record.text for record in library.documents} == texts


def test_add_opens_no_other_documents(library, tiny, monkeypatch):
    looks = Counter()
    stamp, scan = Folder.stamp_of, os.scandir
    monkeypatch.setattr(Folder, "stamp_of", lambda *key: looks.update(key[1:]) or stamp(*key))
    for looker in ("iterdir", "glob"):
        monkeypatch.setattr(Path, looker, lambda *asked: pytest.fail("looked at a folder"))
    monkeypatch.setattr(os, "scandir", lambda *asked: looks.update("/") or scan(*asked))
    texts = [(f"new {number}", f"Text {number}.") for number in range(5)]
    texts += [(name, f"{text} No more.") for name, text in TEXTS.items()]
    assert whats(library.add(tiny.model, tiny.tokenizer, texts)) == ["read"] * 5 + ["changed"] * 3
    library.remove(["new 4"])
    assert {hit.name for hit in library.search("text", 9)} == {f"new {place}" for place in range(4)}
    assert "/" not in looks
    assert len(looks) == 8
    monkeypatch.undo()
    assert library.verify() == []
    assert len(caches(library)) == len(library.documents) == 7


def test_words_of_a_question_find_documents_and_best_passages(tmp_path, tiny):
    library = Library(tmp_path / "l")
    filler = "\n".join("Nothing of note is said here." for _ in range(50))
    texts = {"a": f"{filler}\nZebras graze.\n{filler}", "b": "One zebra.", "c": "No animals."}
    tiny = tiny_loaded(tiny.tokenizer, positions=4096)
    library.add(tiny.model, tiny.tokenizer, texts.items())
    hits = library.search("zebras?", 5)
    assert [hit.name for hit in hits] == ["b", "a"]
    assert hits[0].score > hits[1].score > 0
    assert hits[1].lines[0] <= 51 <= hits[1].lines[1]
    assert hits[1].passage == texts["a"][slice(*hits[1].span)]
    assert len(library.search("zebras?", 1)) == 1
    assert library.search("the of", 1) == library.search("lion") == []


def test_one_document_is_answered_like_a_prompt_read_in_full(library, tiny):
    hits = library.search("What does the bank lend?", 1)
    how = {"policy": FullCache(), "recompute": 0}
    inputs = library.inputs(tiny.model, tiny.tokenizer, "What does the bank lend?", hits, **how)
    content = f"===== loan =====\n{TEXTS['loan']}\n\nWhat does the bank lend?"
    turns = [{"role": "user", "content": content}]
    text = tiny.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert tiny.tokenizer.decode(inputs["input_ids"][0]) == text
    plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    cache = cache_among(
        library.inputs(tiny.model, tiny.tokenizer, "What does the bank lend?", hits)
    )
    asked = plain["input_ids"].shape[1] - cache.get_seq_length()
    assert cache.prompt_state.policy == default_policy(voters=max(16, asked))
    assert torch.equal(answered(tiny, inputs), answered(tiny, plain))


def test_inputs_without_a_chat_template_are_plain_text(tmp_path, demo, tiny):
    tokenizer = copy.deepcopy(demo.tokenizer)
    tokenizer.chat_template = None
    library = Library(tmp_path / "l")
    library.add(tiny.model, tokenizer, TEXTS.items())
    hits = library.search("rent", 2)
    ids = library.inputs(tiny.model, tokenizer, "Rent?", hits, answer_start="It")["input_ids"]
    assert tokenizer.decode(ids[0]).endswith("\n\nQuestion: Rent?\nAnswer: It")


@pytest.mark.parametrize(
    ("policy", "bits"),
    [
        (None, "int4"),
        (None, KVCodes(8, 4, group_size=64)),
        (SnapKV(40), None),
        (H2O(40), "K8V4"),
        (AdaKV(KVzip(keep_ratio=0.5)), "int8"),
        (AcrossLayers(KVzip(keep_ratio=0.5)), "int4"),
        (SnapKV("60%", window_size=8), None),
    ],
    ids=str,
)
def test_documents_are_stored_with_the_policy_and_bits(tmp_path, tiny, policy, bits):
    library = Library(tmp_path / "l")
    library.add(tiny.model, tiny.tokenizer, TEXTS.items(), policy, bits=bits)
    whole = Library(tmp_path / "whole")
    whole.add(tiny.model, tiny.tokenizer, TEXTS.items(), bits="none")
    sizes = [sum(record.bytes for record in each.documents) for each in (library, whole)]
    assert sizes[0] < sizes[1]
    parts = library.parts(tiny.model, tiny.tokenizer, library.search("lease", 1))
    report = parts[0].cache.report()
    assert (report.kept_tokens < report.seen_tokens) == (policy is not None)
    assert library.verify() == []
    for record in library.documents:
        damage(library.path / "caches" / record.cache, 5000)
    assert len(library.verify()) == 3
    # the next adder need not say it again
    assert whats(library.add(tiny.model, tiny.tokenizer, [("x", "new")])) == ["read"]


def test_new_library_has_4_bits_and_existing_one_keeps_its_own(library, tiny, tmp_path):
    new = Library(tmp_path / "new")
    new.add(tiny.model, tiny.tokenizer, TEXTS.items())
    sizes = [sum(record.bytes for record in each.documents) for each in (new, library)]
    assert sizes[0] < 0.75 * sizes[1]  # of so short documents
    for own, bits, other in ((new, "int4", "none"), (library, None, "int4")):
        assert own.about.bits == bits
        given = [("more", f"Of its own. {TEXTS['loan']}")]
        assert whats(own.add(tiny.model, tiny.tokenizer, given)) == ["read"]
        own.add(tiny.model, tiny.tokenizer, given, bits=bits or "none")
        with pytest.raises(LibraryError, match=f"bits: .*{bits or 'none'}.*got .*{other}"):
            own.add(tiny.model, tiny.tokenizer, given, bits=other)
    parts = [
        each.parts(tiny.model, tiny.tokenizer, each.search("roses", 1)) for each in (new, library)
    ]
    for few, whole in zip(*parts, strict=True):
        for near, exact in zip(few.cache.layers, whole.cache.layers, strict=True):
            difference = (near.store.keys - exact.store.keys).abs().max()
            assert 0 < difference < exact.store.keys.abs().max() / 8


def test_other_model_or_tokenizer_is_refused_with_both_names(library, tiny):
    other = tiny_model("llama")
    with pytest.raises(
        LibraryError, match=r"model: .* were read with .*LlamaForCausalLM.*got .*other"
    ):
        library.add(other, tiny.tokenizer, TEXTS.items(), model_name="other")
    hits, halved = library.search("rent"), tiny_loaded(tiny.tokenizer).model.to(torch.bfloat16)
    with pytest.raises(LibraryError, match=r"float32\).*got .*bfloat16\)"):
        library.inputs(halved, tiny.tokenizer, "rent?", hits)
    plain = copy.deepcopy(tiny.tokenizer)
    plain.chat_template = None
    with pytest.raises(LibraryError, match="were read with the tokenizer and chat template"):
        library.inputs(tiny.model, plain, "rent?", hits)


def test_missing_documents_are_refused_in_both_ways_of_reading(library, tiny):
    hits = library.search("rent", 1)
    library.remove([hits[0].name])
    for call in (library.inputs, library.token_ids):
        with pytest.raises(LibraryError, match="hits: expected at least one"):
            call(tiny.model, tiny.tokenizer, "Rent?", [])
        with pytest.raises(LibraryError, match="the document 'lease' has been removed"):
            call(tiny.model, tiny.tokenizer, "Rent?", hits)


@pytest.mark.parametrize("around", [AdaKV, AcrossLayers])
def test_policy_that_cannot_evict_from_ragged_documents_warns(tmp_path, tiny, notices, around):
    library = Library(tmp_path / "l", on_notice=notices.append)
    library.add(tiny.model, tiny.tokenizer, TEXTS.items(), around(KVzip(keep_ratio=0.5)))
    hits, few = library.search("rent roses bank"), SnapKV(30, window_size=4)
    for policy, recompute in ((None, 0), (FullCache(), 0), (few, 1), (few, 0)):
        assert not notices
        library.inputs(tiny.model, tiny.tokenizer, "?", hits, policy=policy, recompute=recompute)
    assert len(notices) == 1
    assert "policy: snapkv evicts no tokens of these documents" in notices[0]


@pytest.mark.parametrize("at", [-40, 3, None])
def test_damaged_cache_is_named_and_read_again(library, tiny, notices, at):
    hits = library.search("rent", 1)
    right = answered(tiny, library.inputs(tiny.model, tiny.tokenizer, "Rent?", hits, recompute=0))
    record = next(record for record in library.documents if record.name == "lease")
    cache = library.path / "caches" / record.cache
    cache.unlink() if at is None else damage(cache, at)
    assert [fault.name for fault in library.verify()] == ["lease"]
    inputs = library.inputs(tiny.model, tiny.tokenizer, "Rent?", hits, recompute=0)
    assert torch.equal(answered(tiny, inputs), right)
    assert len(notices) == 1
    assert "'lease' is read again, because its cache is damaged" in notices[0]
    assert library.verify() == []
    assert len(caches(library)) == 3
    (library.path / "caches" / library.documents[0].cache).unlink()
    outcomes = library.add(tiny.model, tiny.tokenizer, TEXTS.items())
    assert sorted(whats(outcomes)) == ["mended", "skipped", "skipped"]


def test_cache_of_another_document_is_not_used(library, tiny, notices):
    one, other, _ = (library.path / "caches" / record.cache for record in library.documents)
    one.write_bytes(other.read_bytes())
    assert [fault.name for fault in library.verify()] == [library.documents[0].name]
    hits = library.search("roses", 1)
    inputs = library.inputs(tiny.model, tiny.tokenizer, "Roses?", hits)
    assert "Tomatoes" in tiny.tokenizer.decode(inputs["input_ids"][0])
    assert len(notices) == 1


def test_damaged_record_is_named_and_added_again(library, tiny, notices):
    file = sorted((library.path / "documents").iterdir())[0]
    damage(file)
    assert [fault.path for fault in library.verify()] == [file]
    assert len(library.documents) == 2
    assert str(file) in notices[0]
    outcomes = library.add(tiny.model, tiny.tokenizer, TEXTS.items())
    assert sorted(whats(outcomes)) == ["read", "skipped", "skipped"]
    assert library.verify() == []


def test_leftovers_of_killed_adds_go_and_foreign_files_stay(library, tiny):
    record = library.documents[0]
    key = record.key
    own = [
        library.path / f".library.json.{'a' * 32}.partial",
        library.path / "documents" / f".{key}.json.{'b' * 32}.partial",
        library.path / "caches" / f".{record.cache}.{'c' * 32}.partial",
        library.path / "caches" / ".tmpBYxAp0",
        library.path / "caches" / f"{key}-{'0' * 16}-{'1' * 8}.safetensors",
    ]
    foreign = [
        library.path / "notes.txt",
        library.path / "documents" / "mine.json",
        library.path / "caches" / "mine.safetensors",
        library.path / "caches" / ".mine.partial",
    ]
    for file in own + foreign:
        file.write_bytes(b"mine")
    library.add(tiny.model, tiny.tokenizer, [("x", "new")])
    assert all(file.exists() for file in own)  # nobody was killed
    (library.path / "library.lock").write_text("17\n")
    library.add(tiny.model, tiny.tokenizer, [("y", "new")])
    assert not any(file.exists() for file in own)
    assert all(file.read_bytes() == b"mine" for file in foreign)


@pytest.mark.parametrize("name", ["notes.txt", "library.json", "library.lock"])
def test_foreign_folder_is_refused_and_unchanged(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(LibraryError, match="library: "):
        Library(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_unreadable_document_does_not_set_the_policy_of_a_new_library(tmp_path, tiny):
    library, moved = Library(tmp_path / "new"), StreamingLLM(64)
    given = tiny.model, tiny.tokenizer, [("long", "The gate opens at nine. " * 40)]
    assert whats(library.add(*given, moved)) == ["failed"]
    assert library.about is None
    assert whats(library.add(*given, SnapKV(64), bits="int8")) == ["read"]
    assert library.required().policy["name"] == "snapkv"


@pytest.mark.parametrize("path", [None, 3, b"lib"], ids=repr)
def test_invalid_path_is_refused_by_its_argument(path, tiny):
    for name, opened in (
        ("library", Library),
        ("path", lambda given: CompressedCache.load(given, tiny.model)),
        ("path", CompressedCache(tiny.model).save),
    ):
        with pytest.raises(InvalidTypeError, match=f"{name}: expected a path, but got {path!r}"):
            opened(path)
        with pytest.raises(InvalidArgumentError, match=f"{name}: a path cannot contain NUL"):
            opened("a\0b")


def test_foreign_record_is_not_replaced(library, tiny):
    library.remove(["loan"])
    loan = [("loan", TEXTS["loan"])]
    library.add(tiny.model, tiny.tokenizer, loan)
    key = next(record.key for record in library.documents if record.name == "loan")
    file = library.path / "documents" / f"{key}.json"
    file.write_text("mine")
    (outcome,) = library.add(tiny.model, tiny.tokenizer, loan)
    assert outcome.what == "failed"
    assert "it cannot be replaced" in outcome.reason
    assert file.read_text() == "mine"


def test_library_of_a_later_version_is_refused(library):
    file = library.path / "library.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": "snapkv library 3"}))
    with pytest.raises(LibraryError, match="got 'snapkv library 3'"):
        Library(library.path)


def test_invalid_documents_and_names_are_refused(library, tiny):
    """A name has a first and a second letter, and a text is a list of names of a letter each."""
    for documents in ({"lease": "Rent is due in May."}, "Rent is due", [("a", "b", "c")]):
        with pytest.raises(InvalidTypeError, match="documents: expected a Text, or a pair of a"):
            library.add(tiny.model, tiny.tokenizer, documents)
    with pytest.raises(InvalidTypeError, match="model: expected a PreTrainedModel of transformers"):
        library.add(tiny, tiny.tokenizer, [("a", "Of some length.")])
    library.add(tiny.model, tiny.tokenizer, [("a", "Of some length.")])
    with pytest.raises(InvalidTypeError, match=r"names: .*got 'a'\. For example, pass \['a'\]"):
        library.remove("a")


def test_empty_texts_and_repeated_names_are_refused(library, tiny):
    with pytest.raises(ValueError, match="text: the text of 'x' must not be empty"):
        library.add(tiny.model, tiny.tokenizer, [("x", " \n")])
    with pytest.raises(ValueError, match="two different texts have the name 'x'"):
        library.add(tiny.model, tiny.tokenizer, [("x", "a"), ("x", "b")])
    with pytest.raises(
        ValueError, match=r"text: expected Unicode text, but got half of a character, '\\ud800'"
    ):
        library.add(tiny.model, tiny.tokenizer, [("x", "a\ud800")])
    for what in ("read", "skipped"):  # a name stays on its line
        documents = [("two\nlines \x1b[31mred", "Of some length.")]
        assert whats(library.add(tiny.model, tiny.tokenizer, documents)) == [what]
    assert "two lines  [31mred" in [record.name for record in library.documents]
