"""Imports go one way: specdec_cli -> commands -> runtime, and from room to room within runtime and commands."""

import ast
import functools
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from setuptools import find_namespace_packages
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from commands.options.hints import HINTS, MESSAGES, flag_of_setting
from runtime.checkpoint.build_code import build_code, digests_of_build_code, is_left_out

ROOT = Path(__file__).parents[1]
PACKAGES = ("specdec_cli", "commands", "runtime")
MAY_IMPORT = {
    "specdec_cli": {"specdec_cli", "commands", "runtime"},
    "commands": {"commands", "runtime"},
    "runtime": {"runtime"},
}
HEAVY = {"torch", "transformers", "datasets", "evaluate", "safetensors"}
NEVER_IN_RUNTIME = {"typer", "click", "rich", "datasets", "evaluate"}
# The rooms of `runtime` from the bottom: a room imports itself and those before it, inside functions and for types too.
ROOMS = (
    *("util", "checkpoint", "kernels", "core", "text", "model", "compiler", "engine", "drafters", "loop", "builder"),
    *("proof", "llm", "measure", "training"),
)
# The same for `commands`: what commands share, then the commands. A command may import those that stand before it.
SHARED_ROOMS = ("output", "options", "inputs")
COMMANDS = (
    *("build", "cache", "config", "convert", "corpus", "integrity", "run", "chat", "serve", "launch", "batch"),
    *("summarize", "compare", "doctor", "drafters", "train", "tune", "check", "regress", "fingerprint", "predict"),
    "schema",
)
ROOT_ENTRIES = {*ROOMS, "demo", "__init__.py", "py.typed"}


class Named(NamedTuple):
    """Line of a file, and what stands there: a string, or the module and the names of `from module import names`."""

    line: int
    text: str
    names: frozenset[str] = frozenset()


class Facts(NamedTuple):
    """All that these tests ask of a file, which takes less memory than its syntax tree."""

    imports: frozenset[str]
    at_import: frozenset[str]
    names_imported: tuple[Named, ...]
    bound: frozenset[str]
    strings: tuple[Named, ...]
    docstrings: tuple[Named, ...]


@functools.cache
def facts(path: Path) -> Facts:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = nodes_of(tree)
    return Facts(
        imports=imported(nodes[ast.Import] + nodes[ast.ImportFrom], path),
        at_import=imported(tree.body, path),
        names_imported=tuple(
            Named(node.lineno, node.module or "", frozenset(alias.name for alias in node.names))
            for node in nodes[ast.ImportFrom]
        ),
        bound=bound_names(nodes),
        strings=tuple(Named(node.lineno, node.value) for node in nodes[ast.Constant] if isinstance(node.value, str)),
        docstrings=tuple(docstrings(nodes)),
    )


def nodes_of(tree: ast.AST) -> defaultdict[type, list[Any]]:
    """All nodes by their type: `ast.walk` and a look at each for every question take twice as long."""
    found, left = defaultdict[type, list[Any]](list), [tree]
    for node in left:
        found[type(node)].append(node)
        for value in vars(node).values():
            if isinstance(value, list):
                left += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST):
                left.append(value)
    return found


def imported(nodes: Sequence[ast.AST], path: Path) -> frozenset[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module or "")
    return frozenset(found)


def bound_names(nodes: Mapping[type, list[Any]]) -> frozenset[str]:
    """The names that a module defines or imports."""
    defined = [*nodes[ast.FunctionDef], *nodes[ast.AsyncFunctionDef], *nodes[ast.ClassDef]]
    aliases = [alias for node in nodes[ast.Import] + nodes[ast.ImportFrom] for alias in node.names]
    return frozenset(
        {node.name for node in defined}
        | {node.id for node in nodes[ast.Name]}
        | {alias.asname or alias.name for alias in aliases}
    )


def docstrings(nodes: Mapping[type, list[Any]]) -> Iterator[Named]:
    """Docstrings, of fields and constants too."""
    bodies = [
        node.body
        for same in nodes.values()
        if same and isinstance(getattr(same[0], "body", None), list)
        for node in same
    ]
    for before, statement in (pair for body in bodies for pair in itertools.pairwise([None, *body])):
        if isinstance(before, ast.Assign | ast.AnnAssign | None) and isinstance(statement, ast.Expr):
            value = getattr(statement.value, "value", None)
            if isinstance(value, str):
                yield Named(statement.lineno, value)


def imports(path: Path, *, at_import_only: bool = False) -> frozenset[str]:
    """Modules a file imports, anywhere in it; `from a.b import c` is a.b, since c may be a name."""
    return facts(path).at_import if at_import_only else facts(path).imports


@functools.cache
def modules_imported(path: Path) -> frozenset[str]:
    """Modules of ours that a file imports, anywhere in it; `from a import b` is `a.b` where that is a module."""
    ours = {name for package in PACKAGES for name in modules(package)}
    named = {f"{one.text}.{name}" for one in facts(path).names_imported for name in one.names}
    return (imports(path) | named) & ours


@functools.cache
def modules(package: str) -> dict[str, Path]:
    """Module name -> file, of a package and the packages in it."""
    paths = sorted((ROOT / package).rglob("*.py"))
    return {str(path.relative_to(ROOT).with_suffix("")).replace("/", "."): path for path in paths}


def test_every_file_is_installed() -> None:
    """An installation that is not from a checkout has them, too: setuptools takes what `pyproject.toml` names."""
    names = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = set(find_namespace_packages(str(ROOT), include=names["packages"]["find"]["include"]))
    assert {module.rpartition(".")[0] for package in PACKAGES for module in modules(package)} <= packages
    data = {
        path
        for package, patterns in names["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package).glob(pattern)
    }
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {ROOT / name for name in listed.stdout.splitlines() if not name.endswith(".py")}
    assert files
    assert files - data == set()


def test_packages_import_downwards_only() -> None:
    for package in PACKAGES:
        assert modules(package)
        for module, path in modules(package).items():
            ours = {name.split(".")[0] for name in imports(path)} & set(PACKAGES)
            assert ours <= MAY_IMPORT[package], f"{module} imports upwards"


def test_scripts_import_each_other_as_packages() -> None:
    files = sorted((ROOT / "scripts").rglob("*.py"))
    ours = {path.stem for path in files}
    assert "faults" in ours
    for path in files:
        assert not {name.split(".")[0] for name in imports(path)} & ours, path


def test_runtime_knows_no_terminal_and_no_dataset() -> None:
    for module, path in modules("runtime").items():
        foreign = {name.split(".")[0] for name in imports(path)} & NEVER_IN_RUNTIME
        assert not foreign, f"{module} imports {foreign}"


def test_nobody_imports_click() -> None:
    """Typer vendors its own; an error of another click's would slip past it."""
    for package in PACKAGES:
        for module, path in modules(package).items():
            assert "click" not in {name.split(".")[0] for name in imports(path)}, module


SPECS = (
    "runtime.drafters.lists", "runtime.drafters.spec", "runtime.drafters.plugins", "runtime.drafters.specs",
    "runtime.drafters.speculation",
)  # fmt: skip


def test_drafters_are_described_without_their_algorithms() -> None:
    """Modules that open one are imported when it is opened: flags and documents are made of specs without torch."""
    for module in SPECS:
        ours = {name for name in imports(modules("runtime")[module], at_import_only=True) if name.startswith("runtime")}
        assert ours <= {"runtime.util.errors", "runtime.checkpoint.config", *SPECS[:-1]}, module


def room_of(module: str) -> str:
    """The room of a module: `checkpoint` for `runtime.checkpoint.gguf.config`."""
    return module.split(".")[1]


@pytest.mark.parametrize(("package", "rooms"), [("runtime", ROOMS), ("commands", (*SHARED_ROOMS, *COMMANDS))])
def test_rooms_import_downwards_only(package: str, rooms: Sequence[str]) -> None:
    """Imports in functions and for types alone count too."""
    place = {room: number for number, room in enumerate(rooms)}
    inside = {name: path for name, path in modules(package).items() if name.count(".") > 0 and "__init__" not in name}
    assert {room_of(name) for name in inside} == set(rooms)
    for module, path in inside.items():
        for name in modules_imported(path) & inside.keys():
            assert place[room_of(name)] <= place[room_of(module)], f"{module} imports {name}, from a room above"


def test_protocols_know_no_http() -> None:
    """`http` imports `protocol`, and both import what stands beside them, such as `errors`."""
    protocol = {name: path for name, path in modules("commands").items() if name.startswith("commands.serve.protocol.")}
    assert protocol
    for module, path in protocol.items():
        assert not [name for name in modules_imported(path) if name.startswith("commands.serve.http.")], module


def test_the_root_of_runtime_is_its_rooms() -> None:
    listed = subprocess.run(["git", "ls-files", "runtime"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split("/")[1] for line in listed.stdout.splitlines()} == ROOT_ENTRIES


def test_no_circle_of_modules() -> None:
    """Imports inside functions, and those for types, are counted too."""
    graph = {name: modules_imported(path) & everywhere().keys() for name, path in everywhere().items()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"a circle of imports: {' -> '.join([*above, module])}"
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    assert done == set(graph)


def test_what_builds_an_engine_is_in_its_identity() -> None:
    """All that the builder imports, and what that imports, is digested or left out by name."""
    graph = {name: modules_imported(path) for name, path in modules("runtime").items()}
    reached, left = set[str](), ["runtime.builder.build", "runtime.builder.convert", "runtime.builder.draft_ids"]
    while left:
        module = left.pop()
        if module in graph and module not in reached:
            reached.add(module)
            left += graph[module]
    digested = set(build_code())
    for module in sorted(reached):
        path = modules("runtime")[module]
        assert (path in digested) != is_left_out(path.relative_to(ROOT / "runtime")), module
    sources = {path for path in (ROOT / "runtime" / "kernels").rglob("*") if path.suffix in (".cpp", ".h")}
    assert sources and sources <= digested


@pytest.mark.parametrize("room", sorted(path.name for path in (ROOT / "runtime").iterdir() if path.suffix != ".typed"))
def test_a_change_in_a_room_makes_another_engine_or_is_left_out(room: str, tmp_path: Path) -> None:
    """Every fourth file of a room is changed; the test before names them all."""
    if room in ("__pycache__", "demo"):
        return
    source, copy = ROOT / "runtime" / room, tmp_path / room
    shutil.copytree(source, copy) if source.is_dir() else shutil.copyfile(source, copy)
    for changed in [copy] if copy.is_file() else sorted(copy.rglob("*.py"))[::4]:
        before = digests_of_build_code(tmp_path)
        changed.write_text(changed.read_text() + "\n# changed")
        assert (digests_of_build_code(tmp_path) != before) != is_left_out(changed.relative_to(tmp_path)), changed


def test_runtime_names_no_flag_and_no_command() -> None:
    """The commands know which flag to turn (`commands/options/hints.py`). Only specs and fields of requests
    describe flags.

    `--param=` is GNU's."""
    named = re.compile(r"--(?!param=)[a-z]|\bspecdec (convert|build|run|summarize|compare|tune|train|corpus|verify)\b")
    for module, path in modules("runtime").items():
        for one in facts(path).strings if module not in (*SPECS, "runtime.core.params") else ():
            assert not named.search(one.text), f"{module}, line {one.line}: {one.text[:60]}"


def test_every_code_of_an_error_has_its_hint() -> None:
    """A setting that has a flag, or one of the command line; and none is for a code that no error has."""
    own, stated = {*HINTS, "other_environment", "no_such_model"}, set()
    for module, path in modules("runtime").items():
        text = path.read_text(encoding="utf-8")
        stated |= set(re.findall(r'\bcode ?= ?"(\w+)"', text)) | set(re.findall(r'"(cache_too_\w+)"', text))
        tree = ast.parse(text if "code=" in text else "")
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            if isinstance(code := given.get("code"), ast.Constant) and code.value not in own:
                named = re.findall(r"`(\w+|\{name\})", ast.unparse(given["hint"]))
                assert any(name == "{name}" or flag_of_setting(name) for name in named), (module, code.value)
    assert {*own, *MESSAGES} <= stated


def everywhere() -> dict[str, Path]:
    return {name: path for package in PACKAGES for name, path in modules(package).items()}


def test_what_scripts_and_tests_import_is_there() -> None:
    """Names of ours, also inside functions, and where a test or a benchmark is seldom run."""
    ours, wrong = everywhere(), []
    names = {module: facts(path).bound for module, path in ours.items()}
    parts: dict[str, set[str]] = {}
    for name in ours:
        parts.setdefault(name.rpartition(".")[0], set()).add(name.rpartition(".")[2])
    for path in (path for folder in ("scripts", "tests", "examples") for path in (ROOT / folder).rglob("*.py")):
        for line, module, asked in facts(path).names_imported:
            if module.split(".")[0] in PACKAGES:
                home = module if module in names else f"{module}.__init__"
                missing = asked - names.get(home, frozenset()) - parts.get(module, set())
                if missing and module != "specdec_cli":  # which finds its names when they are asked for
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {module} has no {missing}")
    assert wrong == []


@functools.cache
def imported_at_once() -> dict[str, frozenset[str]]:
    """Module -> the modules that it imports when it is imported."""
    return {module: imports(path, at_import_only=True) for module, path in everywhere().items()}


def test_a_command_is_there_before_torch() -> None:
    """Modules that `--help` may not import are other files of the command's folder, such as `work.py`."""
    graph = imported_at_once()
    for command in (name for name in modules("commands") if name.endswith(".command")):
        found, left = set[str](), [command]
        while left:
            module = left.pop()
            if module not in found:
                found.add(module)
                left += graph.get(module, ())
        assert found & {name for name in graph if name.startswith("commands.options")}, command
        assert not {name.split(".")[0] for name in found} & HEAVY, command
        late = (".work", ".report", ".document", ".tables")
        assert not {name for name in found if name.endswith(late)}, command


def test_help_loads_no_torch() -> None:
    """`python -X importtime` names every module that is loaded, on stderr."""
    command = [sys.executable, "-X", "importtime", "-m", "specdec_cli", "run", "--help-all"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in result.stderr.splitlines() if "|" in line}
    assert "typer" in loaded
    assert not loaded & {*HEAVY, "numpy"}


HEADLESS = re.compile(
    r"(What\w*|Who\w*|Which\w*|Where\w*|When\w*|How|Whether|That|Those|Of|As|By|So|In|With|For|From|At|On|To|Not|Only|Nobody)\b"
)


@pytest.mark.parametrize("folder", [*PACKAGES, "scripts", "tests", "examples"])
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str) -> None:
    """A relative clause without a head ("What the step takes") leaves the reader to guess the subject."""
    found = {
        f"{path.relative_to(ROOT)}:{one.line}: {one.text.splitlines()[0]}"
        for path in modules(folder).values()
        for one in facts(path).docstrings
        if HEADLESS.match(one.text)
    }
    assert found == set()


MECHANISMS = (
    *(f"model.{name}" for name in ("causal_heads", "mixers", "model", "placing", "pretrained", "replaced")),
    *(f"checkpoint.gguf.{name}" for name in ("blocks", "config", "metadata", "reader", "ropes")),
    *(f"drafters.heads.{name}" for name in ("assistant", "head_config", "head_model", "mtp_head")),
)


def test_mechanisms_name_no_family() -> None:
    """A family is described in its row (`model/families`, `checkpoint/gguf/families.py`), and nowhere else."""
    types = set(CONFIG_MAPPING_NAMES)
    assert {"llama", "zamba2", "qwen3_next"} <= types
    for module in MECHANISMS:
        strings = (one.text for one in facts(modules("runtime")[f"runtime.{module}"]).strings)
        lists = (text.split() for text in strings if re.fullmatch(r"[\w-]+( [\w-]+)*", text))  # "mamba mamba2" too
        assert not {word for words in lists for word in words} & types, module
