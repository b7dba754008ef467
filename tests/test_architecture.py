"""Imports go one way: specdec_cli -> commands -> runtime, and within runtime from engines down to nouns."""

import ast
import functools
import itertools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from setuptools import find_namespace_packages

from commands.options.hints import HINTS

ROOT = Path(__file__).parents[1]
PACKAGES = ("specdec_cli", "commands", "runtime")
MAY_IMPORT = {
    "specdec_cli": {"specdec_cli", "commands", "runtime"},
    "commands": {"commands", "runtime"},
    "runtime": {"runtime"},
}
HEAVY = {"torch", "transformers", "datasets", "evaluate", "safetensors"}
ATTENTION = "runtime.model.attention"
MOST_MODULES, MOST_OF_ONE_IMPORTER, MOST_NAMES_TWICE = 260, 66, 8
NEVER_IN_RUNTIME = {"typer", "click", "rich", "datasets", "evaluate"}
# The nouns: of runtime's modules they import these and no others.
NOUNS = {
    "runtime.util.errors": set(),
    "runtime.checkpoint.config": {"runtime.util.errors", "runtime.util.reading"},
    "runtime.core.stats": set(),
    "runtime.core.params": {"runtime.util.errors"},
    "runtime.core.occurrences": {"runtime.core.params"},
    "runtime.core.forms": set(),
    "runtime.core.form_prover": {"runtime.util.errors", "runtime.core.forms"},
    "runtime.core.grammar": {
        "runtime.util.errors",
        "runtime.core.form_prover",
        "runtime.core.forms",
        "runtime.core.params",
    },
    "runtime.core.sampling": {
        "runtime.util.errors",
        "runtime.core.grammar",
        "runtime.core.occurrences",
        "runtime.core.params",
    },
    "runtime.core.request": {
        "runtime.core.grammar",
        "runtime.core.params",
        "runtime.core.sampling",
        "runtime.core.stats",
    },
    "runtime.core.verify": {"runtime.util.errors", "runtime.core.request", "runtime.core.sampling"},
    "runtime.util.files": {"runtime.util.errors"},
    "runtime.util.reading": {"runtime.util.errors", "runtime.util.files"},
    "runtime.util.cache": {"runtime.util.errors", "runtime.util.files"},
    "runtime.util.tensor_file": set(),
    "runtime.text.corpus": {
        "runtime.util.cache",
        "runtime.checkpoint.checksums",
        "runtime.checkpoint.config",
        "runtime.util.errors",
        "runtime.util.files",
        "runtime.util.tensor_file",
    },
}


class Named(NamedTuple):
    """Line of a file, and what stands there: a string, or the module and the names of `from module import names`."""

    line: int
    text: str
    names: frozenset[str] = frozenset()


class Function(NamedTuple):
    name: str
    parameters: tuple[str, ...]
    num_lines: int


class Facts(NamedTuple):
    """All that these tests ask of a file, which takes less memory than its syntax tree."""

    imports: frozenset[str]
    at_import: frozenset[str]
    names_imported: tuple[Named, ...]
    bound: frozenset[str]
    strings: tuple[Named, ...]
    docstrings: tuple[Named, ...]
    functions: tuple[Function, ...]


@functools.cache
def facts(path: Path) -> Facts:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    return Facts(
        imports=imported(nodes, path),
        at_import=imported(tree.body, path),
        names_imported=tuple(
            Named(node.lineno, node.module or "", frozenset(alias.name for alias in node.names))
            for node in nodes
            if isinstance(node, ast.ImportFrom)
        ),
        bound=bound_names(nodes),
        strings=tuple(
            Named(node.lineno, node.value)
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ),
        docstrings=tuple(docstrings(nodes)),
        functions=tuple(function_of(node) for node in nodes if isinstance(node, ast.FunctionDef)),
    )


def imported(nodes: Sequence[ast.AST], path: Path) -> frozenset[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module or "")
    return frozenset(found)


def bound_names(nodes: Sequence[ast.AST]) -> frozenset[str]:
    """The names that a module defines or imports."""
    found = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name for alias in names}
    return frozenset(found)


def docstrings(nodes: Sequence[ast.AST]) -> Iterator[Named]:
    """Docstrings, of fields and constants too."""
    for node in nodes:
        body = getattr(node, "body", None)
        for before, statement in itertools.pairwise([None, *body] if isinstance(body, list) else []):
            if isinstance(before, ast.Assign | ast.AnnAssign | None) and isinstance(statement, ast.Expr):
                value = getattr(statement.value, "value", None)
                if isinstance(value, str):
                    yield Named(statement.lineno, value)


def function_of(node: ast.FunctionDef) -> Function:
    parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    parameters += [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
    names = tuple(one.arg for one in parameters if one.arg not in ("self", "cls"))
    return Function(node.name, names, (node.end_lineno or node.lineno) - node.lineno + 1)


def imports(path: Path, *, at_import_only: bool = False) -> frozenset[str]:
    """Modules a file imports, anywhere in it; `from a.b import c` is a.b, since c may be a name."""
    return facts(path).at_import if at_import_only else facts(path).imports


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


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_downwards_only(package: str) -> None:
    assert modules(package)
    for module, path in modules(package).items():
        ours = {name.split(".")[0] for name in imports(path)} & set(PACKAGES)
        assert ours <= MAY_IMPORT[package], f"{module} imports upwards"


def test_scripts_import_each_other_as_packages() -> None:
    files = sorted((ROOT / "scripts").rglob("*.py"))
    ours = {path.stem for path in files} - {"llamacpp_tokens"}  # tests have one of that name
    assert "mutate" in ours
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


@pytest.mark.parametrize("noun", NOUNS)
def test_nouns_import_only_nouns(noun: str) -> None:
    ours = {name for name in imports(modules("runtime")[noun]) if name.split(".")[0] == "runtime"}
    assert ours <= NOUNS[noun]


SPECS = (
    "runtime.drafters.spec",
    "runtime.drafters.trtllm",
    "runtime.drafters.specs",
    "runtime.drafters.speculation",
)


@pytest.mark.parametrize("module", SPECS)
def test_drafters_are_described_without_their_algorithms(module: str) -> None:
    """Modules that open one are imported when it is opened: flags and documents are made of specs without torch."""
    ours = {name for name in imports(modules("runtime")[module], at_import_only=True) if name.startswith("runtime")}
    assert ours <= {"runtime.util.errors", "runtime.checkpoint.config", *SPECS[:-1]}


WITH_ENGINES = ("runtime.drafters.draft_target", "runtime.drafters.head_draft")
# A head reads an engine's K/V cache, of which it has layers.
OF_HEADS = {
    "runtime.core.batch",
    "runtime.checkpoint.bundle",
    "runtime.compiler.compilation",
    "runtime.kernels.memory",
    "runtime.checkpoint.config",
}
OF_TEXTS = {"runtime.drafters.translated": {"runtime.text.token_text", "runtime.checkpoint.tokenizer"}}


def test_drafters_know_no_engine_but_their_own() -> None:
    allowed = {"runtime.text.corpus", "runtime.util.errors", "runtime.core.request", "runtime.core.sampling"}
    makers = {
        "runtime.loop.opening",
        "runtime.drafters.opened",
        "runtime.loop.compatibility",
        *SPECS,
    }  # they open engines, and hold models together
    for drafter in (name for name in modules("runtime") if name.startswith("runtime.drafters.") and name not in makers):
        ours = {name for name in imports(modules("runtime")[drafter]) if name.startswith("runtime")}
        engines = {"runtime.engine.engine"} if drafter in WITH_ENGINES else set()
        if drafter == WITH_ENGINES[-1]:
            engines |= OF_HEADS | {name for name in ours if name.startswith("runtime.heads.")}
        known = allowed | engines | OF_TEXTS.get(drafter, set())
        assert {name for name in ours if not name.startswith("runtime.drafters")} <= known, drafter


def test_replay_loads_no_engine() -> None:
    ours = {name for name in imports(modules("runtime")["runtime.measure.tuning.replay"]) if name.startswith("runtime")}
    assert {name for name in ours if not name.startswith("runtime.drafters")} <= {
        "runtime.core.request",
        "runtime.core.stats",
        "runtime.text.trace_lines",
    }


# From the top: what a layer holds is imported by nothing in the layers below it.
LAYERS = (
    ("runtime.training", "runtime.measure.evaluation.hugging_face"),
    (
        "runtime.tuning",
        "runtime.measure.evaluation.systems",
        "runtime.builder.artefacts",
        "runtime.serving",
        "runtime.diagnosis",
    ),
    ("runtime.llm",),
    ("runtime.loop.lossless.check",),
    ("runtime.loop.session", "runtime.builder.engine_cache"),
    ("runtime.builder.draft_ids",),
    ("runtime.loop.opening", "runtime.loop.compatibility"),
    ("runtime.loop.orchestrator", "runtime.loop.scheduler"),
    ("runtime.loop.drafting",),
    ("runtime.drafters.translated",),
    WITH_ENGINES,
    ("runtime.engine.engine",),
)


def layer_of(module: str) -> int:
    """The number of its layer; a module in none of them is below all."""
    for number, names in enumerate(LAYERS):
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    return len(LAYERS)


def test_layers_of_runtime_import_downwards_only() -> None:
    """`build` opens the engine that it has made, to measure it: the compiler stands beside the layers."""
    for module, path in modules("runtime").items():
        if module.startswith("runtime.compiler."):
            continue
        for name in imports(path, at_import_only=module in SPECS):
            assert layer_of(name) >= layer_of(module) or not name.startswith("runtime"), f"{module} imports {name}"


def test_runtime_names_no_flag_and_no_command() -> None:
    """The commands know which flag to turn (`commands/options/hints.py`). Only specs describe flags.

    `--param=` is GNU's."""
    named = re.compile(r"--(?!param=)[a-z]|\bspecdec (convert|build|run|summarize|compare|tune|train|corpus|verify)\b")
    for module, path in modules("runtime").items():
        for one in facts(path).strings if module not in SPECS else ():
            assert not named.search(one.text), f"{module}, line {one.line}: {one.text[:60]}"


def test_every_code_of_an_error_has_its_hint() -> None:
    """And no hint is for a code that no error has."""
    stated = set()
    for path in modules("runtime").values():
        stated |= set(re.findall(r'code="(\w+)"', path.read_text(encoding="utf-8")))
        stated |= set(re.findall(r'"(cache_too_\w+)"', path.read_text(encoding="utf-8")))
    assert stated == {*HINTS, "other_environment"}


def test_functions_are_short_and_narrow() -> None:
    """Limits: 60 lines and 7 parameters; `self` and `cls` are none. Attention's are transformers'
    own, and a step's are its inputs."""
    for package in PACKAGES:
        for module, path in modules(package).items():
            for name, parameters, num_lines in facts(path).functions:
                if (module, name) != ("runtime.model.model", "forward") and module != ATTENTION:
                    assert len(parameters) <= 7, f"{module}.{name} has {len(parameters)} parameters"
                assert num_lines <= 60, f"{module}.{name} has {num_lines} lines"


def everywhere() -> dict[str, Path]:
    return {name: path for package in PACKAGES for name, path in modules(package).items()}


def test_places_are_few() -> None:
    """Limits on lines and parameters are easily met by scattering code; these hold that a change has one place."""
    paths = everywhere()
    importers = Counter(name for path in paths.values() for name in imports(path) & paths.keys())
    names = Counter(path.name for path in paths.values())
    assert len(paths) <= MOST_MODULES
    assert sum(num > 1 for num in names.values()) <= MOST_NAMES_TWICE
    assert sum(num == 1 for num in importers.values()) <= MOST_OF_ONE_IMPORTER


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


def test_no_import_cycle() -> None:
    """Imports inside functions are left out: they run later."""
    graph = imported_at_once()
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, f"import cycle: {' -> '.join([*above, module])}"
        if module in graph and module not in done:
            for name in graph[module]:
                visit(name, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    assert done == set(graph)


@pytest.mark.parametrize("command", [name for name in modules("commands") if name.endswith(".command")])
def test_a_command_is_there_before_torch(command: str) -> None:
    """Modules that `--help` may not import are other files of the command's folder, such as `work.py`."""
    graph = imported_at_once()
    found, left = set[str](), [command]
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += graph.get(module, ())
    assert found & {name for name in graph if name.startswith("commands.options")}
    assert not {name.split(".")[0] for name in found} & HEAVY
    assert not {name for name in found if name.endswith((".work", ".report", ".document", ".tables"))}


@pytest.mark.skipif(not (ROOT / "specdec_cli" / "app.py").exists(), reason="specdec_cli/app.py is missing yet")
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["corpus", "create", "--help"]])
def test_help_loads_no_torch(arguments: list[str]) -> None:
    """`python -X importtime` names every module that is loaded, on stderr."""
    command = [sys.executable, "-X", "importtime", "-m", "specdec_cli", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in result.stderr.splitlines() if "|" in line}
    assert "typer" in loaded
    assert not loaded & HEAVY


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
