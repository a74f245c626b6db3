"""Shows an answer as it arrives: on a terminal with a sign of waiting, and its speed.

Elsewhere it is the plain text of the answer, and nothing else.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

from shoal.cli.terminal import console, printable
from shoal.cli.use.chat.answer import AnswerPart, ChatStream, ShownKind, StreamedAnswer

REASONS = {
    "length": "truncated at the token limit",
    "content_filter": "blocked by moderation",
}
REASONING_STYLE = "dim italic"


class AnswerDisplay:
    """Prints answers; ``details`` about each go to standard error on a terminal."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._out = console()
        self._notes = console(stderr=True)
        self._details = self._terminal and self._notes.is_terminal
        self._column = 0  # characters since the last line break

    def show(self, stream: ChatStream, model: str) -> StreamedAnswer:
        """Print an answer; raises as ``ChatStream.parts`` does."""
        self._column = 0
        before: ShownKind | None = None
        parts = stream.parts()
        try:
            with _waiting(self._notes, f"{model} …", shown=self._details) as status:
                first = next(parts, None)
                status.stop()
                for part in _chain(first, parts):
                    self._print(part, before)
                    before = part.kind
        finally:
            parts.close()
            self.end_line()
        self._conclude(stream.answer)
        return stream.answer

    def end_line(self) -> None:
        """Begin a new line, unless the cursor is at the beginning of one."""
        if self._column:
            self._out.print()
            self._column = 0

    def note(self, text: str) -> None:
        """Print a remark, on a line of its own."""
        self.end_line()
        self._notes.print(printable(text), style="dim", markup=False)

    def _print(self, part: AnswerPart, before: ShownKind | None) -> None:
        if part.kind is ShownKind.RECONNECTING:
            self.note(f"{part.text}\nwaiting for the coordinator …")
            return
        if part.kind is ShownKind.RESTARTED:
            self.note("the answer begins anew:")
            return
        if part.kind is ShownKind.REASONING and not self._terminal:
            return
        if before is ShownKind.REASONING and part.kind is ShownKind.TEXT:
            self.end_line()
        if not self._terminal:
            print(part.text, end="", flush=True)
            self._column = 0 if part.text.endswith("\n") else 1
            return
        text = printable(part.text)
        style = REASONING_STYLE if part.kind is ShownKind.REASONING else None
        self._out.print(text, style=style, end="", markup=False, soft_wrap=True)
        self._out.file.flush()
        self._column = 0 if text.endswith("\n") else 1

    def _conclude(self, answer: StreamedAnswer) -> None:
        if answer.finish_reason in REASONS:
            print(f"({REASONS[answer.finish_reason]})", file=sys.stderr)
        if self._details and (about := describe(answer)):
            self.note(about)


def describe(answer: StreamedAnswer) -> str:
    """Return the speed of an answer, and which machine gave it."""
    parts = []
    if answer.tokens is not None:
        parts.append(f"{answer.tokens} tokens")
    if (speed := answer.tokens_per_second) is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if answer.first_part_at is not None:
        parts.append(f"first after {answer.first_part_at - answer.began:.1f} s")
    if answer.worker:
        parts.append(f"on {machine(answer.worker)}")
    return ", ".join(parts)


def machine(worker: str) -> str:
    """Return the name of the machine of a worker, ``WIRE:MACHINE/MODEL``."""
    return worker.partition("/")[0].partition(":")[2] or worker


@contextmanager
def _waiting(notes: Console, text: str, *, shown: bool) -> Iterator[Status]:
    status = notes.status(printable(text), spinner="dots", spinner_style="dim")
    if shown:
        status.start()
    try:
        yield status
    finally:
        status.stop()


def _chain(
    first: AnswerPart | None, rest: Iterator[AnswerPart]
) -> Iterator[AnswerPart]:
    if first is not None:
        yield first
        yield from rest
