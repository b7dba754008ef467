"""Programs are kept by the graph they are compiled of: whoever wants the same finds it, and nobody finds half."""

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import hf_greedy, make_model
from torch.fx import GraphModule

from runtime.compiler import programs
from runtime.compiler.programs import compile_programs
from runtime.core.request import Request
from runtime.engine.engine import Engine
from runtime.kernels.ops import load_kernels
from runtime.loop.scheduler import generate


@pytest.fixture(autouse=True)
def loaded(kernels: Path) -> None:
    load_kernels(kernels)


def graph(width: int) -> GraphModule:
    module = torch.nn.LayerNorm(width)
    free = {0: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(module, (torch.zeros(3, width),), dynamic_shapes=(free,))
    return exported.module(check_guards=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of programs; what is compiled is taken from the machine's compiler no more than once for each."""
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "programs"


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of graphs that each call of a compiler has compiled, which takes no time."""
    numbers: list[int] = []

    def compile_(graphs: list[GraphModule], options: dict[str, Any]) -> list[programs.Files]:
        if graphs:
            numbers.append(len(graphs))
        return [{programs.LIBRARY: str(len(numbers)).encode()} for _ in graphs]

    monkeypatch.setattr(programs, "_compile", compile_)
    return numbers


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.suffix != ".lock"]


@pytest.mark.slow  # a C++ compiler takes half a minute
def test_an_activation_that_is_left_to_the_compiler_is_transformers(make_engine: Callable[..., Engine]) -> None:
    model = make_model("llama", hidden_act="mish")
    with make_engine(model, compiler="aot") as engine:
        (sequence,) = (s for s, _ in generate(engine, [Request(0, (5, 6, 7, 8), 12)]) if s.finish_reason)
    assert sequence.output_tokens == hf_greedy(model, [5, 6, 7, 8], 12)


def test_numbers_of_short_weights_are_not_in_a_program(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a rotary embedding's frequencies. Another model's program of that form would be computed with them.

    Sources are looked at: a compiler that makes empty files stands for g++.
    """
    compiler = tmp_path / "g++"  # torch asks once in a process whether it is GNU's, by its name
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-o*) ;; *) exec g++ "$@";; esac\n'
        'for word; do [ "$last" = -o ] && : > "$word"; last=$word; done\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    scaled, sources, run = torch.nn.LayerNorm(2), list[str](), programs.run_inductor
    torch.nn.init.constant_(scaled.weight, 3.140625)

    def watched(*arguments: Any) -> list[Any]:
        made: list[Any] = run(*arguments)
        sources.extend(Path(name).read_text() for name in made if str(name).endswith(".cpp"))
        return made

    monkeypatch.setattr(programs, "run_inductor", watched)
    compile_programs([torch.export.export(scaled, (torch.zeros(3, 2),)).module(check_guards=False)])
    assert sources and not any("3.140625" in source for source in sources)


def test_each_graph_is_compiled_once(cache: Path, pretended: list[int]) -> None:
    first, second = compile_programs([graph(8), graph(16)]), compile_programs([graph(16), graph(24), graph(8)])
    assert pretended == [2, 1]
    assert [second[0], second[2]] == [first[1], first[0]]


def test_what_is_damaged_is_compiled_again(cache: Path, pretended: list[int]) -> None:
    compile_programs([graph(8)])
    (entry,) = entries(cache)
    whole = entry.read_bytes()
    for damaged in (b"A" + whole[1:], whole[:-1], b""):
        entry.write_bytes(damaged)
        assert compile_programs([graph(8)]) == [{programs.LIBRARY: str(len(pretended)).encode()}]
    assert pretended == [1] * 4


@pytest.mark.parametrize("of", ["torch.__version__", "runtime.kernels.library._sources"])
def test_what_another_version_compiled_is_not_taken(
    of: str, cache: Path, pretended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_programs([graph(8)])
    monkeypatch.setattr(of, "2.14" if of.startswith("torch") else lambda: "other kernels")
    compile_programs([graph(8)])
    assert pretended == [1, 1] and len(entries(cache)) == 2


def test_who_wants_what_another_compiles_waits_for_it(cache: Path, pretended: list[int]) -> None:
    asked = [[graph(8), graph(16)], [graph(16), graph(8)], [graph(8)]]
    with ThreadPoolExecutor(len(asked)) as pool:
        one, other, _ = pool.map(compile_programs, asked)
    assert sum(pretended) == 2 and one == other[::-1]


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, pretended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert compile_programs([graph(8)]) == [{programs.LIBRARY: b"1"}]


def test_a_disk_that_is_full_leaves_no_half_of_a_program(
    cache: Path, pretended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr("runtime.util.files._flush", fail)
        assert compile_programs([graph(8)]) == [{programs.LIBRARY: b"1"}]
    assert entries(cache) == []
    compile_programs([graph(8)])
    assert pretended == [1, 1]


def test_a_disk_that_is_full_while_a_program_is_compiled_is_said(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'cc1plus: fatal error: x.o: No space left on device' >&2; exit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(OSError, match="No space left on device"):
        programs._run([str(compiler)])
