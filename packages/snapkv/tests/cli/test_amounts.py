"""Amounts as people write them: they work, or the hint does."""

import re

import pytest

from snapkv.cli.amounts import byte_count, count, counts, kernel, token_budget, token_budgets
from snapkv.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("128K", 131072), ("1.5 k", 1536), ("0.25m", 262144), (" 8 ", 8), ("-1", -1)],
)
def test_numbers_are_read(text, number):
    assert count("context", text) == number
    assert counts("lengths", f"{text},7") == (number, 7)


@pytest.mark.parametrize("text", ["128kb", "1.3k", "12.7", "many", "", "4kib", "3g", "1e3", "k"])
def test_what_is_no_number_is_refused_with_one_that_is(text):
    with pytest.raises(InvalidArgumentError, match=r"instance --max-new-tokens 4k$"):
        count("max_new_tokens", text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("80GB", 80 * 10**9),
        ("80 gb", 80 * 10**9),
        ("80G", 80 * 10**9),
        ("24GiB", 24 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("128kb", 128_000),
        ("128KiB", 131072),
        ("512b", 512),
    ],
)
def test_bytes_are_read(text, number):
    assert byte_count("gpu_memory", text) == number


@pytest.mark.parametrize("text", ["80", "much", "", "80Gi", "1,5GB", "GB", "80 XB", "8ib"])
def test_the_hint_for_bytes_is_one_that_works(text):
    with pytest.raises(InvalidArgumentError, match="write for instance --gpu-memory ") as raised:
        byte_count("gpu_memory", text)
    hint = re.search(r"--gpu-memory (\S+)$", str(raised.value))[1]
    assert byte_count("gpu_memory", hint) > 0


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), (" 13 ", 13), ("0+12", (0, 12)), ("3 + 9", (3, 9)), ("-1", -1)]
)
def test_a_kernel_is_a_width_or_how_far_it_reaches(text, size):
    assert kernel(text) == size


@pytest.mark.parametrize("text", ["", "+12", "0+", "0+-1", "1+2+3", "0,12", "7.0", "x"])
def test_what_is_no_kernel_is_refused_with_an_example(text):
    with pytest.raises(InvalidArgumentError, match=r"kernel_size: expected .*--kernel-size 0\+12"):
        kernel(text)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("4k", 4096),
        (" 1 ", 1),
        (" auto ", "auto"),
        ("AUTO", "auto"),
        (" 12% ", "12%"),
        ("1.5GB", "1.5GB"),
        ("auto:", "auto"),
        ("auto:most=4k", {"auto": {"most": 4096}}),
        ("auto: lost_vote = .5, least=8", {"auto": {"lost_vote": 0.5, "least": 8}}),
    ],
)
def test_budgets_are_read(text, budget):
    assert token_budget(text) == budget
    assert token_budgets(f"64,{text},128") == (64, budget, 128)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all", "or auto, got 'all'; write for instance --budget 4k, or --policy full"),
        ("-4", "expected at least 1, got -4"),
        ("120%", "expected a share in (0, 100 %] or a number of bytes, got '120%'; pass"),
        ("auto:all", "expected auto with lost_vote, least or most, got 'all'"),
        ("auto:lost_vote=1e-3", "got 'lost_vote=1e-3'; write for instance --budget auto:lost"),
        ("auto:most=4.5", "least or most, got 'most=4.5'"),
    ],
)
def test_what_is_no_budget_is_one_line(text, message):
    for read in (token_budget, token_budgets):
        with pytest.raises(InvalidArgumentError) as raised:
            read(text)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("ask", "-", "-q", "x"), "--max-new-tokens"),
        (("chat",), "--window-size"),
        (("serve", "demo"), "--decode-budget"),
        (("bench", "decode"), "--tokens"),
        (("eval", "needle"), "--depths"),
        (("plan", "--context", "1k"), "--batch"),
        (("medusa", "train", "--document", "x"), "--seed"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_every_whole_number_of_every_command_is_read_the_same_way(refused, command, option):
    name = option.removeprefix("--").replace("-", "_")
    said = f"{name}: expected a whole number such as 4096, 4k or 1.5k, got 'many'"
    assert said in refused(*command, option, "many")


def test_thousands_work_where_a_number_does(snapkv, tiny_only, document):
    asked = ("--budget", "0.25k", "--max-new-tokens", "0.0078125k", "--set", "kernel_size=5")
    done = snapkv("ask", document, "-q", "When does it open?", *asked, "--json")
    assert done.status == 0, done.err
    assert '"budget": 256' in done.out
    assert '"max_new_tokens": 8' in done.out
