"""How connections between ranks begin: dialled and accepted, each with a handshake."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from shoal.domain.errors import NotAdmitted
from shoal.protocols.seam.ranks import (
    RankHandshake,
    RankIdentity,
    RankRefused,
    RankWire,
)
from shoal.transports.rank_socket import (
    AcceptedSocket,
    Disconnected,
    LocalListener,
    RankListener,
    RankSocket,
    begin_server,
)

HANDSHAKE_TIMEOUT = 10.0  # seconds of a handshake
ADMITTING_MAX = 64  # connections in their handshake at a time; others wait
WAY_TIMEOUT = 3.0  # seconds for one of several ways to a rank
DIAL_INTERVAL = 0.05  # seconds between attempts to reach a rank that is starting

Way: TypeAlias = Callable[[float], RankSocket]
"""Connects to a rank within so many seconds, or raises Disconnected."""


class RankAcceptor:
    """Accepts connections at a port, from a thread of its own.

    ``secret_of`` takes a client's id and returns what it has to prove; ``add`` takes
    its connection after that.  Both may raise NotAdmitted, and are called from threads.
    """

    def __init__(
        self,
        wire: RankWire,
        listener: RankListener | LocalListener,
        identity: RankIdentity,
        secret_of: Callable[[str], str],
        add: Callable[[str, RankSocket], None],
    ) -> None:
        self._wire = wire
        self._listener = listener
        self._identity = identity
        self._secret_of = secret_of
        self._add = add
        self._admitting = threading.Semaphore(ADMITTING_MAX)
        self._thread = threading.Thread(target=self._accept_all, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The number of the port."""
        return self._listener.port

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        self._thread.join()

    def admit(self, accepted: AcceptedSocket) -> None:
        """Handshake with a client in a thread, once fewer than 64 others do."""
        self._admitting.acquire()
        threading.Thread(target=self._admit, args=(accepted,), daemon=True).start()

    def _accept_all(self) -> None:
        while (accepted := self._listener.accept()) is not None:
            self.admit(accepted)

    def _admit(self, accepted: AcceptedSocket) -> None:
        """Handshake with a client; one that may not enter is disconnected."""
        try:
            with contextlib.suppress(Disconnected, RankRefused, NotAdmitted):
                connection = begin_server(accepted, HANDSHAKE_TIMEOUT)
                handshake = self._wire.server(
                    self._identity, connection.address, self._secret_of
                )
                client = agree(connection, handshake)
                try:
                    self._add(client, connection)
                except NotAdmitted:
                    connection.close()
                    raise
        finally:
            self._admitting.release()


def connect_to(
    wire: RankWire,
    identity: RankIdentity,
    server: str,
    ways: Sequence[Way],
    deadline: float,
    *,
    repeats: bool = True,
    on_attempt: Callable[[RankSocket], None] = lambda connection: None,
) -> RankSocket:
    """Connect to the rank ``server``, by the first way that leads to it.

    All are tried in turn until the ``deadline``, a monotonic time: the rank may not
    listen yet, and a private address may be that of another machine here.  Without
    ``repeats``, each is tried once.

    ``on_attempt`` gets each connection before its handshake; to give up, it raises
    Disconnected, or aborts the connection later.

    Raises Disconnected and RankRefused.
    """
    while True:
        failures: list[Disconnected | RankRefused] = []
        for way in ways:
            left = max(deadline - time.monotonic(), DIAL_INTERVAL)
            try:
                connection = way(left if len(ways) == 1 else WAY_TIMEOUT)
            except Disconnected as error:
                failures.append(error)
                continue
            try:
                on_attempt(connection)
                agree(connection, wire.client(identity, server, connection.address))
            except (Disconnected, RankRefused) as error:
                if len(ways) == 1:
                    raise
                failures.append(error)
            else:
                return connection
        if not repeats or deadline - time.monotonic() < DIAL_INTERVAL:
            raise Disconnected("; ".join(map(str, failures)))
        time.sleep(DIAL_INTERVAL)


def agree(connection: RankSocket, handshake: RankHandshake) -> str:
    """Carry out a handshake; return the other end's id.

    Raises Disconnected and RankRefused, after closing the connection.
    """
    # Each wait has a limit, and this is that of all: a stranger may send byte by byte.
    limit = threading.Timer(HANDSHAKE_TIMEOUT, connection.abort)
    limit.daemon = True
    limit.start()
    try:
        return _agree(connection, handshake)
    except RankRefused as refusal:
        with contextlib.suppress(Disconnected):
            connection.send(refusal.send)
        connection.close()
        raise
    except Disconnected:
        connection.close()
        raise
    finally:
        limit.cancel()


def _agree(connection: RankSocket, handshake: RankHandshake) -> str:
    connection.set_timeout(HANDSHAKE_TIMEOUT)
    handshake.on_open(connection.certificate)
    connection.send(handshake.start(time.monotonic()))
    head = memoryview(bytearray(handshake.head_size))
    while True:
        connection.receive_into(head)
        body = bytearray(handshake.body_size(bytes(head)))
        connection.receive_into(memoryview(body))
        step = handshake.receive(bytes(head), bytes(body), time.monotonic())
        connection.send(step.send)
        if step.peer is not None:
            connection.set_timeout(None)
            return step.peer
