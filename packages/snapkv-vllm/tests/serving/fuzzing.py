"""Settings of requests as careless and malicious clients send them."""

import math

from snapkv_vllm.admission.names import PREFIX, REQUEST_SETTINGS

BIG = (2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**18, 10**400)
WORDS = ("", "max", "avg", "fading", "MAX", "none", "64", "auto", "a\nb", "\u2028", "ü" * 40)
STRANGE_NAMES = (
    "",
    "_",
    "budgets",
    "kernel",
    "policy",
    "\n",
    "\u202e",
    "é",
    "a" * 5000,
    "keep_ratio",
)
SPELLINGS = ("", "SNAPKV_", "snapkv-", "snapkv.", "Snapkv")


def random_settings(generator, *, in_json=False):
    """Return one to six settings of a request, by name. Most have likely values, and some have any
    value or a wrong name.

    Args:
        generator: a `random.Random`.
        in_json: True leaves out values that JSON cannot express.
    """
    names = generator.sample(REQUEST_SETTINGS, generator.randint(1, 3))
    given = {PREFIX + name: likely_value(generator, name) for name in names}
    if generator.random() < 0.5:
        given[PREFIX + generator.choice(REQUEST_SETTINGS)] = any_value(generator, in_json=in_json)
    if generator.random() < 0.05:
        given[PREFIX + generator.choice(STRANGE_NAMES)] = any_value(generator, in_json=in_json)
    if generator.random() < 0.05:
        name = generator.choice(REQUEST_SETTINGS)
        given[generator.choice(SPELLINGS) + name] = likely_value(generator, name)
    return given


def likely_value(generator, name):
    """Return a random value of the setting `name`, which is mostly valid."""
    return {
        "budget": lambda: generator.choice((0, 20, 65, 96, 140, 500, generator.randint(-2, 300))),
        "window_size": lambda: generator.choice((1, 8, 16, 32, 128, generator.randint(-2, 140))),
        "voters": lambda: generator.choice((1, 8, 40, 128, generator.randint(-2, 140))),
        "kernel_size": lambda: generator.choice(
            (1, 5, 13, 129, generator.randint(-2, 140), pair(generator))
        ),
        "pooling": lambda: generator.choice(("max", "avg", "fading")),
        "decay": lambda: generator.choice((0.9, 0.5, 1e-300, 1 - 1e-12, generator.random())),
        "safeguard": lambda: generator.choice((0.2, 1, 1.0, 1e-300, 0, 1.1, generator.random())),
        "protect_first": lambda: generator.choice((0, 1, 10, 50, generator.randint(-2, 200))),
        "decode_budget": lambda: generator.choice((0, 250, generator.randint(-2, 400))),
    }[name]()


def pair(generator):
    """Return two random sizes, as a kernel may have."""
    return [generator.choice((0, 1, 12, 64, 129, 2**40)) for _ in range(2)]


def any_value(generator, *, depth=0, in_json=False):
    """Return a random value of any type that JSON has, or that Python has unless `in_json` is True.

    Args:
        generator: a `random.Random`.
        depth: how many lists and objects are around the value; deep ones are not nested further.
        in_json: True leaves out values that JSON cannot express.
    """
    kinds = (
        lambda: generator.choice(BIG) * generator.choice((1, -1)),
        lambda: generator.randint(-5, 2000),
        lambda: generator.choice((0.0, -0.0, 0.5, 1.0, 1e308, 5e-324, 64.0)),
        lambda: generator.choice((math.nan, math.inf, -math.inf)),
        lambda: generator.choice(WORDS),
        lambda: generator.choice((True, False, None)),
        lambda: [
            any_value(generator, depth=depth + 1, in_json=in_json)
            for _ in range(generator.randint(0, 4))
        ],
        lambda: {"a": any_value(generator, depth=depth + 1, in_json=in_json)},
        lambda: (
            generator.choice((b"64", 10**5000, 1j, {1}, range(3))) if not in_json else "z" * 3000
        ),
        lambda: nested(generator.choice((3, 500))),
    )
    return generator.choice(kinds[:6] if depth > 3 else kinds)()


def nested(depth):
    """Return the number 1 inside `depth` lists."""
    value = 1
    for _ in range(depth):
        value = [value]
    return value
