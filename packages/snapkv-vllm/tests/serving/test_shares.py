"""Which tenant evicts if several tenants share too little memory."""

import hashlib
from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv_vllm.front.request_context import SHARED_TENANT, tenant_of
from snapkv_vllm.histories import choose_evictions


@dataclass(frozen=True)
class Held:
    tenant: str
    name: str
    size: int


def held(tenant, **sizes):
    return [Held(tenant, name, size) for name, size in sizes.items()]


def leaving(idle, tenant, size, most, in_use=()):
    """Names of those that go for what a tenant brings, and how much is too much even then."""
    taken = Counter({tenant: size})
    for one in (*idle, *in_use):
        taken[one.tenant] += one.size
    found, lacking = choose_evictions(idle, taken, most, lambda one: one.size)
    return [one.name for one in found], lacking


def test_tenant_is_the_hash_of_its_api_key():
    def of(said):
        first, last = (b"Authorization", said), (b"authorization", b"Bearer x")
        return tenant_of([(b"host", b"here"), first, last])

    assert of(b"Bearer secret") == of(b"bearer secret") == hashlib.sha256(b"secret").hexdigest()
    assert (
        len({of(b"Bearer Secret"), of(b"Bearer secret"), of(b"Bearer a b"), of(b"Bearer a")}) == 4
    )
    assert SHARED_TENANT not in (of(b"Bearer "), tenant_of([]))


def test_eviction_never_takes_from_a_tenant_within_its_share():
    idle = [*held("b", law=50), *held("a", x=25, y=25)]
    assert leaving(idle, "a", 25, 100) == (["x"], 0)
    assert leaving(idle, "a", 50, 100) == (["x", "y"], 0)
    assert leaving(idle, "a", 51, 100) == (["x", "y"], 1)


HELD = st.builds(Held, st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(1, 12))


@settings(max_examples=300, deadline=None)
@given(st.lists(HELD, max_size=8), st.lists(HELD, max_size=3), HELD)
def test_evictions_continue_until_the_new_item_fits_or_none_is_left(idle, in_use, brought):
    """The reference searches a list from its start for the tenant with the most memory."""
    left, expected = list(idle), []
    parts = len({one.tenant for one in (brought, *idle, *in_use)})
    while sum(one.size for one in (brought, *left, *in_use)) > 20:
        bytes_of = Counter()
        for one in (brought, *left, *in_use):
            bytes_of[one.tenant] += one.size
        may_go = [
            (-bytes_of[one.tenant], rank)
            for rank, one in enumerate(left)
            if bytes_of[one.tenant] * parts > 20
        ]
        if not may_go:
            break
        expected.append(left.pop(min(may_go)[1]))
    lacking = max(0, sum(one.size for one in (brought, *left, *in_use)) - 20)
    names = [one.name for one in expected]
    assert leaving(idle, brought.tenant, brought.size, 20, in_use) == (names, lacking)
