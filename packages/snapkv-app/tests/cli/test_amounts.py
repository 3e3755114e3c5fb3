"""Amounts on the command line are parsed, and errors suggest an amount that works."""

from functools import partial

import pytest

from snapkv.errors import InvalidArgumentError
from snapkv_app.cli.amounts import byte_count, count, counts, kernel, token_budget, token_budgets

whole_number, memory = partial(count, "max_new_tokens"), partial(byte_count, "gpu_memory")
NUMBERS = {"4096": 4096, "128K": 131072, "1.5 k": 1536, "0.25m": 262144, " 8 ": 8, "-1": -1}
BUDGETS = {
    "4k": 4096,
    " 1 ": 1,
    " auto ": "auto",
    "AUTO": "auto",
    " 12% ": "12%",
    "1.5GB": "1.5GB",
    "auto:": "auto",
    "auto:most=4k": {"auto": {"most": 4096}},
    "auto: lost_vote = .5, least=8": {"auto": {"lost_vote": 0.5, "least": 8}},
}
BYTES = {
    "80GB": 80 * 10**9,
    "80 gb": 80 * 10**9,
    "80G": 80 * 10**9,
    "24GiB": 24 * 2**30,
    "1.5TB": 1_500_000_000_000,
    "128kb": 128_000,
    "128KiB": 131072,
    "512b": 512,
}
KERNELS = {"7": 7, " 13 ": 13, "0+12": (0, 12), "3 + 9": (3, 9), "-1": -1}
READ = ((whole_number, NUMBERS), (token_budget, BUDGETS), (memory, BYTES), (kernel, KERNELS))


@pytest.mark.parametrize(
    ("read", "text", "amount"),
    [(read, text, amount) for read, amounts in READ for text, amount in amounts.items()],
)
def test_amounts_are_parsed(read, text, amount):
    assert read(text) == amount


def test_lists_of_amounts_are_parsed():
    for text, number in NUMBERS.items():
        assert counts("lengths", f"{text},7") == (number, 7)
    for text, budget in BUDGETS.items():
        assert token_budgets(f"64,{text},128") == (64, budget, 128)


NO_NUMBER = "max_new_tokens: expected a whole number such as 4096, 4k or 1.5k, but got "
NO_MEMORY = "gpu_memory: expected a size with a unit, such as 80GB or 24GiB, but got "
NO_KERNEL = "kernel_size: expected a width such as 7, or the positions before and after"
UNREAD = (
    (whole_number, NO_NUMBER, ("128kb", "1.3k", "12.7", "many", "", "4kib", "3g", "1e3", "k")),
    (memory, NO_MEMORY, ("80", "much", "", "80Gi", "1,5GB", "GB", "80 XB", "8ib")),
    (kernel, NO_KERNEL, ("", "+12", "0+", "0+-1", "1+2+3", "0,12", "7.0", "x")),
)


@pytest.mark.parametrize(
    ("read", "said", "text"), [(read, said, text) for read, said, texts in UNREAD for text in texts]
)
def test_wrong_amount_is_refused_with_an_example_that_works(read, said, text):
    with pytest.raises(InvalidArgumentError, match=rf"^{said}.*\. For example, use ") as raised:
        read(text)
    *_, option, example = str(raised.value).rstrip(".").split()
    assert option == f"--{said.partition(':')[0].replace('_', '-')}"
    assert read(example) != 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all", "or auto, but got 'all'. For example, use --budget 4k, or use --policy full"),
        ("-4", "expected a value of at least 1, but got -4"),
        ("120%", "expected a percentage in (0, 100] or a positive size in bytes"),
        (
            "auto:all",
            "the budget auto can only have the parameters lost_vote, least and most, but got 'all'",
        ),
        ("auto:lost_vote=1e-3", "got 'lost_vote=1e-3'. For example, use --budget auto:lost"),
        ("auto:most=4.5", "least and most, but got 'most=4.5'"),
    ],
)
def test_wrong_budget_is_refused_in_one_line(text, message):
    for read in (token_budget, token_budgets):
        with pytest.raises(InvalidArgumentError) as raised:
            read(text)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)
