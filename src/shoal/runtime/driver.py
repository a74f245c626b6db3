"""Runs one session over one connection: the only place that waits for a peer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from shoal.domain.errors import PeerError
from shoal.protocols.framing import Framed, Whole
from shoal.protocols.session import (
    Bulk,
    Close,
    Notice,
    Output,
    Parting,
    Send,
    Session,
)
from shoal.runtime.clock import Clock, Timer
from shoal.runtime.link import CuttingLink, Link, LinkClosed
from shoal.runtime.outbox import ISSUED_MAX, Outbox

In = TypeVar("In")
Out = TypeVar("Out")
Arrived = TypeVar("Arrived", bound=Sized)

FLUSH_TIMEOUT = 5.0  # seconds to send what is left once a session has ended
READS_IN_A_ROW = 256  # messages of one peer handled before others get their turn
NOTICES_MAX = 20  # notices of one connection that are logged; a flood would fill disks

log = logging.getLogger("shoal.driver")


@dataclass(frozen=True, slots=True)
class End:
    """Why a connection ended; ``code`` and ``text`` are the WebSocket's."""

    reason: str
    code: int = 1000
    text: str = ""
    by_peer: bool = False


class Driver(Generic[In, Out]):
    """Couples a session to a link.

    The session never awaits, so the reader, the timer and whoever issues messages
    share it without a lock.
    """

    def __init__(
        self,
        session: Session[In, Out],
        link: Link,
        clock: Clock,
        receive: Callable[[In], None],
    ) -> None:
        self._session = session
        self._link = link
        self._clock = clock
        self._receive = receive
        self._outbox = Outbox(link)
        self._ended: asyncio.Future[End | Exception] | None = None
        self._timer: Timer | None = None
        self._timer_due = 0.0
        self._notices = 0
        self._parted = False  # the session was told

    @property
    def accepts(self) -> frozenset[type]:
        return self._session.accepts

    @property
    def peer(self) -> str:
        """Who is at the other end."""
        return self._link.peer

    async def run(self) -> End:
        """Serve until the connection ends; return why it ended.

        A bug in the session, or in what receives from it, ends the connection and is
        raised.
        """
        self._ended = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._reading())
            writer = tasks.create_task(self._write())
            self._step(self._session.tick)
            try:
                end = await self._ended
            finally:
                if self._timer is not None:
                    self._timer.cancel()
                # What was said last should still arrive: it may be an error.
                self._outbox.finish()
            reader.cancel()
            # Not awaited, for a reader that is cancelled while it answers a ping takes
            # the writer, which waits for the same room, along.
            await asyncio.wait([writer], timeout=FLUSH_TIMEOUT)
            writer.cancel()
        if isinstance(end, End):
            await self._link.close(end.code, end.text)
            return end
        await self._link.close(1011, "internal error")
        raise end

    def issue(self, message: Out) -> bool:
        """Send a message; say whether the connection was still there to take it.

        Never waits: a peer that does not read is hung up on.
        """
        if self._over:
            return False
        self._step(lambda now: self._session.issue(message, now), ISSUED_MAX)
        return True

    async def room(self) -> None:
        """Wait until the peer has read most of what was issued, or is gone."""
        await self._outbox.room()

    def hang_up(self, reason: str, code: int = 1000, text: str = "") -> None:
        """End the connection.

        The session is not told: whoever hangs up knows it, and the peer did nothing.
        """
        self._end(End(reason, code, text))

    @property
    def _over(self) -> bool:
        return self._ended is None or self._ended.done()

    def _reading(self) -> Coroutine[None, None, None]:
        """Have messages cut by the link, where it can; return what reads them."""
        session, link = self._session, self._link
        if isinstance(session, Framed):
            if isinstance(link, CuttingLink):
                session.opened(link.certificate)
                link.attach(session, partial(self._hear, session))
                return self._read(link.messages, session.take)
            session.opened(b"")
        return self._read(link.receive, session.receive)

    async def _read(
        self,
        arrive: Callable[[], Awaitable[Arrived]],
        hear: Callable[[Arrived, float], Sequence[In | Output]],
    ) -> None:
        try:
            while not self._over:
                handled = 0
                while handled < READS_IN_A_ROW:
                    batch = await arrive()
                    handled += len(batch)
                    self._carry_out(hear(batch, self._clock.now()))
                    if self._over:
                        return
                # A link that always has something never waits, and so never yields.
                await asyncio.sleep(0)
        except LinkClosed as closed:
            self._part(_lost(closed))
        except PeerError as error:
            self._part(_broken(error))
        except Exception as error:
            self._end(error)

    def _hear(self, session: Framed[In], messages: Sequence[Whole]) -> None:
        """Take messages that came while the reader waits."""
        if not self._over:
            self._step(lambda now: session.take(messages, now))

    async def _write(self) -> None:
        try:
            await self._outbox.write()
        except LinkClosed as closed:
            self._part(_lost(closed))
        except Exception as error:
            self._end(error)

    def _arm(self) -> None:
        """Have the session ticked at its deadline."""
        deadline = self._session.deadline
        if deadline is None or self._over:
            return
        if self._timer is not None:
            # The deadline mostly moves away: the timer finds that out when it fires.
            if self._timer_due <= deadline:
                return
            self._timer.cancel()
        self._timer_due = deadline
        self._timer = self._clock.call_at(deadline, self._due)

    def _due(self) -> None:
        self._timer = None
        deadline = self._session.deadline
        if deadline is not None and deadline <= self._clock.now():
            self._step(self._session.tick)
        self._arm()

    def _step(
        self, ask: Callable[[float], Sequence[In | Output]], patience: int = 1
    ) -> None:
        try:
            self._carry_out(ask(self._clock.now()), patience)
        except PeerError as error:
            self._part(_broken(error))
        except Exception as error:
            self._end(error)

    def _carry_out(self, outputs: Sequence[In | Output], patience: int = 1) -> None:
        for output in outputs:
            match output:
                case Send(data):
                    if not self._outbox.post(data, patience):
                        self._give_up()
                case Bulk():
                    if not self._outbox.post_bulk(output, patience):
                        self._give_up()
                case Close(reason, code, text):
                    self._end(End(reason, code, text))
                    return
                case Notice(text):
                    self._note(text)
                case message:
                    self._receive(message)
        self._arm()

    def _give_up(self) -> None:
        self._outbox.clear()
        self._part(End("peer stopped reading", 1008, "too much unread"))

    def _note(self, text: str) -> None:
        self._notices += 1
        if self._notices <= NOTICES_MAX:
            log.warning("notice peer=%s text=%r", self.peer, text)
        if self._notices == NOTICES_MAX:
            log.warning("notice peer=%s text='no more of these are logged'", self.peer)

    def _part(self, end: End) -> None:
        """End it because of the peer, and let the session know first."""
        if not self._over and not self._parted and isinstance(self._session, Parting):
            self._parted = True
            self._step(self._session.parted)
        self._end(end)

    def _end(self, end: End | Exception) -> None:
        """Record the first reason to stop, and stop."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(end)


def _lost(closed: LinkClosed) -> End:
    return End(str(closed), closed.code, closed.text, by_peer=True)


def _broken(error: PeerError) -> End:
    return End(f"protocol error: {error}", 1002, str(error))
