"""One streamed answer of a model: it survives the coordinator's restart, and is shown.

The request has an idempotency key: sent again, it attaches to the same job, whose
stream starts over.  What was shown before is skipped.  When its reader stops, the
job is cancelled; when the command is killed, the coordinator does that shortly after.

On a terminal an answer has a sign of waiting, and its speed.  Elsewhere it is its plain
text, and nothing else.
"""

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rich.console import Console
from rich.status import Status

from shoal.cli.terminal import console, printable
from shoal.client.coordinator import CoordinatorApi
from shoal.client.errors import ConnectionLost
from shoal.domain.errors import NotFound, ShoalError

PATH = "/v1/chat/completions"
JOBS = "/v1/jobs"
RECONNECT_TIMEOUT = 60.0  # seconds to wait for a coordinator that is down
RETRY_DELAY = 0.5  # seconds between attempts
UNATTENDED = 20  # seconds that the job goes on without this command
WAITS = "waits for a worker"  # begins a comment of the stream, which says what for
REASONING_FIELDS = ("reasoning_content", "reasoning")


class ShownKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    RECONNECTING = "reconnecting"  # the text is why
    WAITING = "waiting"  # the text is what for
    RESTARTED = "restarted"  # the answer differs from what was shown, and starts over


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """What to show next."""

    kind: ShownKind
    text: str = ""


@dataclass(slots=True)
class StreamedAnswer:
    """What has arrived of an answer; times are in seconds of the given clock."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    worker: str = ""
    tokens: int | None = None
    began: float = 0.0
    first_part_at: float | None = None
    ended: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """The speed after the first token; None if it is unknown."""
        if self.first_part_at is None or not self.tokens or self.tokens < 2:
            return None
        seconds = self.ended - self.first_part_at
        return (self.tokens - 1) / seconds if seconds > 0 else None


class ChatStream:
    """Requests an answer, and goes on with it after a lost connection."""

    def __init__(
        self,
        api: CoordinatorApi,
        body: Mapping[str, Any],
        key: str,
        now: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._api = api
        self._body = {
            **body,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._headers = {
            "Idempotency-Key": key,
            "x-shoal-unattended-seconds": str(UNATTENDED),
        }
        self._now, self._sleep = now, sleep
        self._connected = False
        self.answer = StreamedAnswer(began=now())

    def parts(self) -> Generator[AnswerPart, None, None]:
        """Yield the answer; closing the iterator cancels the job.

        Raises ShoalError; ConnectionLost if the coordinator was never reached, or is
        away for a minute.
        """
        try:
            yield from self._reconnecting()
        except (GeneratorExit, KeyboardInterrupt):
            # It may have ended meanwhile, and its coordinator, too.
            with suppress(ShoalError):
                cancel = self._api.at_once.request
                cancel(JOBS, method="DELETE", headers=self._headers)
            raise

    def _reconnecting(self) -> Iterator[AnswerPart]:
        lost_at: float | None = None
        while True:
            try:
                with self._api.stream_events(PATH, self._body, self._headers) as (
                    headers,
                    events,
                ):
                    self._connected, lost_at = True, None
                    worker = headers.get("x-shoal-worker")
                    self.answer.worker = worker or self.answer.worker
                    yield from self._read(events)
                    self.answer.ended = self._now()
                    return
            except ConnectionLost as error:
                if not (self._connected or self._api.is_known):
                    raise
                if lost_at is None:
                    lost_at = self._now()
                    yield AnswerPart(ShownKind.RECONNECTING, str(error))
                if self._now() - lost_at > RECONNECT_TIMEOUT:
                    raise
            self._sleep(RETRY_DELAY)

    def _read(self, events: Iterator[Any]) -> Iterator[AnswerPart]:
        answer = self.answer
        shown = {
            ShownKind.REASONING: _Replay(answer.reasoning),
            ShownKind.TEXT: _Replay(answer.text),
        }
        for event in events:
            if isinstance(event, bytes):
                about, _, waits_for = event.decode(errors="replace").partition(", ")
                if about == WAITS:
                    yield AnswerPart(ShownKind.WAITING, waits_for)
                continue
            if usage := event.get("usage"):
                answer.tokens = usage["completion_tokens"]
            for choice in event["choices"]:
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
                for kind, text in _texts(choice["delta"]):
                    new = shown[kind].new_part(text)
                    if new is None:
                        new = shown[kind].restart()
                        yield AnswerPart(ShownKind.RESTARTED)
                    if new:
                        self._add(kind, shown[kind].text)
                        yield AnswerPart(kind, new)

    def _add(self, kind: ShownKind, text: str) -> None:
        answer = self.answer
        if answer.first_part_at is None:
            answer.first_part_at = self._now()
        if kind is ShownKind.TEXT:
            answer.text = text
        else:
            answer.reasoning = text


class _Replay:
    """A stream that starts over, beside the part of it that was shown."""

    def __init__(self, shown: str) -> None:
        self._shown = shown
        self.text = ""

    def new_part(self, text: str) -> str | None:
        """Return what was not shown yet; None: it differs from what was shown."""
        before, self.text = len(self.text), self.text + text
        if before >= len(self._shown):
            return text
        if not (self._shown.startswith(self.text) or self.text.startswith(self._shown)):
            return None
        return self.text[len(self._shown) :]

    def restart(self) -> str:
        """Forget what was shown; return all of the text so far."""
        self._shown = ""
        return self.text


def _texts(delta: Mapping[str, Any]) -> Iterator[tuple[ShownKind, str]]:
    for field in REASONING_FIELDS:
        if reasoning := delta.get(field):
            yield ShownKind.REASONING, reasoning
            break
    if content := delta.get("content"):
        yield ShownKind.TEXT, content


def first_chat_model(api: CoordinatorApi) -> str:
    """Return the first model that chats, one with workers before others.

    Raises NotFound if there is none.
    """
    models = chat_models(api)
    if not models:
        raise NotFound(
            "the pool has no chat model: on any machine, run the `shoal join` command "
            "that `shoal serve` printed"
        )
    return next((each for each in models if models[each]), next(iter(models)))


def chat_models(api: CoordinatorApi) -> dict[str, int]:
    """Return the number of workers of each model that chats."""
    listed = api.request("/v1/models")["data"]
    return {
        str(each["id"]): int(each.get("workers", 1))
        for each in listed
        if "chat" in each.get("kinds", ("chat",))
    }


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
                for part in parts:
                    if part.kind is not ShownKind.WAITING:
                        status.stop()
                        self._print(part, before)
                        before = part.kind
                    elif self._details:
                        self.end_line()
                        status.update(printable(f"waiting: {part.text}"))
                        status.start()
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
            self.note("the answer starts over:")
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
        parts.append(f"first token after {answer.first_part_at - answer.began:.1f} s")
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
