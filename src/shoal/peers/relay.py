"""Runs a relay over its links, and the coordinator's own membership of it."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, TypeAlias

from shoal.domain.addresses import network_key
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.peer_session import PeerSession
from shoal.protocols.seam.relay import (
    RelayBroadcast,
    RelayMachine,
    RelaySend,
    RelayStanding,
)
from shoal.protocols.seam.session import CloseCode, Data
from shoal.transports.clock import Clock, DeadlineTimer
from shoal.transports.driver import READS_IN_A_ROW, STOPPED_READING, ConnectionEnd
from shoal.transports.link import BudgetedLink, Link, LinkClosed
from shoal.transports.local_link import local_links
from shoal.transports.loop_share import LoopShare
from shoal.transports.outbox import OUTBOX_MAX
from shoal.transports.strangers import BY_STRANGER, MESSAGE_MAX, Strangers

HELD_BY_GUESTS_MAX = 32 << 20  # bytes of all messages that they have begun to send
GUESTS_SHARE = 0.25  # of a core: an open relay is meant to be used
GUESTS_BURST = 0.5  # seconds of it at once
HOST_COSTS: Mapping[RelayStanding, float] = {
    RelayStanding.STRANGER: 0.0,  # it has no way there
    RelayStanding.GUEST: 0.15e-3,  # mostly a piece of an answer
}
"""Seconds, about, that a message takes at the coordinator's own node."""

log = logging.getLogger("shoal.peers")


class RelayLink(Link, Protocol):
    """A link that writes many messages at once, without waiting."""

    def pack(self, data: Data) -> Data:
        """Encode a message for ``write``; the result fits all links of this type."""

    def write(self, packs: Sequence[Data]) -> None:
        """Write messages together; what does not fit is buffered.

        Raises LinkClosed if the link has ended.
        """

    @property
    def unread(self) -> int:
        """Number of buffered bytes."""

    def abort(self) -> None:
        """Close the link at once and discard its buffer."""


@dataclass(slots=True, eq=False)
class _RelayedLink:
    """A link of the relay; ``ended`` gets the reason when it ends.

    ``is_host``: at the other end is the coordinator itself.
    """

    link: RelayLink
    ended: asyncio.Future[ConnectionEnd]
    is_host: bool


class RelayRunner:
    """A relay machine and its links.

    Each link has a task that reads; the outputs of the machine are written at once, in
    one write per receiving link.  A link that stops reading is disconnected.  Until a
    peer has registered, it is one of ``strangers``, with their share of the loop; then
    one of the relay's guests, who have a share of their own; ``cpu`` is its meter.
    """

    def __init__(
        self,
        wire: str,
        machine: RelayMachine,
        clock: Clock,
        strangers: Strangers,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._wire = wire
        self._machine = machine
        self._clock = clock
        self._links: dict[int, _RelayedLink] = {}
        self._ended: list[int] = []  # links whose end the machine does not know yet
        self._numbers = count(1)
        share = LoopShare(clock, GUESTS_SHARE, GUESTS_BURST, cpu)
        guests = Strangers(HELD_BY_GUESTS_MAX, None, share)
        self._budgets: Mapping[RelayStanding, tuple[Strangers, int | None]] = {
            RelayStanding.STRANGER: (strangers, MESSAGE_MAX),
            RelayStanding.GUEST: (guests, None),
        }
        self._shares: Mapping[RelayStanding, LoopShare | None] = {
            # Anyone who comes to an open relay may become a guest.
            RelayStanding.STRANGER: share if machine.is_open else strangers.share,
            RelayStanding.GUEST: share,
        }
        self._timer = DeadlineTimer(clock, lambda: machine.deadline, self._tick)

    def __len__(self) -> int:
        return len(self._links)

    async def serve(
        self, link: RelayLink, request: UpgradeRequest, *, is_host: bool = False
    ) -> ConnectionEnd:
        """Relay for a link until it ends; return the reason.

        ``is_host``: at the other end is the coordinator itself.

        Raises only CancelledError: a bug in the machine ends the link.
        """
        number = next(self._numbers)
        ended = asyncio.get_running_loop().create_future()
        self._links[number] = relayed = _RelayedLink(link, ended, is_host)
        level = logging.DEBUG if is_host else logging.INFO
        message = "connected wire=%s peer=%s"
        log.log(level, message, self._wire, link.peer, extra=BY_STRANGER)
        end = ConnectionEnd("cut off")
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(number, relayed, request))
                end = await ended
                reader.cancel()
        finally:
            self._end(number, end)
            self._perform(())
            message = "disconnected wire=%s peer=%s reason=%r"
            args = (self._wire, link.peer, end.reason)
            log.log(level, message, *args, extra=BY_STRANGER)
        if end is STOPPED_READING:
            link.abort()
        await link.close(end.code, end.text)
        return end

    def disconnect_all(self, reason: str) -> None:
        """Disconnect all links; peers may reconnect."""
        for relayed in list(self._links.values()):
            _set_end(relayed, ConnectionEnd(reason, CloseCode.GOING_AWAY, reason))

    async def _read(
        self, number: int, relayed: _RelayedLink, request: UpgradeRequest
    ) -> None:
        link, machine, now = relayed.link, self._machine, self._clock.now
        limits = link if isinstance(link, BudgetedLink) else None
        standing = RelayStanding.STRANGER
        network = network_key(request.address)
        try:
            self._perform(machine.link_opened(number, request, now()))
            while not relayed.ended.done():
                handled = 0
                while handled < READS_IN_A_ROW:
                    batch = await link.receive()
                    if relayed.ended.done():
                        return
                    handled += len(batch)
                    share = self._shares[standing]
                    if share is None or relayed.is_host:
                        self._perform(machine.receive(number, batch, now()))
                    else:
                        # Not read meanwhile, so that the peer has to wait as well.
                        size = sum(map(len, batch))
                        held = nullcontext() if limits is None else limits.holding(size)
                        with held:
                            async with share.turn(network):
                                if relayed.ended.done():
                                    return
                                outputs = machine.receive(number, batch, now())
                                self._perform(outputs)
                        cost = HOST_COSTS[standing] * self._count_for_host(outputs)
                        share.charge(network, cost)
                    if (now_is := machine.standing(number)) is not standing:
                        standing = now_is
                        if limits is not None:
                            limits.share_budget(*self._budgets[standing])
                    if (pause := machine.read_delay(number, now())) > 0:
                        await asyncio.sleep(pause)
                # Yield: a link that always has data never waits.
                await asyncio.sleep(0)
        except LinkClosed as closed:
            _set_end(relayed, ConnectionEnd.of_link(closed))
        except Exception:
            # A bug in the machine, or here, must not end the other links.
            log.exception("broken wire=%s peer=%s", self._wire, link.peer)
            _set_end(
                relayed,
                ConnectionEnd(
                    "internal error", CloseCode.INTERNAL_ERROR, "internal error"
                ),
            )

    def _count_for_host(self, outputs: Sequence[RelaySend | RelayBroadcast]) -> int:
        """Count the messages for the coordinator itself, which has to process them."""
        return sum(
            isinstance(output, RelaySend)
            and (relayed := self._links.get(output.link)) is not None
            and relayed.is_host
            for output in outputs
        )

    def _perform(self, outputs: Sequence[RelaySend | RelayBroadcast]) -> None:
        """Write outputs, end links, and report ended links to the machine."""
        self._write_outputs(outputs)
        while self._ended:
            try:
                outputs = self._machine.link_closed(
                    self._ended.pop(), self._clock.now()
                )
            except Exception:
                # The link is closed already, so there is none to end.
                log.exception("broken wire=%s", self._wire)
            else:
                self._write_outputs(outputs)
        self._timer.update()

    def _write_outputs(self, outputs: Sequence[RelaySend | RelayBroadcast]) -> None:
        packs: dict[int, list[Data]] = {}
        ends: list[tuple[int, ConnectionEnd]] = []
        for output in outputs:
            if isinstance(output, RelayBroadcast):
                self._broadcast(output, packs)
            elif output.close:
                text = str(output.data)
                ends.append((output.link, ConnectionEnd(text, output.close, text)))
            elif (relayed := self._links.get(output.link)) is not None:
                pack = relayed.link.pack(output.data)
                if output.link in packs:
                    packs[output.link].append(pack)
                else:
                    packs[output.link] = [pack]
        for number, batch in packs.items():
            self._write(number, batch)
        for number, end in ends:
            self._end(number, end)

    def _broadcast(
        self, broadcast: RelayBroadcast, packs: dict[int, list[Data]]
    ) -> None:
        packed: dict[type[RelayLink], list[Data]] = {}
        for number, first in broadcast.links:
            relayed = self._links.get(number)
            if relayed is None:
                continue
            kind = type(relayed.link)
            if kind not in packed:
                packed[kind] = [relayed.link.pack(each) for each in broadcast.messages]
            packs.setdefault(number, []).extend(packed[kind][first:])

    def _write(self, number: int, batch: list[Data]) -> None:
        relayed = self._links[number]
        try:
            relayed.link.write(batch)
        except LinkClosed as closed:
            self._end(number, ConnectionEnd.of_link(closed))
            return
        if relayed.link.unread > OUTBOX_MAX:
            self._end(number, STOPPED_READING)

    def _end(self, number: int, end: ConnectionEnd) -> None:
        """Remove a link from the relay; `serve` closes it."""
        relayed = self._links.pop(number, None)
        if relayed is not None:
            _set_end(relayed, end)
            self._ended.append(number)

    def _tick(self) -> None:
        self._perform(self._machine.tick(self._clock.now()))


def _set_end(relayed: _RelayedLink, end: ConnectionEnd) -> None:
    """Record why the link ends; the first reason counts."""
    if not relayed.ended.done():
        relayed.ended.set_result(end)


RESTART_AFTER = 1.0  # seconds until an ended session restarts

ServeSession: TypeAlias = Callable[
    [str, PeerSession, Link], Coroutine[Any, Any, ConnectionEnd]
]
"""Takes the wire, a session and its link; runs the session until it ends."""


async def run_relay_member(
    runner: RelayRunner,
    wire: str,
    new_session: Callable[[float], PeerSession],
    serve: ServeSession,
    clock: Clock,
) -> None:
    """Run the coordinator's own session on a relay until cancelled."""
    while True:
        local, remote = local_links("coordinator", "switch")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                runner.serve(remote, UpgradeRequest(path=""), is_host=True)
            )
            await serve(wire, new_session(clock.now()), local)
        await asyncio.sleep(RESTART_AFTER)
