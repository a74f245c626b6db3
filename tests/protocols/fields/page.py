"""The page of all fields of all documents: ``docs/protocols/fields.md``."""

from collections import defaultdict
from collections.abc import Iterator

from protocols.fields.wire import DATA, NOTES, WIRES, Section, Wire, wire
from shoal.protocols.seam.document_fields import Undocumented, Unread, Unwritten

PAGE = DATA.with_suffix(".md")
HEAD = """\
# Every field of the four documents

Whether the receiver of a field reads it, whether its sender writes it, and why not.
`make fields` makes this page from the notes at the codecs' fields and from
[fields/](fields), which lists each document's fields.  A test fails for a field that no
codec knows, for one that is decoded and then unused, and for an obsolete reason.
"""
NEXT = "**Next:** [back to the protocols](README.md).\n"
USED = "read and written"
WAYS = {
    "worker": "worker → coordinator",
    "coordinator": "coordinator → worker",
    "both": "either way",
}


def page() -> str:
    """Return the page, as it should be."""
    lines = (line for name in WIRES for line in _lines(wire(name)))
    return "\n".join([HEAD, *lines, NEXT])


def _lines(made: Wire) -> Iterator[str]:
    yield f"## {made.title}\n\nDocument: {made.document}.\n"
    for section in made.sections:
        yield f"### `{section.name}`, {WAYS[section.by]}\n"
        yield f"{section.about and f'{section.about}. '}{_codecs(section)}\n"
        fates = {name: _fate(made, section, name) for name in made.rows(section)}
        if used := [f"`{name}`" for name, fate in fates.items() if fate == USED]:
            yield f"{USED.capitalize()}: {', '.join(used)}.\n"
        others = {name: fate for name, fate in fates.items() if fate != USED}
        yield from (f"- {names}: {fate}" for fate, names in _grouped(others))
        if others:
            yield ""
    if made.beside:
        yield "### Beside the document\n\n| struct | what it is | fields |"
        yield "| --- | --- | --- |"
    for title in made.beside:
        about = str(made.structs[title].__doc__).partition("\n")[0].replace("``", "`")
        fields = made.fields[title].items()
        unread = {name: field.notes.get(Unread, "") for name, field in fields}
        cells = [f"{n}{why and f' not read: {why}'}" for why, n in _grouped(unread)]
        yield f"| `{title}` | {about} | {'; '.join(cells)} |"
    if made.beside:
        yield ""


def _codecs(section: Section) -> str:
    found = [(each, "`, `".join(section.codecs(each))) for each in NOTES]
    if found[0][1] == found[1][1]:
        return f"Codec: `{found[0][1]}`."
    return " ".join(f"To {each}: `{codecs}`." for each, codecs in found if codecs)


def _fate(made: Wire, section: Section, name: str) -> str:
    notes = (Unread, Unwritten, Undocumented)
    unread, unwritten, what = (made.said(section, name, note) for note in notes)
    done = " and ".join(["read"] * (not unread) + ["written"] * (not unwritten))
    why = {"not read": unread, "not written": unwritten, "not in the document": what}
    if unread == unwritten:
        why = {"neither read nor written": unread, "not in the document": what}
    return "; ".join([done] * bool(done) + [f"{n}: {why[n]}" for n in why if why[n]])


def _grouped(texts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each text, with the names that have it."""
    names = defaultdict[str, list[str]](list)
    for name, text in texts.items():
        names[text].append(f"`{name}`")
    yield from ((text, ", ".join(names[text])) for text in names)
