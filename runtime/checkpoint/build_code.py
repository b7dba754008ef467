"""The code that an engine's content depends on: its digests are part of the engine's identity."""

from pathlib import Path

from runtime.util.digests import digest

_PACKAGE = Path(__file__).parents[1]
LEFT_OUT = {
    "demo": "models and articles: an engine's identity has the digests of its model's files",
    "drafters": "drafts are made while an engine runs; `drafters/heads`, which engines are built for, is not left out",
    "llm": "opens engines",
    "loop": "runs engines; the costs of steps lie beside an engine, and are measured again by another version",
    "measure": "measures engines",
    "proof": "checks what an engine has answered",
    "training": "writes the files of heads, whose digests are in an engine's identity",
}
"""Parts of `runtime` that do not determine an engine's content, with the reason. Every other source is part of an
engine's identity.
"""
_BUT = ("drafters/heads",)


def build_code(package: Path = _PACKAGE) -> list[Path]:
    """Sources in `runtime` that an engine's content depends on: all except `LEFT_OUT`."""
    found = [path for path in package.rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    return sorted(path for path in found if not is_left_out(path.relative_to(package)))


def is_left_out(path: Path) -> bool:
    """True for a source, given by its path in `runtime`, that does not determine an engine's content."""
    return path.parts[0] in LEFT_OUT and not any(path.is_relative_to(folder) for folder in _BUT)


def digests_of_build_code(package: Path = _PACKAGE) -> list[str]:
    """Names and digests of the sources in `build_code`."""
    return [f"{path.relative_to(package)} {digest([path.read_text('utf-8')])}" for path in build_code(package)]
