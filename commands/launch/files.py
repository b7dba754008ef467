"""An agent's config file while `launch` runs it: the old file is put aside, and put back at the end.

The copy that is put aside has the file's name with `.before-specdec`; it is empty if there was no file. It stays if
`launch` is killed, and `launch TOOL --restore` puts it back.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from commands.launch.tools import Connection, File
from commands.output.output import warn
from runtime.util.errors import SpecDecError
from runtime.util.files import write_file

_MODE = 0o600  # the file may hold a key


def shown(file: File, server: Connection) -> str:
    """Keys that the agent's config file gets, in the file's format."""
    return _written(file.format, file.keys(server))


@contextmanager
def configured(file: File, server: Connection) -> Iterator[None]:
    """Have the config file name the server within the block; all other keys of the file stay. SpecDecError if the file
    cannot be read or written. If the file was changed meanwhile, by the agent for example, the changed file is kept
    beside it, and a warning says so.
    """
    path, aside = file.path(), _aside(file)
    try:
        source = next((one for one in (aside, path) if one.exists()), None)
        old = b"" if source is None else source.read_bytes()
        new = _merged(file, old, file.keys(server)).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not aside.exists():
            write_file(aside, old, _MODE if source is None else source.stat().st_mode & 0o777)
        write_file(path, new, _MODE)
    except OSError as error:
        raise SpecDecError(
            f"the config file cannot be written ({error.strerror}): {path}",
            hint="check its permissions, or `--print` shows what to write",
        ) from None
    try:
        yield
    finally:
        if path.exists() and path.read_bytes() != new:
            changed = path.with_name(f"{path.name}.from-specdec")
            write_file(changed, path.read_bytes(), _MODE)
            warn(f"the config file was changed meanwhile: the old one is put back, and the changed one is {changed}")
        restore(file)


def restore(file: File) -> bool:
    """Put the old file back; False if none was put aside."""
    path, aside = file.path(), _aside(file)
    if not aside.exists():
        return False
    if old := aside.read_bytes():
        write_file(path, old, aside.stat().st_mode & 0o777)  # a path that is a link stays a link
    else:
        path.unlink(missing_ok=True)
    aside.unlink()
    return True


def _aside(file: File) -> Path:
    path = file.path()
    return path.with_name(f"{path.name}.before-specdec")


def _merged(file: File, content: bytes, keys: dict[str, Any]) -> str:
    """The old file's content with these keys merged into it. SpecDecError if the content cannot be read."""
    try:
        old = content.decode()
        if file.format == "toml":
            return _merged_toml(old, keys)
        found = (json.loads(old) if file.format == "json" else _yaml().safe_load(old)) if old.strip() else {}
        if not isinstance(found, dict):
            raise ValueError("it is no object")
    except Exception as error:  # YAML's errors are of a class of its own
        reason = str(error).splitlines()[0]
        raise SpecDecError(
            f"the config file cannot be read ({reason}): {file.path()}",
            hint="correct it, or `--print` shows what to write",
        ) from None
    return _written(file.format, _deeply(found, keys))


def _deeply(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`new` merged into `old`, object by object. A list begins with the new elements, followed by the old elements
    whose names are not among the new.
    """
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            value = _deeply(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            names = [one.get("name") for one in value if isinstance(one, dict)]
            value = [*value, *(one for one in before if not (isinstance(one, dict) and one.get("name") in names))]
        merged[key] = value
    return merged


def _written(form: str, keys: dict[str, Any]) -> str:
    if form == "json":
        return json.dumps(keys, indent=2, ensure_ascii=False) + "\n"
    if form == "yaml":
        return str(_yaml().safe_dump(keys, sort_keys=False, allow_unicode=True))
    return _toml(keys)


def _yaml() -> Any:
    return import_module("yaml")  # transformers brings it


# Python's library reads TOML, and does not write it: keys are replaced in the text, and the new text is read again


def _toml(keys: Mapping[str, Any], table: str = "") -> str:
    """The keys as TOML: first values, then tables. Texts and numbers have the same form in JSON and TOML."""
    plain = {key: value for key, value in keys.items() if not isinstance(value, dict)}
    head = f"[{table}]\n" if table and plain else ""
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in plain.items()]
    tables = [(f"{table}.{key}" if table else key, value) for key, value in keys.items() if isinstance(value, dict)]
    return head + "".join(lines) + "".join("\n" + _toml(inner, name).lstrip() for name, inner in tables)


def _merged_toml(old: str, keys: dict[str, Any]) -> str:
    tomllib.loads(old)
    plain = {key: value for key, value in keys.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in keys.items() if isinstance(value, dict)}
    ours = [f"{name}.{inner}" for name, table in tables.items() for inner in table]
    kept, table = [], ""
    for line in old.splitlines(keepends=True):
        if header := re.match(r"\s*\[+([^\[\]]+)\]", line):
            table = header[1].strip()
        is_ours = any(table == name or table.startswith(f"{name}.") for name in ours)
        is_replaced = not table and any(re.match(rf"\s*{re.escape(key)}\s*=", line) for key in plain)
        if not (is_ours or is_replaced):
            kept.append(line)
    merged = f"{_toml(plain)}{''.join(kept).rstrip()}\n\n{_toml(tables).lstrip()}"
    found = tomllib.loads(merged)
    if any(found.get(key) != value for key, value in plain.items()):
        raise ValueError("its keys cannot be replaced")
    return merged
