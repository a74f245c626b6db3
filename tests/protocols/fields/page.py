"""The page of fields that Shoal does not use: ``docs/protocols/fields.md``."""

from collections import defaultdict
from collections.abc import Iterator

from protocols.fields.wire import DATA, NOTES, WIRES, Section, Wire, wire
from shoal.protocols.seam.document_fields import Undocumented, Unread, Unwritten

PAGE = DATA.with_suffix(".md")
HEAD = """\
# Unused fields of the four documents

The fields that Shoal does not read or does not write, and why, and those that the
documents lack.  All other fields of the documents, which [fields/](fields) lists, are
read and written.  `make fields` makes this page from the notes at the codecs' fields.
A test fails for a field that no codec knows, for one that is decoded and then unused,
and for an obsolete reason.
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
        fates = {name: _fate(made, section, name) for name in made.rows(section)}
        unused = {name: fate for name, fate in fates.items() if fate != USED}
        if not unused:
            continue
        yield f"### `{section.name}`, {WAYS[section.by]}\n"
        yield f"{section.about and f'{section.about}. '}{_codecs(section)}\n"
        yield from (f"- {names}: {fate}" for fate, names in _grouped(unused))
        yield ""
    if rows := [*_beside(made)]:
        yield "### Beside the document\n\n| struct | what it is | not read |"
        yield "| --- | --- | --- |"
        yield from rows
        yield ""


def _beside(made: Wire) -> Iterator[str]:
    for title in made.beside:
        about = str(made.structs[title].__doc__).partition("\n")[0].replace("``", "`")
        fields = made.fields[title].items()
        unread = {n: f.notes[Unread] for n, f in fields if Unread in f.notes}
        if unread:
            cells = [f"{names}: {why}" for why, names in _grouped(unread)]
            yield f"| `{title}` | {about} | {'; '.join(cells)} |"


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
