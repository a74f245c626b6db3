"""Limits the cost of connections until their peer is admitted.

Anyone who reaches a port can connect, and begin a message that never ends.  Until a
credential was accepted, or the peer has joined where none is asked for, it is a
*stranger*: all strangers share a small budget of memory, and of CPU time.  Those of a
program have both together, on all ports.  An admitted peer is limited by its wire
alone, and what it had cost before is paid back.
"""

import asyncio
import ssl
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from shoal.domain.addresses import is_loopback, network_key
from shoal.transports.clock import Clock
from shoal.transports.loop_share import LoopShare

T = TypeVar("T")

MESSAGE_MAX = 64 << 10  # bytes of one message, or of the head of a request
MESSAGE_TIMEOUT = 10.0  # seconds from the first byte of a message to its last
HELD_MAX = 32 << 20  # bytes of all strangers together
STRANGERS_MAX = 8192  # connections
PER_ADDRESS_MAX = 64  # connections; loopback is exempt, for proxies connect from there
PIECE_OVERHEAD = 64  # bytes of memory for a piece, besides its data
ACCEPTING_SHARE = 0.025  # of a core, to accept connections
ACCEPTING_BURST = 0.05  # seconds of it at once
STRANGERS_SHARE = 0.01  # of a core, for all else that they cause
STRANGERS_BURST = 0.2  # seconds of it at once
FAMILIAR_SHARE = 0.01  # the same, for networks from which a client was admitted lately
FAMILIAR_BURST = 0.2
FAMILIAR_FOR = 86_400.0  # seconds
FAMILIAR_MAX = 10_000  # networks; the least recently admitted one is evicted
WAKE_COST = 10e-6  # seconds, about, to wake up for them, which are not measured
CONNECTION_COST = 0.5e-3  # seconds, about, that are not measured: to open and close
TLS_COST = 1e-3  # and for TLS, besides the handshake
READ_COST = 20e-6  # and to notice that something can be read
REQUEST_COST = 0.15e-3  # and to pass a request on, and to write its answer
HANDSHAKE_COST = 2e-3  # seconds of a TLS handshake, until it is known

BY_STRANGER: Mapping[str, object] = {"by_stranger": True}
"""The ``extra`` of log records that strangers cause: as many as they like."""

OVER_BUDGET = (
    "unauthenticated connections use too much memory; closing the one that uses most"
)
TOO_MANY = "too many unauthenticated connections; closing the oldest"


class StepwiseMeter(Generator[Any, Any, T], Generic[T]):
    """Awaits ``work``, and charges what each of its steps took by a ``meter``.

    ``meter`` returns seconds, such as the CPU time of the loop's thread.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, T],
        meter: Callable[[], float],
        charge: Callable[[float], None],
    ) -> None:
        self._work = work
        self._meter = meter
        self._charge = charge

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def send(self, value: Any) -> Any:
        began = self._meter()
        try:
            return self._work.send(value)
        finally:
            self._charge(self._meter() - began)

    def throw(self, *error: Any) -> Any:
        began = self._meter()
        try:
            return self._work.throw(*error)
        finally:
            self._charge(self._meter() - began)


class Stranger:
    """The account of one connection: ``held`` is in bytes, ``spent`` in seconds.

    ``drop`` ends the connection at once, and takes the reason.  ``share`` is that of
    its network.
    """

    __slots__ = (
        "_admitted",
        "_paced",
        "_strangers",
        "drop",
        "held",
        "network",
        "share",
        "spent",
    )

    def __init__(
        self, strangers: "Strangers", address: str, drop: Callable[[str], object]
    ) -> None:
        self.network = network_key(address)
        self.drop = drop
        self.held = 0
        self.spent = 0.0
        self.share = strangers.share_of(self.network)
        self._strangers: Strangers | None = strangers
        self._admitted = False
        # The transport that is not read until it is this one's turn, and that turn.
        self._paced: tuple[asyncio.ReadTransport, asyncio.Future[None]] | None = None

    def run(self, call: Callable[..., T], *args: object) -> T:
        """Call, and charge the CPU time that it takes, unless that admits the peer."""
        if (share := self.share) is None:
            return call(*args)
        began = share.meter()
        try:
            return call(*args)
        finally:
            if not self._admitted:
                took = share.meter() - began + READ_COST
                self.spent += took
                share.charge(self.network, took)

    def charge(self, seconds: float) -> None:
        """Charge CPU time that was used for the connection."""
        if self.share is not None:
            self.spent += seconds
            self.share.charge(self.network, seconds)

    @contextmanager
    def opening(self, *, secure: bool) -> Iterator[None]:
        """Charge the cost of opening the connection in the block.

        ``secure``: with a TLS handshake.
        """
        self.charge(CONNECTION_COST + (TLS_COST if secure else 0.0))
        share, handshake = self.share, HANDSHAKE_COST if secure else 0.0
        if share is not None:
            share.charge(self.network, handshake)
        try:
            yield
        finally:
            if share is not None:  # what it took is measured
                share.charge(self.network, -handshake)

    def on_open(
        self, transport: asyncio.BaseTransport, drop: Callable[[str], object]
    ) -> None:
        """Have ``drop`` end the connection from now on, which is open."""
        self.drop = drop
        tls = transport.get_extra_info("ssl_object")
        if isinstance(tls, MeteredTls):
            tls.share.charge(None, -tls.spent)
            self.charge(tls.spent)

    def pace(self, transport: asyncio.ReadTransport) -> None:
        """Stop reading until it is this one's turn, if the strangers' share is spent.

        Nothing happens if reading has stopped for another reason.
        """
        share = self.share
        if (
            share is not None
            and self._paced is None
            and share.is_spent
            and transport.is_reading()
            and not transport.is_closing()
        ):
            transport.pause_reading()
            turn = share.request(self.network, self._resume)
            self._paced = transport, turn

    def admit(self) -> None:
        """Count the connection no more, and pay back what it has cost."""
        if self._strangers is not None:
            self._admitted = True
            self.charge(-self.spent)
            self._strangers.meet(self.network)
        self.leave()

    def received(self, size: int) -> None:
        """Count bytes that arrived; this may drop a stranger, even this one."""
        if self._strangers is not None:
            self.held += size
            self._strangers.on_received(size)

    def progressed(self) -> None:
        """Count nothing more of what arrived: it was a whole message."""
        if self._strangers is not None:
            self._strangers.held -= self.held
            self.held = 0

    def released(self, size: int) -> None:
        """Count bytes no more that were counted by ``received``."""
        if self._strangers is not None:
            size = min(size, self.held)
            self.held -= size
            self._strangers.held -= size

    def move(self, strangers: "Strangers") -> None:
        """Count the connection, and what it has cost, among others from now on."""
        spent = self.spent
        self.charge(-spent)
        self.leave()
        self._strangers, self.share = strangers, strangers.share_of(self.network)
        strangers.register(self)
        self.charge(spent)

    def leave(self) -> None:
        """Count the connection no more: it was admitted, or has ended."""
        self.progressed()
        self._resume()
        if self._strangers is not None:
            self._strangers.remove(self)
            self._strangers = self.share = None

    def _resume(self) -> None:
        if self._paced is not None:
            transport, turn = self._paced
            self._paced = None
            turn.cancel()
            if not transport.is_closing():
                transport.resume_reading()


class MeteredTls(ssl.SSLObject):
    """A server's TLS connection, which charges its handshake to a ``share``.

    ``spent`` is what that took, in seconds.
    """

    share: LoopShare
    spent = 0.0

    def do_handshake(self) -> None:
        began = self.share.meter()
        try:
            super().do_handshake()
        finally:
            took = self.share.meter() - began
            self.spent += took
            self.share.charge(None, took)


def bounded_strangers(clock: Clock, processes: int = 1) -> "Strangers":
    """Return the budget of a program's unauthenticated clients, 4.5 % of a core.

    Its ``processes`` share one budget of memory.
    """
    cpu = time.thread_time
    return Strangers(
        HELD_MAX // processes,
        STRANGERS_MAX // processes,
        share=LoopShare(clock, STRANGERS_SHARE, STRANGERS_BURST, cpu),
        familiar=LoopShare(clock, FAMILIAR_SHARE, FAMILIAR_BURST, cpu),
        accepting=LoopShare(clock, ACCEPTING_SHARE, ACCEPTING_BURST, cpu),
        now=clock.now,
    )


class Strangers:
    """Strangers with one budget, such as those on all ports of a program.

    ``held`` is in bytes, and ``held_max`` the budget; without ``count_max`` their
    number is limited elsewhere.  ``accepting`` is the share of the loop for accepting
    connections, and ``share`` that for all other costs; *familiar* networks, from which
    a client was admitted lately, have a share of their own.  None: unlimited.
    """

    def __init__(
        self,
        held_max: int = HELD_MAX,
        count_max: int | None = STRANGERS_MAX,
        share: LoopShare | None = None,
        familiar: LoopShare | None = None,
        accepting: LoopShare | None = None,
        now: Callable[[], float] = time.monotonic,  # noqa: TID251  # a default
    ) -> None:
        self.held = 0
        self.share = share
        self._familiar_share = familiar or share
        self._familiar = OrderedDict[str, float]()  # networks, by the time of admission
        self._now = now
        self.accepting = accepting
        self._held_max = held_max
        self._count_max = count_max
        self._strangers: dict[Stranger, None] = {}  # the oldest first
        self._per_address = Counter[str]()
        self._forwarded = dict[tuple[str, int], str]()

    def __len__(self) -> int:
        return len(self._strangers)

    def forward(self, source: tuple[str, int], client: str) -> None:
        """Take the next connection from a source, of this program, as a client's."""
        self._forwarded[source] = client

    def client_of(self, source: tuple[str, int]) -> str:
        """Return the address of the client whose connection comes from a source."""
        if not self._forwarded:
            return source[0]
        return self._forwarded.pop(source, source[0])

    def has_room(self, address: str) -> bool:
        """Return whether one more connection from an address may be opened."""
        from_there = self._per_address[network_key(address)]
        return from_there < PER_ADDRESS_MAX or is_loopback(address)

    def add(self, address: str, drop: Callable[[str], object]) -> Stranger:
        """Count a new connection; beyond the limit this drops the oldest."""
        stranger = Stranger(self, address, drop)
        self.register(stranger)
        return stranger

    # What they cost.

    def meet(self, network: str) -> None:
        """Record that a client from a network was admitted."""
        self._familiar[network] = self._now()
        self._familiar.move_to_end(network)
        if len(self._familiar) > FAMILIAR_MAX:
            self._familiar.popitem(last=False)

    def share_of(self, network: str) -> LoopShare | None:
        """Return the share of the loop for strangers from a network."""
        met = self._familiar.get(network)
        if met is None or self._now() > met + FAMILIAR_FOR:
            return self.share
        return self._familiar_share

    def meter_accepting(self, accept: Callable[[], float]) -> None:
        """Call ``accept``, and charge the fraction of its time that it returns."""
        if (share := self.accepting) is None:
            accept()
            return
        began = share.meter()
        part = accept()
        share.charge(None, part * (share.meter() - began + WAKE_COST))

    async def meter(
        self,
        work: Callable[[], Coroutine[Any, Any, T]],
        charge: Callable[[float], None],
    ) -> T:
        """Do work, and charge the CPU time of its steps."""
        if (share := self.share) is None:
            return await work()
        return await StepwiseMeter(work(), share.meter, charge)

    def meter_handshakes(self, context: ssl.SSLContext) -> None:
        """Charge the TLS handshakes of a server's side, finished or not."""
        if self.share is not None:
            metered = type("MeteredTls", (MeteredTls,), {"share": self.share})
            context.sslobject_class = metered

    # For its strangers.

    def register(self, stranger: Stranger) -> None:
        """Count a connection that holds nothing."""
        self._strangers[stranger] = None
        self._per_address[stranger.network] += 1
        if self._count_max is not None and len(self._strangers) > self._count_max:
            self._drop(next(iter(self._strangers)), TOO_MANY)

    def on_received(self, size: int) -> None:
        """Count bytes of a stranger; beyond the budget drop who holds the most."""
        self.held += size
        while self.held > self._held_max:
            # Not the last that sent: that may be the only honest one.
            largest = max(self._strangers, key=lambda stranger: stranger.held)
            self._drop(largest, OVER_BUDGET)

    def remove(self, stranger: Stranger) -> None:
        """Forget a stranger that holds nothing."""
        del self._strangers[stranger]
        self._per_address[stranger.network] -= 1
        if not self._per_address[stranger.network]:
            del self._per_address[stranger.network]

    @staticmethod
    def _drop(stranger: Stranger, reason: str) -> None:
        stranger.leave()
        stranger.drop(reason)
