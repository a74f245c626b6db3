"""Where a wire's source reads and writes the attributes of its classes.

The source is parsed, and not run.  Types are followed as far as annotations, calls of
constructors and patterns tell them; a read of an object whose type remains unknown
counts for every class that has the attribute.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

SOURCE = Path(__file__).parents[3] / "src" / "shoal"
TEXT_MAX = 72  # characters of an expression that are shown

Type: TypeAlias = ast.expr | None
"""An annotation; None: unknown."""

Scope: TypeAlias = dict[str, Type]
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_MAPPINGS = frozenset({"dict", "defaultdict", "Mapping", "OrderedDict"})
_CONTAINERS = _MAPPINGS | {
    *("list", "tuple", "set", "frozenset", "deque"),
    *("Sequence", "Collection", "Set", "Iterable", "Iterator", "Generator"),
}
_SAME = frozenset({"replace", "list", "tuple", "set", "sorted", "reversed", "iter"})
_ENCODERS = ("encode_", "write_", "wire_")


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
class ClassSource:
    """A class: its bases and the annotations of its attributes, in their order.

    ``fields`` are the attributes that a constructor takes by position, with their
    defaults.  ``module`` is a path without its suffix.
    """

    module: str
    bases: list[str]
    methods: dict[str, Function]
    fields: dict[str, ast.expr | None] = field(default_factory=dict)
    types: dict[str, Type] = field(default_factory=dict)


@dataclass(slots=True)
class Flow:
    """What the source of a wire reads and writes."""

    classes: dict[str, ClassSource]
    functions: dict[str, Function]
    aliases: dict[str, ast.expr] = field(default_factory=dict)
    decoded: set[str] = field(default_factory=set)  # by a decoder
    reads: list[AttributeRead] = field(default_factory=list)
    writes: dict[tuple[str, str], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )
    keys: dict[tuple[str, str], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """What functions read from mappings, by ``module:function`` and key."""

    def lineage(self, name: str) -> Iterator[str]:
        """Yield a class and its bases, as far as they belong to the source."""
        if name in self.classes:
            yield name
            for base in self.classes[name].bases:
                yield from self.lineage(base)

    def fields_of(self, name: str) -> Mapping[str, ast.expr | None]:
        """Return the fields of a class, those of its bases first, with defaults."""
        fields: dict[str, ast.expr | None] = {}
        for each in reversed([*self.lineage(name)]):
            fields |= self.classes[each].fields
        return fields

    def type_of(self, name: str, attribute: str) -> Type:
        """Return the annotation of an attribute, or what a property returns."""
        for each in self.lineage(name):
            source = self.classes[each]
            if attribute in source.types:
                return source.types[attribute]
            if attribute in source.methods:
                return source.methods[attribute].returns
        return None

    def targets(self, name: str, attribute: str) -> set[str]:
        """Return what an attribute is read into: ``AttributeRead.into`` of its reads.

        A read of a base counts for its subclasses, and so does one of a subclass for
        the fields of its base.  Without either, reads of unknown objects count.
        """
        related = {*self.lineage(name)}
        related |= {each for each in self.classes if name in {*self.lineage(each)}}
        reads = [each for each in self.reads if each.attribute == attribute]
        return {
            target
            for each in reads
            if not related.isdisjoint(each.classes)
            for target in each.into
        }

    def is_own(self, name: str) -> bool:
        """Whether a class is the wire's own."""
        return not self.classes[name].module.startswith(("domain/", "seam/"))

    def methods_of(self, name: str) -> frozenset[str]:
        """Return the names of a class's methods, with those of its bases."""
        return frozenset(m for c in self.lineage(name) for m in self.classes[c].methods)

    def takes(self, name: str, parameter: str) -> bool:
        """Whether the constructor of a class works on a parameter."""
        source = self.classes[name]
        return "__init__" in source.methods and parameter not in source.types

    def mentioned(self, given: Type) -> frozenset[str]:
        """Return the classes that an annotation names, at any depth."""
        found: set[str] = set()
        for node in ast.walk(given) if given is not None else ():
            match node:
                case ast.Name(name) | ast.Attribute(attr=name):
                    if name in self.classes:
                        found.add(name)
                    elif name in self.aliases:
                        found |= self.mentioned(self.aliases[name])
                case ast.Constant(str(text)) if text.isidentifier() or "|" in text:
                    found |= self.mentioned(ast.parse(text, mode="eval").body)
        return frozenset(found)

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
                    for attribute, inner in self.captures(node, ast.unparse(cls)):
                        if isinstance(inner, ast.MatchAs) and inner.name == value.id:
                            found.append(f"{ast.unparse(cls)}.{attribute}")
                case _:
                    pass
        values = [each for each in found if each not in ("", "UNSET")]
        if values or not isinstance(within, Function):
            return values
        is_parameter = value.id in _parameters(within)
        return [f"{within.name}({value.id})" if is_parameter else value.id]

    def captures(
        self, pattern: ast.MatchClass, name: str
    ) -> Iterator[tuple[str, ast.pattern]]:
        """Yield the attributes in a pattern of a class, with their own patterns."""
        fields = self.fields_of(name) if name in self.classes else ()
        yield from zip(fields, pattern.patterns, strict=False)
        yield from zip(pattern.kwd_attrs, pattern.kwd_patterns, strict=True)

    def written(self, name: str, attribute: str) -> set[str]:
        """Return the expressions that constructors get for a field."""
        return self.writes.get((name, attribute), set())


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(path.read_text())


def flow_of(wire: str) -> Flow:
    """Analyse ``protocols/<wire>``, with what the seam and the domain declare."""
    own = SOURCE / "protocols" / wire
    folders = [own, SOURCE / "protocols" / "seam", SOURCE / "domain"]
    trees = {
        (folder, path.relative_to(folder).with_suffix("").as_posix()): parsed(path)
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
    }
    world = _World()
    for (folder, module), tree in reversed(trees.items()):  # the wire's names win
        prefix = "" if folder == own else f"{folder.name}/"
        world.declare(prefix + module, tree)
    for (folder, module), tree in trees.items():
        if folder == own:
            world.analyse(module, tree)
    return world.flow


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


class _World:
    """Declarations first, then the bodies of functions."""

    def __init__(self) -> None:
        self.flow = Flow({}, {})
        self._globals: Scope = {}
        self._module = ""  # the one in hand

    def declare(self, module: str, tree: ast.Module) -> None:
        self._module = module
        for node in tree.body:
            match node:
                case ast.ClassDef():
                    name = node.name
                    if name.startswith("_") and name in self.flow.classes:
                        name = self._local(name)
                    self.flow.classes[name] = _class_source(module, node)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.flow.functions[self._local(node.name)] = node
                    if not node.name.startswith("_"):
                        self.flow.functions[node.name] = node
                case ast.AnnAssign(target=ast.Name(name), annotation=given):
                    if isinstance(given, ast.Name) and given.id == "TypeAlias":
                        assert node.value is not None
                        self.flow.aliases[name] = node.value
                    else:
                        self._globals[self._local(name)] = given
                        self._globals[name] = given
                case ast.Assign(targets=[ast.Name(name)], value=value):
                    if isinstance(value, ast.BinOp | ast.Subscript | ast.Name):
                        self.flow.aliases.setdefault(name, value)
                    inferred = self._infer(value, {})
                    self._globals[self._local(name)] = inferred
                    self._globals[name] = inferred
                case _:
                    pass

    def _local(self, name: str) -> str:
        """Return the key of a name that another module may have, too."""
        return f"{name}@{self._module}"

    def analyse(self, module: str, tree: ast.Module) -> None:
        self._module = module
        for source in self.flow.classes.values():
            if source.module == module:
                self._declare_attributes(source)
        for node in tree.body:
            _Body(self, module, node).visit_all()

    def _declare_attributes(self, source: ClassSource) -> None:
        """Add what ``__init__`` assigns to ``self``."""
        init = source.methods.get("__init__")
        if init is None:
            return
        scope = _parameters(init)
        for node in ast.walk(init):
            match node:
                case ast.AnnAssign(
                    target=ast.Attribute(value=ast.Name("self"), attr=name),
                    annotation=given,
                ):
                    source.types[name] = given
                case ast.Assign(
                    targets=[ast.Attribute(value=ast.Name("self"), attr=name)],
                    value=value,
                ):
                    source.types.setdefault(name, self._infer(value, scope))
                case _:
                    pass

    # Types.

    def classes_in(self, given: Type) -> frozenset[str]:
        """Return the classes that a value of a type may have."""
        match given:
            case ast.Name(name) | ast.Attribute(attr=name):
                for each in (self._local(name), name):
                    if each in self.flow.classes:
                        return frozenset({each})
                alias = self.flow.aliases.get(name)
                return frozenset() if alias is None else self.classes_in(alias)
            case ast.Constant(str(text)):
                return self.classes_in(ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, right=right):
                return self.classes_in(left) | self.classes_in(right)
            case ast.Subscript(value=ast.Name("Annotated"), slice=ast.Tuple(elts)):
                return self.classes_in(elts[0])
            case ast.Subscript(value=ast.Name("type")):
                return frozenset()
            case ast.Subscript(value=value):
                return self.classes_in(value)
            case _:
                return frozenset()

    def _parameter(self, given: Type, names: frozenset[str], at: int) -> Type:
        """Return a type's parameter, if it is one of the generic types."""
        match given:
            case ast.Name(name) if name in self.flow.aliases:
                return self._parameter(self.flow.aliases[name], names, at)
            case ast.BinOp(left=left, right=right):
                found = self._parameter(left, names, at)
                return found or self._parameter(right, names, at)
            case ast.Subscript(value=ast.Name("Annotated"), slice=ast.Tuple(elts)):
                return self._parameter(elts[0], names, at)
            case ast.Subscript(value=ast.Name(name), slice=inner) if name in names:
                if isinstance(inner, ast.Tuple):
                    return inner.elts[at] if at < len(inner.elts) else None
                return inner if at == 0 else None
            case _:
                return None

    def element(self, given: Type, at: int = 0) -> Type:
        """Return the type of the elements, or of one of a tuple."""
        return self._parameter(given, _CONTAINERS, at)

    def infer(self, node: ast.expr, scope: Scope) -> Type:
        return self._infer(node, scope)

    def constructed(self, called: ast.expr, scope: Scope) -> frozenset[str]:
        """Return the classes of which a call makes an instance."""
        match called:
            case ast.Name(name) if name in scope:
                parts = ast.walk(scope[name] or called)
                types = [each for each in parts if isinstance(each, ast.Subscript)]
                made = [self.classes_in(each.slice) for each in types if _is_type(each)]
                return frozenset[str]().union(*made)
            case ast.Name(name) | ast.Attribute(attr=name):
                keys = [
                    each
                    for each in (self._local(name), name)
                    if each in self.flow.classes
                ]
                return frozenset(keys[:1])
            case _:
                return frozenset()

    def _infer(self, node: ast.expr, scope: Scope) -> Type:
        match node:
            case ast.Name(name):
                local = self._globals.get(self._local(name), self._globals.get(name))
                return scope.get(name, local)
            case ast.Attribute(value=value, attr="decode"):
                return self._infer(value, scope)
            case ast.Attribute(value=value, attr=name):
                types = [
                    self.flow.type_of(each, name)
                    for each in sorted(self.classes_in(self._infer(value, scope)))
                ]
                return _union(each for each in types if each is not None)
            case ast.Call():
                return self._infer_call(node, scope)
            case ast.BoolOp(values=values):
                return _union(self._infer(each, scope) for each in values)
            case ast.IfExp(body=body, orelse=orelse):
                return _union([self._infer(body, scope), self._infer(orelse, scope)])
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                return self._infer(value, scope)
            case ast.Starred(value=value):
                return self._infer(value, scope)
            case ast.Subscript(value=value, slice=index):
                outer = self._infer(value, scope)
                if isinstance(index, ast.Slice):
                    return outer
                inner = self._parameter(outer, _MAPPINGS, 1)
                return inner or self.element(outer)
            case ast.Dict(values=values) if values:
                element = self._infer(values[0], scope)
                return _generic("dict", ast.Name("str"), element)
            case ast.List(elts=elts) | ast.Tuple(elts=elts) if elts:
                kind = "list" if isinstance(node, ast.List) else "tuple"
                return _generic(kind, *(self._infer(each, scope) for each in elts))
            case ast.ListComp(elt=elt) | ast.GeneratorExp(elt=elt):
                inner_scope = dict(scope)
                for each in node.generators:
                    self.bind(
                        each.target, self._iterated(each.iter, scope), inner_scope
                    )
                return _generic("list", self._infer(elt, inner_scope))
            case _:
                return None

    def _infer_call(self, node: ast.Call, scope: Scope) -> Type:
        made = self.constructed(node.func, scope)
        if made:
            return _union(ast.Name(each) for each in sorted(made))
        first = node.args[0] if node.args else None
        match node.func:
            case ast.Name(name) if self._local(name) in self.flow.functions:
                return self.flow.functions[self._local(name)].returns
            case ast.Name(name) if name in self.flow.functions:
                return self.flow.functions[name].returns
            case ast.Name("zip" | "zip_longest") if first is not None:
                each = (self.element(self._infer(arg, scope)) for arg in node.args)
                return _generic("list", _generic("tuple", *each))
            case ast.Name("enumerate") if first is not None:
                element = self.element(self._infer(first, scope))
                return _generic("list", _generic("tuple", ast.Name("int"), element))
            case ast.Name("next") if first is not None:
                return self.element(self._infer(first, scope))
            case ast.Name(name) if name in _SAME and first is not None:
                return self._infer(first, scope)
            case ast.Name(name) if name in scope or name in self._globals:
                return self._decoded(self._infer(node.func, scope))
            case ast.Attribute(attr="Decoder") if first is not None:
                return _generic("Decoder", first)
            case ast.Attribute(attr="convert") if len(node.args) > 1:
                return node.args[1]
            case ast.Attribute(attr="replace") if first is not None:
                return self._infer(first, scope)
            case ast.Attribute(value=value, attr=name):
                base = self._infer(value, scope)
                if base is None and name in self.flow.functions:  # of a module
                    return self.flow.functions[name].returns
                return self._infer_method(base, name)
            case _:
                return None

    def _infer_method(self, base: Type, name: str) -> Type:
        if name == "decode":
            return self._decoded(base)
        if name == "values":
            return _generic("list", self._parameter(base, _MAPPINGS, 1))
        if name == "items":
            pair = [self._parameter(base, _MAPPINGS, at) for at in (0, 1)]
            return _generic("list", _generic("tuple", *pair))
        returned = [
            self.flow.type_of(each, name) for each in sorted(self.classes_in(base))
        ]
        if returned:
            return _union(returned)
        if name in ("get", "pop", "popleft", "setdefault"):
            return self._parameter(base, _MAPPINGS, 1) or self.element(base)
        return None

    def _decoded(self, base: Type) -> Type:
        return self._parameter(base, frozenset({"Decoder"}), 0)

    def _iterated(self, node: ast.expr, scope: Scope) -> Type:
        return self.element(self._infer(node, scope))

    def bind(self, target: ast.expr, given: Type, scope: Scope) -> None:
        """Give the names of a target their types."""
        match target:
            case ast.Name(name):
                scope[name] = given
            case ast.Tuple(elts) | ast.List(elts):
                several = len(elts) > 1
                for at, each in enumerate(elts):
                    inner = self.element(given, at if several else 0)
                    self.bind(each, inner, scope)
            case _:
                pass


class _Body:
    """The functions of one module or class."""

    def __init__(self, world: _World, module: str, node: ast.stmt) -> None:
        self._world = world
        self._flow = world.flow
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
                (self._owner,) = self._world.classes_in(ast.Name(name))
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
        scope = outer | _parameters(node)
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
                        scope[name] = _union([scope.get(name), inner[name]])
                self._statements(orelse, scope)
                self._narrow_after(node, scope)
            case ast.Match(subject=subject, cases=cases):
                self._expression(subject, scope)
                given = self._world.infer(subject, scope)
                for case in cases:
                    inner = dict(scope)
                    self._pattern(case.pattern, subject, given, inner)
                    if case.guard is not None:
                        self._expression(case.guard, inner)
                    self._statements(case.body, inner)
            case ast.For(target=target, iter=iterated, body=body, orelse=orelse):
                self._expression(iterated, scope)
                given = self._world.element(self._world.infer(iterated, scope))
                self._world.bind(target, given, scope)
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
                given = self._world.infer(value, scope)
                for target in targets:
                    self._unpack(target, given, scope)
                    self._world.bind(target, given, scope)
            case ast.AnnAssign(target=target, annotation=given, value=value):
                if value is not None:
                    self._expression(value, scope)
                self._world.bind(target, given, scope)
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self._expression(child, scope)

    def _expression(self, node: ast.expr, scope: Scope) -> None:
        """Record the reads and the constructors in an expression."""
        match node:
            case ast.Attribute(value=value, attr=name, ctx=ast.Load()):
                self._expression(value, scope)
                classes = self._world.classes_in(self._world.infer(value, scope))
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
                self._world.bind(target, self._world.infer(value, scope), scope)
                return
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                scope = dict(scope)
                for part in node.generators:
                    self._expression(part.iter, scope)
                    given = self._world.element(self._world.infer(part.iter, scope))
                    self._world.bind(part.target, given, scope)
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
                self._expression(body, scope | dict.fromkeys(_names(args)))
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
                if self._world.classes_in(given):
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
                classes = self._world.classes_in(cls)
                own = next(iter(classes), "")
                for name, inner in self._flow.captures(pattern, own):
                    captured = inner.name if isinstance(inner, ast.MatchAs) else ""
                    if captured is not None:  # an underscore reads nothing
                        self._record(classes, name, pattern, captured)
                    types = [self._flow.type_of(each, name) for each in classes]
                    self._pattern(inner, None, _union(types), scope)
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
                    scope[subject.id] = _union(either)
            case _:
                pass

    def _unpack(self, target: ast.expr, given: Type, scope: Scope) -> None:
        """Record what unpacking a named tuple reads."""
        if not isinstance(target, ast.Tuple):
            return
        classes = self._world.classes_in(given)
        for name, each in zip(
            self._flow.fields_of(next(iter(classes), "")), target.elts, strict=False
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
                        names = [*self._flow.fields_of(owner)]
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
                return self._uses(name, node, depth + 1)
            case _:
                return frozenset({self._place})

    def _uses(self, name: str, node: ast.AST, depth: int = 1) -> frozenset[str]:
        """Return what a local variable goes into, after its assignment."""
        function = self._function_of(node, ast.match_case)
        line = getattr(node, "lineno", 0)
        found: set[str] = set()
        for each in ast.walk(function):
            match each:
                case ast.Name(id, ctx=ast.Load()) if id == name and each.lineno >= line:
                    found |= self._into(each, depth)
        if len(found) > 1:
            found.discard(self._place)
        return frozenset(found or {self._place})

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
                given = self._world.infer(node.args[0], self._scope)
                return self._world.classes_in(given)
            case _:
                return self._world.constructed(node.func, self._scope)

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
            given = dict(zip(self._flow.fields_of(each), by_position, strict=False))
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
                self._world.infer(each, scope)
                for each in ast.walk(given)
                if isinstance(each, ast.Name)
            ),
        ]
        for each in types:
            self._flow.decoded |= self._flow.mentioned(each)


def _class_source(module: str, node: ast.ClassDef) -> ClassSource:
    source = ClassSource(
        module,
        [each.id for each in node.bases if isinstance(each, ast.Name)],
        {each.name: each for each in node.body if isinstance(each, Function)},
    )
    for each in node.body:
        match each:
            case ast.AnnAssign(target=ast.Name(name), annotation=given, value=value):
                source.fields[name] = value
                source.types[name] = given
            case _:
                pass
    init = source.methods.get("__init__")
    if init is not None:
        source.fields = dict.fromkeys(_names(init.args)[1:])
    return source


def _parameters(node: Function) -> Scope:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    given: Scope = {
        each.arg: each.annotation for each in arguments if each.annotation is not None
    }
    if node.args.vararg is not None:
        given[node.args.vararg.arg] = _generic("tuple", node.args.vararg.annotation)
    return given


def _names(arguments: ast.arguments) -> list[str]:
    return [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]


def _is_type(given: ast.Subscript) -> bool:
    """Whether an annotation is that of a class itself."""
    return isinstance(given.value, ast.Name) and given.value.id == "type"


def _union(types: Iterable[Type]) -> Type:
    found: Type = None
    for each in types:
        if each is not None:
            found = each if found is None else ast.BinOp(found, ast.BitOr(), each)
    return found


def _generic(name: str, *parameters: Type) -> ast.expr:
    unknown = ast.Constant(None)
    elements = [unknown if each is None else each for each in parameters]
    inner = elements[0] if len(elements) == 1 else ast.Tuple(elements)
    return ast.Subscript(ast.Name(name), inner)


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
