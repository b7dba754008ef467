"""A change has one place: a drafter is added to a copy of the tree by a spec and an algorithm, and is everywhere."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
# What a user would do with it, in a process that imports the copy.
USE = """
import contextlib, io, json, sys
from pathlib import Path
from specdec_cli.app import main

def specdec(*arguments):
    sys.argv, out = ["specdec", *map(str, arguments)], io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as error:
            assert not error.code, (arguments, error.code)
    return json.loads(out.getvalue()) if "--json" in arguments else out.getvalue()

engine, traces, home = map(Path, sys.argv[1:4])
found = {}
run = ["run", "--engine-dir", engine, "--input-text", "The dog the dog", "--max-output-len", 12, "--json"]
plain = specdec(*run)["requests"][0]["output_ids"]
for name, flags in {
    "V1": ["--echo-config", "[3,[0]]", "--echo-loudness", 2],
    "V2": ["--spec-decode-algo", "ECHO", "--echo-volume", 2, "--draft-len-mode", "fixed"],
}.items():
    document = specdec(*run, *flags, "--report", home / "report.html")
    assert document["requests"][0]["output_ids"] == plain, name
    found[name] = document["settings"]["echo_config"], document["total"]["num_draft_tokens"]
    found["drafters"] = document["settings"]["drafters"]
found["report"] = "echo of the last token" in (home / "report.html").read_text()
shown = specdec("serve", "--help-all")
found["help"] = "--echo-loudness" in shown and "--echo-volume" in shown
found["summarize"] = specdec(
    *["summarize", "--test-engine", "--engine-dir", engine, "--dataset", home / "samples.jsonl", "--max-ite", 1],
    *["--output-len", 4, "--echo-config", 2, "--json"],
)["settings"]["drafters"]
tuned = specdec("tune", "--traces", traces, "--json")
found["tune"] = [one["flags"] for one in tuned["candidates"] if one["drafter"] and one["drafter"]["name"] == "echo"]

from runtime.builder.profile import drafter_record
from specdec_cli import LLM, EchoDrafter, SamplingParams
from commands.serve.protocol.schema import Speculative
from runtime.drafters.speculation import Speculation

found["serve"] = "echo_config" in Speculative.model_fields
found["profile"] = drafter_record(Speculation.of(EchoDrafter(2)))
with LLM(engine) as llm:
    prompt = "The dog the dog"
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    (output,) = llm.generate(prompt, greedy, drafter=EchoDrafter(), draft_len_mode="fixed")  # or steps' prices decide
    assert output.token_ids == plain
    found["python"] = output.stats.num_draft_tokens
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


def test_a_drafter_is_one_spec_and_one_algorithm(tree: Path, llama_engine_dir: Path, tmp_path: Path) -> None:
    """It is in `run` of both modes, `serve`, `summarize`, `tune`, Python, documents, reports and profiles."""
    changed = [
        path
        for path in tree.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if not (ROOT / path.relative_to(tree)).is_file()
        or path.read_bytes() != (ROOT / path.relative_to(tree)).read_bytes()
    ]
    assert len(changed) + len(("test", "documentation", "changelog")) <= MOST_FILES, changed
    traces = tmp_path / "traces.jsonl"
    traces.write_text(json.dumps({"prompt_ids": [5, 6, 7], "output_ids": [7, 7, 7, 7, 8, 8, 9]}) + "\n")
    (tmp_path / "samples.jsonl").write_text(json.dumps({"text": "The dog", "reference": "The dog"}) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", USE, llama_engine_dir, traces, tmp_path], cwd=tree, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    settings = {"max_draft_len": 3, "loudness": 2, "pool": "private", "device_id": 0, "device_ids": [0]}
    assert found["V1"][0] == settings and found["V2"][0] == settings | {"max_draft_len": 4}
    assert min(found["V1"][1], found["V2"][1], found["python"]) > 0, "tokens were drafted"
    assert found["drafters"] == found["summarize"] == ["echo"]
    assert found["report"] and found["help"] and found["serve"]
    assert "--echo-config '[10]'" in found["tune"]
    assert found["profile"] == {"name": "echo", "max_draft_len": 2, "loudness": 1, "pool": "private"}
