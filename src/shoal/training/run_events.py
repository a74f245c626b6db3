"""The events of one run: what its members report, for those who watch it.

A run is N durable calls that train together.  Each member reports to the coordinator,
which keeps the newest events and the present notes in memory, and passes new ones to
all connections.  A note is a value that one member leaves for the others, such as the
address of rank 0; it is withdrawn when its member's connection ends.

``RunProgress`` is a run's progress in numbers: its loss and its pace, and how far each
rank is.  It follows from the events, and its memory is bounded.

Only the members of a run, and who submitted it, have its token.  The id of a run is the
token's digest, so that the coordinator checks a token without storing any.
"""

import hashlib
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from shoal.domain.errors import PeerError
from shoal.domain.work import JSON

Message: TypeAlias = Mapping[str, JSON]
"""A message of a run's connections: a JSON object."""

MESSAGE_MAX = 64 << 10  # bytes of a message, of members and of watchers
EVENTS_MAX = 2000  # events that a run keeps
EVENTS_SIZE = 1 << 20  # characters of them, about
HISTORY_MAX = 200  # events of the run's history, which are kept longer
NOTES_MAX = 64
KEY_MAX = 100  # characters of a note's key
VALUE_MAX = 1000  # characters of its value
LINES_MAX = 200  # lines of output in one event
LINE_MAX = 4096  # characters of a line
TEXT_MAX = 2000  # characters of any other text
VALUES_MAX = 16  # numbers that one report has
RANKS_MAX = 1 << 16
POINTS_MAX = 2000  # of a run; then every second one is left out
POINTS_OF_ENDED = 500  # of a run that has ended
RANKS_KEPT = 1024  # of which the progress is kept
INTEGER_MAX = 2**53  # larger ones are not exact as a float
TOKEN_SIZE = 32  # random bytes
ID_SIZE = 32  # hexadecimal digits of a run's id
HASH_MAX = 64  # hexadecimal digits of a hash: those of SHA-256

STARTED, ENDED, OUTPUT, PROGRESS, REMARK = (
    *("started", "ended", "output"),
    *("progress", "remark"),
)
STORY = frozenset({STARTED, ENDED, REMARK})
"""Kinds of events that make up a run's history."""

_HASH = re.compile(rf"[0-9a-f]{{1,{HASH_MAX}}}", re.ASCII)

NOTE, WATCH = "note", "watch"
READY = "ready"  # the key of a message after the present notes
MASTER = "master"  # the note with a round, and the address of its rank 0


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that a member reported; sequence numbers grow, also after a restart."""

    sequence: int
    at: float  # Unix seconds
    kind: str
    fields: Message

    @property
    def message(self) -> Message:
        """The event as its watchers get it."""
        head: Message = {"event": self.kind, "sequence": self.sequence, "at": self.at}
        return {**self.fields, **head}

    @property
    def is_bar(self) -> bool:
        """Whether it is a progress bar, which is not kept: another one replaces it."""
        lines = self.fields.get("lines")
        return (
            isinstance(lines, list) and len(lines) == 1 and str(lines[0])[-1:] == "\r"
        )

    @property
    def size(self) -> int:
        """Its size in characters, about."""
        lines = self.fields.get("lines", ())
        assert isinstance(lines, (list, tuple)), "checked when it was received"
        return 200 + sum(len(str(line)) for line in lines)


@dataclass(slots=True)
class _Connection:
    """A connection of a member or of a watcher."""

    watches: bool = False
    notes: set[str] = field(default_factory=set)  # keys of those that it left


class RunEvents:
    """The events and notes of one run, and the connections that get them.

    Connections are named by their caller.
    """

    def __init__(self) -> None:
        self._connections: dict[str, _Connection] = {}
        self._notes: dict[str, str] = {}
        self._events: deque[RunEvent] = deque()
        self._history: deque[RunEvent] = deque(maxlen=HISTORY_MAX)
        self._size = 0
        self._last = 0
        self.progress = RunProgress()
        """Its loss, pace and progress."""

    @property
    def history(self) -> list[RunEvent]:
        """The events of the run's history, the oldest first."""
        return [*self._history]

    def open(self, name: str) -> Iterator[tuple[str, Message]]:
        """Add a connection; yield the notes for it, and that these were all."""
        self._connections[name] = _Connection()
        for key, value in self._notes.items():
            yield name, {NOTE: key, "value": value}
        yield name, {READY: True}

    def close(self, name: str) -> Iterator[tuple[str, Message]]:
        """Remove a connection; yield the withdrawal of its notes, for the others."""
        connection = self._connections.pop(name, None)
        if connection is None:
            return
        for key in connection.notes:
            del self._notes[key]
            yield from self._to_others("", {NOTE: key, "value": None})

    def receive(
        self, name: str, message: object, at: float
    ) -> list[tuple[str, Message]]:
        """Handle a connection's message; return the messages that follow from it.

        Raises PeerError if it is invalid.
        """
        connection = self._connections[name]
        if not isinstance(message, dict):
            raise PeerError("a message of a run is a JSON object")
        if NOTE in message:
            return self._on_note(name, connection, message)
        if WATCH in message:
            after = message[WATCH]
            if type(after) is not int:
                raise PeerError(f"{WATCH}: expected the number of an event")
            connection.watches = True
            return [
                (name, each.message) for each in self._events if each.sequence > after
            ]
        kind, fields = _checked(message)
        self._follow(kind, fields, at)
        return self._publish(kind, fields, at)

    def remark(self, text: str, at: float) -> list[tuple[str, Message]]:
        """Add a remark of the coordinator's own; return the messages that follow."""
        return self._publish(REMARK, {"text": text[:TEXT_MAX]}, at)

    def _on_note(
        self, name: str, connection: _Connection, message: Message
    ) -> list[tuple[str, Message]]:
        key, value = message[NOTE], message.get("value")
        if not isinstance(key, str) or not 0 < len(key) <= KEY_MAX:
            raise PeerError(f"{NOTE}: expected 1 to {KEY_MAX} characters")
        if not isinstance(value, str) or len(value) > VALUE_MAX:
            raise PeerError(f"{NOTE} {key}: expected up to {VALUE_MAX} characters")
        if key not in self._notes and len(self._notes) >= NOTES_MAX:
            raise PeerError(f"a run has at most {NOTES_MAX} notes")
        for each in self._connections.values():
            each.notes.discard(key)  # of a member that another one has replaced
        self._notes[key] = value
        connection.notes.add(key)
        return self._to_others(name, {NOTE: key, "value": value})

    def _to_others(self, name: str, message: Message) -> list[tuple[str, Message]]:
        return [(other, message) for other in self._connections if other != name]

    def _follow(self, kind: str, fields: Message, at: float) -> None:
        rank, values = fields["rank"], fields.get("values")
        assert isinstance(rank, int), "checked when it was received"
        if kind == STARTED:
            self.progress.start(rank)
        elif kind == ENDED:
            self.progress.end(rank)
        elif kind == PROGRESS and isinstance(values, dict):
            self.progress.report(rank, values, at)
            step, text = fields.get("hash_step"), fields.get("hash")
            if isinstance(step, int) and isinstance(text, str):
                self.progress.report_hash(rank, StepHash(step, text))

    def _publish(
        self, kind: str, fields: Message, at: float
    ) -> list[tuple[str, Message]]:
        self._last = max(self._last + 1, int(at * 1000))
        event = RunEvent(self._last, at, kind, fields)
        if not event.is_bar:
            self._events.append(event)
            self._size += event.size
        while len(self._events) > EVENTS_MAX or self._size > EVENTS_SIZE:
            self._size -= self._events.popleft().size
        if kind in STORY:
            self._history.append(event)
        return [
            (name, event.message)
            for name, each in self._connections.items()
            if each.watches
        ]


def _checked(message: Message) -> tuple[str, Message]:
    """Return the kind and the fields of an event; raises PeerError."""
    kind, rank = message.get("event"), message.get("rank")
    if kind not in (STARTED, ENDED, OUTPUT, PROGRESS, REMARK):
        raise PeerError("event: unknown kind")
    if type(rank) is not int or not 0 <= rank < RANKS_MAX:
        raise PeerError(f"{kind}: rank: expected a number from 0")
    fields: dict[str, JSON] = {"rank": rank}
    if kind == OUTPUT:
        fields["lines"] = _lines(message.get("lines"))
    elif kind == PROGRESS:
        fields["values"] = _values(message.get("values"))
        if "hash" in message:
            fields |= _hash(message)
    else:
        text = message.get("text", "")
        if not isinstance(text, str):
            raise PeerError(f"{kind}: text: expected a text")
        fields["text"] = text[:TEXT_MAX]
    return str(kind), fields


def _lines(lines: JSON) -> list[JSON]:
    if not isinstance(lines, list) or len(lines) > LINES_MAX:
        raise PeerError(f"{OUTPUT}: lines: expected a list of at most {LINES_MAX}")
    if not all(isinstance(each, str) for each in lines):
        raise PeerError(f"{OUTPUT}: lines: expected texts")
    return [str(each)[:LINE_MAX] for each in lines]


def _values(values: JSON) -> Message:
    if not isinstance(values, dict) or len(values) > VALUES_MAX:
        raise PeerError(f"{PROGRESS}: values: expected at most {VALUES_MAX}")
    for name, value in values.items():
        is_number = type(value) is float or (
            type(value) is int and abs(value) <= INTEGER_MAX
        )
        if len(name) > KEY_MAX or not is_number:
            raise PeerError(f"{PROGRESS}: values: expected numbers by their names")
    return values


def _hash(message: Message) -> Message:
    text, step = message["hash"], message.get("hash_step")
    if not isinstance(text, str) or _HASH.fullmatch(text) is None:
        raise PeerError(f"{PROGRESS}: hash: expected up to {HASH_MAX} digits")
    if type(step) is not int or not 0 <= step <= INTEGER_MAX:
        raise PeerError(f"{PROGRESS}: hash_step: expected a number from 0")
    return {"hash": text, "hash_step": step}


class StepPoint(NamedTuple):
    """A step that was reported; ``seconds`` are those of a step since the last one.

    ``at`` is in Unix seconds.
    """

    step: int
    loss: float | None
    seconds: float | None
    at: float


class StepHash(NamedTuple):
    """The hash of a rank's parameters after a step."""

    step: int
    text: str


@dataclass(slots=True)
class RankProgress:
    """How far a rank is; ``running``: it has started and not ended."""

    running: bool = True
    step: int | None = None
    step_seconds: float | None = None
    reported_at: float = 0.0  # Unix seconds
    hash: StepHash | None = None  # the last one


@dataclass(slots=True)
class RunProgress:
    """The points of a run, and its ranks.

    The points are those of one rank, which has them for all: the first that reported a
    step, or a lower one.
    """

    ranks: dict[int, RankProgress] = field(default_factory=dict)
    _points: list[StepPoint] = field(default_factory=list)
    _latest: StepPoint | None = None  # if it is not among the points
    _gap: int = 1  # steps between two points
    _told_by: int | None = None  # the rank whose points these are
    _hashed: int | None = None  # the step of the last hash of any rank

    @property
    def points(self) -> list[StepPoint]:
        """The points, by their steps; the last one is the newest."""
        return self._points + ([] if self._latest is None else [self._latest])

    @property
    def last(self) -> StepPoint | None:
        """The newest point."""
        return self._latest or (self._points[-1] if self._points else None)

    def start(self, rank: int) -> None:
        """Note that a rank has started."""
        if (known := self._rank(rank)) is not None:
            known.running = True

    def end(self, rank: int) -> None:
        """Note that a rank has ended."""
        if (known := self._rank(rank)) is not None:
            known.running = False

    def report(self, rank: int, values: Mapping[str, object], at: float) -> None:
        """Note numbers that a rank reported, of which ``step`` and ``loss`` count."""
        known, step = self._rank(rank), values.get("step")
        if known is None or not isinstance(step, int | float):
            return
        if not 0 <= step <= INTEGER_MAX:  # also if it is not a number
            return
        step = int(step)
        seconds = known.step_seconds
        if known.step is not None and step > known.step and at > known.reported_at:
            seconds = (at - known.reported_at) / (step - known.step)
        known.step, known.step_seconds, known.reported_at = step, seconds, at
        if self._told_by is None or rank <= self._told_by:
            self._told_by = rank
            loss = values.get("loss")
            shown = float(loss) if isinstance(loss, int | float) else None
            self._add(StepPoint(step, shown, seconds, at))

    def report_hash(self, rank: int, found: StepHash) -> None:
        """Note the hash of a rank's parameters."""
        if (known := self._rank(rank)) is not None:
            known.hash, self._hashed = found, found.step

    def hash_of(self, rank: int) -> str | None:
        """Return the hash of a rank's parameters, if it is after the last such step.

        So all that are returned are of the same step, and can be compared.
        """
        known = self.ranks.get(rank)
        if known is None or known.hash is None or known.hash.step != self._hashed:
            return None
        return known.hash.text

    def shrink(self) -> None:
        """Leave out points of a run that has ended."""
        while len(self._points) > POINTS_OF_ENDED:
            self._thin()

    def _rank(self, rank: int) -> RankProgress | None:
        if rank not in self.ranks and len(self.ranks) >= RANKS_KEPT:
            return None
        return self.ranks.setdefault(rank, RankProgress())

    def _add(self, point: StepPoint) -> None:
        self._latest = None
        # A run that goes on from a checkpoint repeats steps.
        while self._points and self._points[-1].step >= point.step:
            self._points.pop()
        if self._points and point.step - self._points[-1].step < self._gap:
            self._latest = point
            return
        self._points.append(point)
        if len(self._points) >= POINTS_MAX:
            self._thin()

    def _thin(self) -> None:
        self._latest = self.last
        self._points = self._points[::2]
        if self._latest == self._points[-1]:
            self._latest = None
        self._gap *= 2


def member_key(run_id: str, node: int) -> str:
    """Return the idempotency key of a member's call, by which its job is found."""
    return f"{run_id}/{node}"


def run_id_of(token: str) -> str:
    """Return the id of the run that a token belongs to."""
    return hashlib.sha256(token.encode()).hexdigest()[:ID_SIZE]
