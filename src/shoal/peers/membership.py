"""Runs a wire's membership protocol: short probe exchanges and lasting connections.

A probe has its own connection, which carries no peers; a node that the protocol wants
to keep is dialled and served like any other peer.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.peers.outbound import Dial, FixedTarget, OutboundConnections
from shoal.protocols.seam import endpoints
from shoal.protocols.seam.peer_session import PeerMessage, ToPeer
from shoal.transports.clock import Clock
from shoal.transports.driver import Driver
from shoal.transports.link import LinkClosed

EXCHANGES_MAX = 64  # concurrent probes; further ones wait
CHECK_INTERVAL = 1.0  # maximum seconds until a moved deadline takes effect

log = logging.getLogger("shoal.peers")


@dataclass(slots=True, eq=False)
class MembershipRunner:
    """Runs one endpoint's prober; ``connections`` are the tasks of kept connections."""

    _wire: str
    _prober: endpoints.MembershipProber
    _outbound: OutboundConnections
    _dial: Dial
    _clock: Clock
    _tasks: asyncio.TaskGroup
    connections: set[asyncio.Task[None]] = field(default_factory=set)
    # By `id` of its OutgoingConnection.
    _targets: dict[int, FixedTarget] = field(default_factory=dict)
    _exchange_slots: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(EXCHANGES_MAX)
    )
    _probe_ended: asyncio.Event = field(default_factory=asyncio.Event)
    _listed: Mapping[str, endpoints.ListedNode] = field(default_factory=dict)

    async def run(self) -> None:
        """Run the prober until cancelled."""
        async with asyncio.TaskGroup() as probes:
            while True:
                self._probe_ended.clear()
                for each in self._prober.tick(self._clock.now()):
                    match each:
                        case endpoints.Probe():
                            probes.create_task(self._run_probe(each))
                        case endpoints.OutgoingConnection():
                            self._maintain(each)
                for outgoing in self._prober.dropped():
                    if (target := self._targets.pop(id(outgoing), None)) is not None:
                        target.release()
                self._log_changes()
                await self._pause()

    async def _pause(self) -> None:
        """Wait until a tick is due or a probe ends."""
        while True:
            deadline = self._prober.deadline
            delay = CHECK_INTERVAL if deadline is None else deadline - self._clock.now()
            if delay <= 0:
                await asyncio.sleep(
                    0
                )  # a deadline that is always due must not block other tasks
                return
            try:
                async with asyncio.timeout(min(delay, CHECK_INTERVAL)):
                    await self._probe_ended.wait()
            except TimeoutError:
                continue
            self._probe_ended.clear()

    async def _run_probe(self, probe: endpoints.Probe) -> None:
        """Run one probe, and report why it ended."""
        reason = "cut off"
        try:
            async with self._exchange_slots:
                reason = await self._exchange(probe)
        finally:
            probe.on_end(reason, self._clock.now())
            self._probe_ended.set()

    async def _exchange(self, probe: endpoints.Probe) -> str:
        outgoing = probe.outgoing
        try:
            async with (
                asyncio.timeout(probe.timeout),
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
            return f"no answer from {outgoing.url} within {probe.timeout:g} s"
        except Exception:
            # A bug in one session must not end the other connections.
            log.exception("broken wire=%s peer=%s", self._wire, outgoing.url)
            return "internal error"

    def _maintain(self, outgoing: endpoints.OutgoingConnection) -> None:
        target = self._targets[id(outgoing)] = FixedTarget(outgoing)
        task = self._tasks.create_task(self._outbound.maintain(self._wire, target))
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
                log.log(
                    _level(each),
                    "node wire=%s name=%r address=%s state=%r remark=%r",
                    self._wire,
                    each.name,
                    each.address,
                    each.state,
                    each.note,
                )


def _level(node: endpoints.ListedNode) -> int:
    """Return the level at which to log a node's state."""
    if not node.address:
        return logging.DEBUG  # this machine
    # A configured address without an answer is unidentified.
    return logging.INFO if node.name else logging.WARNING


def _expect_no_peer(message: PeerMessage) -> None:
    """Fail: the session of a probe reports no peers."""
    raise AssertionError(f"a probe's session reported a peer: {message}")
