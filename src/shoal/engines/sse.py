"""Cuts a stream of server-sent events into the data of each.

Source: WHATWG HTML, 9.2.6 "Interpreting an event stream".  Only ``data`` is kept;
names, ids and comments carry nothing that engines need.
"""

import re

from shoal.domain.errors import LimitExceeded

EVENT_MAX = 1024 * 1024  # bytes of one event; a chunk of an answer has a few hundred

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventReader:
    """Feed it reads of any size: it returns the data of each event that is whole.

    Most reads are whole events of one line each, which is looked for first.  Quadratic
    in the reads that one line takes; lines are of a few hundred bytes.
    """

    def __init__(self) -> None:
        self._unfinished = b""
        self._data: list[bytes] = []
        self._held = 0  # bytes of the event in hand
        self._first = True

    def feed(self, data: bytes) -> list[bytes]:
        """Take a read.  Raises LimitExceeded if an event is too large to be held."""
        clean = not (self._held or self._unfinished or self._first)
        if clean and (plain := _plain_events(data)) is not None:
            return plain
        *lines, self._unfinished = self._lines(self._unfinished + data)
        events = [event for line in lines if (event := self._take(line)) is not None]
        if (held := self._held + len(self._unfinished)) > EVENT_MAX:
            raise LimitExceeded("event", held, EVENT_MAX)
        return events

    def _lines(self, data: bytes) -> list[bytes]:
        # A carriage return at the very end may be half of a line's end: wait for more.
        if data.endswith(b"\r"):
            *lines, last = _LINE_END.split(data[:-1])
            return [*lines, last + b"\r"]
        return _LINE_END.split(data)

    def _take(self, line: bytes) -> bytes | None:
        if self._first:
            self._first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            event = b"\n".join(self._data) if self._data else None
            self._data.clear()
            self._held = 0
            return event
        name, _, value = line.partition(b":")
        if name == b"data":
            value = value.removeprefix(b" ")
            self._data.append(value)
            self._held += len(value) + 1  # an empty line is joined to the others too
            if self._held > EVENT_MAX:
                raise LimitExceeded("event", self._held, EVENT_MAX)
        return None


def _plain_events(data: bytes) -> list[bytes] | None:
    """Return the data of events that are whole and of one line; None if any is not."""
    if not data.endswith(b"\n\n") or b"\r" in data or len(data) > EVENT_MAX:
        return None
    blocks = data[:-2].split(b"\n\n")
    for block in blocks:
        if not block.startswith(b"data: ") or b"\n" in block:
            return None
    return [block[6:] for block in blocks]
