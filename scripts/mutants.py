"""Finds the small changes to a module, each of which its tests should notice.

What is not changed: annotations, decorators, assertions, log lines, texts, and numbers
outside of functions (a figure is a choice, and tests use it by its name).
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from textwrap import shorten
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]
"""First and last line."""

Key: TypeAlias = tuple[str, str, str]
"""Module, function and change."""

Change: TypeAlias = tuple[ast.AST, str, str]
"""What is replaced, by what, and how that is told."""

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr},
    **{ast.LShift: ast.RShift, ast.RShift: ast.LShift},
}
_OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGS = {"log", "logger", "_log", "_logger"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to one module."""

    path: str
    scope: str
    """The function, as ``Class.method()``."""
    change: str
    """``before -> after``, numbered from its second occurrence in the scope on."""
    lines: Span
    start: int  # bytes into the module
    end: int
    text: str

    @property
    def key(self) -> Key:
        """What names it, wherever else the module has changed."""
        return self.path, self.scope, self.change

    def __str__(self) -> str:
        return f"{self.path}:{self.lines[0]} {self.scope}: {self.change}"

    def applied_to(self, source: bytes) -> bytes:
        """Return the module with this change."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return the mutants of a module, in the order of its text."""
    starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
    seen: Counter[tuple[str, str]] = Counter()
    spans: set[tuple[int, int, str]] = set()
    found = []
    for scope, (node, text, change) in _changes(ast.parse(source), "", None):
        assert isinstance(node, ast.stmt | ast.expr)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        if (start, end, text) in spans:
            continue
        spans.add((start, end, text))
        seen[scope, change] += 1
        times = seen[scope, change]
        mutant = Mutant(
            path, scope, change, (node.lineno, node.end_lineno), start, end, text
        )
        if times > 1:
            mutant = replace(mutant, change=f"{change} #{times}")
        found.append(mutant)
    return sorted(found, key=lambda each: (each.start, each.end))


def _changes(
    node: ast.AST, scope: str, above: ast.AST | None
) -> Iterator[tuple[str, Change]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        scope = f"{scope}.{node.name}()".lstrip(".")
    elif isinstance(node, ast.ClassDef):
        scope = f"{scope}.{node.name}".lstrip(".")
    for operator in _OPERATORS:
        for change in operator(node, scope, above):
            yield scope, change
    for child in _children(node):
        yield from _changes(child, scope, node)


def _children(node: ast.AST) -> Iterable[ast.AST]:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Raise():
            return []  # what an error says is no promise
        case ast.Expr() if _is_log(node):
            return []
        case ast.AnnAssign():
            return [node.value] if node.value else []
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [
                *node.args.defaults,
                *filter(None, node.args.kw_defaults),
                *node.body,
            ]
        case ast.ClassDef():
            return node.body
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return []
        case _:
            return ast.iter_child_nodes(node)


def _removed(node: ast.AST, scope: str, above: ast.AST | None) -> Iterator[Change]:
    """A statement is missing.  Guards are missing if their condition is False."""
    match node:
        case ast.Expr(value=ast.Constant() | ast.Yield() | ast.YieldFrom()):
            return
        case ast.Expr() if _is_log(node):
            return
        case ast.Expr() | ast.AugAssign() | ast.Delete():
            pass
        case ast.Assign(targets=targets) if not scope.endswith("__init__()"):
            if not any(isinstance(t, ast.Attribute | ast.Subscript) for t in targets):
                return
        case ast.Raise() | ast.Continue() | ast.Break():
            if isinstance(above, ast.If) and above.body == [node] and not above.orelse:
                return
        case _:
            return
    yield node, "pass", f"{_shown(node)} -> removed"


def _forced(node: ast.AST, scope: str, above: ast.AST | None) -> Iterator[Change]:
    """A condition always or never holds."""
    match node:
        case ast.If(test=test) | ast.IfExp(test=test):
            values = ["True", "False"]
        case ast.match_case(guard=ast.expr() as test):
            values = ["True", "False"]
        case ast.While(test=test):
            values = ["False"]  # the other would hang
        case _:
            values = []
    for value in values:
        if not isinstance(test, ast.Constant):
            yield test, value, f"{_shown(test)} -> {value}"
    if isinstance(node, ast.comprehension):
        for each in node.ifs:
            yield each, "True", f"{_shown(each)} -> True"


def _operands(node: ast.AST, scope: str, above: ast.AST | None) -> Iterator[Change]:
    """One side of ``and`` or ``or`` is missing, or a ``not``."""
    match node:
        case ast.BoolOp(operator, values):
            for left_out in values:
                rest = [each for each in values if each is not left_out]
                yield _becomes(
                    node, ast.BoolOp(operator, rest) if len(rest) > 1 else rest[0]
                )
        case ast.UnaryOp(ast.Not(), operand) if not _is_test(node, above):
            yield _becomes(node, operand)
        case _:
            pass


def _compared(node: ast.AST, scope: str, above: ast.AST | None) -> Iterator[Change]:
    """A boundary is moved by one, or a comparison is reversed."""
    if isinstance(node, ast.Compare):
        swaps = _SWAPS if _is_test(node, above) else _SWAPS | _OPPOSITES
        for place, operator in enumerate(node.ops):
            if other := swaps.get(type(operator)):
                ops = [*node.ops]
                ops[place] = other()  # type: ignore[call-overload] # an operator too
                yield _becomes(node, ast.Compare(node.left, ops, node.comparators))


def _computed(node: ast.AST, scope: str, above: ast.AST | None) -> Iterator[Change]:
    """Arithmetic is done with another operator, or a function with its counterpart."""
    if not scope.endswith(")"):
        return
    match node:
        case ast.BinOp(left, operator, right) if not (
            _is_text(left) or _is_text(right)
        ):
            if other := _SWAPS.get(type(operator)):
                new = ast.BinOp(left, other(), right)  # type: ignore[arg-type] # is one
                yield _becomes(node, new)
        case ast.Call(func=ast.Name(id=name) as function) if name in _NAMES:
            yield function, _NAMES[name], f"{_shown(node)} -> {_NAMES[name]}"
        case _:
            pass


def _constant(node: ast.AST, scope: str, above: ast.AST | None) -> Iterator[Change]:
    """A number or a truth value is another."""
    if not isinstance(node, ast.Constant):
        return
    is_default = isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef)
    if isinstance(node.value, bool):
        yield _becomes(node, ast.Constant(not node.value), above)
    elif isinstance(node.value, int | float) and scope.endswith(")") and not is_default:
        yield _becomes(node, ast.Constant(node.value + 1), above)


def _returned(node: ast.AST, scope: str, above: ast.AST | None) -> Iterator[Change]:
    """A function does nothing, or its predicate always says the same."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    body = node.body[1:] if ast.get_docstring(node) else node.body
    inside = [*ast.walk(node)]
    returns = node.returns and ast.unparse(node.returns)
    is_initial = node.name == "__init__" or any(
        isinstance(x, ast.Yield) for x in inside
    )
    if returns == "None" and len(body) > 1 and not is_initial:
        yield body[0], "return", "does nothing"
    if returns == "bool":
        for each in inside:
            match each:
                case ast.Return(value=ast.Constant() | None):
                    pass
                case ast.Return(value=ast.expr() as answer):
                    for value in ("True", "False"):
                        yield answer, value, f"{_shown(each)} -> {value}"
                case _:
                    pass


def _uncaught(node: ast.AST, scope: str, above: ast.AST | None) -> Iterator[Change]:
    """What was handled is raised."""
    if isinstance(node, ast.ExceptHandler):
        first = node.body[0]
        if not isinstance(first, ast.Raise) or first.exc is not None:
            caught = ast.unparse(node.type) if node.type else ""
            yield first, "raise", f"except {caught}: {_shown(first)} -> raise"


_OPERATORS = (
    *(_removed, _forced, _operands, _compared, _computed),
    *(_constant, _returned, _uncaught),
)


def _becomes(old: ast.expr, new: ast.expr, above: ast.AST | None = None) -> Change:
    # In parentheses, for an operator around it binds more tightly, maybe.
    text = ast.unparse(new)
    told = f"{_shown(old)} -> {text}"
    if above is not None:
        told += f" in {_shown(above)}"
    return old, text if isinstance(new, ast.Constant) else f"({text})", told


def _shown(node: ast.AST) -> str:
    first = ast.unparse(node).splitlines()[0]
    return shorten(first, 100, placeholder="...")


def _is_test(node: ast.AST, above: ast.AST | None) -> bool:
    """Say whether an expression is all of a condition, which is forced anyway."""
    match above:
        case ast.If(test=test) | ast.IfExp(test=test) | ast.match_case(guard=test):
            return test is node
        case _:
            return False


def _is_log(node: ast.Expr) -> bool:
    match node.value:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
            return name in _LOGS
        case _:
            return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
