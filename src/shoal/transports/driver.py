"""Runs one session over one link: the only place that waits for a peer."""

import asyncio
import logging
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Mapping,
    Sequence,
    Sized,
)
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

from shoal.domain.errors import PeerError
from shoal.protocols.seam.framing import FramedMessage, FramedSession
from shoal.protocols.seam.session import (
    BoundSession,
    Bulk,
    Close,
    CloseCode,
    HandlesConnectionLoss,
    Notice,
    Output,
    Send,
    Session,
)
from shoal.transports.clock import Clock, DeadlineTimer
from shoal.transports.link import (
    EncryptedLink,
    FramingLink,
    LimitingLink,
    Link,
    LinkClosed,
)
from shoal.transports.loop_share import LARGE, LoopShare
from shoal.transports.outbox import ISSUED_MAX, Outbox
from shoal.transports.strangers import BY_STRANGER

In = TypeVar("In")
Out = TypeVar("Out")
Arrived = TypeVar("Arrived", bound=Collection[Any])  # with sizes, or see ``BODY``

FLUSH_TIMEOUT = 5.0  # seconds to send what is left once a session has ended
READS_IN_A_ROW = 256  # messages of one peer handled before others get their turn
NOTICES_MAX = 20  # notices of one connection that are logged; a flood would fill disks
BODY = attrgetter("body")  # of a framed message
NOTICE = "notice peer=%s text=%r"

log = logging.getLogger("shoal.transports")


@dataclass(frozen=True, slots=True)
class ConnectionEnd:
    """Why a connection ended; ``code`` and ``text`` are the WebSocket's."""

    reason: str
    code: int = CloseCode.NORMAL
    text: str = ""
    by_peer: bool = False

    @classmethod
    def of_link(cls, closed: LinkClosed) -> "ConnectionEnd":
        """Return the end of a connection whose link has ended."""
        return cls(str(closed), closed.code, closed.text, by_peer=True)


STOPPED_READING = ConnectionEnd(
    "peer stopped reading", CloseCode.POLICY_VIOLATION, "too much unread"
)


class Driver(Generic[In, Out]):
    """Couples a session to a link.

    The session never awaits, so the reader, the timer and senders share it without a
    lock.  With a ``share``, large messages take turns with those of other connections.
    """

    def __init__(
        self,
        session: Session[In, Out],
        link: Link,
        clock: Clock,
        on_message: Callable[[In], None],
        share: LoopShare | None = None,
    ) -> None:
        self._share = share
        self._session = session
        self._link = link
        self._clock = clock
        self._on_message = on_message
        self._outbox = Outbox(link)
        # Not a method of its own: a worker calls it for each piece of an answer.
        self.wait_for_room = self._outbox.wait_for_room
        self.wait_for_bulk_room = self._outbox.wait_for_bulk_room
        self._ended: asyncio.Future[ConnectionEnd | Exception] | None = None
        self._timer = DeadlineTimer(
            clock, self._deadline, lambda: self._step(session.tick)
        )
        self._last_end: ConnectionEnd | None = None  # once all is written
        self._notices = 0
        self._loss_reported = False  # to the session

    @property
    def accepts(self) -> frozenset[type]:
        return self._session.accepts

    @property
    def peer(self) -> str:
        """The address of the other end."""
        return self._link.peer

    @property
    def log_extra(self) -> Mapping[str, object] | None:
        """What log records about the connection carry; see ``BY_STRANGER``."""
        link = self._link
        by_stranger = isinstance(link, LimitingLink) and link.is_stranger
        return BY_STRANGER if by_stranger else None

    async def run(self) -> ConnectionEnd:
        """Serve until the connection ends; return why it ended.

        A bug in the session, or in what receives from it, ends the connection and is
        raised.
        """
        self._ended = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._start_reading())
            writer = tasks.create_task(self._write())
            self._step(self._session.tick)
            try:
                end = await self._ended
            finally:
                self._timer.cancel()
                # The last messages should still arrive: one may be an error.
                self._outbox.close()
            reader.cancel()
            # Not awaited: a reader that is cancelled while it answers a ping also
            # cancels the writer, which waits for the same room.
            await asyncio.wait([writer], timeout=FLUSH_TIMEOUT)
            writer.cancel()
        if isinstance(end, ConnectionEnd):
            await self._link.close(end.code, end.text)
            return end
        await self._link.close(CloseCode.INTERNAL_ERROR, "internal error")
        raise end

    def send(self, message: Out) -> bool:
        """Send a message; return whether the connection was still open.

        Never waits: a peer that does not read is disconnected.
        """
        if self._ended is None or self._ended.done() or self._last_end is not None:
            return False
        self._step(partial(self._session.send, message), ISSUED_MAX)
        return True

    def admit(self) -> None:
        """Lift the limits of a stranger from the connection."""
        if isinstance(self._link, LimitingLink):
            self._link.admit()

    def disconnect(
        self, reason: str, code: int = CloseCode.NORMAL, text: str = ""
    ) -> None:
        """End the connection, once bulk data is written for which the peer has room.

        The session is not notified: the caller decides, not the peer.
        """
        end = ConnectionEnd(reason, code, text)
        if self._over or not self._outbox.finish():
            self._end(end)
        elif self._last_end is None:
            self._last_end, self._on_message = end, _ignore
            loop = asyncio.get_running_loop()
            loop.call_later(FLUSH_TIMEOUT, self._end, end)

    @property
    def _over(self) -> bool:
        return self._ended is None or self._ended.done()

    def _deadline(self) -> float | None:
        if self._ended is None or self._ended.done():
            return None
        return self._session.deadline

    def _start_reading(self) -> Coroutine[None, None, None]:
        """Report the link's protection to the session; return the reader.

        The link splits messages, if it can.
        """
        session, link = self._session, self._link
        if (
            isinstance(link, EncryptedLink)
            and link.binding
            and isinstance(session, BoundSession)
        ):
            session.bind(link.binding)
        if isinstance(session, FramedSession) and isinstance(link, FramingLink):
            link.attach(session, partial(self._on_messages, session))
            return self._read(link.messages, session.receive_messages, BODY)
        return self._read(link.receive, session.receive)

    async def _read(
        self,
        arrive: Callable[[], Awaitable[Arrived]],
        receive: Callable[[Arrived, float], Sequence[In | Output]],
        data_of: Callable[[Any], Sized] | None = None,
    ) -> None:
        share, link = self._share, self._link
        strange = link if isinstance(link, LimitingLink) else None
        try:
            while not self._over:
                handled = 0
                while handled < READS_IN_A_ROW:
                    batch = await arrive()
                    handled += len(batch)
                    parts = batch if data_of is None else map(data_of, batch)
                    if strange is not None and strange.is_stranger:
                        strange.run(self._handle, receive, batch)
                    elif share is None or sum(map(len, parts)) < LARGE:
                        self._perform(receive(batch, self._clock.now()))
                    else:
                        async with share.turn(self):
                            if not self._over:
                                self._perform(receive(batch, self._clock.now()))
                    if self._over:
                        return
                # A link that always has something never waits, and so never yields.
                await asyncio.sleep(0)
        except LinkClosed as closed:
            self._end_by_peer(ConnectionEnd.of_link(closed))
        except PeerError as error:
            self._end_by_peer(_protocol_broken(error))
        except Exception as error:
            # A bug ends this connection, and `run` raises it.
            self._end(error)

    def _handle(
        self, receive: Callable[[Arrived, float], Sequence[In | Output]], batch: Arrived
    ) -> None:
        self._perform(receive(batch, self._clock.now()))

    def _on_messages(
        self, session: FramedSession[In], messages: Sequence[FramedMessage]
    ) -> None:
        """Process messages that arrive while the reader waits."""
        if not self._over:
            self._step(lambda now: session.receive_messages(messages, now))

    async def _write(self) -> None:
        try:
            await self._outbox.run()
            if self._last_end is not None:
                self._end(self._last_end)
        except LinkClosed as closed:
            self._end_by_peer(ConnectionEnd.of_link(closed))
        except Exception as error:
            # A bug ends this connection, and `run` raises it.
            self._end(error)

    def _step(
        self, step: Callable[[float], Sequence[In | Output]], patience: int = 1
    ) -> None:
        try:
            self._perform(step(self._clock.now()), patience)
        except PeerError as error:
            self._end_by_peer(_protocol_broken(error))
        except Exception as error:
            # A bug ends this connection, and `run` raises it.
            self._end(error)

    def _perform(self, outputs: Sequence[In | Output], patience: int = 1) -> None:
        for output in outputs:
            match output:
                case Send(data):
                    if not self._outbox.send(data, patience):
                        self._give_up()
                case Bulk():
                    if not self._outbox.send_bulk(output, patience):
                        self._give_up()
                case Close(reason, code, text):
                    self._end(ConnectionEnd(reason, code, text))
                    return
                case Notice(text, routine=True):
                    log.info(NOTICE, self.peer, text, extra=self.log_extra)
                case Notice(text):
                    self._log_notice(text)
                case message:
                    self._on_message(message)
        if self._outbox.stalled:
            self._outbox.resume()
        self._timer.update()

    def _give_up(self) -> None:
        self._outbox.clear()
        self._end_by_peer(STOPPED_READING)

    def _log_notice(self, text: str) -> None:
        self._notices += 1
        if self._notices <= NOTICES_MAX:
            log.warning(NOTICE, self.peer, text, extra=self.log_extra)
        if self._notices == NOTICES_MAX:
            text = "no more of these are logged"
            log.warning(NOTICE, self.peer, text, extra=self.log_extra)

    def _end_by_peer(self, end: ConnectionEnd) -> None:
        """End the connection because of the peer, and notify the session first."""
        if (
            not self._over
            and not self._loss_reported
            and isinstance(self._session, HandlesConnectionLoss)
        ):
            self._loss_reported = True
            self._step(self._session.connection_lost)
        self._end(end)

    def _end(self, end: ConnectionEnd | Exception) -> None:
        """Record the first reason to stop, and stop."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(end)


def _ignore(message: object) -> None:
    """Drop what arrives while the last bulk data is written."""


def _protocol_broken(error: PeerError) -> ConnectionEnd:
    return ConnectionEnd(
        f"protocol error: {error}", CloseCode.PROTOCOL_ERROR, str(error)
    )
