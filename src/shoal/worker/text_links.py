"""Sends pieces of answers to clients' fronts at once, and to the coordinator later.

The copies come in larger messages, so that the coordinator has all of an answer, and
each token costs it nothing.  A worker that cannot reach a front sends only to the
coordinator, which sends on what is no copy.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from shoal.domain import vocabulary as words
from shoal.domain.answer_assembly import is_thought, size_of
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.outcome import AnswerPiece
from shoal.protocols.seam.context import Dialer, DialsText
from shoal.transports.clock import Clock, Timer
from shoal.transports.driver import Driver
from shoal.transports.link import LinkClosed, OpenLink

COPIED_EVERY = 1.0  # seconds
SENT_MAX = 32 << 10  # characters that are sent past the coordinator in one message
PIECES_MAX = 1024  # of one message, which is never divided
LINKS_MAX = 32  # to different addresses
RETRY_AFTER = 10.0  # seconds until a front is dialled again that was not reached
ENDS = (words.Completed, words.Rejected, words.Failed)
OF_ANSWERS = (words.AnswerChunk, *ENDS)

log = logging.getLogger("shoal.worker")


@dataclass(slots=True, eq=False)
class _TextLink:
    """A connection to a front; ``driver`` is that of an open one."""

    task: asyncio.Task[None] | None = None
    driver: Driver[object, words.TextSent] | None = None
    retry_at: float = -math.inf


@dataclass(slots=True, eq=False)
class _RoutedAnswer:
    """An answer with a route, of which ``size`` characters were sent on either way.

    ``unsent`` are its pieces of this turn of the loop, and ``uncopied`` those that were
    sent along the route only.
    """

    lease: LeaseNumber
    name: bytes
    link: _TextLink
    size: int = 0
    unsent: list[AnswerPiece] = field(default_factory=list)
    unsent_size: int = 0
    uncopied: list[AnswerPiece] = field(default_factory=list)


class TextLinks:
    """The connections to fronts, and the ``answers`` that have routes.

    ``send`` sends an event to the coordinator, and says whether it could.
    """

    def __init__(
        self,
        dialer: Dialer,
        dial: OpenLink,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        send: Callable[[words.Event], bool],
    ) -> None:
        self.answers: dict[JobId, _RoutedAnswer] = {}
        self._dialer = dialer if isinstance(dialer, DialsText) else None
        self._message_max = dialer.message_max
        self._dial = dial
        self._clock = clock
        self._tasks = tasks
        self._send = send
        self._links: dict[str, _TextLink] = {}  # by their URLs
        self._timer: Timer | None = None  # for the next copies
        self._flushes = False  # whether that is scheduled

    def begin(self, job_id: JobId, lease: LeaseNumber, route: words.TextRoute) -> None:
        """Send the answer to a job along a route, as soon as it is open."""
        dialer = self._dialer
        url = None if dialer is None else dialer.text_url(route)
        if len(self._links) >= LINKS_MAX:  # fronts come and go, with their addresses
            used = {at: link for at, link in self._links.items() if link.task}
            self._links = used
        if url is None or (url not in self._links and len(self._links) >= LINKS_MAX):
            return
        link = self._links.setdefault(url, _TextLink())
        if link.task is None and self._clock.now() >= link.retry_at:
            link.task = self._tasks.create_task(self._keep_open(url, link, route))
        self.answers[job_id] = _RoutedAnswer(lease, route.name, link)

    def send(self, chunk: words.AnswerChunk) -> Driver[object, words.TextSent] | None:
        """Send pieces along their route; None: they have to go to the coordinator."""
        answer = self.answers.get(chunk.job_id)
        if answer is None:
            return None
        driver, size = answer.link.driver, size_of(chunk.pieces)
        if driver is None or size > SENT_MAX or not all(map(_is_text, chunk.pieces)):
            self._flush(chunk.job_id, answer)
            answer.size += size
            return None
        answer.unsent += chunk.pieces
        answer.unsent_size += size
        if answer.unsent_size >= SENT_MAX or len(answer.unsent) >= PIECES_MAX:
            self._flush(chunk.job_id, answer)
        if not self._flushes:
            self._flushes = True
            asyncio.get_running_loop().call_soon(self._flush_all)
        return driver

    def send_copies_before(self, event: words.Event) -> words.Event | None:
        """Send copies of what was sent before an event, or add them to it.

        None: they could not be sent.
        """
        if not isinstance(event, OF_ANSWERS):
            return event
        job_id = event.job_id
        answer = self.answers.get(job_id)
        if answer is None or (isinstance(event, words.AnswerChunk) and event.copied):
            return event
        self._flush(job_id, answer)
        if isinstance(event, words.Completed) and answer.uncopied and not event.rest:
            event = replace(event, rest=(*answer.uncopied,), copied=True)
        elif not self._copy(job_id, answer):
            return None
        return event

    def on_sent(self, event: words.Event) -> None:
        """Forget an answer whose end was sent."""
        if isinstance(event, ENDS):
            self.forget(event.job_id)

    def end_all(self) -> None:
        """Send copies of all, and what comes to the coordinator, which is another."""
        self._copy_all()
        self.answers.clear()

    def forget(self, job_id: JobId) -> None:
        """Send nothing more of an answer."""
        self.answers.pop(job_id, None)

    def close(self) -> None:
        """Close all connections."""
        if self._timer is not None:
            self._timer.cancel()
        for link in self._links.values():
            if link.task is not None:
                link.task.cancel()

    def _flush_all(self) -> None:
        self._flushes = False
        for job_id, answer in [*self.answers.items()]:
            self._flush(job_id, answer)

    def _flush(self, job_id: JobId, answer: _RoutedAnswer) -> None:
        """Send the pieces of this turn along the route."""
        if not answer.unsent:
            return
        pieces, answer.unsent = answer.unsent, []
        at, driver = answer.size, answer.link.driver
        answer.size += answer.unsent_size
        answer.unsent_size = 0
        if driver is None and self._copy(job_id, answer):
            rest = words.AnswerChunk(job_id, answer.lease, pieces)
            if self._send(rest):
                return
        answer.uncopied += pieces
        if driver is not None:  # else its front asks for them
            driver.send(words.TextSent(answer.name, at, pieces))
        if not at:
            self._copy(job_id, answer)  # the first output decides about much
        elif self._timer is None:
            next_ = self._clock.now() + COPIED_EVERY
            self._timer = self._clock.call_at(next_, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._copy_all()

    def _copy_all(self) -> None:
        for job_id, answer in [*self.answers.items()]:
            self._flush(job_id, answer)
            self._copy(job_id, answer)

    def _copy(self, job_id: JobId, answer: _RoutedAnswer) -> bool:
        """Send copies of what has none; return whether there is none left."""
        if not answer.uncopied:
            return True
        copy = words.AnswerChunk(job_id, answer.lease, answer.uncopied, copied=True)
        if not self._send(copy):
            return False
        answer.uncopied = []
        return True

    async def _keep_open(
        self, url: str, link: _TextLink, route: words.TextRoute
    ) -> None:
        """Keep a connection open until it ends."""
        assert self._dialer is not None, "it has the URL"
        try:
            async with self._dial(url, {}, self._message_max) as (opened, _):
                session = self._dialer.start_text(route)
                driver = Driver(session, opened, self._clock, lambda _: admit())

                def admit() -> None:
                    link.driver = driver
                    driver.admit()
                    log.info("text link open url=%s", url)

                end = await driver.run()
                log.info("text link ended url=%s reason=%r", url, end.reason)
        except LinkClosed as error:
            log.info("no text link url=%s reason=%r", url, str(error))
        finally:
            if link.driver is None:
                link.retry_at = self._clock.now() + RETRY_AFTER
            link.task = link.driver = None


def _is_text(piece: AnswerPiece) -> bool:
    """Return whether a piece is text or thoughts: others are few, and may be large."""
    return isinstance(piece, str) or is_thought(piece)
