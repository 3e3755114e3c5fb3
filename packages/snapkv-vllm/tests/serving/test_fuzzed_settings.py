"""Thousands of random settings are accepted within the limits or refused by name."""

import random

import pytest

from snapkv.errors import InvalidArgumentError, InvalidTypeError
from snapkv_vllm.admission.methods import count_kept_tokens, count_window_tokens, scoring_policy
from snapkv_vllm.admission.names import PREFIX, REQUEST_SETTINGS
from snapkv_vllm.admission.settings import ServingSettings
from tests.ops.states import random_layer
from tests.serving.fuzzing import random_settings
from tests.serving.selections import kept_of

SERVERS = (
    ServingSettings(budget=96, policy="snapkv"),
    ServingSettings(budget=0, parameters={"pooling": "fading", "window_size": 16}),
    ServingSettings(budget=60, max_window_size=64, max_kernel_size=31, protect_first=8),
    ServingSettings(policy="streaming-llm", budget=64, protect_first=5),
    ServingSettings(policy="tova", budget=64),
    ServingSettings(policy="adakv", budget=80, max_kernel_size=31, protect_first=3),
    ServingSettings(policy="across-layers", budget=70, protect_first=4),
)
CASES = 2_000  # for each
PROMPT = 150


@pytest.mark.parametrize("server", SERVERS, ids=lambda one: f"{one.policy}-{one.budget}")
def test_random_settings_are_accepted_within_the_limits_or_refused_by_name(server):
    taken, refused = {}, 0
    generator = random.Random(20 * SERVERS.index(server) + 1)
    for _ in range(CASES):
        given = random_settings(generator)
        try:
            policy = server.policy_for_request(given)
        except (InvalidArgumentError, InvalidTypeError) as error:
            require_clear(str(error), given, server)
            refused += 1
        else:
            require_capped(policy, server)
            taken[repr(policy)] = policy
    assert refused > CASES // 4
    for policy in generator.sample(sorted(taken.items()), min(len(taken), 60)):
        require_working(policy[1])


def require_clear(message, given, server):
    """One short line that names a setting of the request, or the server's that it clashes with."""
    assert len(message) < 500
    assert message.isprintable()
    ours = [name for name in given if "snapkv" in name.lower() or name in REQUEST_SETTINGS]
    own = [PREFIX + name for name in ("budget", "window_size", "protect_first", "voters")]
    said = message.partition(":")[0].partition(",")[0]
    shortened = said.removesuffix("...")
    names = [name.encode("unicode_escape").decode() for name in (*ours, *own)]
    assert any(name.startswith(shortened) for name in names), (message, given)


def require_capped(policy, server):
    kernel = getattr(scoring_policy(policy), "kernel_size", None) or 1
    width = kernel if isinstance(kernel, int) else sum(kernel) + 1
    asked = () if policy is None else (policy.query_tokens, count_window_tokens(policy))
    assert all(size <= server.max_window_size for size in asked)
    assert width <= server.max_kernel_size


def require_working(policy):
    """It keeps exactly the budget of a prompt, window and protected tokens among it.

    Where heads keep different numbers, on average, and -1 stands before what a head keeps.
    """
    if policy is None or count_kept_tokens(policy, PROMPT) == PROMPT:
        return
    layer = random_layer(0, prompt_tokens=PROMPT, query_tokens=policy.query_tokens)
    keep = kept_of(policy, layer)
    counts = (keep >= 0).sum(dim=-1).float()
    assert counts.mean() == count_kept_tokens(policy, PROMPT)
    assert policy.per_head_budget or counts.min() == counts.max()
    assert ((keep.diff(dim=-1) > 0) | (keep[..., :-1] < 0)).all()
    assert 0 <= int(keep[keep >= 0].min()) <= int(keep.max()) < PROMPT
