"""Runs one session over one connection: the only place that waits for a peer."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.domain.errors import PeerError
from shoal.protocols.session import Bulk, Close, Data, Notice, Output, Send, Session
from shoal.runtime.clock import Clock, Timer
from shoal.runtime.link import Link, LinkClosed

In = TypeVar("In")
Out = TypeVar("Out")

OUTBOX_MAX = 16 << 20  # unread bytes at which what a peer provokes is too much
ISSUED_MAX = (
    16  # times as much may be what we ask of it: long prompts, in all its slots
)
OUTBOX_FULL = 1 << 20  # bytes at which whoever can wait should
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
        # Plain lists and futures: events and deques would be a tenth of what an idle
        # worker takes.
        self._outbox: list[Data] = []
        self._outbox_size = 0  # bytes, with those that are being sent
        self._writer: asyncio.Future[None] | None = None  # waits for something to send
        self._waiting: list[asyncio.Future[None]] = []  # for room in the outbox
        self._ended: asyncio.Future[End | Exception] | None = None
        self._timer: Timer | None = None
        self._timer_due = 0.0
        self._notices = 0

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
            reader = tasks.create_task(self._read())
            writer = tasks.create_task(self._write())
            self._step(self._session.tick)
            try:
                end = await self._ended
            finally:
                if self._timer is not None:
                    self._timer.cancel()
                self._make_room()  # those who wait for room wait in vain
            reader.cancel()
            # What the session said last should still arrive: it may be an error.
            self._wake_writer()
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
        while self._outbox_size > OUTBOX_FULL and not self._over:
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    def hang_up(self, reason: str, code: int = 1000, text: str = "") -> None:
        """End the connection."""
        self._end(End(reason, code, text))

    @property
    def _over(self) -> bool:
        return self._ended is None or self._ended.done()

    async def _read(self) -> None:
        try:
            while not self._over:
                handled = 0
                while handled < READS_IN_A_ROW:
                    batch = await self._link.receive()
                    handled += len(batch)
                    self._carry_out(self._session.receive(batch, self._clock.now()))
                    if self._over:
                        return
                # A link that always has something never waits, and so never yields.
                await asyncio.sleep(0)
        except LinkClosed as closed:
            self._end(_lost(closed))
        except PeerError as error:
            self._end(_broken(error))
        except Exception as error:
            self._end(error)

    async def _write(self) -> None:
        try:
            while self._outbox or not self._over:
                if not self._outbox:
                    self._writer = asyncio.get_running_loop().create_future()
                    await self._writer
                batch, self._outbox = self._outbox, []
                for data in batch:
                    await self._link.send(data)
                    self._outbox_size -= len(data)
                    if self._outbox_size <= OUTBOX_FULL:
                        self._make_room()
        except LinkClosed as closed:
            self._end(_lost(closed))
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
            self._end(_broken(error))
        except Exception as error:
            self._end(error)

    def _carry_out(self, outputs: Sequence[In | Output], patience: int = 1) -> None:
        for output in outputs:
            match output:
                case Send(data):
                    self._post(data, patience)
                case Bulk(parts):
                    for part in parts:
                        self._post(bytes(part), patience)
                case Close(reason, code, text):
                    self._end(End(reason, code, text))
                    return
                case Notice(text):
                    self._note(text)
                case message:
                    self._receive(message)
        self._arm()

    def _post(self, data: Data, patience: int) -> None:
        # Never wait here: two peers that both stop reading in order to write would
        # wait for each other for ever.
        self._outbox.append(data)
        self._outbox_size += len(data)
        self._wake_writer()
        if self._outbox_size > OUTBOX_MAX * patience:
            self._outbox.clear()
            self._outbox_size = 0
            self._end(End("peer stopped reading", 1008, "too much unread"))

    def _wake_writer(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def _make_room(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    def _note(self, text: str) -> None:
        self._notices += 1
        if self._notices <= NOTICES_MAX:
            log.warning("notice peer=%s text=%r", self.peer, text)
        if self._notices == NOTICES_MAX:
            log.warning("notice peer=%s text='no more of these are logged'", self.peer)

    def _end(self, end: End | Exception) -> None:
        """Record the first reason to stop, and stop."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(end)


def _lost(closed: LinkClosed) -> End:
    return End(str(closed), closed.code, closed.text, by_peer=True)


def _broken(error: PeerError) -> End:
    return End(f"protocol error: {error}", 1002, str(error))
