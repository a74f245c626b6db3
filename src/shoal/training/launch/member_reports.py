"""A member's reports: events for the watchers of its run, and notes for other members.

Reports never delay the script: beyond a limit, lines are left out, and counted.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from shoal.training import run_events
from shoal.training.run_events import LINES_MAX, RANKS_MAX, TEXT_MAX, Message
from shoal.training.run_link import RunOver
from shoal.training.run_rounds import MEMBER, NO_ROUND, ROUND, Round

FLUSH_INTERVAL = 0.2  # seconds between reports of output and numbers
UNSENT_LINES_MAX = 1000  # lines of one rank that wait; the oldest are left out
EVENTS_PER_FLUSH = 4  # of a rank's output
EVENT_SIZE = 8000  # characters of one: below a message's limit however it is encoded


class EventLink(Protocol):
    """The connection of a member to the events of its run."""

    def send(self, message: Message) -> bool:
        """Queue a message; return False if it cannot be sent."""

    def receive(self, timeout: float | None = None) -> Message | None:
        """Wait for a message."""


class MemberReports:
    """The reports of the member ``node``, which may have several ranks.

    Any thread may report.  ``greeting`` is that of the link.
    """

    def __init__(self, node: int) -> None:
        self.round = Round(NO_ROUND, ())
        """Where the script runs now, as far as this member knows."""
        self._node = node
        self._changed = threading.Condition()
        self._over: RunOver | None = None
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._lines: dict[int, deque[str]] = {}
        self._left_out: dict[int, int] = {}
        self._bars: dict[int, str] = {}
        self._values: dict[int, Mapping[str, float]] = {}
        self._hashes: dict[int, tuple[int, str]] = {}
        self._own_notes: dict[str, str] = {}
        self._notes: dict[str, str] = {}  # of all members
        self._link: EventLink | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._flush_periodically, daemon=True)
        self._reader = threading.Thread(target=self._receive, daemon=True)

    def start(self, link: EventLink) -> None:
        """Report over a link from now on."""
        self._link = link
        self._thread.start()
        self._reader.start()

    def greeting(self) -> Sequence[Message]:
        """Return the messages to send over each new connection."""
        with self._lock:
            notes = [
                {run_events.NOTE: key, "value": value}
                for key, value in self._own_notes.items()
            ]
        return [*notes, {MEMBER: self._node, **self.round.message()}]

    def event(self, kind: str, rank: int, text: str = "") -> None:
        """Report a run event."""
        self._flush_all()
        self._send({"event": kind, "rank": rank, "text": text[:TEXT_MAX]})

    def line(self, rank: int, line: str) -> None:
        """Report a line of a rank's output."""
        with self._lock:
            self._bars.pop(rank, None)  # the line comes after it
            lines = self._lines.setdefault(rank, deque())
            lines.append(line[: run_events.LINE_MAX])
            if len(lines) > UNSENT_LINES_MAX:
                lines.popleft()
                self._left_out[rank] = self._left_out.get(rank, 0) + 1

    def bar(self, rank: int, bar: str) -> None:
        """Report a progress bar, which replaces the one before; the newest is sent."""
        with self._lock:
            self._bars[rank] = bar

    def values(self, rank: int, values: Mapping[str, float]) -> None:
        """Report numbers of a rank; the newest of each name is sent."""
        with self._lock:
            merged = {**self._values.get(rank, {}), **values}
            self._values[rank] = dict(list(merged.items())[-run_events.VALUES_MAX :])

    def hash(self, rank: int, step: int, text: str) -> None:
        """Report the hash of a rank's parameters after a step; the newest is sent."""
        with self._lock:
            self._hashes[rank] = (step, text)

    def leave_note(self, key: str, value: str) -> None:
        """Leave a note for the other members, again with each connection."""
        with self._lock:
            self._own_notes[key] = self._notes[key] = value
        self._send({run_events.NOTE: key, "value": value})

    @property
    def master(self) -> str | None:
        """The note of the member that has rank 0; None: there is none."""
        return self._notes.get(run_events.MASTER)

    def wait(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait for a condition of what was received; return False after a timeout.

        ``wake`` says that it may have changed otherwise.  Raises RunOver.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or condition(), timeout)
            if self._over is not None:
                raise self._over
            return condition()

    def wake(self) -> None:
        """Let ``wait`` look again."""
        with self._changed:
            self._changed.notify_all()

    def _receive(self) -> None:
        """Receive messages, in a thread."""
        assert self._link is not None, "started before"
        over, message = None, None
        while over is None and not self._closing.is_set():
            try:
                message = self._link.receive(FLUSH_INTERVAL)
            except RunOver as error:
                over = error
            with self._changed:
                self._over = over
                if message is not None and over is None:
                    self._on_message(message)
                self._changed.notify_all()

    def _on_message(self, message: Message) -> None:
        name, value = message.get(run_events.NOTE), message.get("value")
        if ROUND in message:
            self.round = Round.of(message, RANKS_MAX)
        elif isinstance(name, str) and isinstance(value, str):
            self._notes[name] = value
        elif isinstance(name, str):
            self._notes.pop(name, None)

    def flush(self) -> None:
        """Send the waiting lines and numbers."""
        with self._sending:  # so that no event overtakes what another thread took
            with self._lock:
                messages = [*self._pending()]
            for each in messages:
                self._send(each)

    def close(self) -> None:
        """Send what waits, and report nothing more."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._flush_all()

    def _flush_all(self) -> None:
        self.flush()
        while self._lines:
            self.flush()

    def _pending(self) -> list[Message]:
        messages: list[Message] = []
        for rank, lines in list(self._lines.items()):
            left_out = self._left_out.pop(rank, 0)
            first = [f"… {left_out} lines left out"] if left_out else []
            for _ in range(EVENTS_PER_FLUSH):
                if not lines:
                    del self._lines[rank]
                    break
                taken, first = [*first, *_next_lines(lines)], []
                messages.append(
                    {"event": run_events.OUTPUT, "rank": rank, "lines": taken}
                )
        for rank, bar in self._bars.items():
            messages.append({"event": run_events.OUTPUT, "rank": rank, "lines": [bar]})
        self._bars.clear()
        for rank, values in self._values.items():
            messages.append(
                {"event": run_events.PROGRESS, "rank": rank, "values": values}
            )
        for rank, (step, text) in self._hashes.items():
            message: Message = {"event": run_events.PROGRESS, "rank": rank}
            hashed: Message = {"values": {}, "hash": text, "hash_step": step}
            messages.append({**message, **hashed})
        self._values, self._hashes = {}, {}
        return messages

    def _send(self, message: Message) -> None:
        if self._link is not None:
            self._link.send(message)

    def _flush_periodically(self) -> None:
        while not self._closing.wait(FLUSH_INTERVAL):
            self.flush()


def _next_lines(lines: deque[str]) -> Iterator[str]:
    """Remove the lines of one event, and yield them."""
    size, count = 0, 0
    while lines and count < LINES_MAX - 1 and size + len(lines[0]) <= EVENT_SIZE:
        size, count = size + len(lines[0]), count + 1
        yield lines.popleft()
