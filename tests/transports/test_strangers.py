"""The accounts of strangers, without sockets."""

import asyncio
from typing import Any

from shoal.transports.strangers import (
    MESSAGE_MAX,
    PER_ADDRESS_MAX,
    Stranger,
    Strangers,
)
from shoal.transports.unadmitted_connection import UnadmittedConnection


class Crowd:
    """Strangers, and those of them that were dropped."""

    def __init__(self, held_max: int = 100, count_max: int | None = 10) -> None:
        self.strangers = Strangers(held_max, count_max)
        self.dropped: list[str] = []

    def add(self, name: str, address: str = "192.0.2.1") -> Stranger:
        return self.strangers.add(address, lambda reason: self.dropped.append(name))


def test_who_holds_the_most_is_dropped() -> None:
    crowd = Crowd()
    greedy, modest, last = map(crowd.add, ("greedy", "modest", "last"))

    greedy.received(60)
    modest.received(30)
    last.received(11)

    assert crowd.dropped == ["greedy"]
    assert crowd.strangers.held == 41


def test_what_is_held_elsewhere_counts_until_it_is_released() -> None:
    crowd = Crowd()
    stranger = crowd.add("it")

    stranger.received(60)
    stranger.received(30)
    stranger.released(60)

    assert (stranger.held, crowd.strangers.held) == (30, 30)
    stranger.progressed()
    stranger.released(60)
    assert (stranger.held, crowd.strangers.held) == (0, 0)


def test_whole_messages_count_no_more() -> None:
    crowd = Crowd()
    stranger = crowd.add("it")
    for _ in range(10):
        stranger.received(90)
        stranger.progressed()

    assert crowd.dropped == []
    assert crowd.strangers.held == 0


def test_the_admitted_and_the_gone_count_no_more() -> None:
    crowd = Crowd()
    stranger = crowd.add("it")
    stranger.received(90)

    stranger.leave()
    stranger.leave()
    stranger.received(1000)

    assert crowd.dropped == []
    assert (crowd.strangers.held, len(crowd.strangers)) == (0, 0)


def test_the_oldest_makes_room() -> None:
    crowd = Crowd(count_max=2)
    for name in ("first", "second", "third"):
        crowd.add(name)

    assert crowd.dropped == ["first"]
    assert len(crowd.strangers) == 2


def test_who_moves_counts_elsewhere() -> None:
    crowd, others = Crowd(), Crowd(200)
    stranger = crowd.add("it")
    stranger.received(90)

    stranger.move(others.strangers)
    stranger.received(150)

    assert (len(crowd.strangers), crowd.strangers.held) == (0, 0)
    assert (len(others.strangers), others.strangers.held) == (1, 150)


def test_an_address_has_a_limit_and_loopback_has_none() -> None:
    strangers = Strangers()
    networks = ("192.0.2.1", "2001:db8::1", "127.0.0.1")
    added = [
        strangers.add(address, lambda reason: None)
        for address in networks
        for _ in range(PER_ADDRESS_MAX)
    ]

    assert not strangers.has_room("192.0.2.1")
    assert not strangers.has_room("2001:db8::ffff")  # of the same network
    assert strangers.has_room("192.0.2.2")
    assert strangers.has_room("127.0.0.1")
    added[0].leave()
    assert strangers.has_room("192.0.2.1")
    strangers.add("192.0.2.1", lambda reason: None)  # one left, so one may come
    assert not strangers.has_room("192.0.2.1")


class FakeTransport(asyncio.Transport):
    """Remembers what was done to it."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1)})
        self.protocol: asyncio.BaseProtocol | None = None
        self.aborted = False
        self.written = b""

    def abort(self) -> None:
        self.aborted = True

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def lose(self) -> None:
        assert self.protocol is not None
        self.protocol.connection_lost(None)

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self.protocol is not None
        return self.protocol


class Recorder(asyncio.Protocol):
    """The protocol behind."""

    def __init__(self) -> None:
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data


def opened(
    strangers: Strangers, address: str = "192.0.2.1"
) -> tuple[FakeTransport, UnadmittedConnection, Recorder]:
    transport, behind = FakeTransport(address), Recorder()
    connection = UnadmittedConnection(strangers, behind)
    transport.set_protocol(connection)
    connection.connection_made(transport)
    return transport, connection, behind


async def test_connections_beyond_the_limit_of_an_address_are_closed() -> None:
    strangers = Strangers()
    crowd = [opened(strangers)[0] for _ in range(PER_ADDRESS_MAX + 1)]

    assert [each.aborted for each in crowd] == [False] * PER_ADDRESS_MAX + [True]
    crowd[0].lose()
    assert not opened(strangers)[0].aborted


async def test_nothing_is_between_once_the_peer_is_admitted() -> None:
    strangers = Strangers()
    transport, connection, behind = opened(strangers)
    connection.data_received(b"GET / HTTP/1.1\r\n")

    connection.admit()

    assert transport.protocol is behind
    assert len(strangers) == 0


async def test_body_is_no_head_wherever_the_head_ends() -> None:
    body = bytes(4 * MESSAGE_MAX)
    for cut in range(1, 5):
        transport, connection, behind = opened(Strangers())
        connection.data_received(b"POST / HTTP/1.1\r\nX: y\r\n\r\n"[:-cut])
        connection.data_received(b"\r\n\r\n"[-cut:] + body)
        connection.data_received(body)

        assert len(behind.received) > 2 * len(body)
        assert not transport.written
        connection.connection_lost(None)
