"""Documents by tenant and name: who sees them, and which ones go when room is needed."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapkv_vllm.documents.catalogue import Catalogue, SharedDocument
from snapkv_vllm.documents.prefix import CachedPrefix
from snapkv_vllm.names import RefusedError
from snapkv_vllm.tenants import tenant_of
from snapkv_vllm.visits import EVERYBODY


def document(name, size=10, tenant="a"):
    return SharedDocument(
        document_id=f"{tenant}-{name}",
        tenant=tenant,
        name=name,
        prefix=CachedPrefix(token_ids=(1, 2), kept_tokens=2, reused_tokens=2),
        bytes=size,
    )


def catalogue_of(*documents):
    catalogue = Catalogue()
    for one in documents:
        catalogue.add(one)
    return catalogue


def names(documents):
    return [one.name for one in documents]


def test_a_tenant_is_the_hash_of_its_key():
    def of(said):
        first, last = (b"Authorization", said), (b"authorization", b"Bearer x")
        return tenant_of([(b"host", b"here"), first, last])

    assert of(b"Bearer secret") == of(b"bearer secret") == hashlib.sha256(b"secret").hexdigest()
    assert (
        len({of(b"Bearer Secret"), of(b"Bearer secret"), of(b"Bearer a b"), of(b"Bearer a")}) == 4
    )
    assert EVERYBODY not in (of(b"Bearer "), tenant_of([]))


def test_a_document_is_found_by_its_own_tenant_alone():
    mine, theirs = document("contract"), document("contract", tenant="b")
    catalogue = catalogue_of(mine, theirs, document("law"))
    assert catalogue.find("a", "contract") is mine
    assert names(catalogue.all_of("a")) == ["contract", "law"]
    assert catalogue.all_of("b") == [theirs]
    assert catalogue.all_of("c") == []
    with pytest.raises(RefusedError, match=r"one of this key's documents, got 'law'") as refused:
        catalogue.find("b", "law")
    assert refused.value.status == 404


def test_nobody_makes_another_tenants_documents_go_that_are_within_its_share():
    catalogue = catalogue_of(document("law", 50, "b"), *(document(name, 25) for name in "xy"))
    assert names(catalogue.make_room("a", 25, 100)) == ["x"]
    catalogue.add(document("z", 25))
    assert names(catalogue.make_room("a", 50, 100)) == ["y", "z"]
    with pytest.raises(RefusedError, match=r"at most 50 B.* within other keys' shares, got 51 B"):
        catalogue.make_room("a", 51, 100)
    assert names(catalogue.all_of("b")) == ["law"]


def test_who_has_most_gives_back_first():
    """Three share 60: a and b have more than 20, and a most."""
    held = [
        document(name, size, tenant) for tenant, size in (("b", 14), ("a", 15)) for name in "xy"
    ]
    catalogue = catalogue_of(*held)
    assert names(catalogue.make_room("c", 14, 60)) == ["x"]
    assert [names(catalogue.all_of(tenant)) for tenant in "ab"] == [["y"], ["x", "y"]]


def test_a_deleted_document_takes_its_bytes_until_its_last_request_has_ended():
    old = document("contract", 60)
    catalogue = catalogue_of(old)
    catalogue.begin(old)
    catalogue.begin(old)
    assert catalogue.delete(old) is False
    with pytest.raises(RefusedError, match="got 'contract'"):
        catalogue.find("a", "contract")
    new = document("contract", 40)
    new.document_id = "new"
    catalogue.add(new)  # the name is free again
    assert (len(catalogue), catalogue.bytes) == (1, 100)
    with pytest.raises(RefusedError, match="at most 40 B"):
        catalogue.make_room("a", 41, 100)
    assert catalogue.end(old) is False
    assert catalogue.end(old) is True
    assert catalogue.bytes == 40
    assert catalogue.delete(new) is True


TENANTS, NAMES = "ab", "xyz"
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.sampled_from(TENANTS), st.sampled_from(NAMES), st.integers(1, 12)
        ),
        st.tuples(st.just("begin"), st.sampled_from(TENANTS), st.sampled_from(NAMES)),
        st.tuples(st.just("end"), st.integers(0, 20)),
        st.tuples(st.just("delete"), st.sampled_from(TENANTS), st.sampled_from(NAMES)),
    ),
    max_size=60,
)


class Oracle:
    """What should be there, with the engine's side of it: a list, searched from its start."""

    def __init__(self):
        self.catalogue = Catalogue()
        self.engine = {}  # bytes by id, of what it was not told to drop
        self.order = []  # of (tenant, name), least recently used first
        self.under_way = []
        self.owners = {}  # tenants by id

    def add(self, tenant, name, size):
        if (tenant, name) in self.order:
            with pytest.raises(RefusedError):
                self.catalogue.require_free(tenant, name)
            return
        go = self.going(tenant, size)
        if go is None:
            with pytest.raises(RefusedError):
                self.catalogue.make_room(tenant, size, 20)
            return
        gone = self.catalogue.make_room(tenant, size, 20)
        assert [(one.tenant, one.name) for one in gone] == go
        for one in gone:
            self.order.remove((one.tenant, one.name))
            del self.engine[one.document_id]
        new = document(name, size, tenant)
        new.document_id = str(len(self.owners))
        self.owners[new.document_id] = tenant
        self.engine[new.document_id] = size
        self.catalogue.add(new)
        self.order.append((tenant, name))

    def going(self, tenant, size):
        """One after the other goes, until it fits; None where what may go is not enough."""
        in_use = {one.document_id for one in self.under_way}
        kept, go = dict(self.engine), []
        while sum(kept.values()) + size > 20:
            held = {tenant: size}
            for document_id, one in kept.items():
                owner = self.owners[document_id]
                held[owner] = held.get(owner, 0) + one
            parts = len({tenant, *(self.owners[one] for one in self.engine)})
            may_go = [
                (-held[key[0]], rank, key)
                for rank, key in enumerate(self.order)
                if key not in go
                and held[key[0]] * parts > 20
                and self.catalogue.find(*key).document_id not in in_use
            ]
            if not may_go:
                return None
            go.append(min(may_go)[2])
            del kept[self.catalogue.find(*go[-1]).document_id]
        return go

    def begin(self, tenant, name):
        if (tenant, name) in self.order:
            found = self.catalogue.find(tenant, name)
            self.catalogue.begin(found)
            self.under_way.append(found)
            self.order.remove((tenant, name))
            self.order.append((tenant, name))

    def end(self, which):
        if self.under_way:
            found = self.under_way.pop(which % len(self.under_way))
            if self.catalogue.end(found):
                del self.engine[found.document_id]

    def delete(self, tenant, name):
        if (tenant, name) in self.order:
            self.order.remove((tenant, name))
            found = self.catalogue.find(tenant, name)
            if self.catalogue.delete(found):
                del self.engine[found.document_id]
        else:
            with pytest.raises(RefusedError):
                self.catalogue.find(tenant, name)

    def check(self):
        assert self.catalogue.bytes == sum(self.engine.values()) <= 20
        assert all(one.document_id in self.engine for one in self.under_way)
        for tenant in TENANTS:
            own = sorted(name for owner, name in self.order if owner == tenant)
            assert names(self.catalogue.all_of(tenant)) == own
            assert all(one.tenant == tenant for one in self.catalogue.all_of(tenant))
        assert len(self.catalogue) == len(self.order)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_any_sequence_stays_below_the_cap_and_keeps_what_is_in_use(steps):
    oracle = Oracle()
    for what, *arguments in steps:
        getattr(oracle, what)(*arguments)
        oracle.check()
    while oracle.under_way:
        oracle.end(0)
        oracle.check()
    assert set(oracle.engine) == {oracle.catalogue.find(*key).document_id for key in oracle.order}
