"""`snapkv demo` on the beginning of its document."""

import re

import pytest

from snapkv.app import answering


@pytest.mark.slow
def test_both_caches_answer_in_an_order_that_favours_neither_and_a_library_answers_again(
    snapkv, demo_only, monkeypatch
):
    answer, asked = answering.answer, []

    def watched(loaded, prompt, policy, *args, **options):
        asked.append((policy.name, len(prompt.text)))
        return answer(loaded, prompt, policy, *args, **options)

    monkeypatch.setattr(answering, "answer", watched)
    done = snapkv("demo", "--characters", 2400, "--budget", 96)
    assert done.status == 0
    names, lengths = zip(*asked, strict=True)
    assert names == ("snapkv", "full", "snapkv", "full", "full", "snapkv")
    assert len(set(lengths[:2])) == len(set(lengths[2:])) == 1
    assert lengths[0] < lengths[2]  # the first two warm up
    told = " ".join(done.out.split())
    assert re.search(r"in total: [\d.]+ s with the compressed cache, [\d.]+ s with the full", told)
    assert re.search(r"read into a library in [\d.]+ s, [\d.]+ MiB on disk; asked again", told)
    library = re.search(r"([\d.]+) s from the library: It is based on Andrew", told)
    full = re.search(r"([\d.]+) s reading everything again: It is based on Andrew", told)
    assert float(library[1]) < float(full[1])
