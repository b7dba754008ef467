"""Tells apart the clients that take turns, without storing their names or keys."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from runtime.loop.serving import ServeRequest

KEY_OF_SCOPE = "specdec.key"
"""Key of a request's ASGI scope for the API key that came with it, and whether that key alone tells clients apart."""

SALT_OF_SCOPE = "specdec.salt"
"""Key of a request's ASGI scope for the salt of its API key, if keys are checked."""


def with_key(scope: Mapping[str, Any], key: bytes, *, num_keys: int) -> dict[str, Any]:
    """A request's scope with the API key that came with the request. `num_keys` is the number of keys that the server
    knows; if there are several, the key alone tells clients apart.
    """
    return {**scope, KEY_OF_SCOPE: (key, num_keys > 1)} | salt_scope(key if num_keys else None)


def salt_scope(key: bytes | None) -> dict[str, Any]:
    """Entry of a scope with the salt of an API key, from which the key cannot be read; with None, if no keys are
    checked, an empty entry.
    """
    return {SALT_OF_SCOPE: None if key is None else f"key {_digest([b'salt', key]).hex()}"}


def salted(asked: Seq[ServeRequest], scope: Mapping[str, Any], given: str | None) -> list[ServeRequest]:
    """The requests, each with the salt that separates its keys and values from other clients': made from the API key,
    if keys are checked, and the body's `cache_salt`.
    """
    salt = corpus_owners(scope, given)[0]
    return [replace(one, request=replace(one.request, cache_salt=salt)) for one in asked]


def corpus_owners(scope: Mapping[str, Any], given: str | None) -> tuple[str | None, ...]:
    """Owners whose corpora a request may name: its salt's, then its API key's, or, without either, the common owner
    None. A corpus that the request adds belongs to the first.
    """
    own = scope.get(SALT_OF_SCOPE)
    return (own,) if given is None else (" ".join(filter(None, (own, f"salt {given}"))), own)


def client_of(scope: Mapping[str, Any], user: str | None) -> bytes:
    """A digest that is equal for all requests of a client. If clients have their own keys, it is made from the key
    alone. Otherwise it is made from the key as it was sent, which all may share, together with the field `user`, or
    with the address if that field is missing.
    """
    key, is_apart = scope.get(KEY_OF_SCOPE, (b"", False))
    address = scope.get("client")
    if is_apart:
        return _digest([b"key", key])
    if user:
        return _digest([b"user", key, user.encode(errors="surrogatepass")])
    return _digest([b"address", key, str(address[0] if address else "").encode()])


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
