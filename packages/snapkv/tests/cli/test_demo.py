"""`snapkv demo` on the beginning of its document."""

import re

import pytest

from snapkv import default_policy
from snapkv.app import answering
from snapkv.cli.ask_options import AskOptions
from snapkv.cli.demo import DemoOptions
from snapkv.cli.policy import build_policy


def test_without_options_it_keeps_what_ask_keeps():
    assert default_policy(DemoOptions().budget) == build_policy(AskOptions())


@pytest.mark.slow
def test_ten_lines_from_both_caches_and_a_library_and_nothing_else(snapkv, demo_only, monkeypatch):
    answer, asked = answering.answer, []

    def watched(loaded, prompt, policy, *args, **options):
        asked.append((policy.name, len(prompt.text)))
        return answer(loaded, prompt, policy, *args, **options)

    monkeypatch.setattr(answering, "answer", watched)
    done = snapkv("demo", "--characters", 2400, "--budget", 96)
    assert (done.status, done.err) == (0, "")
    names, lengths = zip(*asked, strict=True)
    assert names == ("snapkv", "full") * 2
    assert len(set(lengths[:2])) == len(set(lengths[2:])) == 1
    assert lengths[0] < lengths[2]  # the first two warm up
    lines = done.out.splitlines()
    assert [line[:12].strip() for line in lines] == [
        "document", "question", re.match(r"\d+% of cache", lines[2])[0], "", "full cache", "",
        "library", "question", "library", "full cache",
    ]  # fmt: skip
    assert int(lines[2].partition("%")[0]) < 25
    costs = (
        r"            ([\d.]+) MiB of cache; [\d.]+ s to the first token, \d+ ms for each one after"
    )
    ours, full = (float(re.match(costs, lines[place])[1]) for place in (3, 5))
    assert ours < full / 4
    assert re.fullmatch(
        r"library     the document, read once in [\d.]+ s, [\d.]+ MiB on disk", lines[6]
    )
    again = [re.search(r"It is based on Andrew .* \(([\d.]+) s", line)[1] for line in lines[8:]]
    assert float(again[0]) < float(again[1])
