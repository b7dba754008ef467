"""Drafters of other packages: one that is installed in a directory is everywhere, one that fails is one sentence."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from waiting import HANG_S

ROOT = Path(__file__).parents[3]

_PAGE = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
(SPEC,) = re.findall(r"<!-- file: specdec_echo.py -->\n```py\n(.*?)```", _PAGE, re.DOTALL)
(PROJECT,) = re.findall(r"```toml\n(.*?)```", _PAGE, re.DOTALL)
ALGORITHM = '''
from specdec_cli import Draft, Sequence


class Echo:
    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft([s.tokens[-1]] * min(max_draft_len, s.max_draft_len)) for s in sequences]

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""
'''
# A user's commands in one process, which imports torch once.
USE = """
import contextlib, functools, io, json, sys, typer.main
from specdec_cli.app import main

typer.main.get_command = functools.cache(typer.main.get_command)  # as once in a process

engine, traces, home = sys.argv[1:]
assert "torch" not in sys.modules and "echo_algorithm" not in sys.modules

def specdec(*arguments):
    sys.argv, out = ["specdec", *map(str, arguments)], io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as error:
            assert not error.code, (arguments, error.code)
    return out.getvalue()

found = {"help": {c: specdec(c, "--help-all") for c in ("run", "serve", "tune")}}
found["schema"] = specdec("schema", "run")
assert "torch" not in sys.modules
run = ["run", "--engine-dir", engine, "--input-text", "The dog the dog", "--max-output-len", 12, "--json"]
for name, flags in {
    "plain": [],
    "V1": ["--echo-config", "[3,[0]]", "--echo-loudness", 2, "--report", f"{home}/V1.html"],
    "V2": ["--spec-decode-algo", "ECHO", "--echo-loudness", 2, "--draft-len-mode", "fixed"],
    "chain": ["--drafters", "echo,ngram", "--echo-config", 3, "--ngram-config", "4,2"],
}.items():
    found[name] = json.loads(specdec(*run, *flags))
found["tune"] = json.loads(specdec("tune", "--traces", traces, "--json"))
from commands.serve.protocol.schema import Speculative
from runtime.builder.profile import drafter_record
from runtime.drafters.speculation import Speculation
from specdec_cli import LLM, SamplingParams
from specdec_echo import EchoDrafter

found["serve"] = [*Speculative.model_fields]
found["profile"] = drafter_record(Speculation.of(EchoDrafter(2)))
with LLM(engine) as llm:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    (output,) = llm.generate("The dog the dog", greedy, drafter=EchoDrafter(), draft_len_mode="fixed")
found["python"] = output.token_ids, output.stats.num_draft_tokens
json.dump(found, sys.stdout)
"""


def describe(name: str = "Echo", word: str = "echo", algorithm: str = "ECHO", flag: str = "echo_loudness") -> str:
    """The example of the documentation, or another drafter that is written like it."""
    text = SPEC.replace("EchoDrafter", f"{name}Drafter").replace('"ECHO"', f'"{algorithm}"')
    return text.replace('"echo_loudness"', f'"{flag}"').replace('"echo', f'"{word}')


def install(site: Path, package: str, source: str, **entries: str) -> None:
    """Write a package into a directory for `PYTHONPATH`, as `pip install --target` does."""
    (site / f"{package}.py").write_text(source)
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("[specdec.drafters]\n" + "\n".join(lines) + "\n")


def python(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=HANG_S)


def test_a_drafter_of_another_package_is_everywhere(tmp_path: Path, llama_engine_dir: Path) -> None:
    """Flags, lists, both modes, documents, schemas, reports, profiles, `tune`, requests to `serve` and
    Python have it; outputs stay the same.
    """
    (tmp_path / "site").mkdir()
    entries = tomllib.loads(PROJECT)["project"]["entry-points"]["specdec.drafters"]
    install(tmp_path / "site", "specdec_echo", describe(), **entries)
    (tmp_path / "site" / "echo_algorithm.py").write_text(ALGORITHM)
    traces = tmp_path / "traces.jsonl"
    traces.write_text(json.dumps({"prompt_ids": [5, 6, 7], "output_ids": [7, 7, 7, 7, 8, 8, 9]}) + "\n")
    done = python(tmp_path / "site", "-c", USE, llama_engine_dir, traces, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "of another package" not in done.stderr
    found = json.loads(done.stdout)
    for command in ("run", "serve", "tune"):
        assert "--echo-config" in found["help"][command] and "--echo-loudness" in found["help"][command]
    assert "echo" in found["schema"] and "echo_config" in found["serve"]
    (plain,) = found["plain"]["requests"]
    for name in ("V1", "V2", "chain"):
        (answer,) = found[name]["requests"]
        assert answer["output_ids"] == plain["output_ids"], name
        assert found[name]["total"]["num_draft_tokens"] > 0
    settings = {"max_draft_len": 3, "loudness": 2, "pool": "private", "device_id": 0, "device_ids": [0]}
    assert found["V1"]["settings"]["echo_config"] == settings
    assert found["chain"]["settings"]["drafters"] == ["echo", "ngram"]
    assert "echo of the last token" in (tmp_path / "V1.html").read_text()
    assert found["profile"] == {"name": "echo", "max_draft_len": 2, "loudness": 1, "pool": "private"}
    assert found["python"][0] == plain["output_ids"] and found["python"][1] > 0
    assert "--echo-config '[10]'" in [one["flags"] for one in found["tune"]["candidates"]]


BAD = {
    "fails": ("raise RuntimeError('first line\\nsecond line')", "X", "RuntimeError: first line second line"),
    "unwritten": ("def (", "X", "SyntaxError"),
    "needs": ("import a_package_that_is_not_there", "X", "a_package_that_is_not_there"),
    "lacks": ("", "EchoDrafter", "EchoDrafter"),
    "leaves": ("import sys; sys.exit(3)", "X", "SystemExit: 3"),
    "other": ("class X: ...", "X", "DrafterSpec"),
    "named": (describe("Ngram", "ngram", "NGRAM", "ngram_loudness"), "NgramDrafter", "specs:NgramDrafter: ngram"),
    "again": (describe(), "EchoDrafter", "another_echo:EchoDrafter: echo"),
    "algorithm": (describe(word="loud", algorithm="SUFFIX", flag="loud_er"), "EchoDrafter", "SUFFIX"),
    "flag": (describe(word="hot", algorithm="HOT", flag="temperature"), "EchoDrafter", "temperature"),
    "kind": (describe(word="big", algorithm="BIG", flag="big_one").replace("[int,", "[dict,"), "EchoDrafter", "dict"),
    "bare": (describe(word="raw", algorithm="RAW", flag="raw_one").replace("@data", "#"), "EchoDrafter", "@dataclass"),
    "word": (describe(word="none", algorithm="NONE", flag="none_er"), "EchoDrafter", "stands for something else: none"),
    "spelled": (describe(word="a,b", algorithm="AB", flag="ab"), "EchoDrafter", "'a,b'"),
    "half": (describe(word="half", algorithm="HALF", flag="half_er").replace("def lookup", "def look"), "EchoDrafter",
             "lookup"),
    "late": (describe(word="late", algorithm="LATE", flag="late_er") + "\nraise ValueError(7)", "EchoDrafter", "7"),
}  # fmt: skip


def test_a_package_that_cannot_be_used_is_one_sentence_and_the_rest_works(tmp_path: Path) -> None:
    """Each of them beside one that works, whose name comes first."""
    install(tmp_path, "another_echo", describe(), another="another_echo:EchoDrafter")
    for name, (source, attribute, _) in BAD.items():
        install(tmp_path, f"bad_{name}", source, **{f"bad_{name}": f"bad_{name}:{attribute}"})
    done = python(tmp_path, "-m", "specdec_cli", "run", "--help-all")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--echo-config" in done.stdout and "--ngram-config" in done.stdout
    for word in ("--late-", "--hot-", "--big-", "--raw-", "--loud-", "--half-"):
        assert word not in done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == len(BAD), done.stderr
    for name, (_, _, reason) in BAD.items():
        (line,) = (line for line in lines if f"`bad_{name}`" in line)
        assert line.startswith("warning: ") and reason in line


def test_a_package_that_is_imported_first_is_known_too(tmp_path: Path) -> None:
    """Its import asks for the drafters, which ask for it."""
    install(tmp_path, "specdec_echo", describe(), echo="specdec_echo:EchoDrafter")
    program = "import specdec_echo\nfrom runtime.drafters import plugins, specs\n"
    program += "plugins.tell_problems(); print('echo' in specs.DRAFTERS, len(specs.lookups()))"
    done = python(tmp_path, "-W", "error", "-c", program)
    assert done.stdout == "True 3\n", done.stderr


def modules_loaded(done: subprocess.CompletedProcess[str]) -> set[str]:
    assert done.returncode == 0, done.stderr[-3000:]
    return {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}


def test_without_such_packages_nothing_is_imported_to_find_them(tmp_path: Path) -> None:
    """`importlib.metadata` takes longer to import than the files of all packages take to read."""
    done = python(tmp_path, "-X", "importtime", "-m", "specdec_cli", "--help")
    assert "importlib.metadata" not in modules_loaded(done)
