"""`--prefill` of ask, chat, eval and bench: what is asked for by name is what is done, and said."""

import io
import json
from types import SimpleNamespace

import pytest

from snapkv.app.prefills import PREFILLS, Chunked, Exact, GemFilter, LayerByLayer, Selective
from snapkv.cli.options import RunOptions
from snapkv.cli.prefill import read_prefill, read_prefills
from snapkv.cli.remedies import changes_by_price
from snapkv.errors import InvalidArgumentError
from tests.cli.test_notes import answered
from tests.families import tiny_model
from tests.lab.evaluate.tiny import tiny_loaded

FEW = "least_tokens=8"
ASKED = ("--budget", 48, "--window-size", 16, "--max-new-tokens", 6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exact", Exact()),
        ("selective", Selective()),
        ("selective:layer=15,keep_ratio=0.2", Selective(layer=15, keep_ratio=0.2)),
        ("gemfilter:least-tokens=1k", GemFilter(least_tokens=1024)),
        ("layer-by-layer:chunk_tokens=2k", LayerByLayer(chunk_tokens=2048)),
        ("chunked:cap_tokens=512, chunk_tokens=64", Chunked(cap_tokens=512, chunk_tokens=64)),
    ],
)
def test_a_way_of_reading_with_its_parameters(text, expected):
    assert read_prefill(text) == expected
    assert expected.describe()["name"] in PREFILLS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selektiv", "did you mean selective"),
        ("", "prefill: expected one of exact"),
        ("exact:layer=3", "expected exact with no parameters"),
        ("selective:lyer=3", "did you mean layer"),
        ("selective:layer", "as NAME=VALUE"),
        ("selective:layer=a", "layer: expected a whole number"),
        ("selective:least_tokens=few", "write for instance --prefill selective:least_tokens=4k"),
        ("selective:layer=0", "layer: expected"),
        ("selective:keep_ratio=some", "keep_ratio: expected a number"),
        ("selective:keep_ratio=2", "keep_ratio: expected a number in"),
        ("selective:layer=1,layer=2", "expected every parameter once"),
        ("chunked:cap_tokens=0", "cap_tokens: expected"),
        ("layer-by-layer:chunk_tokens=99999999999999999999", "chunk_tokens: expected at most"),
    ],
)
def test_what_is_no_way_of_reading_is_refused_in_one_line(text, message):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        read_prefill(text)
    assert "\n" not in str(caught.value)


def test_the_same_way_twice_is_refused():
    with pytest.raises(InvalidArgumentError, match="once"):
        read_prefills(["selective", "selective"])


@pytest.mark.parametrize("way", ["selective", "gemfilter"])
def test_ask_reads_so_and_says_that_it_is_not_exact(snapkv, demo_only, document, way):
    done = snapkv("ask", document, "-q", "Where is the key?", *ASKED, "--prefill", f"{way}:{FEW}")
    assert done.status == 0
    assert f"prefill {way}: not exact" in " ".join(done.err.split())
    told = snapkv(
        "ask",
        document,
        "-q",
        "Where is the key?",
        *ASKED,
        "--prefill",
        f"{way}:{FEW}",
        "--json",
        "--verbose",
    )
    record = json.loads(told.out)
    assert record["prefill"] == {
        "name": way,
        "layer": None,
        "keep_ratio": 0.15,
        "least_tokens": 8,
    }
    assert record["runs"][0]["text"] == done.out.strip()
    first, *_, last = [
        layer["kept_tokens"]
        for layer in record["runs"][0]["cache"]["layers"]
        if layer["kind"] == "compressed"
    ]
    assert last < 48 + 6  # fewer went on than the budget holds
    assert first == (48 + 5 if way == "selective" else last)


@pytest.mark.parametrize("way", ["layer-by-layer:chunk_tokens=64", "chunked:cap_tokens=4k"])
def test_exact_ways_give_the_exact_answer(snapkv, demo_only, document, way):
    asked = ("ask", document, "-q", "Where is the key?", *ASKED)
    assert snapkv(*asked, "--prefill", way).out == snapkv(*asked).out


def test_a_comparison_reads_the_full_cache_exactly(snapkv, demo_only, document):
    asked = ("ask", document, "-q", "Where is the key?", *ASKED, "--prefill", f"selective:{FEW}")
    record = json.loads(snapkv(*asked, "--compare", "--json").out)
    ours, full = record["runs"]
    assert full["cache"]["kept_tokens"] == full["cache"]["seen_tokens"]
    assert ours["cache"]["kept_tokens"] < 48 + 6


def test_the_first_remedy_of_a_selective_reading_is_the_exact_one():
    options = RunOptions(policy="snapkv", budget=64, prefill="selective")
    changes = list(changes_by_price(options, answered(options=options)))
    assert changes[0] == {"prefill": None}
    assert all("prefill" in change for change in changes)
    exact = RunOptions(policy="snapkv", budget=64)
    assert not any("prefill" in change for change in changes_by_price(exact, answered()))


def test_drafts_are_refused_by_name(snapkv, demo_only, document):
    done = snapkv("ask", document, "-q", "Where?", "--prefill", "selective", "--self-speculate")
    assert "drafts: expected none with --prefill selective" in done.err


def test_a_chat_whose_prompt_was_read_in_part_drops_what_a_turn_does_not_need(
    snapkv, demo_only, document, monkeypatch
):
    def chat(*options):
        monkeypatch.setattr("sys.stdin", io.StringIO("Where is the key?\nWhen?\n/stats\n"))
        return snapkv("chat", document, "--max-new-tokens", 4, *options)

    done = chat("--prefill", f"selective:{FEW}", "--budget", 64)
    assert done.status == 0
    assert done.out.splitlines()[-1] == "host: 0 B"
    refused = chat("--prefill", f"selective:{FEW}", "--recall", "host")
    assert "recall: expected none where only some tokens go on" in refused.err


def test_eval_compares_ways_of_reading_by_name(snapkv, demo, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    tiny = tiny_loaded(demo.tokenizer)
    monkeypatch.setattr("snapkv.cli.loading.load", lambda **_: tiny)
    needle = ("eval", "needle", "--lengths", "300", "--depths", 2, "--digits", 1, "--cloze")
    ways = ("--prefill", "exact", "--prefill", f"selective:{FEW},layer=1")
    done = snapkv(*needle, "--budget", 64, *ways, "--json")
    assert done.status == 0
    found = json.loads(done.out)
    labels = [row["method"] for row in found["rows"]]
    assert set(labels) == {"full", "default@64", f"default@64 selective:{FEW},layer=1"}
    samples = (tmp_path / found["folder"] / "samples.jsonl").read_text().splitlines()
    kept = {}
    for sample in map(json.loads, samples):
        kept.setdefault(sample["method"], set()).add(sample["kept_tokens"])
    assert max(kept[f"default@64 selective:{FEW},layer=1"]) < min(kept["default@64"])
    changed = ("--prefill", "exact", "--prefill", f"selective:{FEW},layer=1")
    again = snapkv(*needle, "--budget", 64, *changed, "--json")
    assert again.out == done.out


def test_bench_times_ways_of_reading(snapkv, monkeypatch):
    loaded = SimpleNamespace(model=tiny_model("llama"), description=lambda: {"name": "tiny"})
    monkeypatch.setattr("snapkv.cli.loading.load", lambda **_: loaded)
    small = ("--lengths", "128", "--budget", 48, "--rounds", 2, "--policy", "snapkv:window_size=8")
    ways = ("--prefill", "exact", "--prefill", f"selective:layer=2,{FEW}")
    done = snapkv("bench", "prefill", *small, *ways, "--json")
    rows = json.loads(done.out)["rows"]
    assert [row["cache"] for row in rows] == [
        "transformers",
        "snapkv:window_size=8@48 dynamic",
        f"snapkv:window_size=8@48 selective:layer=2,{FEW} dynamic",
    ]
    assert all(row["status"] == "ok" for row in rows)
    refused = snapkv("bench", "prefill", *small, *ways, "--chunk-tokens", 32)
    assert "chunk_tokens: expected none with --prefill exact selective" in refused.err
