"""What becomes of each field of a wire's document, and what is wrong about it.

``docs/protocols/fields/<wire>.toml`` lists the objects of the document: its messages,
and what a field of the same name contains::

    [register]
    by = "worker"                 # who writes it: worker, coordinator or both
    fields = [..]                 # of the document
    codec = ["RegisterProvider"]  # what reads and writes it; or apart: read, write
    words = {FIELD = "word"}      # what the code calls it, if it is in no struct
    unread = {FIELD = ".."}       # why, if it is in no struct; a text: for all fields
    unwritten = {FIELD = ".."}    # likewise
    undocumented = {FIELD = ".."} # what else is sent, if it is in no struct
    open = true                   # it may have any other fields
    about = ".."                  # for the page

A codec is a struct, or code that mentions the field: ``module`` or ``module:name``.
What a struct's field says of itself stands there: see
``shoal.protocols.seam.document_fields``.

The check knows names alone.  A struct's field counts as read if ``.name`` occurs in the
wire, whatever the object: of two fields of one name, one may be unused.
"""

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

import msgspec
from msgspec import Struct

from protocols.fields.names import Names, owned
from shoal.protocols.seam.document_fields import Undocumented, Unread, Unwritten

DATA = Path(__file__).parents[3] / "docs" / "protocols" / "fields"
WIRES = tuple(sorted(path.stem for path in DATA.glob("*.toml")))

NOTES: Mapping[str, type[str]] = {"read": Unread, "write": Unwritten}
UNUSED = {"read": "decoded and then unused", "write": "never written"}
TAG = "its tag"


class Section(Struct, forbid_unknown_fields=True):
    """An object of a document: see the module."""

    name: str
    by: str
    fields: list[str]
    codec: list[str] = []
    read: list[str] = []
    write: list[str] = []
    words: dict[str, str] = {}
    unread: dict[str, str] | str = {}
    unwritten: dict[str, str] | str = {}
    undocumented: dict[str, str] = {}
    open: bool = False
    about: str = ""

    def codecs(self, *actions: str) -> list[str]:
        """Return what reads it, what writes it, or both."""
        found = (getattr(self, each) or self.codec for each in actions or NOTES)
        return [codec for codecs in found for codec in codecs]

    def reasons(self, note: type[str]) -> dict[str, str]:
        """Return what the list notes of fields."""
        given = getattr(self, note.__name__.lower())
        return dict.fromkeys(self.fields, given) if isinstance(given, str) else given


class Field(NamedTuple):
    """A field of a struct; ``always``: it is written even at its default."""

    owner: str
    name: str
    notes: Mapping[type[str], str]
    always: bool


class Wire:
    """A document, and its codec: fields are by struct, and by name in the document."""

    def __init__(self, name: str) -> None:
        data = tomllib.loads((DATA / f"{name}.toml").read_text())
        self.name = name
        self.title: str = data.pop("title")
        self.document: str = data.pop("document")
        sections = ({"name": each, **data[each]} for each in data)
        self.sections = [msgspec.convert(each, Section) for each in sections]
        self.names = _names(name)
        rooms = (f"protocols/{name}", "protocols/seam", "domain")
        self.owned = sum(map(owned, rooms), start=Counter[str]())
        self.done = {"read": {*self.names.read}, "write": {*self.names.written}}
        self.structs = dict(_structs(name, [*self.names.code]))
        self.fields = {each: _fields(self.structs[each]) for each in self.structs}
        listed = {codec for each in self.sections for codec in each.codecs()}
        bases = {base for made in self.structs.values() for base in made.__bases__}
        others = {each for each in self.structs if self.structs[each] not in bases}
        self.beside = [each for each in self.structs if each in others - listed]
        """The structs that the document lacks."""

    def rows(self, section: Section) -> list[str]:
        """Return the fields of an object, also those that the document lacks."""
        fields = (self.fields.get(each, {}) for each in section.codecs())
        noted = (n for each in fields for n in each if Undocumented in each[n].notes)
        return [*dict.fromkeys((*section.fields, *section.undocumented, *noted))]

    def said(self, section: Section, name: str, note: type[str]) -> str:
        """Return what the list or a codec notes of a field; "" for nothing."""
        fields = (self.fields.get(each, {}).get(name) for each in section.codecs())
        noted = (each.notes[note] for each in fields if each and note in each.notes)
        return section.reasons(note).get(name) or next(noted, "")

    def faults(self) -> list[str]:
        """Return what is missing or obsolete, with what to do."""
        sections = (self._faults_of(each) for each in self.sections)
        structs = (self._faults_of_struct(each) for each in self.structs)
        found = (fault for faults in (*sections, *structs) for fault in faults)
        return [f"{self.name}: {fault}" for fault in dict.fromkeys(found)]

    def _faults_of(self, section: Section) -> Iterator[str]:
        for codec in {*section.codecs()} - {*self.fields, *self.names.code}:
            yield f"{section.name}: there is no {codec}; name its codec"
            return
        rows = self.rows(section)
        told = {name for note in NOTES.values() for name in section.reasons(note)}
        for name in {*section.words, *told} - {*rows}:
            yield f"{section.name}.{name}: not listed; list it, or remove it"
        for action, note in NOTES.items():
            codecs = section.codecs(action)
            known = {name for each in codecs for name in self.fields.get(each, ())}
            mentioned = {word for each in codecs for word in self.names.words(each)}
            for name in rows:
                is_mentioned = section.words.get(name, name) in mentioned
                reason, listed = self.said(section, name, note), section.reasons(note)
                where = f"{section.name}.{name}"
                if (is_mentioned and reason) or (name in known and name in listed):
                    yield f"{where}: a codec {action}s it; remove the reason"
                elif not (name in known or is_mentioned or reason):
                    yield f"{where}: no codec {action}s it; {action} it, or say why not"

    def _faults_of_struct(self, title: str) -> Iterator[str]:
        users = [each for each in self.sections if title in each.codecs()]
        listed = {name for each in users for name in (*each.fields, *each.undocumented)}
        actions = {a for a in NOTES for each in users if title in each.codecs(a)}
        if title in self.beside:
            actions = {"read"}
            if self.structs[title].__doc__ is None:
                yield f"{title}: the document lacks it; say in a docstring what it is"
        for name, (owner, attribute, notes, always) in self.fields[title].items():
            where = f"{owner}.{attribute}"
            if users and name in listed and Undocumented in notes:
                yield f"{where}: the document has it; remove Undocumented"
            if users and name not in listed and Undocumented not in notes:
                yield f"{where}: the document lacks it; add Undocumented(what)"
            for action, note in NOTES.items():
                certain = attribute == TAG or (always and action == "write")
                named = attribute in self.done[action]
                done = certain or named or title in self.done[action]
                if note not in notes and action in actions and not done:
                    add = f"{action} it, or add {note.__name__}(why)"
                    yield f"{where}: {UNUSED[action]}; {add}"
                alone = named and self.owned[attribute] == 1  # it can be no other's
                if note in notes and (certain or alone):
                    yield f"{where}: a codec {action}s it; remove {note.__name__}"


wire = cache(Wire)
_names = cache(Names)


def _structs(wire: str, places: list[str]) -> Iterator[tuple[str, type[Struct]]]:
    """Yield the structs that a wire's modules declare."""
    for place in [each.replace("/", ".") for each in places if ":" not in each]:
        dotted = f"shoal.protocols.{wire}.{place}".removesuffix(".__init__")
        for name, made in vars(import_module(dotted)).items():
            is_struct = isinstance(made, type) and issubclass(made, Struct)
            if is_struct and (made.__module__, made.__name__) == (dotted, name):
                yield name, made


def _fields(made: type[Struct]) -> Mapping[str, Field]:
    config, found = made.__struct_config__, {}
    if config.tag_field is not None:
        found[config.tag_field] = Field(made.__name__, TAG, {}, True)
    for each in msgspec.structs.fields(made):
        owner = next(c for c in made.__mro__ if each.name in c.__annotations__)
        given = getattr(each.type, "__metadata__", ())
        notes = {type(note): note for note in given if isinstance(note, str)}
        is_made = isinstance(each.default_factory, FunctionType)  # it is never omitted
        omitted = config.omit_defaults or each.default is msgspec.UNSET
        always = each.required or is_made or not omitted
        found[each.encode_name] = Field(owner.__name__, each.name, notes, always)
    return found
