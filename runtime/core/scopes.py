"""Scopes of a request: things that its output shares with other outputs, such as the tools that it may call.

Pools of earlier outputs are kept by scope (`runtime.drafters.owner_pools`). Every request has its owner as a scope;
other scopes are made from its body. A scope is identified by a digest, so no text is kept for it.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

ScopeKind = Literal["tool", "schema", "system", "owner"]
KINDS: tuple[ScopeKind, ...] = get_args(ScopeKind)
"""Kinds of scopes, the most specific first."""


@dataclass(frozen=True)
class Scope:
    """A scope. `name` is a tool's name: an output belongs to the tools whose names are in its text."""

    kind: ScopeKind
    digest: str = ""
    name: str = ""

    @classmethod
    def of(cls, kind: ScopeKind, content: Any, name: str = "") -> "Scope":
        """The scope of a system prompt, a JSON schema or a tool's definition; equal contents have equal scopes."""
        written = json.dumps(content, sort_keys=True, ensure_ascii=True, default=str).encode()
        return cls(kind, hashlib.blake2b(written, digest_size=16).hexdigest(), name)


OWNER = Scope("owner")
