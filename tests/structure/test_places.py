"""Who looks for a thing by the field's words finds the file that does it."""

from pathlib import Path

import pytest

import snapkv
from tests.structure.places import places
from tests.structure.source import Source

SOURCE = Source(Path(snapkv.__file__).parent)
FIRST_FEW = 5

# Question: words to search for, and where the answer is, a file or a folder.
PLACES = {
    "top-k is chosen": (["top k"], ["ops/"]),
    "a pad is kept from winning": (["pad", "wins?"], ["ops/", "policies/"]),
    "offloaded tokens come back": (["offload", "back"], ["storage/offload.py"]),
    "offload to host or disk": (["offload", "host|disk"], ["storage/offload_pool.py"]),
    "a model is refused": (["model", "refuse"], ["hf/build.py"]),
    "eviction while generating is applied": (
        ["evict", "apply|applied"],
        ["cache/layer.py", "hf/selection.py"],
    ),
    "rejected drafts are rolled back": (
        ["roll(ed)? back"],
        ["decoding/tree_cache.py", "cache/layer.py"],
    ),
    "vLLM's queries are captured": (["capture", "quer"], ["serving/"]),
    "snapkv.Document": ([r"class Document\b"], ["document.py"]),
    "a policy is added": (["new policy"], ["policies/base.py", "policies/__init__.py"]),
    "vLLM's blocks are freed": (["free", "blocks"], ["serving/blocks.py"]),
    "attention is intercepted": (["intercept", "attention"], ["hf/attention.py"]),
    "bits are packed": (["pack", "bits"], ["storage/quantized.py", "storage/codes.py"]),
    "a graph is captured": (["cuda graph"], ["storage/static.py"]),
    "heads of different length are attended to": (["varlen|ragged"], ["ops/ragged"]),
    "a prompt is read under a cap": (["prompt", r"\bcap\b"], ["prefill/chunks.py"]),
    "the speculative loop": (["speculat", "loop"], ["decoding/speculation.py"]),
    "where a prompt ends is announced": (["prompt", "announce"], ["cache/reading.py"]),
    "PyramidKV's budgets": (["pyramid", "budget"], ["policies/pyramidkv.py"]),
    "a cache is written to disk": (["cache", "sav(e|ing)"], ["cache/saving/"]),
}

# A word of the field: the room that it must lead to.
WORDS = {
    "top k": "ops/",
    "varlen": "ops/ragged",
    "ragged": "ops/ragged",
    "eviction": "policies/",
    "offload": "storage/offload.py",
    "append buffer": "storage/append_buffer.py",
    "kv cache slot": "cache/slots.py",
    "attention sink": "policies/streaming_llm.py",
    "observation window": "policies/snapkv.py",
}


@pytest.mark.parametrize("question", PLACES)
def test_a_newcomer_finds_the_place(question):
    words, targets = PLACES[question]
    found = places(SOURCE, *words)[:FIRST_FEW]
    assert any(path.startswith(tuple(targets)) for path in found), found


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_the_field_leads_to_its_room(word):
    found = places(SOURCE, word)[:FIRST_FEW]
    assert any(path.startswith(WORDS[word]) for path in found), found


def test_names_paths_and_first_lines_are_searched(tmp_path):
    files = {
        "top_k.py": "",
        "one.py": 'def f():\n    """Take the top-k.\n\n    Longest."""\ndef topk(): ...',
        "two.py": "class TopK: ...\nvalue = 'top k'",
        "other.py": '"""Nothing.\n\nAbout top-k."""\ntop_k = 1',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    source = Source(tmp_path)
    assert places(source, "top k") == ["top_k.py", "one.py", "two.py"]
    assert places(source, "top k", "take") == ["one.py"]
    assert places(source, "one", "topk") == ["one.py"]
    assert places(source, "absent") == []
