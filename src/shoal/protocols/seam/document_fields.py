"""Notes at the fields of wire messages: why a field is not read, not written, or extra.

A note is part of the field's annotation, where msgspec and type checkers ignore it::

    timestamp: Annotated[Date, Unread("the session's own clock decides liveness")]

A field without a note is read, written, and in the wire's document.  A test compares
the notes with the code and the documents; ``make fields`` prints them in
``docs/protocols/fields.md``.
"""


class Unread(str):
    """Why no end reads a field."""

    __slots__ = ()


class Unwritten(str):
    """Why no end writes a field."""

    __slots__ = ()


class Undocumented(str):
    """What a field is that the document lacks: another program sends it, or Shoal."""

    __slots__ = ()
