"""Tells apart the clients that take turns, without storing their names or keys."""

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

KEY_OF_SCOPE = "specdec.key"
"""Entry of a request's ASGI scope: the key that came with it, and whether the key alone says who asks."""


def with_key(scope: Mapping[str, Any], key: bytes, *, is_checked_apart: bool) -> dict[str, Any]:
    """The scope with the key that came with the request. `is_checked_apart`: each client has a key of its own."""
    return {**scope, KEY_OF_SCOPE: (key, is_checked_apart)}


def client_of(scope: Mapping[str, Any], user: str | None) -> bytes:
    """A digest that is equal for all requests of a client.

    If clients have their own keys, it is made from the key. Otherwise from the key as it was sent, which may be the
    same for all, together with the field `user`, or with the address if there is no such field.
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
