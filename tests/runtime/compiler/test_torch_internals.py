"""Parts of torch that it promises to nobody are looked for first, and missing ones are named."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sentences import Said
from tiny import make_build

from runtime.builder.build import build_engine
from runtime.compiler.torch_internals import PRIVATE, check_names
from runtime.util.errors import SpecDecError

RUNTIME = Path(__file__).parents[3] / "runtime"


@pytest.mark.parametrize("name", ["torch.fx.node.map_aggregate", "torch._inductor.cpu_vec_isa.VecISA"])
def test_torch_that_lacks_something_is_named_and_nothing_is_written(
    name: str,
    llama_checkpoint_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: Said,
) -> None:
    check_names()
    monkeypatch.delattr(name)
    monkeypatch.setattr("torch.__version__", "2.14.0")
    output, build, cpu = tmp_path / "engine", make_build(compiler="aot"), torch.device("cpu")
    with pytest.raises(SpecDecError) as error:
        build_engine(llama_checkpoint_dir, output, build, cpu, replace=False, phase=lambda name: None)
    said(error, torch.__version__, f"`{name}")
    assert list(tmp_path.iterdir()) == []


def private_names(source: str) -> Iterator[str]:
    """Names of torch, as they are imported or written out."""
    for node in ast.walk(ast.parse(source if "torch" in source else "")):
        names = []
        if isinstance(node, ast.Attribute):
            names = [dotted(node)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if re.fullmatch(r"torch(\.\w+)*\._[A-Za-z][\w.]*", name))


def dotted(node: ast.expr) -> str:
    """`a.b.c`, or nothing where it does not begin with a name; `ast.unparse` takes twenty times as long."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return before and f"{before}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_nothing_else_of_torch_is_private() -> None:
    """A new use belongs into the list."""
    used = {name for path in RUNTIME.rglob("*.py") for name in private_names(path.read_text())}
    assert len(used) >= 6
    assert not [name for name in used if not any(f"{one}.".startswith(f"{name}.") for one in PRIVATE)]
