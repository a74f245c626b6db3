"""Shows a training run on the terminal: a table of its ranks, and what they print."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.cli.terminal import printable
from shoal.training import run_events
from shoal.training.run_events import Message

COLUMNS = {
    "step": "STEP",
    "loss": "LOSS",
    "samples_per_s": "SAMPLES/S",
    "sync": "SYNC",
    "generation": "GENERATION",
}
"""The numbers that have a column, by the names under which scripts report them."""

WAITING = "waiting"
SUBMITTED, DONE, FAILED = "submitted", "done", "failed"
CANCELLED = "cancelled"
"""Kinds of events of the program that watches."""


@dataclass(slots=True)
class RankStatus:
    """What is known of one rank."""

    state: str = WAITING
    values: dict[str, float] = field(default_factory=dict)


class RunStatus:
    """The present state of all ranks, from their events, and their progress bars."""

    def __init__(self, nodes: int, processes: int) -> None:
        self.bars: dict[str, str] = {}
        self.ranks = {rank: RankStatus() for rank in range(nodes * processes)}
        self._processes = processes

    def update(self, event: Message) -> None:
        """Apply an event."""
        rank = event.get("rank")
        if not isinstance(rank, int) or rank not in self.ranks:
            return
        kind, values = event["event"], event.get("values")
        if kind in (run_events.STARTED, run_events.ENDED):
            for each in range(rank, rank + self._processes):  # of one machine
                self.ranks[each].state = "running" if kind == "started" else "ended"
        elif isinstance(values, Mapping):
            numbers = {
                name: value
                for name, value in values.items()
                if isinstance(value, (int, float))
            }
            self.ranks[rank].values |= numbers

    def rows(self) -> list[tuple[str, ...]]:
        """Return the rows of the table."""
        return [
            (
                str(rank),
                each.state,
                *(format_value(name, each.values.get(name)) for name in COLUMNS),
            )
            for rank, each in self.ranks.items()
        ]


HEAD = ("RANK", "STATE", *COLUMNS.values())


def format_value(name: str, value: float | None) -> str:
    """Return a number for its column; empty: it was not reported."""
    if value is None:
        return ""
    if name == "sync":
        return f"{value:.0%}"
    if name in ("step", "generation"):
        return f"{value:.0f}"
    return f"{value:.4g}"


def event_lines(event: Message) -> Iterator[str]:
    """Yield an event as lines for people, each with its rank."""
    rank, kind = event.get("rank"), event["event"]
    who = "run" if rank is None else f"rank {rank}"
    lines = event.get("lines")
    if isinstance(lines, (list, tuple)):
        for line in lines:
            text = str(line)
            bar = "\r" if text.endswith("\r") else ""
            yield f"[{who}] {printable(text.removesuffix(bar))}{bar}"
    elif kind in (run_events.REMARK, SUBMITTED, DONE, CANCELLED):
        yield f"[{who}] {printable(str(event['text']))}"
    elif kind in (run_events.STARTED, run_events.ENDED):
        yield f"[{who}] {kind}: {printable(str(event['text']))}"


class RunDisplay(Protocol):
    """Shows events as they come."""

    def show(self, event: Message) -> None:
        """Show an event."""


class JsonDisplay:
    """Prints each event as one JSON object."""

    def show(self, event: Message) -> None:
        print(json.dumps(event), flush=True)


class LineDisplay:
    """Prints lines: for a terminal without a cursor, and for files."""

    def show(self, event: Message) -> None:
        for line in event_lines(event):
            print(line, end="" if line.endswith("\r") else "\n", flush=True)


class TableDisplay:
    """Prints lines above a table of the ranks that stays at the bottom."""

    def __init__(self, status: RunStatus, live: Any) -> None:
        self._status = status
        self._live = live

    def show(self, event: Message) -> None:
        self._status.update(event)
        for line in event_lines(event):
            if line.endswith("\r"):
                self._status.bars[line.partition("]")[0]] = line.rstrip()
            else:
                self._status.bars.pop(line.partition("]")[0], None)
                self._live.console.print(line, markup=False, highlight=False)
        self._live.update(_view(self._status))


@contextmanager
def display(nodes: int, processes: int, *, as_json: bool) -> Iterator[RunDisplay]:
    """Show a run within the block, as fits where standard output goes."""
    if as_json:
        yield JsonDisplay()
    elif not sys.stdout.isatty():
        yield LineDisplay()
    else:
        # Imported late: it takes a third of the time of a quick command.
        from rich.live import Live

        status = RunStatus(nodes, processes)
        with Live(_view(status), refresh_per_second=4) as live:
            yield TableDisplay(status, live)


def rank_table(status: RunStatus) -> Any:
    """Return the table of the ranks."""
    from rich.table import Table

    table = Table(*HEAD, box=None, header_style="bold")
    for row in status.rows():
        table.add_row(*row)
    return table


def _view(status: RunStatus) -> Any:
    """Return the table of the ranks, below their progress bars."""
    from rich.console import Group
    from rich.text import Text

    return Group(*map(Text, status.bars.values()), rank_table(status))
