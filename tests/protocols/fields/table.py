"""The table of every field of every document: who reads it into what, who writes it.

``docs/protocols/fields/<wire>.toml`` lists what a document has, and the reason for each
cell that is empty; the cells come from the wire's source (``flow``).  A message is::

    [register]
    by = "worker"                # who writes it: worker, coordinator or both
    class = "RegisterProvider"   # the codec's class of it, or:
    read = [..]                  # classes that it is read as,
    write = [..]                 # and written as, or functions that name its fields
    fields = [..]                # of the document; a dot leads to an inner field
    about = ".."                 # what it is, if the document lacks it
    extensions = {..}            # other fields of the class, and what they are
    inner = {FIELD = "CLASS"}    # fields that are read and written apart
    open = [..]                  # fields whose content the document leaves open
    at = {FIELD.read = [..]}     # where one field is, if it is elsewhere
    reasons = {"FIELD read" = ".."}

A function is ``module:name``, or ``module:name#word`` if the source calls the field by
another word.  A reason's key names the field, or ``*`` for all of the message, and the
cell: ``read`` or ``write``, after ``coordinator`` or ``worker`` where the two differ.
"""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias

import msgspec

from protocols.fields.flow import Flow, flow_of, read_elsewhere
from protocols.fields.source import SOURCE, parsed

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "protocols" / "fields.md"
DATA = ROOT / "docs" / "protocols" / "fields"
WIRES = tuple(sorted(path.stem for path in DATA.glob("*.toml")))

ROLES = ("coordinator", "worker")
ACTIONS = ("read", "write")
TARGETS_MAX = 4  # targets and expressions that a cell names
COMMAND = "make fields"

Place: TypeAlias = tuple[str, str]
"""A class and its attribute."""


@dataclass(frozen=True, slots=True)
class MessageSpec:
    """A message of a document: see the module."""

    name: str
    by: str
    about: str
    read: tuple[str, ...]
    write: tuple[str, ...]
    fields: tuple[str, ...]
    extensions: Mapping[str, str]
    open: tuple[str, ...]
    inner: Mapping[str, str]
    at: Mapping[str, Mapping[str, Sequence[str]]]
    reasons: Mapping[str, str]

    @property
    def listed(self) -> frozenset[str]:
        """The fields of the document and of Shoal."""
        return frozenset({*self.fields, *self.extensions})

    def unlisted(self, payload: Mapping[str, Any]) -> Iterator[str]:
        """Yield the fields of a message that are neither listed nor left open."""
        for path in _paths_in(payload):
            if path not in self.listed and not path.startswith(
                tuple(f"{each}." for each in self.open)
            ):
                yield path

    def acts(self, role: str, action: str) -> bool:
        """Whether a role reads or writes the message by the document."""
        return self.by == "both" or (self.by == role) is (action == "write")

    def places(self, name: str, action: str) -> Sequence[str]:
        """Return the classes and functions that read or write a field."""
        given = self.at.get(name, {}).get(action)
        if given is not None:
            return given
        for outer, class_name in self.inner.items():
            if name.startswith(f"{outer}."):
                return [f"{class_name}.{name.removeprefix(outer + '.')}"]
        return self.read if action == "read" else self.write

    def exception(self, name: str, role: str, action: str) -> str:
        """Return why a role leaves out what the code of both could do, or nothing."""
        keys = (f"{name} {role} {action}", f"* {role} {action}", f"* {action}")
        return next((self.reasons[key] for key in keys if key in self.reasons), "")

    def reason(self, name: str, role: str, action: str) -> str:
        """Return why a cell is empty, or nothing."""
        given = self.reasons.get(f"{name} {action}", "")
        return given or self.exception(name, role, action)


@dataclass(frozen=True, slots=True)
class Cell:
    """What a role does with a field; without places the reason says why nothing."""

    role: str
    action: str
    places: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        verb = "read into" if self.action == "read" else "written from"
        if not self.places:
            done = "not read" if self.action == "read" else "not written"
            return f"*{done}: {self.reason or '?'}*"
        shown = [f"`{each}`" for each in self.places[:TARGETS_MAX]]
        return f"{verb} {', '.join(shown)}{' …' * (len(self.places) > TARGETS_MAX)}"


@dataclass(frozen=True, slots=True)
class Row:
    """A field of a message; ``extension``: what it is, if the document lacks it."""

    message: MessageSpec
    name: str
    cells: tuple[Cell, ...]
    extension: str = ""


class WireTable:
    """The rows of one wire, and what is wrong with them."""

    def __init__(self, wire: str) -> None:
        data = tomllib.loads((DATA / f"{wire}.toml").read_text())
        self.wire = wire
        self.title: str = data.pop("title")
        self.document: str = data.pop("document")
        self.beyond: Mapping[str, str] = data.pop("beyond", {})
        self.unread: Mapping[str, str] = data.pop("unread", {})
        self.messages = [_message(name, each) for name, each in data.items()]
        self.flow: Flow = flow_of(wire)

    @cached_property
    def rows(self) -> Sequence[Row]:
        return [
            self._row(message, name)
            for message in self.messages
            for name in (*message.fields, *message.extensions)
        ]

    def faults(self) -> Iterator[str]:
        """Yield what is missing or obsolete, with what to do."""
        for row in self.rows:
            yield from self._faults_of(row)
        for message in self.messages:
            yield from self._faults_of_message(message)
        yield from self._faults_beyond()

    # Rows.

    def _row(self, message: MessageSpec, name: str) -> Row:
        cells = []
        for role in ROLES:
            for action in ACTIONS:
                if not message.acts(role, action):
                    continue
                never = message.exception(name, role, action)
                places = () if never else self._places(message, name, action)
                reason = never or message.reason(name, role, action)
                cells.append(Cell(role, action, tuple(places), reason))
        return Row(message, name, tuple(cells), message.extensions.get(name, ""))

    def _places(self, message: MessageSpec, name: str, action: str) -> Sequence[str]:
        found: dict[str, None] = {}
        for each in message.places(name, action):
            if ":" in each:
                found |= dict.fromkeys(self._in_function(each, name, action))
            elif (place := self._resolve(each, name)) is not None:
                found |= dict.fromkeys(self._of_attribute(place, action))
        return sorted(found)

    def _resolve(self, class_name: str, path: str) -> Place | None:
        """Return the attribute that a field of a message is decoded into."""
        owner, dot, attribute = class_name.partition(".")
        if dot:
            return owner, self.names_of(owner).get(attribute, attribute)
        first, _, rest = path.partition(".")
        names = self.names_of(owner)
        if first not in names:
            return None
        attribute = names[first]
        if not rest or attribute == _TAG:
            return owner, attribute
        for inner in sorted(self._inner_classes(owner, attribute)):
            if (place := self._resolve(inner, rest)) is not None:
                return place
        return None

    def _inner_classes(self, owner: str, attribute: str) -> frozenset[str]:
        return frozenset(
            each
            for each in self.flow.source.mentioned(
                self.flow.source.type_of(owner, attribute)
            )
            if self.flow.source.is_own(each)
        )

    def names_of(self, class_name: str) -> Mapping[str, str]:
        """Return the attributes of a class by their names on the wire."""
        made = self._runtime(class_name)
        if not _is_struct(made):
            return {name: name for name in self.flow.source.fields_of(class_name)}
        names = {each.encode_name: each.name for each in msgspec.structs.fields(made)}
        config = made.__struct_config__
        return names | ({config.tag_field: _TAG} if config.tag_field else {})

    def _runtime(self, class_name: str) -> Any:
        source = self.flow.source.classes[class_name]
        module = f"shoal.protocols.{self.wire}.{source.module.replace('/', '.')}"
        name = class_name.partition("@")[0]
        return getattr(importlib.import_module(module), name)

    def _of_attribute(self, place: Place, action: str) -> Iterable[str]:
        if place[1] == _TAG:
            return ("the kind of message",)
        if action == "read":
            targets = self.flow.targets(*place)
            return [each for each in targets if not self._is_dead(each, {place})]
        written = self.flow.written(*place)
        return written or self._default(place)

    def _default(self, place: Place) -> Iterable[str]:
        """Return the default of a field, if it is written."""
        made = self._runtime(place[0])
        if not _is_struct(made):
            return ()
        fields = {each.name: each for each in msgspec.structs.fields(made)}
        given, omits = fields[place[1]], made.__struct_config__.omit_defaults
        if isinstance(given.default_factory, FunctionType):
            return (f"{given.default_factory()!r}",)  # msgspec does not omit it
        if omits or given.default in (msgspec.NODEFAULT, msgspec.UNSET):
            return ()
        return (f"{given.default!r}",)

    def _is_dead(self, target: str, seen: set[Place]) -> bool:
        """Whether a value ends where nothing reads it."""
        owner, _, attribute = target.rpartition(".")
        if (
            owner not in self.flow.source.classes
            or attribute in self.flow.source.methods_of(owner)
        ):
            return False  # a function
        if self.flow.source.takes(owner, attribute):
            return False
        if not self.flow.source.is_own(owner):
            return attribute not in _read_beside(self.wire)
        if _is_struct(self._runtime(owner)):
            return False  # it is sent back
        if (owner, attribute) in seen:
            return True
        targets = self.flow.targets(owner, attribute)
        return all(self._is_dead(each, seen | {(owner, attribute)}) for each in targets)

    def _in_function(self, place: str, path: str, action: str) -> Iterable[str]:
        """Return the expressions under a field's name in a function, or its place."""
        where, _, word = place.partition("#")
        module, _, name = where.partition(":")
        node = _definition(self.wire, module, name)
        short = f"{module.rpartition('/')[2]}.{name}"
        leaf = word or path.rpartition(".")[2]
        if node is None:
            return ()
        if action == "write":
            values = [*_values_under(self.flow, node, leaf)]
        else:
            targets = self.flow.keys.get((f"{module}:{name}", leaf), set())
            values = [each for each in targets if not self._is_dead(each, set())]
            if targets and not values:
                return ()
        if values:
            return values
        return (short,) if _mentions(node, leaf) else ()

    # Faults.

    def _faults_of(self, row: Row) -> Iterator[str]:
        message = row.message
        where = f"{self.wire}: {message.name}.{row.name}"
        for cell in row.cells:
            what = f"{where} {cell.role} {cell.action}"
            if not cell.places and not cell.reason:
                known = any(
                    ":" in each or self._resolve(each, row.name) is not None
                    for each in message.places(row.name, cell.action)
                )
                why = "known to the codec, and then unused" if known else "unknown"
                yield f"{what}: {why}; use it, or give a reason"
            if cell.places and message.reason(row.name, cell.role, cell.action):
                yield f"{what}: the reason is obsolete: {cell}"

    def _faults_of_message(self, message: MessageSpec) -> Iterator[str]:
        where = f"{self.wire}: {message.name}"
        listed = message.listed
        for each in sorted({*message.read, *message.write}):
            if ":" in each:
                continue
            if each not in self.flow.source.classes:
                yield f"{where}: there is no class {each}"
                continue
            beside = self._listed_for(each)
            for path in self._paths(each, listed):
                if path not in beside:
                    yield f"{where}.{path}: not in the document; say what it is"
        for key in message.reasons:
            if key.split(" ")[0] not in {*listed, "*"}:
                yield f"{where}: a reason for an unknown field: {key}"
        for name in message.at.keys() - listed:
            yield f"{where}: a place for an unknown field: {name}"

    def _listed_for(self, class_name: str) -> frozenset[str]:
        """Return the fields of all messages that are decoded as one class."""
        return frozenset(
            name
            for message in self.messages
            if class_name in (*message.read, *message.write)
            for name in message.listed
        )

    def _paths(self, class_name: str, listed: Iterable[str]) -> Iterator[str]:
        """Yield the fields of a class, and the inner ones of those that are listed."""
        for name, attribute in self.names_of(class_name).items():
            yield name
            if any(each.startswith(f"{name}.") for each in listed):
                inner = [
                    each.removeprefix(f"{name}.")
                    for each in listed
                    if each.startswith(f"{name}.")
                ]
                for each in self._inner_classes(class_name, attribute):
                    yield from (f"{name}.{path}" for path in self._paths(each, inner))

    def _faults_beyond(self) -> Iterator[str]:
        """Yield codec classes that are in no message and in no list."""
        claimed = {
            each
            for message in self.messages
            for places in (
                *(message.read, message.write, message.inner.values()),
                *_all_places(message),
            )
            for each in places
        }
        claimed = {each.partition(".")[0] for each in claimed if ":" not in each}
        for name in sorted(self._structs() - {*self._with_inner(claimed)}):
            if name not in self.beyond:
                yield f"{self.wire}: {name} is in no message; say what it is"
        for name in self.beyond.keys() - self._structs():
            yield f"{self.wire}: {name} is beyond the document, and no codec has it"
        unread = {*self._unread()}
        for name, attribute in sorted(unread):
            if not self.unread.keys() & {f"{name}.{attribute}", f"{name}.*"}:
                yield (
                    f"{self.wire}: {name}.{attribute} is decoded and then unused;"
                    " use it, or give a reason"
                )
        needed = {f"{name}.{attribute}" for name, attribute in unread}
        needed |= {f"{name}.*" for name, _ in unread}
        for key in self.unread.keys() - needed:
            yield f"{self.wire}: {key} is used: the reason is obsolete"

    def _unread(self) -> Iterator[Place]:
        """Yield the fields without a row that are decoded and then unused."""
        shown = {*self._shown()}
        for name in self._structs() & self._decoded():
            for attribute in self.names_of(name).values():
                place = name, attribute
                if attribute == _TAG or place in shown:
                    continue
                if not self._of_attribute(place, "read"):
                    yield place

    def _shown(self) -> Iterator[Place]:
        """Yield the attributes that the fields of messages are decoded into."""
        for row in self.rows:
            for each in row.message.places(row.name, "read"):
                if ":" not in each and (place := self._resolve(each, row.name)):
                    yield place

    def _structs(self) -> frozenset[str]:
        return frozenset(
            name
            for name in self.flow.source.classes
            if self.flow.source.is_own(name)
            and _is_struct(self._runtime(name))
            and self.flow.source.fields_of(name)
            and not self._is_base(name)
        )

    def _is_base(self, name: str) -> bool:
        return any(name in source.bases for source in self.flow.source.classes.values())

    def _with_inner(self, names: Iterable[str]) -> Iterator[str]:
        """Yield classes and the classes of their fields."""
        seen: set[str] = set()
        waiting = [*names]
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self.flow.source.classes:
                continue
            seen.add(name)
            yield name
            for attribute in self.flow.source.fields_of(name):
                waiting += self._inner_classes(name, attribute)

    def _decoded(self) -> frozenset[str]:
        """Return the classes that a decoder makes, with those of their fields."""
        return frozenset(self._with_inner(self.flow.decoded))


def page() -> str:
    """Return the page, as it should be."""
    return _HEAD + "\n".join(_section(table_of(wire)) for wire in WIRES)


@cache
def table_of(wire: str) -> WireTable:
    return WireTable(wire)


_TAG = "the tag"

_HEAD = f"""\
# Every field of the four documents

Who reads each field into what, and who writes it from what: `{COMMAND}` makes this
page from the codecs and from [fields/](fields), which lists what each document has.  A
test fails for a field that no codec knows, for one that is decoded and then unused, and
for an empty cell without a reason.

"Read into" names the attribute that gets the value, or the function that decides by it;
"written from" is the source's expression.  A field marked † is not in the document.
"""


def _section(table: WireTable) -> str:
    lines = [f"\n## {table.title}\n", f"Document: {table.document}.\n"]
    for message in table.messages:
        lines += [f"### `{message.name}`, {_DIRECTIONS[message.by]}\n"]
        lines += [f"{message.about}.\n"] if message.about else []
        lines += ["| field | coordinator | worker |", "| --- | --- | --- |"]
        for row in table.rows:
            if row.message is message:
                lines.append(_line(row))
        lines.append("")
    if table.beyond:
        lines += ["### Beyond the document\n", "| class | fields | what it is |"]
        lines += ["| --- | --- | --- |"]
        for name, what in sorted(table.beyond.items()):
            fields = ", ".join(f"`{each}`" for each in table.names_of(name))
            lines.append(f"| `{name}` | {fields} | {what} |")
    if table.unread:
        lines += ["\n| decoded and not used | reason |", "| --- | --- |"]
        lines += [f"| `{name}` | {why} |" for name, why in table.unread.items()]
    return "\n".join(lines).rstrip() + "\n"


_DIRECTIONS = {
    "worker": "worker → coordinator",
    "coordinator": "coordinator → worker",
    "both": "either way",
}


def _line(row: Row) -> str:
    name = f"`{row.name}`"
    if row.extension:
        name += f" † {row.extension}"
    shown = ["; ".join(str(c) for c in row.cells if c.role == role) for role in ROLES]
    if row.message.by == "both" and shown[0] == shown[1]:
        shown[1] = "the same"
    return f"| {name} | {_escaped(shown[0])} | {_escaped(shown[1])} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _message(name: str, data: Mapping[str, Any]) -> MessageSpec:
    unknown = data.keys() - {*_KEYS}
    assert not unknown, f"{name}: unknown keys {unknown}"
    default = [data["class"]] if "class" in data else []
    return MessageSpec(
        name,
        data["by"],
        data.get("about", ""),
        tuple(data.get("read", default)),
        tuple(data.get("write", default)),
        tuple(data.get("fields", ())),
        data.get("extensions", {}),
        tuple(data.get("open", ())),
        data.get("inner", {}),
        data.get("at", {}),
        data.get("reasons", {}),
    )


_KEYS = (
    "by",
    "about",
    "class",
    "read",
    "write",
    "fields",
    "extensions",
    "open",
    "inner",
    "at",
    "reasons",
)


def _all_places(message: MessageSpec) -> Iterator[Sequence[str]]:
    for each in message.at.values():
        yield from each.values()


def _paths_in(value: object, prefix: str = "") -> Iterator[str]:
    match value:
        case dict():
            for name, inner in value.items():
                yield f"{prefix}{name}"
                yield from _paths_in(inner, f"{prefix}{name}.")
        case list():
            for inner in value:
                yield from _paths_in(inner, prefix)
        case _:
            pass


def _is_struct(made: Any) -> bool:
    return isinstance(made, type) and issubclass(made, msgspec.Struct)


@cache
def _read_beside(wire: str) -> frozenset[str]:
    return read_elsewhere(wire)


def _definition(wire: str, module: str, name: str) -> ast.AST | None:
    """Return a function, a class, a method or a constant of a module."""
    folder = SOURCE if module.startswith("/") else SOURCE / "protocols" / wire
    node: ast.AST = parsed(folder / f"{module.lstrip('/')}.py")
    for part in name.split("."):
        found = [
            each
            for each in getattr(node, "body", [])
            if getattr(each, "name", "") == part
            or any(getattr(t, "id", "") == part for t in getattr(each, "targets", []))
            or getattr(getattr(each, "target", None), "id", "") == part
        ]
        if not found:
            return None
        node = found[0]
    return node


def _values_under(flow: Flow, node: ast.AST, name: str) -> Iterator[str]:
    """Yield the values that a dictionary gets under a name."""
    for each in ast.walk(node):
        match each:
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == name:
                        yield from flow.explained(value, node)
            case ast.Assign(targets=[ast.Subscript(slice=ast.Constant(key))]):
                if key == name:
                    yield from flow.explained(each.value, node)
            case _:
                pass


def _mentions(node: ast.AST, word: str) -> bool:
    """Whether a word is a name or in a text of some code, beside its docstring."""
    pattern = re.compile(rf"\b{re.escape(word)}\b")
    docstrings = {each.value for each in ast.walk(node) if isinstance(each, ast.Expr)}
    for each in ast.walk(node):
        if each in docstrings:
            continue
        match each:
            case ast.Name(found) | ast.Attribute(attr=found) | ast.arg(arg=found):
                if found == word:
                    return True
            case ast.keyword(arg=found) if found == word:
                return True
            case ast.Constant(str(text)) if pattern.search(text):
                return True
            case ast.Constant(bytes(data)) if pattern.search(data.decode("latin-1")):
                return True
    return False
