"""Runs a wire's membership protocol: short probe exchanges and lasting connections.

A probe has its own connection, which carries no peers; a node that the protocol wants
to keep is dialled and served like any other peer.
"""

import asyncio
import logging
from collections.abc import Mapping

from shoal.peers.outbound import Dial, FixedTarget, OutboundConnections
from shoal.protocols.seam.endpoints import (
    ListedNode,
    MembershipProber,
    OutgoingConnection,
    Probe,
)
from shoal.protocols.seam.peer_session import PeerMessage, ToPeer
from shoal.transports.clock import Clock
from shoal.transports.driver import Driver
from shoal.transports.link import LinkClosed

EXCHANGES_MAX = 64  # concurrent probes; further ones wait
CHECK_INTERVAL = 1.0  # maximum seconds until a moved deadline takes effect

log = logging.getLogger("shoal.peers")


class MembershipRunner:
    """Runs one endpoint's prober; ``connections`` are the tasks of kept connections."""

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
        self._kept: dict[int, FixedTarget] = {}  # by `id` of its OutgoingConnection
        self._room = asyncio.Semaphore(EXCHANGES_MAX)
        self._news = asyncio.Event()  # a probe ended
        self._listed: Mapping[str, ListedNode] = {}

    async def run(self) -> None:
        """Run the prober until cancelled."""
        async with asyncio.TaskGroup() as probes:
            while True:
                self._news.clear()
                for each in self._prober.tick(self._clock.now()):
                    match each:
                        case Probe():
                            probes.create_task(self._exchange_in_turn(each))
                        case OutgoingConnection():
                            self._keep_up(each)
                for outgoing in self._prober.dropped():
                    if (kept := self._kept.pop(id(outgoing), None)) is not None:
                        kept.release()
                self._log_changes()
                await self._pause()

    async def _pause(self) -> None:
        """Wait until a tick is due or a probe ends."""
        while True:
            deadline = self._prober.deadline
            left = CHECK_INTERVAL if deadline is None else deadline - self._clock.now()
            if left <= 0:
                await asyncio.sleep(
                    0
                )  # a deadline that is always due must not block other tasks
                return
            try:
                async with asyncio.timeout(min(left, CHECK_INTERVAL)):
                    await self._news.wait()
            except TimeoutError:
                continue
            self._news.clear()

    async def _exchange_in_turn(self, exchange: Probe) -> None:
        """Run one probe, and report why it ended."""
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
            # A bug in one session must not end the other connections.
            log.exception("broken wire=%s peer=%s", self._wire, outgoing.url)
            return "internal error"

    def _keep_up(self, outgoing: OutgoingConnection) -> None:
        kept = self._kept[id(outgoing)] = FixedTarget(outgoing)
        task = self._tasks.create_task(self._outbound.maintain(self._wire, kept))
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)

    def _log_changes(self) -> None:
        """Log nodes whose state changed."""
        before = self._listed
        self._listed = {
            each.name or each.address: each for each in self._prober.nodes()
        }
        for name, each in self._listed.items():
            known = before.get(name)
            if known is None or known.state != each.state:
                # A node without an address is this machine: log it at DEBUG only.
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
    """Fail: the session of a probe reports no peers."""
    raise AssertionError(f"a probe's session reported a peer: {said}")
