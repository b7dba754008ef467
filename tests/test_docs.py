"""README.md and docs/ are true: flags are the commands', commands and Python run, links and names hold."""

import functools
import json
import re
import shlex
import shutil
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import typer.main
from forked import Forks
from shared import once
from strength import draws

from commands.options.foreign import ANSWERS, WITHOUT_EFFECT
from commands.options.spellings import normalize_name
from scripts.tools import update_docs
from specdec_cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = update_docs.read_pages()
OTHERS_FLAGS = {
    "budget-s", "check", "config", "echo-config", "echo-loudness", "every-failure", "llamacpp-python",
    "max-new-tokens", "models", "nnodes", "nproc-per-node", "num", "num-prompts", "num-tokens", "only", "output-len",
    "outtype", "planted", "runs", "scale", "slow", "update-sentences", "walk", "weight-format", "write",
}  # fmt: skip
"""Flags of scripts, of torchrun, of Continue's, and of the drafter that an example adds."""


NUM_SAMPLES = draws(20, 2)
"""Samples that `summarize` takes in the walk: the first of those of the documentation."""


@pytest.fixture(scope="module")
def walk(
    tmp_path_factory: pytest.TempPathFactory, shared: Path, kernels: Path, forks: Forks
) -> tuple[Path, dict[str, str]]:
    """A copy of the directory the walk was run in, and what its commands printed, by the names of their outputs."""

    def make(directory: Path) -> None:
        (directory / "walk").mkdir(parents=True)
        few = f"specdec summarize --max-ite {NUM_SAMPLES} "
        blocks = [
            block._replace(command=block.command.replace("specdec summarize ", few))
            for block in update_docs.walk_blocks(PAGES)
        ]
        (directory / "bin").mkdir()
        forked.command(directory / "bin" / "specdec", shared / "forks")
        outputs = update_docs.run_walk(blocks, directory / "walk", directory / "bin")
        (directory / "outputs.json").write_text(json.dumps(outputs))

    made = once(shared / "documentation", make)
    copy = shutil.copytree(made / "walk", tmp_path_factory.mktemp("documentation") / "walk", symlinks=True)
    return copy, json.loads((made / "outputs.json").read_text())


def blocks(language: str) -> list[Any]:
    """Every fenced block of a language, as a parameter with the page and the line it is at."""
    found = []
    for page, text in PAGES.items():
        for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, match.start()) + 1
            found.append(pytest.param(match[1], id=f"{page}:{line}"))
    return found


def test_the_readme_is_short() -> None:
    assert PAGES["README.md"].count("\n") <= 150


def test_flag_tables_are_those_of_the_commands() -> None:
    stale = [page for page, text in PAGES.items() if update_docs.with_tables(text) != text]
    assert stale == [], "run scripts/tools/update_docs.py"


def test_every_room_is_described() -> None:
    """A folder with Python files has an `__init__.py`, whose docstring is the folder's line of docs/structure.md."""
    page = PAGES["docs/structure.md"]
    rooms = {path.parent for package in ("runtime", "commands") for path in (ROOT / package).glob("*/**/*.py")}
    listed = re.findall(r"^\| `((?:runtime|commands)/[\w/]+)/` \| (.+) \|$", page, re.MULTILINE)
    assert sorted(name for name, _ in listed) == sorted(str(room.relative_to(ROOT)) for room in rooms)
    assert {name for name, line in listed if line == "None"} == set()


def test_every_command_has_its_flag_table() -> None:
    tables = re.findall(r"<!-- flags: ([\w ]+) -->", PAGES["docs/cli.md"])
    assert sorted(tables) == sorted(command_names())
    assert PAGES["docs/cli.md"].count("| `--ngram-config` |") == 7  # run, chat, serve, batch, summarize, tune, doctor


@functools.cache
def commands() -> Any:
    """The group of all commands, which Typer takes a second to make."""
    return typer.main.get_command(app)


def command_names(group: Any = None, prefix: str = "") -> Iterator[str]:
    for name, command in (group or commands()).commands.items():
        if hasattr(command, "commands"):
            yield from command_names(command, f"{prefix}{name} ")
        else:
            yield prefix + name


def test_the_walk_runs_and_passes_its_own_checks(walk: tuple[Path, dict[str, str]]) -> None:
    _, outputs = walk
    assert "Converted llama to float32" in outputs["convert"]
    assert "aot" in outputs["build"]
    assert 'Output [Text 0]: "' in outputs["run"]
    summarize = outputs["summarize"]
    assert "accuracy check passed" in summarize
    assert f"token for token the same as Hugging Face: {NUM_SAMPLES} of {NUM_SAMPLES}" in summarize
    assert f"token for token the same as the engine without drafter: {NUM_SAMPLES} of {NUM_SAMPLES}" in summarize


def test_the_draft_model_of_the_walk_passes_its_own_checks(walk: tuple[Path, dict[str, str]]) -> None:
    directory, outputs = walk
    assert f"token for token the same as Hugging Face: {NUM_SAMPLES} of {NUM_SAMPLES}" in outputs["draft-model"]
    assert f"lossless check passed: {NUM_SAMPLES} of {NUM_SAMPLES} outputs" in outputs["draft-model"]
    assert "lossless check passed: chi-squared" in outputs["rejection-sampling"]
    assert (directory / "logits_generation.npy").is_file()


def test_leader_mode_of_the_walk_streams_and_is_lossless(walk: tuple[Path, dict[str, str]]) -> None:
    _, outputs = walk
    assert "[Text 0] " in outputs["streaming"] and "[Text 1] " in outputs["streaming"]
    assert "lossless check passed: 2 of 2" in outputs["leader-draft-model"]


def test_the_reports_of_the_walk_mark_tokens_and_compare(walk: tuple[Path, dict[str, str]]) -> None:
    directory, outputs = walk
    assert (
        "⟦" in outputs["show-tokens"]
        and "40 tokens: 27 accepted, 8 recovered, 2 bonus, 3 plain" in outputs["show-tokens"]
    )
    assert (directory / "report.html").is_file()
    assert f"{NUM_SAMPLES} of {NUM_SAMPLES} outputs token for token the same" in outputs["compare"]


def test_pasted_outputs_are_of_the_walk() -> None:
    """A marker outside the walk, or of a name it does not have, would never be pasted anew."""
    names = [block.name for block in update_docs.walk_blocks(PAGES) if block.name]
    assert len(set(names)) == len(names)
    assert {name for text in PAGES.values() for name in re.findall(r"<!-- output: ([\w-]+)", text)} <= set(names)


@pytest.mark.parametrize("block", blocks("bash"))
def test_commands_parse(block: str) -> None:
    """Every `specdec` command names a command that exists, and flags and kinds of values that it has."""
    for words in specdec_commands(block):
        parse(words)


def specdec_commands(block: str) -> Iterator[list[str]]:
    """The words after `specdec` of each such command, without redirections, comments and here documents."""
    text = re.sub(r"<<'(\w+)'\n.*?\n\1\n", "\n", block, flags=re.DOTALL).replace("\\\n", " ")
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if word.startswith("#"):
            words.append("#")
        elif set(word) <= set("();<>|&\n"):
            if words[:1] == ["specdec"]:
                yield words[1 : words.index("#") if "#" in words else None]
            words = []
        else:
            words.append(word)


def parse(words: list[str]) -> None:
    """Raises what Typer raises for wrong usage. Nothing is run."""
    command = commands()
    context = command.make_context("specdec", ["run"])
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"no such command: {words[:1]}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, list(words), parent=context)


def test_flags_in_the_text_exist() -> None:
    known = {
        "flag", "help", "help-all", "version", "debug", "install-completion", "show-completion", *OTHERS_FLAGS,
        *WITHOUT_EFFECT, *ANSWERS,
    }  # fmt: skip
    for name in command_names():
        command = commands()
        for part in name.split():
            command = command.commands[part]
        known |= {option.lstrip("-") for param in command.params for option in (*param.opts, *param.secondary_opts)}
        switches = [param for param in command.params if getattr(param, "is_bool_flag", False)]
        known |= {option.replace("--", "no-") for param in switches for option in param.opts}
        known |= {option.removeprefix("--no-") for param in switches for option in param.opts}
    named = {
        (page, flag)
        for page, text in PAGES.items()
        for span in re.findall(r"`([^`\n]+)`", prose_of(text))
        for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", span)
    }
    assert {(page, flag) for page, flag in named if normalize_name(flag) not in known} == set()


@pytest.mark.parametrize("example", blocks("python"))
def test_python_runs(
    example: str, walk: tuple[Path, dict[str, str]], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(walk[0])
    exec(compile(example, request.node.callspec.id, "exec"), {"__name__": "example"})


def test_the_drafter_of_the_documentation_speculates_without_loss(
    walk: tuple[Path, dict[str, str]], shared: Path
) -> None:
    page = PAGES["docs/drafters.md"]
    ((name, example),) = re.findall(r"<!-- file: ([\w.]+) -->\n```python\n(.*?)```", page, re.DOTALL)
    assert len(example.splitlines()) <= 12
    (walk[0] / name).write_text(example)
    (command,) = re.findall(r"```bash\n(specdec run [^`]*--drafter [^`]*)```", page)
    block = update_docs.WalkBlock(command, "run")
    output = update_docs.run_walk([block], walk[0], shared / "documentation" / "bin")["run"]
    assert "lossless check passed: 1 of 1" in output
    drafted = re.search(r"(\d+)/(\d+)", output)
    assert drafted and int(drafted[1]) > 0


def prose_of(text: str) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def test_links_within_the_documentation_hold() -> None:
    links = [
        (page, target) for page, text in PAGES.items() for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(text))
    ]
    for page, target in links:
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.is_file(), f"{page}: {target} does not exist"
        assert page == "README.md" or linked.parent == ROOT / "docs", f"{page}: {target} is not on the site"
        assert not anchor or anchor in anchors(linked), f"{page}: {target} is no heading"


@functools.cache
def anchors(page: Path) -> set[str]:
    """Anchors that are the same on a code host and on the site: the two make them differently."""
    prose = prose_of(page.read_text(encoding="utf-8"))
    headings = [heading.replace("`", "") for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)]
    on_host = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    plain = [unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode() for heading in headings]
    on_site = [re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain]
    assert len(set(on_host)) == len(on_host), "two headings of a page have one anchor"
    return set(on_host) & set(on_site)


def test_every_chapter_is_on_the_site_and_in_the_readme() -> None:
    chapters = {Path(page).name for page in PAGES} - {"README.md"}
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"[\w-]+\.md", site.partition("\nnav:")[2])) == chapters
    assert set(re.findall(r"docs/([\w-]+\.md)", PAGES["README.md"])) == chapters - {"index.md"}


def test_files_that_are_named_exist() -> None:
    file = r"`((?:commands|runtime|scripts|specdec_cli|tests)/[\w./-]*)"
    named = [(page, name) for page, text in PAGES.items() for name in re.findall(file, text)]
    assert named and [one for one in named if not (ROOT / one[1]).exists()] == []
