"""Conversations that are kept on disk: their messages, beside the keys and values of their tokens."""

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.util.errors import SpecDecError, UsageError
from runtime.util.files import make_private_directory, read_json, write_file

_NAME = re.compile(r"\w[\w.-]{0,63}")


def check_name(name: str) -> None:
    """UsageError for a name that a conversation cannot have."""
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"`--continue` has no name of a conversation: {name[:100]}",
            hint="take up to 64 letters, digits, `_`, `.` and `-`",
        )


@dataclass(frozen=True)
class KeptMessages:
    """A conversation's file. Only its user can read it."""

    directory: Path
    name: str

    @property
    def _path(self) -> Path:
        return self.directory / "chats" / f"{self.name}.json"

    def read(self) -> list[dict[str, Any]]:
        """The messages of the conversation so far, empty for a new conversation. SpecDecError if the file
        is damaged.
        """
        if not self._path.exists():
            return []
        hint = "remove it, or begin another: `--continue NAME`"
        try:
            messages = read_json(self._path).get("messages")
        except SpecDecError as error:
            raise SpecDecError(error.message, hint=hint) from None
        if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
            raise SpecDecError(f"this is no conversation: {self._path}", hint=hint)
        return messages

    def write(self, messages: Seq[Mapping[str, Any]]) -> None:
        make_private_directory(self.directory)
        make_private_directory(self._path.parent)
        write_file(self._path, json.dumps({"messages": list(messages)}, ensure_ascii=False).encode(), 0o600)
