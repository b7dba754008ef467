"""The metadata of a GGUF file about its model."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from runtime.checkpoint.gguf.reader import ORIGINAL, GGUFHeader, damaged
from runtime.util.errors import SpecDecError

WIDTHS, EXPERT_WIDTHS = "feed_forward_length", "expert_feed_forward_length"
SHARED_WIDTH, EXPERT_COUNT = "expert_shared_feed_forward_length", "expert_count"
HEADS, KV_HEADS, LOCAL_HEAD_DIM = "attention.head_count", "attention.head_count_kv", "attention.key_length_swa"


@dataclass(frozen=True)
class Metadata:
    """Metadata by keys without the architecture's name: `block_count` stands for `llama.block_count`."""

    header: GGUFHeader
    path: Path
    may_turn_a_part: bool = False
    """True if rotary positions may turn only a part of each head."""

    def get(self, key: str, default: Any = None) -> Any:
        """The number under a key; SpecDecError for another value, or for a missing key without a default."""
        name = f"{self.header.architecture}.{key}"
        value = self.header.metadata.get(name, default)
        if value is None:
            raise damaged(f"`{self.path}` lacks a value of its model: {name}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise damaged(f"`{self.path}` has a value that is not a number: {name}")
        return value

    def by_layer(self, key: str, default: Any = None) -> list[int]:
        """A number for each layer, also if the file has one number for all layers. SpecDecError as for `get`."""
        num_layers = int(self.get("block_count"))
        if isinstance(found := self.find(key), list):
            if len(found) != num_layers or not all(isinstance(one, int) for one in found):
                self.refuse(key)
            return [int(one) for one in found]
        return [int(self.get(key, default))] * num_layers

    def find(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.header.architecture}.{key}")

    @cached_property
    def head_dim(self) -> int:
        """Size of a head; SpecDecError if keys, values and rotary positions do not all have this size."""
        size = self.size_of_heads(self.of_head_dim)
        is_partial = self.may_turn_a_part and 0 < self.get("rope.dimension_count", size) < size
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.get(key, size) != size and not (is_partial and key == "rope.dimension_count"):
                self.refuse(key, *self.of_head_dim)
        return size

    def size_of_heads(self, keys: tuple[str, ...]) -> int:
        """Size of a head: the value of the single key in `keys`, or the first key's value divided by the second's."""
        size, *number = (int(self.get(key)) for key in keys)
        return size // max(number[0], 1) if number else size

    @property
    def of_head_dim(self) -> tuple[str, ...]:
        """The keys that `head_dim` depends on."""
        own = "attention.key_length"
        return ("embedding_length", "attention.head_count") if self.find(own) is None else (own,)

    def said(self, *keys: str) -> str:
        """The keys with their values, as text for an error."""
        values = {f"{self.header.architecture}.{key}": self.find(key) for key in dict.fromkeys(keys)}
        return ", ".join(f"`{name}` {'none' if value is None else value}" for name, value in values.items())

    def refuse(self, key: str, *beside: str) -> None:
        """Raise SpecDecError for the value of `key`; `beside` names keys whose values contradict it."""
        also = f" beside {self.said(*beside)}" if beside else ""
        raise SpecDecError(
            f"this value of a GGUF file is not supported, {self.said(key)}{also}: {self.path}",
            hint=ORIGINAL,
        )
