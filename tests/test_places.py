"""A change has one place: a lookup, a trained head and a request's field are added to a copy of the tree, and are
everywhere.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

ROOT = Path(__file__).parents[1]
MOST_FILES, MOST_FILES_OF_HEAD, MOST_FILES_OF_FIELD = 5, 8, 4
"""The spec, the algorithm, its test, its page of documentation, the changelog; of a head its kind, its loader and its
row in the table of losslessness too; of a field its description and its effect, beside documentation and changelog.
"""

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
HEAD_SPEC = '''

@dataclass(frozen=True)
class SteadyDrafter(HeadDrafter):
    """A head of one linear layer."""

    description = Description(
        "steady",
        "steady head",
        help="Draft with a steady head",
        flag="steady_config",
        form=_form_of_model(4),
        algorithm="STEADY",
        label="steady",
    )
    kind = "steady"

    head: Annotated[str | Path, _head_setting("Directory of the steady head.")]
'''
HEAD_KIND = """

def _read_steady(config: dict[str, Any], directory: Path, where: str) -> HeadConfig:
    size = _size(config, "hidden_size", where)
    return HeadConfig(directory, "steady", config, size, size, 1, 9, 9, hidden_states=None)


"""
HEAD = '''"""A head of one linear layer."""

from torch import Tensor, nn
import torch

from runtime.drafters.heads.head_config import HeadConfig


class SteadyHead(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)


def load_steady(config: HeadConfig, embedding: Tensor | None, dtype: torch.dtype) -> SteadyHead:
    return SteadyHead(config).to(dtype)
'''
EDITS = {  # by file: (before, what follows it from now on, or stands in its place)
    "runtime/drafters/specs.py": [
        ("\n\n@dataclass(frozen=True)\nclass MtpDrafter", HEAD_SPEC + "\n\n@dataclass(frozen=True)\nclass MtpDrafter"),
        ('    "SelfDrafter",\n', '    "SelfDrafter",\n    "SteadyDrafter",\n'),
    ],
    "runtime/drafters/heads/head_config.py": [
        ('"assistant", "dflash"]', '"assistant", "dflash", "steady"]'),
        ('    if _kind_of_block(config) is not None:\n        return "dflash"\n',
         '    if _kind_of_block(config) is not None:\n        return "dflash"\n'
         '    if config.get("model_type") == "steady":\n        return "steady"\n'),
        ('"dflash": _read_block}', '"dflash": _read_block, "steady": _read_steady}'),
        ("\n\ndef _read_eagle3", HEAD_KIND + "def _read_eagle3"),
    ],
    "runtime/drafters/heads/head_model.py": [
        ('"assistant": load_assistant}', '"assistant": load_assistant, "steady": load_steady}'),
        ("from runtime.drafters.heads.mtp_head", "from runtime.drafters.heads.steady import load_steady\n"
         "from runtime.drafters.heads.mtp_head"),
    ],
}  # fmt: skip
FIELD = """    even_ids: Annotated[
        bool,
        RequestField("True: only even ids can be chosen.", in_all("even_ids"), "mask", neutral=(False,),
                     flag=Flag()),
    ] = False  # fmt: skip
"""
EDITS_OF_FIELD = {
    "runtime/core/params.py": [
        ("    thinking_token_budget: Annotated[\n", FIELD + "    thinking_token_budget: Annotated[\n"),
        ("    thinking_token_budget: int | None = None\n",
         "    thinking_token_budget: int | None = None\n    even_ids: bool = False\n"),
    ],
    "runtime/core/sampling.py": [
        ("        self.is_all = self._allowed is None and", "        self._even = params.even_ids\n"
         "        self.is_all = not self._even and self._allowed is None and"),
        ("        before = float(logits.max())\n",
         "        before = float(logits.max())\n        if self._even:\n            logits[1::2] = -math.inf\n"),
    ],
}  # fmt: skip
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
    "head": specdec(*run, "--steady-config", "[3,[0]]", "--draft-model-dir", "steady"),
}
from commands.serve.protocol.schema import Speculative
from runtime.drafters.specs import DRAFTERS
from specdec_cli import EchoDrafter

found["serve"] = "echo_config" in Speculative.model_fields
found["python"] = [EchoDrafter(2).label, type(EchoDrafter().lookup(None)).__name__]
import torch
from runtime.drafters.heads.head_config import read_head
from runtime.drafters.heads.head_model import load_head
found["loaded"] = type(load_head(read_head("steady"), None, torch.float32)).__name__
heads = {name: spec for name, spec in DRAFTERS.items() if spec.reads_states}
found["reads"] = [name for name, spec in heads.items() if spec.reads("steady")]
from commands.output.documents.settings import Sampling
from commands.serve.protocol.schema import ChatRequest, MessagesRequest, refused_field
from runtime.core.params import SamplingParams
from runtime.core.sampling import Sampler
sampler = Sampler(SamplingParams(temperature=0, even_ids=True).config(), (5, 6))
found["field"] = [
    "even_ids" in ChatRequest.model_fields, refused_field({"even_ids": True}, MessagesRequest),
    "even_ids" in Sampling.model_fields, int(sampler.legal([5, 6], [], torch.arange(8.0)[None]).argmax()),
]
found["flag"] = specdec("run", "--help-all")
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
    (copy / "runtime/drafters/heads/steady.py").write_text(HEAD)
    for name, edits in [*EDITS.items(), *EDITS_OF_FIELD.items()]:
        text = (copy / name).read_text()
        for old, new in edits:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (copy / name).write_text(text)
    (copy / "steady").mkdir()
    (copy / "steady/config.json").write_text(json.dumps({"model_type": "steady", "hidden_size": 8}))
    return copy


@pytest.mark.slow
def test_a_drafter_is_one_spec_and_one_algorithm(tree: Path) -> None:
    """It is in `run` of both modes, `serve`, `summarize`, schemas and Python. A head is recognized by its files. A
    request's field is a flag, in bodies, refused elsewhere, recorded and obeyed.
    """
    changed = [
        path
        for package in ("specdec_cli", "commands", "runtime", "scripts", "tests")
        for path in (tree / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
        if not (ROOT / path.relative_to(tree)).is_file()
        or path.read_bytes() != (ROOT / path.relative_to(tree)).read_bytes()
    ]
    of_head = {str(tree / name) for name in (*EDITS, "runtime/drafters/heads/steady.py")}
    of_field = {str(tree / name) for name in EDITS_OF_FIELD}
    others = {str(path) for path in changed} - of_head - of_field
    assert len(others) + len(("specs.py", "test", "documentation", "changelog")) <= MOST_FILES, others
    assert of_field < {str(path) for path in changed}
    assert len(of_field) + len(("documentation", "changelog")) <= MOST_FILES_OF_FIELD
    assert len(of_head) + len(("test", "documentation", "losslessness", "changelog")) <= MOST_FILES_OF_HEAD
    done = subprocess.run([sys.executable, "-c", USE], cwd=tree, capture_output=True, encoding="utf-8", timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    for version in ("V1", "V2"):  # nothing but the engine is wrong
        assert found[version][0] == 1 and "nowhere" in found[version][1] and "echo" not in found[version][1]
    assert found["refused"][0] == 2 and "--echo-loudness" in found["refused"][1]
    for command in ("help", "summarize"):
        assert "--echo-loudness" in found[command][1] and "--echo-volume" in found[command][1]
    assert "echo_config" in found["schema"][1] and found["serve"]
    assert found["head"][0] == 1 and "nowhere" in found["head"][1] and found["reads"] == ["steady"], found["head"]
    assert found["loaded"] == "SteadyHead"
    assert found["field"] == [True, "even_ids", True, 6] and "--even-ids" in found["flag"][1]
    assert found["python"] == ["echo 1", "Echo"]
