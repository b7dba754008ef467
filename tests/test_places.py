"""A change has one place: a drafter is added to a copy of the tree by a spec and an algorithm, and is everywhere."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

ROOT = Path(__file__).parents[1]
MOST_FILES = 5
"""The spec, the algorithm, its test, its page of documentation, the changelog."""

SPEC = '''

@dataclass(frozen=True)
class EchoDrafter(LookupDrafter):
    """The last token once more."""

    description = Description(
        "echo",
        "echo of the last token",
        help="Draft the last token again and again",
        flag="echo_config",
        form=ListForm((Entry("max_draft_len", "max_draft_len", "count"), Entry("device_list")), ("[3,[0]]", "3")),
        algorithm="ECHO",
    )

    max_draft_len: LookupLen = 3
    loudness: Annotated[
        int, Setting("How loud.", flag="echo_loudness", leader=LeaderFlag("echo_volume", "How loud."), at_least=1)
    ] = 1
    pool: SharedPool = "private"

    @property
    def label(self) -> str:
        return f"echo {self.loudness}"

    @classmethod
    def grid(cls, max_draft_len: int) -> list[DrafterSpec]:
        return [cls(max_draft_len)]

    def lookup(self, pool: "NgramPool | None") -> "Drafter":
        from runtime.drafters.echo import Echo

        return Echo()
'''
ALGORITHM = '''"""Draft the last token again."""

from runtime.core.request import Draft, Sequence


class Echo:
    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft([s.tokens[-1]] * min(max_draft_len, s.max_draft_len)) for s in sequences]

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""
'''
# Help and errors about the added drafter, from a process that imports the copied tree. A drafter in another package,
# whose tokens are tested, runs the same code: `tests/runtime/drafters/test_plugins.py`.
USE = """
import contextlib, io, json, sys
from specdec_cli.app import main

def specdec(*arguments):
    sys.argv, out, errors, code = ["specdec", *arguments], io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as error:
            code = error.code or 0
    return code, out.getvalue() + errors.getvalue()

run = ["run", "--engine-dir", "nowhere", "--input-text", "The dog"]
found = {
    "V1": specdec(*run, "--echo-config", "[3,[0]]", "--echo-loudness", "2"),
    "V2": specdec(*run, "--spec-decode-algo", "ECHO", "--echo-volume", "2"),
    "refused": specdec(*run, "--echo-config", "3", "--echo-loudness", "0"),
    "help": specdec("serve", "--help-all"),
    "summarize": specdec("summarize", "--help-all"),
    "schema": specdec("schema", "run"),
}
from commands.serve.protocol.schema import Speculative
from specdec_cli import EchoDrafter

found["serve"] = "echo_config" in Speculative.model_fields
found["python"] = [EchoDrafter(2).label, type(EchoDrafter().lookup(None)).__name__]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages with the drafter in it, and with what they are compiled to, but what is being written."""
    copy = tmp_path_factory.mktemp("places")
    for package in ("specdec_cli", "commands", "runtime", "scripts", "tests"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    specs = copy / "runtime/drafters/specs.py"
    text = specs.read_text()
    before = "\n\n@dataclass(frozen=True)\nclass DraftTargetDrafter"
    assert before in text
    text = text.replace(before, SPEC + before).replace("    DrafterSpec,\n", "    DrafterSpec,\n    LeaderFlag,\n", 1)
    text = text.replace('    "ChainDrafter",\n', '    "ChainDrafter",\n    "EchoDrafter",\n')
    specs.write_text(text)
    (copy / "runtime/drafters/echo.py").write_text(ALGORITHM)
    return copy


@pytest.mark.slow
def test_a_drafter_is_one_spec_and_one_algorithm(tree: Path) -> None:
    """It is in `run` of both modes, `serve`, `summarize`, schemas and Python."""
    changed = [
        path
        for path in tree.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if not (ROOT / path.relative_to(tree)).is_file()
        or path.read_bytes() != (ROOT / path.relative_to(tree)).read_bytes()
    ]
    assert len(changed) + len(("test", "documentation", "changelog")) <= MOST_FILES, changed
    done = subprocess.run([sys.executable, "-c", USE], cwd=tree, capture_output=True, encoding="utf-8", timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for version in ("V1", "V2"):  # nothing but the engine is wrong
        assert found[version][0] == 1 and "nowhere" in found[version][1] and "echo" not in found[version][1]
    assert found["refused"][0] == 2 and "--echo-loudness" in found["refused"][1]
    for command in ("help", "summarize"):
        assert "--echo-loudness" in found[command][1] and "--echo-volume" in found[command][1]
    assert "echo_config" in found["schema"][1] and found["serve"]
    assert found["python"] == ["echo 1", "Echo"]
