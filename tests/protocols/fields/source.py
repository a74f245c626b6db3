"""The declarations of a wire's source, and the types of its expressions.

The source is parsed, and not run.  Types are followed as far as annotations, calls of
constructors, decoders and patterns tell them.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

SOURCE = Path(__file__).parents[3] / "src" / "shoal"

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


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(path.read_text())


class WireSource:
    """The declarations of a wire's source, and the types that follow from them.

    A type is the annotation that a reader would give: see ``infer``.
    """

    def __init__(self) -> None:
        self.classes: dict[str, ClassSource] = {}
        self.functions: dict[str, Function] = {}
        self.aliases: dict[str, ast.expr] = {}
        self._globals: Scope = {}
        self._module = ""  # the one in hand

    def declare(self, module: str, tree: ast.Module) -> None:
        """Add the declarations of a module; they win over those added before."""
        self._module = module
        for node in tree.body:
            match node:
                case ast.ClassDef():
                    name = node.name
                    if name.startswith("_") and name in self.classes:
                        name = self._local(name)
                    self.classes[name] = _class_source(module, node)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.functions[self._local(node.name)] = node
                    if not node.name.startswith("_"):
                        self.functions[node.name] = node
                case ast.AnnAssign(target=ast.Name(name), annotation=given):
                    if isinstance(given, ast.Name) and given.id == "TypeAlias":
                        assert node.value is not None
                        self.aliases[name] = node.value
                    else:
                        self._globals[self._local(name)] = given
                        self._globals[name] = given
                case ast.Assign(targets=[ast.Name(name)], value=value):
                    if isinstance(value, ast.BinOp | ast.Subscript | ast.Name):
                        self.aliases.setdefault(name, value)
                    inferred = self.infer(value, {})
                    self._globals[self._local(name)] = inferred
                    self._globals[name] = inferred
                case _:
                    pass

    def _local(self, name: str) -> str:
        """Return the key of a name that another module may have, too."""
        return f"{name}@{self._module}"

    def enter(self, module: str) -> None:
        """Make a module the one in hand: its names win over those of others."""
        self._module = module
        for source in self.classes.values():
            if source.module == module:
                self._declare_attributes(source)

    def _declare_attributes(self, source: ClassSource) -> None:
        """Add what ``__init__`` assigns to ``self``."""
        init = source.methods.get("__init__")
        if init is None:
            return
        scope = parameters_of(init)
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
                    source.types.setdefault(name, self.infer(value, scope))
                case _:
                    pass

    # Classes.

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

    def captures(
        self, pattern: ast.MatchClass, name: str
    ) -> Iterator[tuple[str, ast.pattern]]:
        """Yield the attributes in a pattern of a class, with their own patterns."""
        fields = self.fields_of(name) if name in self.classes else ()
        yield from zip(fields, pattern.patterns, strict=False)
        yield from zip(pattern.kwd_attrs, pattern.kwd_patterns, strict=True)

    # Types.

    def classes_in(self, given: Type) -> frozenset[str]:
        """Return the classes that a value of a type may have."""
        match given:
            case ast.Name(name) | ast.Attribute(attr=name):
                for each in (self._local(name), name):
                    if each in self.classes:
                        return frozenset({each})
                alias = self.aliases.get(name)
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
            case ast.Name(name) if name in self.aliases:
                return self._parameter(self.aliases[name], names, at)
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
                    each for each in (self._local(name), name) if each in self.classes
                ]
                return frozenset(keys[:1])
            case _:
                return frozenset()

    def infer(self, node: ast.expr, scope: Scope) -> Type:
        """Return the type of an expression; None if it remains unknown."""
        match node:
            case ast.Name(name):
                local = self._globals.get(self._local(name), self._globals.get(name))
                return scope.get(name, local)
            case ast.Attribute(value=value, attr="decode"):
                return self.infer(value, scope)
            case ast.Attribute(value=value, attr=name):
                types = [
                    self.type_of(each, name)
                    for each in sorted(self.classes_in(self.infer(value, scope)))
                ]
                return union_of(each for each in types if each is not None)
            case ast.Call():
                return self._infer_call(node, scope)
            case ast.BoolOp(values=values):
                return union_of(self.infer(each, scope) for each in values)
            case ast.IfExp(body=body, orelse=orelse):
                return union_of([self.infer(body, scope), self.infer(orelse, scope)])
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                return self.infer(value, scope)
            case ast.Starred(value=value):
                return self.infer(value, scope)
            case ast.Subscript(value=value, slice=index):
                outer = self.infer(value, scope)
                if isinstance(index, ast.Slice):
                    return outer
                inner = self._parameter(outer, _MAPPINGS, 1)
                return inner or self.element(outer)
            case ast.Dict(values=values) if values:
                element = self.infer(values[0], scope)
                return generic("dict", ast.Name("str"), element)
            case ast.List(elts=elts) | ast.Tuple(elts=elts) if elts:
                kind = "list" if isinstance(node, ast.List) else "tuple"
                return generic(kind, *(self.infer(each, scope) for each in elts))
            case ast.ListComp(elt=elt) | ast.GeneratorExp(elt=elt):
                inner_scope = dict(scope)
                for each in node.generators:
                    self.bind(
                        each.target, self._iterated(each.iter, scope), inner_scope
                    )
                return generic("list", self.infer(elt, inner_scope))
            case _:
                return None

    def _infer_call(self, node: ast.Call, scope: Scope) -> Type:
        made = self.constructed(node.func, scope)
        if made:
            return union_of(ast.Name(each) for each in sorted(made))
        first = node.args[0] if node.args else None
        match node.func:
            case ast.Name(name) if self._local(name) in self.functions:
                return self.functions[self._local(name)].returns
            case ast.Name(name) if name in self.functions:
                return self.functions[name].returns
            case ast.Name("zip" | "zip_longest") if first is not None:
                each = (self.element(self.infer(arg, scope)) for arg in node.args)
                return generic("list", generic("tuple", *each))
            case ast.Name("enumerate") if first is not None:
                element = self.element(self.infer(first, scope))
                return generic("list", generic("tuple", ast.Name("int"), element))
            case ast.Name("next") if first is not None:
                return self.element(self.infer(first, scope))
            case ast.Name(name) if name in _SAME and first is not None:
                return self.infer(first, scope)
            case ast.Name(name) if name in scope or name in self._globals:
                return self._decoded(self.infer(node.func, scope))
            case ast.Attribute(attr="Decoder") if first is not None:
                return generic("Decoder", first)
            case ast.Attribute(attr="convert") if len(node.args) > 1:
                return node.args[1]
            case ast.Attribute(attr="replace") if first is not None:
                return self.infer(first, scope)
            case ast.Attribute(value=value, attr=name):
                base = self.infer(value, scope)
                if base is None and name in self.functions:  # of a module
                    return self.functions[name].returns
                return self._infer_method(base, name)
            case _:
                return None

    def _infer_method(self, base: Type, name: str) -> Type:
        if name == "decode":
            return self._decoded(base)
        if name == "values":
            return generic("list", self._parameter(base, _MAPPINGS, 1))
        if name == "items":
            pair = [self._parameter(base, _MAPPINGS, at) for at in (0, 1)]
            return generic("list", generic("tuple", *pair))
        returned = [self.type_of(each, name) for each in sorted(self.classes_in(base))]
        if returned:
            return union_of(returned)
        if name in ("get", "pop", "popleft", "setdefault"):
            return self._parameter(base, _MAPPINGS, 1) or self.element(base)
        return None

    def _decoded(self, base: Type) -> Type:
        return self._parameter(base, frozenset({"Decoder"}), 0)

    def _iterated(self, node: ast.expr, scope: Scope) -> Type:
        return self.element(self.infer(node, scope))

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
        source.fields = dict.fromkeys(names_of(init.args)[1:])
    return source


def parameters_of(node: Function) -> Scope:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    given: Scope = {
        each.arg: each.annotation for each in arguments if each.annotation is not None
    }
    if node.args.vararg is not None:
        given[node.args.vararg.arg] = generic("tuple", node.args.vararg.annotation)
    return given


def names_of(arguments: ast.arguments) -> list[str]:
    return [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]


def _is_type(given: ast.Subscript) -> bool:
    """Whether an annotation is that of a class itself."""
    return isinstance(given.value, ast.Name) and given.value.id == "type"


def union_of(types: Iterable[Type]) -> Type:
    found: Type = None
    for each in types:
        if each is not None:
            found = each if found is None else ast.BinOp(found, ast.BitOr(), each)
    return found


def generic(name: str, *parameters: Type) -> ast.expr:
    unknown = ast.Constant(None)
    elements = [unknown if each is None else each for each in parameters]
    inner = elements[0] if len(elements) == 1 else ast.Tuple(elements)
    return ast.Subscript(ast.Name(name), inner)
