"""A process's port for other ranks, and its connections to the ranks of each group.

A connection begins with a handshake, in which both ends prove the secret of their
group.  The dialling rank's id is ``GROUP/GENERATION/RANK``, and what the connection is
for; that of the port is drawn for each process and known to its group, so that an old
address leads to no other process.
"""

import base64
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

from shoal.domain.addresses import is_loopback
from shoal.domain.errors import NotAdmitted, Unavailable
from shoal.protocols.seam.ranks import RankIdentity, RankRefused, SegmentWire
from shoal.training.links import (
    WAY_TIMEOUT,
    IncomingLink,
    OutgoingLink,
    RankAcceptor,
    Way,
    connect_to,
)
from shoal.transports.blocking.rank_socket import (
    HAS_LOCAL_SOCKETS,
    AcceptedSocket,
    Disconnected,
    LocalListener,
    RankListener,
    RankSocket,
    begin_client,
    dial,
    dial_local,
)
from shoal.transports.relayed_sockets import RelayedSockets
from shoal.transports.tls import self_signed_tls

OPEN_TIMEOUT = 5.0  # seconds that a rank of an expected group waits until it is open
RELAYED = "the relay of the coordinator"  # the address of connections by it
LOOK_INTERVAL = 3.0  # seconds after which a rank that is waited for is looked for
ID_SIZE = 12  # random bytes of a port's id

log = logging.getLogger("shoal.training")


class GroupEnded(Unavailable, RuntimeError):
    """A rank is lost, late or out of step: its group does nothing more.

    It is a RuntimeError because scripts expect those of PyTorch's groups.

    The numbers of the operation that was under way are undefined.  ``suspect`` is the
    rank that this one waited for.  ``out_of_step``: the programs of the ranks differ.
    """

    def __init__(
        self, reason: str, suspect: int | None = None, *, out_of_step: bool = False
    ) -> None:
        super().__init__(reason)
        self.suspect = suspect
        self.out_of_step = out_of_step


class LinkUse(Enum):
    """What a connection between two ranks is for, as the end of the dialling id."""

    COLLECTIVES = ""
    POINT_TO_POINT = "/point-to-point"


class RankAddress(NamedTuple):
    """Where a rank listens, and the id that it has there.

    ``hosts`` are the addresses of its machine, the likeliest first.
    """

    hosts: Sequence[str]
    port: int
    id: str


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """One rank's part in one generation of a group; all ranks have the ``secret``.

    ``names`` are the numbers of the ranks in errors, if they had others before.
    """

    group: str
    generation: int
    rank: int
    size: int
    secret: str
    names: Sequence[int] = ()

    def name(self, rank: int) -> str:
        """Return what a rank is called in errors."""
        return f"rank {self.names[rank] if self.names else rank}"

    @property
    def id(self) -> str:
        """The rank's id in handshakes."""
        return f"{self.group}/{self.generation}/{self.rank}"


class RankPort:
    """The port of this process; it admits the ranks of the groups that are open.

    ``encrypts`` must be the same in all ranks; None: all connections but those within
    the machine are encrypted.  ``local``: ranks of this machine use a local socket,
    where there are such, unless all is encrypted.  ``relay`` leads to ranks that are
    not reachable otherwise, always encrypted.  ``wire`` is this port's alone.
    """

    def __init__(
        self,
        wire: SegmentWire,
        listener: RankListener,
        *,
        encrypts: bool | None,
        local: bool = False,
        relay: RelayedSockets | None = None,
    ) -> None:
        self.wire = wire
        self._encrypts = encrypts
        self._is_local = local and HAS_LOCAL_SOCKETS and encrypts is not True
        self._relay = relay
        self._relayed: set[str] = set()  # ids of ports that are reached by the relay
        drawn = base64.b32encode(os.urandom(ID_SIZE)).decode().rstrip("=").lower()
        self.id = f"rank-{drawn}"
        self._groups: dict[tuple[str, int], GroupLinks] = {}
        self._expected: dict[str, int] = {}
        self._changed = threading.Condition()
        listeners: list[RankListener | LocalListener] = [listener]
        if self._is_local:
            # Its id was drawn just now: the name cannot be in use.
            try:
                listeners.append(LocalListener(self.id))
            except Unavailable as error:  # a sandbox may forbid it
                log.warning("ranks of this machine use TCP reason=%r", str(error))
        self._acceptors = [
            RankAcceptor(
                *(wire, each, RankIdentity(self.id, "", os.urandom)),
                secret_of=self._secret_of,
                add=self._add,
            )
            for each in listeners
        ]
        if relay is not None:
            tls = self_signed_tls("rank")  # always: the coordinator sees what passes
            relay.listen(
                self.id,
                lambda each: self._acceptors[0].admit(
                    AcceptedSocket(each, RELAYED, tls)
                ),
            )

    @property
    def port(self) -> int:
        """The number of the port."""
        return self._acceptors[0].port

    def open_group(
        self,
        membership: GroupMembership,
        timeout: float,
        dial_timeout: float | None = None,
    ) -> "GroupLinks":
        """Admit the ranks of a group from now on; before this, they are refused.

        ``timeout`` limits the wait for a connection.  ``dial_timeout``: the other ranks
        listen already, so each address is tried once, with that time limit.
        """
        links = GroupLinks(self, membership, timeout, dial_timeout)
        with self._changed:
            self._groups[membership.group, membership.generation] = links
            self._changed.notify_all()
        return links

    def expect(self, group: str, generation: int) -> None:
        """From this generation of a group on, let ranks wait for ``open_group``."""
        with self._changed:
            self._expected[group] = generation

    def close_group(self, membership: GroupMembership) -> None:
        """Admit no ranks of a group any more."""
        with self._changed:
            self._groups.pop((membership.group, membership.generation), None)

    def close(self) -> None:
        """Stop listening."""
        for acceptor in self._acceptors:
            acceptor.close()
        if self._relay is not None:
            self._relay.close()

    def ways_to(self, address: RankAddress) -> Sequence[Way]:
        """Return how to connect to a rank; the likeliest way first."""
        ways: list[Way] = [partial(self._dial, host, address) for host in address.hosts]
        if self._relay is not None:
            first = address.id in self._relayed
            ways.insert(0 if first else len(ways), self._way_by_relay(address.id))
        return ways

    def _dial(self, host: str, address: RankAddress, timeout: float) -> RankSocket:
        if self._is_local and (found := dial_local(address.id, timeout)) is not None:
            return found
        encrypts = self._encrypts
        if encrypts is None:
            encrypts = not is_loopback(host)
        return dial(host, address.port, timeout, encrypts=encrypts)

    def _way_by_relay(self, port_id: str) -> Way:
        def connect(timeout: float) -> RankSocket:
            assert self._relay is not None, "there is no such way else"
            connected = self._relay.dial(port_id)
            connected.settimeout(timeout)
            return begin_client(connected, RELAYED, encrypts=True)

        return connect

    def is_gone(self, address: RankAddress) -> bool:
        """Return whether nothing listens where a rank did; False: that is not known."""
        for way in self.ways_to(address):
            try:
                way(WAY_TIMEOUT).close()
            except Disconnected as error:
                if not isinstance(error.__cause__, ConnectionRefusedError):
                    return False
            else:
                return False
        return True

    def on_connected(self, connection: RankSocket, port_id: str) -> None:
        """Remember which way led to a rank."""
        if connection.address == RELAYED:
            self._relayed.add(port_id)

    def _add(self, client: str, connection: RankSocket, end: bytes) -> None:
        """Take over the connection of a client.  Raises NotAdmitted, Disconnected."""
        links, rank, use = self._find(client)
        links.add(rank, use, connection)
        connection.send(end)

    def _secret_of(self, client: str) -> str:
        """Return the secret that a client has to prove.  Raises NotAdmitted."""
        return self._find(client)[0].membership.secret

    def _find(self, client: str) -> tuple["GroupLinks", int, LinkUse]:
        """Return the group of a client, its rank and use.  Raises NotAdmitted."""
        use = LinkUse.COLLECTIVES
        if client.endswith(LinkUse.POINT_TO_POINT.value):
            use = LinkUse.POINT_TO_POINT
        group, _, rest = client.removesuffix(use.value).partition("/")
        generation, _, rank = rest.partition("/")
        if not (generation.isdecimal() and rank.isdecimal()):
            raise NotAdmitted("this port is for the ranks of training runs only")
        key = group, int(generation)
        with self._changed:
            if self._expected.get(group, key[1] + 1) <= key[1]:
                self._changed.wait_for(lambda: key in self._groups, OPEN_TIMEOUT)
            links = self._groups.get(key)
        if links is None or links.has_ended:
            raise NotAdmitted(f"generation {generation} of this group is not open here")
        if int(rank) >= links.membership.size:
            raise NotAdmitted(f"this group has {links.membership.size} ranks")
        return links, int(rank), use


class GroupLinks:
    """The connections of one rank in one generation of a group, made when needed.

    ``set_addresses`` must be called before the first use.
    """

    def __init__(
        self,
        port: RankPort,
        membership: GroupMembership,
        timeout: float,
        dial_timeout: float | None = None,
    ) -> None:
        self.membership = membership
        self._port = port
        self._timeout = timeout
        self._dial_timeout = dial_timeout
        self._addresses: Mapping[int, RankAddress] = {}
        self._changed = threading.Condition()
        self._outgoing: dict[tuple[int, LinkUse], OutgoingLink] = {}
        self._incoming: dict[tuple[int, LinkUse], IncomingLink] = {}
        self._dialled: dict[tuple[int, LinkUse], RankSocket] = {}  # some still agree
        self._read: Callable[[int, IncomingLink], None] | None = None
        self._on_lost: Callable[[int, str], None] = lambda rank, reason: None
        self._on_end: Callable[[], None] = lambda: None
        self._ended: tuple[str, int | None, bool] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can be sent or received."""
        return self._ended is not None

    def check(self) -> None:
        """Raise GroupEnded if the group has ended."""
        if self._ended is not None:
            reason, suspect, out_of_step = self._ended
            raise GroupEnded(reason, suspect, out_of_step=out_of_step)

    def set_addresses(self, addresses: Mapping[int, RankAddress]) -> None:
        """Set where the other ranks listen."""
        self._addresses = addresses

    def attend(
        self,
        read: Callable[[int, IncomingLink], None],
        on_lost: Callable[[int, str], None],
        on_end: Callable[[], None],
    ) -> None:
        """Set what serves the links for POINT_TO_POINT.

        ``read`` gets each connection from a rank, in a thread, and closes it;
        ``on_lost`` a rank to which there is no connection, and why not.  ``on_end`` is
        called when the group has ended.
        """
        with self._changed:
            self._read, self._on_lost, self._on_end = read, on_lost, on_end
            waiting = [*self._incoming.items()]
        for (rank, use), link in waiting:
            self._begin_to_read(rank, use, link)

    def outgoing(self, rank: int, use: LinkUse = LinkUse.COLLECTIVES) -> OutgoingLink:
        """Return the connection to a rank; the first time, it is dialled meanwhile."""
        with self._changed:
            link = self._outgoing.get((rank, use))
            if link is None:
                link = self._outgoing[rank, use] = OutgoingLink(
                    partial(self._dial, rank, use),
                    self._port.wire,
                    partial(self._on_failure, rank, use),
                )
            return link

    def incoming(self, rank: int) -> IncomingLink:
        """Return the connection from a rank; the first time, wait for it.

        Raises GroupEnded.
        """
        link = self._incoming.get((rank, LinkUse.COLLECTIVES))
        return self._wait_for(rank) if link is None else link

    def add(self, rank: int, use: LinkUse, connection: RankSocket) -> None:
        """Take over a connection from a rank.

        Raises NotAdmitted if there is one: a rank dials once.
        """
        link = IncomingLink(connection, self._port.wire)
        with self._changed:
            if (rank, use) in self._incoming or self._ended is not None:
                raise NotAdmitted(f"rank {rank} is connected already")
            self._incoming[rank, use] = link
            self._changed.notify_all()
            reads = self._read is not None
        if reads:
            self._begin_to_read(rank, use, link)

    def has_incoming(self, rank: int, use: LinkUse) -> bool:
        """Return whether a rank has connected."""
        with self._changed:
            return (rank, use) in self._incoming

    def abort(
        self, reason: str, suspect: int | None = None, *, out_of_step: bool = False
    ) -> None:
        """End all connections, for the first reason given; any thread may call it.

        ``suspect`` is the rank that is to blame, as far as this one knows.
        """
        with self._changed:
            self._ended = self._ended or (reason, suspect, out_of_step)
            for link in self._incoming.values():
                link.abort()
            for dialled in self._dialled.values():
                dialled.abort()
            self._changed.notify_all()
        self._on_end()

    def close(self) -> None:
        """Close all connections, after what is queued was sent, and the group."""
        self._port.close_group(self.membership)
        with self._changed:
            self._ended = self._ended or ("the group was closed", None, False)
            outgoing, self._outgoing = self._outgoing, {}
            incoming, self._incoming = self._incoming, {}
        for sender in outgoing.values():
            sender.close()
        for (_, use), link in incoming.items():
            if use is LinkUse.COLLECTIVES or self._read is None:
                link.close()
            else:
                link.abort()
        self._on_end()

    def _begin_to_read(self, rank: int, use: LinkUse, link: IncomingLink) -> None:
        if use is LinkUse.POINT_TO_POINT:
            assert self._read is not None
            arguments = rank, link
            threading.Thread(target=self._read, args=arguments, daemon=True).start()

    def _dial(self, rank: int, use: LinkUse) -> RankSocket:
        """Connect to a rank.  Raises Disconnected, also if the group ends meanwhile."""
        address = self._addresses[rank]
        own_id = self.membership.id + use.value
        try:
            connection = connect_to(
                self._port.wire,
                RankIdentity(own_id, self.membership.secret, os.urandom),
                address.id,
                [partial(self._try, way) for way in self._port.ways_to(address)],
                deadline=time.monotonic() + (self._dial_timeout or self._timeout),
                repeats=self._dial_timeout is None,
                on_attempt=partial(self._on_attempt, rank, use),
            )
        except (Disconnected, RankRefused, GroupEnded) as error:
            raise Disconnected(f"unreachable: {error}") from error
        self._port.on_connected(connection, address.id)
        return connection

    def _try(self, way: Way, timeout: float) -> RankSocket:
        self.check()
        return way(timeout)

    def _on_attempt(self, rank: int, use: LinkUse, connection: RankSocket) -> None:
        with self._changed:
            self._dialled[rank, use] = connection
            if self._ended is not None:
                connection.close()
                raise Disconnected("the group has ended")

    def _on_failure(self, rank: int, use: LinkUse, reason: str) -> None:
        """Nothing can be sent to a rank any more."""
        if use is LinkUse.POINT_TO_POINT:
            self._on_lost(rank, reason)
        else:
            self.abort(f"{self.membership.name(rank)}: {reason}", rank)

    def _wait_for(self, rank: int) -> IncomingLink:
        key = rank, LinkUse.COLLECTIVES
        reason, deadline = "", time.monotonic() + self._timeout
        while not reason:
            left = deadline - time.monotonic()
            with self._changed:
                self._changed.wait_for(
                    lambda: key in self._incoming or self._ended is not None,
                    min(left, LOOK_INTERVAL),
                )
                if key in self._incoming:
                    return self._incoming[key]
            self.check()
            if left <= LOOK_INTERVAL:
                reason = f"did not connect within {self._timeout:g} s"
            elif self._port.is_gone(self._addresses[rank]):
                reason = "ended before it connected"
        self.abort(f"{self.membership.name(rank)} {reason}", rank)
        self.check()
        raise AssertionError("an aborted group has ended")
