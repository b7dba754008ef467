"""Small faults, made by operators on a syntax tree: no name inside a function matters, and no layout.

An address is a function, an operator and which of its places: `BlockManager.release drop 0` leaves out the first
statement of that method that can be left out.
"""

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_OTHER: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """A fault of Python code: in `function`, the node at `parent.field[index]` becomes another."""

    address: str
    tree: ast.Module
    function: ast.FunctionDef
    place: tuple[ast.AST, str, int | None]
    old: ast.AST
    new: ast.AST

    @property
    def what(self) -> str:
        return " → ".join(
            ast.unparse(ast.fix_missing_locations(node)).partition("\n")[0] for node in (self.old, self.new)
        )

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The trees have it meanwhile."""
        parent, field, i = self.place
        before = getattr(parent, field)
        setattr(parent, field, self.new if i is None else [*before[:i], self.new, *before[i + 1 :]])
        ast.fix_missing_locations(self.tree)
        try:
            yield
        finally:
            setattr(parent, field, before)


def _negate(node: ast.AST) -> Iterator[ast.AST]:
    """A condition is turned round."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.comprehension) and node.ifs:
        yield _with(node, ifs=[ast.UnaryOp(ast.Not(), node.ifs[0]), *node.ifs[1:]])


def _compare(node: ast.AST) -> Iterator[ast.AST]:
    """A bound counts, or no longer does; equal is unequal."""
    if isinstance(node, ast.Compare):
        yield _with(node, ops=[_OTHER[type(node.ops[0])](), *node.ops[1:]])


def _drop(node: ast.AST) -> Iterator[ast.AST]:
    """A call or an assignment to something that outlives the function is left out."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    if is_call or any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
        yield ast.Pass()


def _one_more(node: ast.AST) -> Iterator[ast.AST]:
    """A sum, a length or a bound is one more."""
    is_count = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("len", "min", "max")
    if is_count or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.FloorDiv | ast.Mult)):
        assert isinstance(node, ast.expr)
        yield ast.BinOp(node, ast.Add(), ast.Constant(1))


def _exchange(node: ast.AST) -> Iterator[ast.AST]:
    """Both sides of a difference, or of an assignment from one element to another, change places."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div):
        yield _with(node, left=node.right, right=node.left)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript) and len(node.targets) == 1:
        (target,) = node.targets
        if isinstance(target, ast.Subscript):
            yield ast.Assign([_with(node.value, ctx=ast.Store())], _with(target, ctx=ast.Load()))


def _without(node: ast.AST) -> Iterator[ast.AST]:
    """One of the operands is left out."""
    if isinstance(node, ast.BoolOp):
        for i in range(len(node.values)):
            rest = [*node.values[:i], *node.values[i + 1 :]]
            yield rest[0] if len(rest) == 1 else _with(node, values=rest)
    if isinstance(node, ast.BinOp):
        yield from (node.left, node.right)
    if isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        yield from node.args if len(node.args) > 1 else ()
    if isinstance(node, ast.AugAssign):
        yield ast.Assign([node.target], node.value)
    if isinstance(node, ast.Slice):
        yield from (_with(node, **{bound: None}) for bound in ("lower", "upper") if getattr(node, bound) is not None)
    if isinstance(node, ast.List) and len(node.elts) > 1:
        yield from (_with(node, elts=[*node.elts[:i], *node.elts[i + 1 :]]) for i in range(len(node.elts)))


def _unwrap(node: ast.AST) -> Iterator[ast.AST]:
    """Replace a call by what it is about: its object, or its first argument."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield node.func.value
    elif isinstance(node, ast.Call) and node.args and not isinstance(node.args[0], ast.Starred):
        yield node.args[0]


def _constant(node: ast.AST) -> Iterator[ast.AST]:
    """A number is one more, a truth a falsehood, a text another."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str):
        value = node.value
        yield ast.Constant(not value if isinstance(value, bool) else value + (" " if isinstance(value, str) else 1))


def _jump(node: ast.AST) -> Iterator[ast.AST]:
    """A loop goes on where it ended, or ends where it went on."""
    if isinstance(node, ast.Break | ast.Continue):
        yield ast.Continue() if isinstance(node, ast.Break) else ast.Break()


OPERATORS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "negate": _negate, "compare": _compare, "drop": _drop, "one-more": _one_more, "exchange": _exchange,
    "without": _without, "unwrap": _unwrap, "constant": _constant, "jump": _jump,
}  # fmt: skip


def _with(node: ast.AST, **changes: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed


def mutations(source: str, within: str = "") -> Iterator[Mutation]:
    """All of a file's functions, or of the one of this name."""
    tree = ast.parse(source)
    for name, function in _functions(tree):
        if within in ("", name):
            numbers: Counter[str] = Counter()
            for *place, node in _places(function):
                for operator, variants in OPERATORS.items():
                    for new in variants(node):
                        address = f"{name} {operator} {numbers[operator]}"
                        numbers[operator] += 1
                        yield Mutation(address, tree, function, (place[0], place[1], place[2]), node, new)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node


def _places(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Every node of the function's body, in the order of the source, with where it hangs; docstrings and types not."""

    def below(parent: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "args" if parent is function else "", "decorator_list"):
                continue
            for i, node in enumerate(value if isinstance(value, list) else [value]):
                is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                if isinstance(node, ast.AST) and not is_docstring:
                    yield parent, field, i if isinstance(value, list) else None, node
                    yield from below(node)

    return below(function)


_CPP_OPERATORS: dict[str, tuple[str, dict[str, str]]] = {
    "compare": (r" ([<>]=?|[!=]=) ", {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}),
    "sum": (r" ([-+]) ", {"+": "-", "-": "+"}),
    "bound": (r"\b(std::min|std::max)\(", {"std::min": "std::max", "std::max": "std::min"}),
    "drop": (r"(?m)^ +((?!return|throw)[\w.>-]+\([^;{}]*\);)$", {}),
}
