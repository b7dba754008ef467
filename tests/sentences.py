"""Sentences of commands and errors, word by word, in `tests/sentences/*.json`.

Tests assert exit codes, error codes and the values that a message quotes. The sentence around them stands in a file: to
edit an error is to run `pytest --update-sentences` and to read the difference. A sentence that its test no longer has
fails there, one whose test is gone fails in `test_sentences.py`, and the flag removes both.
"""

import json
import os
import re
from collections.abc import Generator, Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from zlib import crc32

import pytest
from filelock import FileLock

from runtime.drafters.specs import DRAFTERS
from runtime.util.errors import SpecDecWarning

DIRECTORY = Path(__file__).parent / "sentences"
STALE = pytest.StashKey[list[str]]()
_FAILED = pytest.StashKey[bool]()
_ALGORITHMS = [spec.description.algorithm for spec in DRAFTERS.values() if spec.description.algorithm]
_VARYING = (
    (re.escape(", ".join(DRAFTERS)), "DRAFTERS"),
    (re.escape(", ".join(_ALGORITHMS)), "ALGORITHMS"),
    (r"\b[0-9a-f]{12,64}\b", "HEX"),
    (r"\b[\d.,]+ ([kMGT]i?B)\b", r"N \1"),
    (r"[\d,]+ bytes, written with [\d,]+", "N bytes, written with N"),
    (r"0x[0-9a-f]{6,}", "0xHEX"),
    (r"recursion depth exceeded while calling a Python object", "recursion depth exceeded"),  # where it happens to be
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r" ?warning: \w+ take [\d.]+ times as long as when they were measured; .*? build the engine again", ""),
    (r"\b[\d.]+ s\b", "N s"),
    (r"^(N s [a-z ]+? )*(?=(error|warning): )", ""),  # progress, of what was not made before
    (r"^warning: .*?(?=error: )", ""),  # of a file that was not converted before
    (r"(is not valid JSON): .+?(?=: line)", r"\1: WHY"),  # by where it is cut off
    (r"\(\[Errno -\d\] [^)]*\)", "(WHY)"),  # a name that is not found, in the resolver's words
    (r"\bp = [\d.e-]+", "p = P"),
    (r"\b\d(\.\d+)?e[+-]\d+\b", "FLOAT"),
    (r"line \d+ column \d+ \(char \d+\)", "line N column N (char N)"),
)
"""Parts that depend on the machine or the run, or say all drafters."""
_TORCH = find_spec("torch")
assert _TORCH is not None and _TORCH.origin is not None
# As it is installed, whatever a test sets. torch itself, which says +cpu where its package does not, takes two seconds.
_TORCHS_VERSION = run_path(str(Path(_TORCH.origin).with_name("version.py")))["__version__"]
_VERSIONS = (_TORCHS_VERSION, version("torch"), version("transformers"))

Sentences = dict[str, dict[str, str]]
"""Sentences by file, and in it by test."""


class Said:
    """`said(result, 97)`, or of an exception, warnings or a text: it quotes the values, and is what it was.

    If sentences of several tests differ in their values alone, one of these tests holds the sentence. What
    differs from machine to machine is named in `varying`.
    """

    def __init__(self, node_id: str, base: Path, held: Sentences, *, update: bool) -> None:
        self.sentences: Sentences = {}
        self._test = key_of(node_id)
        self._base = base
        self._held = held
        self._own = of_test(held, node_id)
        self._update = update

    def __call__(self, source: object, *values: object, varying: tuple[object, ...] = ()) -> None:
        file, text = self._read(source)
        for value in values:
            before = r"[\w.-]" if str(value)[:1].isdigit() else r"\w"
            assert re.search(rf"(?<!{before}){re.escape(str(value))}(?!\w)", text), f"no `{value}` in: {text}"
        sentence = self._fixed(text, varying)
        own_forms = {form_of(one) for sentences in self.sentences.values() for one in sentences.values()}
        if form_of(sentence) in own_forms:
            return
        number = sum(map(len, self.sentences.values())) + 1
        key = self._test if number == 1 else f"{self._test} ({number})"
        own = self._own.get(file, {})
        if own.get(key) != sentence and form_of(sentence) in self._forms_of_others():
            return
        self.sentences.setdefault(file, {})[key] = sentence
        if not self._update:
            assert sentence == own.get(key), "meant so? `pytest --update-sentences` keeps it"

    def end(self) -> None:
        """Compare the test's sentences with the kept sentences; keep them with `--update-sentences`."""
        if self._update:
            replace(of_test(load(), self._test), self.sentences)
        else:
            assert self._own == self.sentences, "the test no longer has some of these sentences"

    def _forms_of_others(self) -> set[str]:
        """Forms of the sentences that other tests hold."""
        own = {key for sentences in self._own.values() for key in sentences}
        return {form for held in self._held.values() for key, form in _forms_of(held).items() if key not in own}

    def _read(self, source: object) -> tuple[str, str]:
        """The file, which is the command's or the test module's, and the text on one line."""
        module = Path(self._test.partition("::")[0]).stem.removeprefix("test_")
        if isinstance(source, pytest.ExceptionInfo):
            source = source.value
        if isinstance(source, pytest.WarningsRecorder):
            source = " ".join(str(w.message) for w in source if issubclass(w.category, SpecDecWarning))
        command = getattr(source, "command", module)
        parts = [getattr(source, "stderr", None) or str(source)]
        parts += [f"{name}: {part}" for name in ("hint", "code") if (part := getattr(source, name, None))]
        return command, " ".join(" ".join(parts).split())

    def _fixed(self, text: str, varying: tuple[object, ...]) -> str:
        text = re.sub(rf"{re.escape(str(self._base))}(/popen-gw\d+)?/[^/\s`'\",;:]+", "TMP", text)
        for value in (*varying, *_VERSIONS):
            text = text.replace(str(value), "VARYING")
        for pattern, name in _VARYING:
            text = re.sub(pattern, name, text)
        return text


@pytest.fixture
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Said]:
    """Holds all of this test's sentences."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if base.name.startswith("popen-") else base
    update = request.config.getoption("--update-sentences")
    said = Said(request.node.nodeid, base, load(), update=update)
    yield said
    if not request.node.stash.get(_FAILED, False):
        said.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed or report.skipped:
        item.stash[_FAILED] = True
    return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-sentences", action="store_true", help="keep what commands and errors say now")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sentences of tests that are gone: before any test is deselected, and where whole modules were collected."""
    tests = {key_of(item.nodeid) for item in items if "said" in getattr(item, "fixturenames", ())}
    is_whole = not any("::" in argument for argument in config.args)
    modules = {key_of(item.nodeid).partition("::")[0] for item in items} if is_whole else set()
    stale: Sentences = {}
    for file, sentences in load().items():
        for key, text in sentences.items():
            module = key.partition("::")[0]
            is_looked_at = module in modules or not (DIRECTORY.parent / module).exists()
            if is_looked_at and re.sub(r" \(\d+\)$", "", key) not in tests:
                stale.setdefault(file, {})[key] = text
    if stale and config.getoption("--update-sentences"):
        replace(stale, {})
        stale = {}
    config.stash[STALE] = [key for sentences in stale.values() for key in sentences]


def form_of(sentence: str) -> str:
    """The sentence without its values: those in backticks, numbers, and what stands behind the last colon.

    "`--top-k` must be at least 0: -1 hint: leave it out" is "… must be at least N: … hint: leave it out".
    """
    prefix, message = re.fullmatch(r"((?:error: |warning: |note: )?)(.*)", sentence, re.DOTALL).groups()  # type: ignore[union-attr]
    message, *others = re.split(r" (?=hint: |code: )", message)
    message = re.sub(r": [^:]{0,80}$", ": …", message)
    return prefix + " ".join(re.sub(r"`[^`]*`|'[^']*'|TMP\S*|-?\d[\d.,]*", "…", one) for one in (message, *others))


_known_forms: dict[int, tuple[dict[str, str], dict[str, str]]] = {}


def _forms_of(sentences: dict[str, str]) -> dict[str, str]:
    """The form of each; kept as long as the dictionary, which `load` gives again while its file is the same."""
    known = _known_forms.get(id(sentences))
    if known is None or known[0] is not sentences:
        known = _known_forms[id(sentences)] = (sentences, {key: form_of(text) for key, text in sentences.items()})
    return known[1]


def key_of(node_id: str) -> str:
    name = node_id.removeprefix("tests/")
    return name if len(name) < 300 else f"{name[:280]}…{crc32(name.encode()):08x}"


def of_test(held: Sentences, node_id: str) -> Sentences:
    pattern = re.compile(re.escape(key_of(node_id)) + r"( \(\d+\))?")
    found = {file: {key: text for key, text in held[file].items() if pattern.fullmatch(key)} for file in held}
    return {file: sentences for file, sentences in found.items() if sentences}


def load() -> Sentences:
    """Read every file that has changed since it was last read: most tests ask, and the files hardly ever change."""
    with os.scandir(DIRECTORY) as entries:
        changed = sorted((one.name, one.stat().st_mtime_ns) for one in entries if one.name.endswith(".json"))
    return {name.removesuffix(".json"): _read_file(name, changed_ns) for name, changed_ns in changed}


@cache
def _read_file(name: str, changed_ns: int) -> dict[str, str]:
    found: dict[str, str] = json.loads((DIRECTORY / name).read_text(encoding="utf-8"))
    return found


def replace(old: Sentences, new: Sentences) -> None:
    """Write it in the files; workers do it one after another."""
    with FileLock(DIRECTORY / ".lock"):
        held = load()
        for file in old.keys() | new.keys():
            kept = {key: text for key, text in held.get(file, {}).items() if key not in old.get(file, {})}
            sentences = dict(sorted((kept | new.get(file, {})).items()))
            path = DIRECTORY / f"{file}.json"
            path.with_suffix(".new").write_text(json.dumps(sentences, indent=1, ensure_ascii=False) + "\n", "utf-8")
            path.with_suffix(".new").replace(path)  # a worker that reads has the old or the new
