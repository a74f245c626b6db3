"""Where a wire's source reads and writes the attributes of its classes.

A read counts for the classes that the object may have.  One of an object whose type
remains unknown (``source``) counts for none: where a field is reported as unused, and
is used, an annotation is missing.
"""

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protocols.fields.source import (
    SOURCE,
    Function,
    Scope,
    Type,
    WireSource,
    names_of,
    parameters_of,
    parsed,
    union_of,
)

TEXT_MAX = 72  # characters of an expression that are shown

NO_MODULES: Mapping[str, ast.Module] = {}

_ENCODERS = ("encode_", "write_", "wire_")  # functions that write this end's values


@dataclass(frozen=True, slots=True)
class AttributeRead:
    """A read of an attribute.

    ``classes`` are the possible types of the object; empty: unknown.  ``into`` is the
    attribute that gets the value, as ``Class.attribute``, or else the function that
    uses it, as ``module.function``.
    """

    classes: frozenset[str]
    attribute: str
    into: frozenset[str]


@dataclass(slots=True)
class Flow:
    """What the source of a wire reads and writes."""

    source: WireSource
    decoded: set[str] = field(default_factory=set)  # by a decoder
    reads: list[AttributeRead] = field(default_factory=list)
    writes: dict[tuple[str, str], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )
    keys: dict[tuple[str, str], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """What functions read from mappings, by ``module:function`` and key."""

    def targets(self, name: str, attribute: str) -> set[str]:
        """Return what an attribute is read into: ``AttributeRead.into`` of its reads.

        XX
        """
        lineage = self.source.lineage
        related = {*lineage(name)}
        related |= {each for each in self.source.classes if name in {*lineage(each)}}
        reads = [each for each in self.reads if each.attribute == attribute]
        return {
            target
            for each in reads
            if not related.isdisjoint(each.classes)
            for target in each.into
        }

    def explained(self, value: ast.expr, within: ast.AST) -> list[str]:
        """Return an expression as text.

        A variable of the function ``within`` is shown as what it is set to, and a
        parameter with the function's name.
        """
        if not isinstance(value, ast.Name):
            return [shown(value)]
        found: list[str] = []
        for node in ast.walk(within):
            match node:
                case (
                    ast.Assign(targets=[target], value=given)
                    | ast.AnnAssign(target=target, value=given)
                    | ast.NamedExpr(target=target, value=given)
                ):
                    found.append(_assigned_to(value.id, target, given))
                case ast.MatchClass(cls=cls):
                    for attribute, inner in self.source.captures(
                        node, ast.unparse(cls)
                    ):
                        if isinstance(inner, ast.MatchAs) and inner.name == value.id:
                            found.append(f"{ast.unparse(cls)}.{attribute}")
                case _:
                    pass
        values = [each for each in found if each not in ("", "UNSET")]
        if values or not isinstance(within, Function):
            return values
        is_parameter = value.id in parameters_of(within)
        return [f"{within.name}({value.id})" if is_parameter else value.id]

    def written(self, name: str, attribute: str) -> set[str]:
        """Return the expressions that constructors get for a field."""
        return self.writes.get((name, attribute), set())


def flow_of(wire: str) -> Flow:
    """Analyse ``protocols/<wire>``, with what the seam and the domain declare."""
    own = _modules(SOURCE / "protocols" / wire)
    seam = _modules(SOURCE / "protocols" / "seam", "seam/")
    return analyse(own, _modules(SOURCE / "domain", "domain/") | seam)


def analyse(
    own: Mapping[str, ast.Module], others: Mapping[str, ast.Module] = NO_MODULES
) -> Flow:
    """Analyse modules by name, with what others declare."""
    flow = Flow(WireSource())
    for module, tree in (*others.items(), *own.items()):
        flow.source.declare(module, tree)
    for module, tree in own.items():
        flow.source.enter(module)
        for node in tree.body:
            _Body(flow, module, node).visit_all()
    return flow


def _modules(folder: Path, prefix: str = "") -> dict[str, ast.Module]:
    return {
        prefix + path.relative_to(folder).with_suffix("").as_posix(): parsed(path)
        for path in sorted(folder.rglob("*.py"))
    }


def read_elsewhere(wire: str) -> frozenset[str]:
    """Return the names of the attributes that modules beside a wire read.

    The gateway's answers also take attributes by the names of their own fields.
    """
    own = SOURCE / "protocols" / wire
    names: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if own in path.parents:
            continue
        answers = SOURCE / "gateway" in path.parents
        for node in ast.walk(parsed(path)):
            match node:
                case ast.Attribute(attr=name, ctx=ast.Load()):
                    names.add(name)
                case ast.MatchClass(kwd_attrs=attributes):
                    names.update(attributes)
                case ast.AnnAssign(target=ast.Name(name)) if answers:
                    names.add(name)
                case _:
                    pass
    return frozenset(names)


class _Body:
    """The functions of one module or class."""

    def __init__(self, flow: Flow, module: str, node: ast.stmt) -> None:
        self._flow = flow
        self._source = flow.source
        self._module = module
        self._node = node
        self._parents = {
            child: parent
            for parent in ast.walk(node)
            for child in ast.iter_child_nodes(parent)
        }
        self._prefix = f"{module.rpartition('/')[2]}."
        self._scope: Scope = {}  # of what is recorded
        self._place = ""
        self._owner = ""  # the class

    def visit_all(self) -> None:
        match self._node:
            case ast.ClassDef(name=name, body=body):
                (self._owner,) = self._source.classes_in(ast.Name(name))
                for node in body:
                    if isinstance(node, Function):
                        self._function(node, {"self": ast.Name(name)})
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(self._node, {})
            case _:
                self._place = self._module
                self._statement(self._node, {})

    def _function(self, node: Function, outer: Scope) -> None:
        before = self._place
        scope = outer | parameters_of(node)
        owner = f"{self._owner}." if self._owner else ""
        if not before:
            self._place = f"{owner or self._prefix}{node.name}"
        self._statements(node.body, scope)
        self._place = before

    def _statements(self, body: Sequence[ast.stmt], scope: Scope) -> None:
        for node in body:
            self._statement(node, scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, dict(scope))
            case ast.If(test=test, body=body, orelse=orelse):
                self._expression(test, scope)
                narrowed = self._narrowed(test, scope)
                inner = scope | narrowed
                self._statements(body, inner)
                for name in inner.keys() - narrowed.keys():
                    if inner[name] is not scope.get(name):
                        scope[name] = union_of([scope.get(name), inner[name]])
                self._statements(orelse, scope)
                self._narrow_after(node, scope)
            case ast.Match(subject=subject, cases=cases):
                self._expression(subject, scope)
                given = self._source.infer(subject, scope)
                for case in cases:
                    inner = dict(scope)
                    self._pattern(case.pattern, subject, given, inner)
                    if case.guard is not None:
                        self._expression(case.guard, inner)
                    self._statements(case.body, inner)
            case ast.For(target=target, iter=iterated, body=body, orelse=orelse):
                self._expression(iterated, scope)
                given = self._source.element(self._source.infer(iterated, scope))
                self._source.bind(target, given, scope)
                self._statements([*body, *orelse], scope)
            case ast.While(test=test, body=body):
                self._expression(test, scope)
                self._statements(body, scope)
            case ast.With(items=items, body=body):
                for item in items:
                    self._expression(item.context_expr, scope)
                self._statements(body, scope)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=end):
                self._statements(body, scope)
                for handler in handlers:
                    self._statements(handler.body, scope)
                self._statements([*orelse, *end], scope)
            case ast.Assign(targets=targets, value=value):
                self._expression(value, scope)
                given = self._source.infer(value, scope)
                for target in targets:
                    self._unpack(target, given, scope)
                    self._source.bind(target, given, scope)
            case ast.AnnAssign(target=target, annotation=given, value=value):
                if value is not None:
                    self._expression(value, scope)
                self._source.bind(target, given, scope)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._expression(child, scope)

    def _expression(self, node: ast.expr, scope: Scope) -> None:
        """Record the reads and the constructors in an expression."""
        match node:
            case ast.Attribute(value=value, attr=name, ctx=ast.Load()):
                self._expression(value, scope)
                classes = self._source.classes_in(self._source.infer(value, scope))
                if not (isinstance(value, ast.Name) and value.id.isupper()):
                    self._scope = scope
                    self._record(classes, name, node)  # it is no constant's
                return
            case ast.Subscript(slice=ast.Constant(str(key)), ctx=ast.Load()):
                self._record_key(key, node, scope)
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(key), *_]):
                self._record_key(key, node, scope)
            case ast.Call():
                self._record_call(node, scope)
                match node.args:
                    case [_, ast.Constant(str(key)), *_]:  # a function that reads it
                        self._record_key(key, node, scope)
                    case _:
                        pass
            case ast.NamedExpr(target=target, value=value):
                self._expression(value, scope)
                self._source.bind(target, self._source.infer(value, scope), scope)
                return
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                scope = dict(scope)
                for part in node.generators:
                    self._expression(part.iter, scope)
                    given = self._source.element(self._source.infer(part.iter, scope))
                    self._source.bind(part.target, given, scope)
            case ast.BoolOp(op=ast.And(), values=values):
                inner = dict(scope)
                for value in values:
                    self._expression(value, inner)
                    inner |= self._narrowed(value, inner)
                return
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._expression(test, scope)
                self._expression(body, scope | self._narrowed(test, scope))
                self._expression(orelse, scope)
                return
            case ast.Lambda(args=args, body=body):
                self._expression(body, scope | dict.fromkeys(names_of(args)))
                return
            case _:
                pass
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, scope)
            elif isinstance(child, ast.keyword):
                self._expression(child.value, scope)
            elif isinstance(child, ast.comprehension):
                for condition in child.ifs:
                    self._expression(condition, scope)

    # What narrows a type.

    def _narrowed(self, test: ast.expr, scope: Scope) -> Scope:
        match test:
            case ast.Call(func=ast.Name("isinstance"), args=[ast.Name(name), given]):
                if self._source.classes_in(given):
                    return {name: given}
            case ast.BoolOp(op=ast.And(), values=values):
                found: Scope = {}
                for each in values:
                    found |= self._narrowed(each, scope)
                return found
            case _:
                pass
        return {}

    def _narrow_after(self, node: ast.If, scope: Scope) -> None:
        """Narrow what follows ``if not isinstance(...): return``."""
        leaves = isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue)
        match node.test:
            case ast.UnaryOp(op=ast.Not(), operand=test) if leaves:
                scope |= self._narrowed(test, scope)

    def _pattern(
        self, pattern: ast.pattern, subject: ast.expr | None, given: Type, scope: Scope
    ) -> None:
        match pattern:
            case ast.MatchClass(cls=cls):
                if isinstance(subject, ast.Name):
                    scope[subject.id] = cls
                classes = self._source.classes_in(cls)
                own = next(iter(classes), "")
                for name, inner in self._source.captures(pattern, own):
                    captured = inner.name if isinstance(inner, ast.MatchAs) else ""
                    if captured is not None:  # an underscore reads nothing
                        self._record(classes, name, pattern, captured)
                    types = [self._source.type_of(each, name) for each in classes]
                    self._pattern(inner, None, union_of(types), scope)
            case ast.MatchAs(pattern=inner, name=name):
                if inner is not None:
                    self._pattern(inner, subject, given, scope)
                    given = inner.cls if isinstance(inner, ast.MatchClass) else given
                if name is not None:
                    scope[name] = given
            case ast.MatchOr(patterns):
                either = [p.cls for p in patterns if isinstance(p, ast.MatchClass)]
                for each in patterns:
                    self._pattern(each, None, given, scope)
                if isinstance(subject, ast.Name) and len(either) == len(patterns):
                    scope[subject.id] = union_of(either)
            case _:
                pass

    def _unpack(self, target: ast.expr, given: Type, scope: Scope) -> None:
        """Record what unpacking a named tuple reads."""
        if not isinstance(target, ast.Tuple):
            return
        classes = self._source.classes_in(given)
        for name, each in zip(
            self._source.fields_of(next(iter(classes), "")), target.elts, strict=False
        ):
            if not (isinstance(each, ast.Name) and each.id == "_"):
                captured = each.id if isinstance(each, ast.Name) else ""
                self._record(classes, name, target, captured)

    # What is recorded.

    def _record_key(self, key: object, node: ast.expr, scope: Scope) -> None:
        place = f"{self._module}:{self._place.removeprefix(self._prefix)}"
        if isinstance(key, str):
            self._scope = scope
            self._flow.keys[place, key] |= self._into(node)

    def _record(
        self, classes: frozenset[str], name: str, node: ast.AST, captured: str = ""
    ) -> None:
        function = self._place.rpartition(".")[2].lstrip("_")
        if f"{function}_".startswith(_ENCODERS):
            return  # it writes this end's values
        into = self._uses(captured, node) if captured else self._into(node)
        self._flow.reads.append(AttributeRead(classes, name, into))

    def _into(self, node: ast.AST, depth: int = 0) -> frozenset[str]:
        """Return what a value goes into: see ``AttributeRead``."""
        at = node
        while at in self._parents:
            inner, at = at, self._parents[at]
            match at:
                case ast.Call(func=func) if inner is not func:
                    made = self._made(at)
                    owner = next(iter(made), "")
                    if owner and inner in at.args:
                        names = [*self._source.fields_of(owner)]
                        place = at.args.index(inner)
                        if place < len(names):
                            return frozenset({f"{owner}.{names[place]}"})
                case ast.keyword(arg=str(name)):
                    call = self._parents[at]
                    assert isinstance(call, ast.Call | ast.ClassDef)
                    if isinstance(call, ast.Call):
                        made = self._made(call)
                        if made:
                            return frozenset(f"{each}.{name}" for each in made)
                case ast.Compare() | ast.If() | ast.While() | ast.IfExp(test=_):
                    tested = not isinstance(at, ast.IfExp) or inner is at.test
                    if tested:
                        return frozenset({self._place})
                case ast.Assign(targets=[target]) | ast.NamedExpr(target=target):
                    return self._assigned(target, at, depth)
                case ast.stmt():
                    break
                case _:
                    pass
        return frozenset({self._place})

    def _assigned(self, target: ast.expr, node: ast.AST, depth: int) -> frozenset[str]:
        match target:
            case ast.Attribute(value=ast.Name("self"), attr=name) if self._owner:
                return frozenset({f"{self._owner}.{name}"})
            case ast.Name(name) if depth < 3:
                found = self._uses(name, node, depth + 1)
                return found or frozenset({self._place})
            case _:
                return frozenset({self._place})

    def _uses(self, name: str, node: ast.AST, depth: int = 1) -> frozenset[str]:
        """Return what a local variable goes into, after its assignment, if anything."""
        function = self._function_of(node, ast.match_case)
        line = getattr(node, "lineno", 0)
        found: set[str] = set()
        for each in ast.walk(function):
            match each:
                case ast.Name(id, ctx=ast.Load()) if id == name and each.lineno >= line:
                    found |= self._into(each, depth)
        if len(found) > 1:
            found.discard(self._place)
        return frozenset(found)

    def _function_of(
        self, node: ast.AST, other: type[ast.AST] | None = None
    ) -> ast.AST:
        """Return the function that a node is in, or what is nearer, of another type."""
        while node in self._parents and not isinstance(node, Function):
            if other is not None and isinstance(node, other):
                break
            node = self._parents[node]
        return node

    def _made(self, node: ast.Call) -> frozenset[str]:
        """Return the classes of which a call makes an instance, or a changed copy."""
        match node:
            case ast.Call(func=ast.Name("replace") | ast.Attribute(attr="replace")):
                if not node.args:
                    return frozenset()
                given = self._source.infer(node.args[0], self._scope)
                return self._source.classes_in(given)
            case _:
                return self._source.constructed(node.func, self._scope)

    def _record_call(self, node: ast.Call, scope: Scope) -> None:
        self._scope = scope
        made, by_position = self._made(node), node.args
        match node.func:
            case ast.Name(name) | ast.Attribute(attr=name):
                if name in ("Decoder", "convert") and node.args:
                    self._record_decoder(node.args[-1], scope)
                by_position = [] if name == "replace" else by_position
            case _:
                pass
        named = {each.arg: each.value for each in node.keywords if each.arg is not None}
        places = self._function_of(node, ast.match_case), self._function_of(node)
        for each in made:
            given = dict(zip(self._source.fields_of(each), by_position, strict=False))
            for attribute, value in (given | named).items():
                self._flow.writes[each, attribute].update(
                    self._flow.explained(value, places[0])
                    or self._flow.explained(value, places[1])
                )

    def _record_decoder(self, given: ast.expr, scope: Scope) -> None:
        """Record the classes that a decoder makes; it may get them by a variable."""
        types = [
            given,
            *(
                self._source.infer(each, scope)
                for each in ast.walk(given)
                if isinstance(each, ast.Name)
            ),
        ]
        for each in types:
            self._flow.decoded |= self._source.mentioned(each)


def _assigned_to(name: str, target: ast.expr, given: ast.expr | None) -> str:
    """Return the expression that a variable gets from an assignment, or nothing."""
    match target, given:
        case ast.Tuple(targets), ast.Tuple(values) if len(targets) == len(values):
            pairs = zip(targets, values, strict=True)
            found = [_assigned_to(name, each, value) for each, value in pairs]
            return "".join(found)
        case ast.Tuple(targets), ast.expr():
            return "".join(_assigned_to(name, each, given) for each in targets)
        case ast.Name(id), ast.expr() if id == name:
            return shown(given)
        case _:
            return ""


def shown(value: ast.expr) -> str:
    text = ast.unparse(value)
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1]}…"
