"""Runs a wire's membership protocol: short probe exchanges and lasting connections.

A probe has a connection of its own and ends before anything else knows of it; a node
that the protocol wants to keep is dialled and served like any other peer.
"""

import asyncio
import logging
from collections.abc import Mapping

from shoal.peers.outbound import Dial, OutboundConnections
from shoal.protocols.seam.endpoints import (
    ListedNode,
    MembershipProber,
    OutgoingConnection,
    Probe,
)
from shoal.protocols.seam.multi_peer import PeerMessage, ToPeer
from shoal.transports.clock import Clock
from shoal.transports.driver import Driver
from shoal.transports.link import LinkClosed

EXCHANGES_MAX = 64  # exchanges; others wait for one of them to end
CHECK_INTERVAL = 1.0  # seconds at most until it is seen that a deadline has moved

log = logging.getLogger("shoal.rounds")


class KeptConnection:
    """A connection that is kept up until it is let go: an ``Aim``."""

    def __init__(self, outgoing: OutgoingConnection) -> None:
        self.changed = asyncio.Event()
        self.wanted = True
        self._outgoing = outgoing

    def next_attempt(self, now: float) -> OutgoingConnection:
        """Return how to connect."""
        return self._outgoing

    def release(self) -> None:
        """Call no more.  A connection that is there goes on."""
        self.wanted = False
        self.changed.set()


class MembershipRunner:
    """One endpoint's rounds; ``calling`` are the connections that are kept up."""

    def __init__(
        self,
        wire: str,
        rounds: MembershipProber,
        calls: OutboundConnections,
        dial: Dial,
        clock: Clock,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.connections: set[asyncio.Task[None]] = set()
        self._wire = wire
        self._prober = rounds
        self._outbound = calls
        self._dial = dial
        self._clock = clock
        self._tasks = tasks
        self._kept: dict[int, KeptConnection] = {}  # by the identity of what is called
        self._room = asyncio.Semaphore(EXCHANGES_MAX)
        self._news = asyncio.Event()  # an exchange has ended
        self._listed: Mapping[str, ListedNode] = {}

    async def run(self) -> None:
        """Make the rounds until cancelled."""
        async with asyncio.TaskGroup() as asking:
            while True:
                self._news.clear()
                for each in self._prober.tick(self._clock.now()):
                    match each:
                        case Probe():
                            asking.create_task(self._exchange_in_turn(each))
                        case OutgoingConnection():
                            self._keep_up(each)
                for outgoing in self._prober.dropped():
                    if (kept := self._kept.pop(id(outgoing), None)) is not None:
                        kept.release()
                self._log_changes()
                await self._pause()

    async def _pause(self) -> None:
        """Wait until a tick is due."""
        while True:
            deadline = self._prober.deadline
            left = CHECK_INTERVAL if deadline is None else deadline - self._clock.now()
            if left <= 0:
                await asyncio.sleep(0)  # what is always due is not all there is to do
                return
            try:
                async with asyncio.timeout(min(left, CHECK_INTERVAL)):
                    await self._news.wait()
            except TimeoutError:
                continue
            self._news.clear()

    async def _exchange_in_turn(self, exchange: Probe) -> None:
        """Make one connection, and tell why it ended."""
        reason = "cut off"
        try:
            async with self._room:
                reason = await self._exchange(exchange)
        finally:
            exchange.on_end(reason, self._clock.now())
            self._news.set()

    async def _exchange(self, exchange: Probe) -> str:
        outgoing = exchange.outgoing
        try:
            async with (
                asyncio.timeout(exchange.timeout),
                self._dial(
                    outgoing.url,
                    outgoing.headers,
                    outgoing.message_max,
                    fingerprint=outgoing.fingerprint,
                ) as (link, _),
            ):
                session = outgoing.new_session(self._clock.now())
                driver = Driver[PeerMessage, ToPeer](
                    session, link, self._clock, _expect_no_peer
                )
                return (await driver.run()).reason
        except LinkClosed as closed:
            return str(closed)
        except TimeoutError:
            return f"no answer from {outgoing.url} within {exchange.timeout:g} s"
        except Exception:
            # A bug in the session: it must not take the other connections with it.
            log.exception("broken wire=%s peer=%s", self._wire, outgoing.url)
            return "internal error"

    def _keep_up(self, outgoing: OutgoingConnection) -> None:
        kept = self._kept[id(outgoing)] = KeptConnection(outgoing)
        task = self._tasks.create_task(self._outbound.maintain(self._wire, kept))
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)

    def _log_changes(self) -> None:
        """Log whose state has changed."""
        before = self._listed
        self._listed = {
            each.name or each.address: each for each in self._prober.nodes()
        }
        for name, each in self._listed.items():
            known = before.get(name)
            if known is None or known.state != each.state:
                # One without an address is this machine, which is no news to it.
                log.log(
                    logging.INFO if each.address else logging.DEBUG,
                    "node wire=%s name=%r address=%s state=%r remark=%r",
                    self._wire,
                    each.name,
                    each.address,
                    each.state,
                    each.note,
                )


def _expect_no_peer(said: PeerMessage) -> None:
    """Take what a session of an exchange says, which is to be nothing."""
    raise AssertionError(f"nobody is met in an exchange: {said}")
