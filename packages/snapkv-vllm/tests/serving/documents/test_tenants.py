"""Whose a request is."""

import hashlib

from snapkv_vllm.documents.tenants import EVERYBODY, tenant_of


def of(said):
    return tenant_of(
        [(b"host", b"here"), (b"Authorization", said), (b"authorization", b"Bearer x")]
    )


def test_a_tenant_is_the_hash_of_its_key():
    assert of(b"Bearer secret") == hashlib.sha256(b"secret").hexdigest()
    assert of(b"bearer secret") == of(b"Bearer secret")
    assert of(b"Bearer Secret") != of(b"Bearer secret")
    assert of(b"Bearer a b") != of(b"Bearer a")


def test_no_key_is_a_tenant_of_everybody():
    assert of(b"Bearer ") != EVERYBODY
    assert tenant_of([]) != EVERYBODY
