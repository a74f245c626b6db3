"""The accounts of strangers, without sockets."""

import asyncio
import ssl
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shoal.protocols.tealenet.codec.relay_messages import REGISTRATION_MAX
from shoal.transports.clock import LoopClock
from shoal.transports.loop_share import LoopShare
from shoal.transports.strangers import (
    CONNECTION_COST,
    FAMILIAR_FOR,
    FAMILIAR_MAX,
    HANDSHAKE_COST,
    MESSAGE_MAX,
    PER_ADDRESS_MAX,
    TLS_COST,
    Stranger,
    Strangers,
)
from shoal.transports.tcp import TcpLink
from shoal.transports.tcp_server import ConnectionPolicy, tcp_listener
from shoal.transports.unadmitted_connection import UnadmittedConnection
from transports.certificates import issue
from transports.manual_clock import ManualClock


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
    stranger.released(90)

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


def test_who_moves_takes_its_costs_along() -> None:
    clock = ManualClock()
    shares = [LoopShare(clock, 0.1, 1.0, clock.cpu) for _ in range(2)]
    here, there = (Strangers(share=each) for each in shares)
    stranger = here.add("192.0.2.1", lambda reason: None)

    stranger.charge(2.0)
    assert [each.is_spent for each in shares] == [True, False]
    stranger.move(there)
    assert [each.is_spent for each in shares] == [False, True]
    stranger.admit()
    assert [each.is_spent for each in shares] == [False, False]


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
        self.resumed = 0
        self._reading = True

    def is_closing(self) -> bool:
        return False

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self.resumed += 1

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


class Meter:
    """Strangers with a share of 0.1 and 1 s at once, by clocks that a test sets."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.share, self.familiar, self.accepting = (
            LoopShare(self.clock, 0.1, 1.0, self.clock.cpu) for _ in range(3)
        )
        self.strangers = Strangers(
            share=self.share,
            familiar=self.familiar,
            accepting=self.accepting,
            now=self.clock.now,
        )

    def use(self, seconds: float) -> None:
        self.clock.used += seconds


async def test_what_a_stranger_costs_is_charged_until_it_is_admitted() -> None:
    meter = Meter()
    _transport, connection, _behind = opened(meter.strangers)

    connection.run(meter.use, 2.0)
    assert meter.share.is_spent
    connection.admit()

    assert not meter.share.is_spent
    connection.run(meter.use, 2.0)
    assert not meter.share.is_spent


async def test_what_was_used_elsewhere_for_a_stranger_is_charged_until_admission() -> (
    None
):
    meter = Meter()
    stranger = meter.strangers.add("192.0.2.1", lambda reason: None)

    stranger.charge(2.0)
    assert meter.share.is_spent
    stranger.admit()

    assert not meter.share.is_spent


async def test_only_the_time_of_a_call_is_charged() -> None:
    meter = Meter()
    meter.use(100.0)  # for others
    stranger = meter.strangers.add("192.0.2.1", lambda reason: None)

    stranger.run(meter.use, 0.25)

    assert stranger.spent == pytest.approx(0.25, abs=0.01)
    assert not meter.share.is_spent


async def test_what_a_stranger_cost_that_left_stays_charged() -> None:
    meter = Meter()
    transport, connection, _behind = opened(meter.strangers)

    connection.run(meter.use, 2.0)
    transport.lose()

    assert meter.share.is_spent


async def test_stranger_is_not_read_until_its_turn() -> None:
    meter = Meter()
    transport, connection, _behind = opened(meter.strangers)
    meter.share.charge("192.0.2.9", 2.0)

    connection.data_received(b"G")
    assert not transport.is_reading()
    await meter.clock.advance(9.0)
    assert not transport.is_reading()
    await meter.clock.advance(2.0)

    assert transport.is_reading()
    connection.connection_lost(None)


async def test_stranger_whose_turn_comes_is_not_read_if_that_stopped_before() -> None:
    meter = Meter()
    transport, connection, _behind = opened(meter.strangers)
    meter.share.charge("192.0.2.9", 2.0)
    transport.pause_reading()  # for what is behind cannot take more

    connection.data_received(b"G")
    await meter.clock.advance(20.0)

    assert not transport.is_reading()
    connection.connection_lost(None)


async def test_admitted_peer_is_read_at_once() -> None:
    meter = Meter()
    transport, connection, _behind = opened(meter.strangers)
    meter.share.charge("192.0.2.9", 2.0)
    connection.data_received(b"G")

    connection.admit()

    assert transport.is_reading()
    await meter.clock.advance(20.0)
    assert transport.resumed == 1


async def test_network_of_the_admitted_has_a_share_of_its_own_for_a_day() -> None:
    meter = Meter()
    strangers = meter.strangers
    strangers.add("192.0.2.1", lambda reason: None).admit()

    assert strangers.share_of("192.0.2.1") is meter.familiar
    assert strangers.share_of("192.0.2.2") is meter.share
    await meter.clock.advance(FAMILIAR_FOR + 1.0)
    assert strangers.share_of("192.0.2.1") is meter.share


def test_the_network_that_was_met_longest_ago_is_forgotten() -> None:
    meter = Meter()
    strangers = meter.strangers
    for number in (0, 1, 0, *range(2, FAMILIAR_MAX + 1)):
        strangers.meet(str(number))

    assert strangers.share_of("0") is meter.familiar
    assert strangers.share_of("1") is meter.share


async def test_connection_costs_more_with_a_tls_handshake() -> None:
    meter = Meter()
    spent = []
    for secure in (False, True):
        stranger = meter.strangers.add("192.0.2.1", lambda reason: None)
        with stranger.opening(secure=secure):
            spent.append(stranger.spent)

    assert 0.0 < spent[0] < spent[1]


@pytest.mark.parametrize("secure", [False, True])
async def test_tls_handshake_is_charged_in_advance_until_it_is_over(
    secure: bool,
) -> None:
    meter = Meter()
    left = CONNECTION_COST + TLS_COST + HANDSHAKE_COST / 2
    meter.share.charge("192.0.2.9", 1.0 - left)
    stranger = meter.strangers.add("192.0.2.1", lambda reason: None)
    with stranger.opening(secure=secure):
        assert meter.share.is_spent is secure

    assert not meter.share.is_spent


def test_tls_handshake_is_charged_and_paid_back_at_admission(
    run: Callable[[Callable[[], Coroutine[Any, Any, None]]], None], tmp_path: Path
) -> None:
    certificate = issue(tmp_path)

    async def scenario() -> None:
        share = LoopShare(LoopClock(), 1e-9, 0.0, time.thread_time)
        was_spent = list[bool]()

        async def serve(link: TcpLink) -> None:
            was_spent.append(share.is_spent)
            link.admit()
            was_spent.append(share.is_spent)

        policy = ConnectionPolicy(
            certificate.presented, strangers=Strangers(share=share)
        )
        trusted = ssl.create_default_context(cafile=certificate.authority)
        async with tcp_listener("127.0.0.1", 0, serve, policy) as bound:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", bound.port, ssl=trusted
            )
            assert await reader.read() == b""
            writer.close()

        assert was_spent == [True, False]

    run(scenario)


def test_registration_at_a_relay_fits_into_a_message() -> None:
    assert REGISTRATION_MAX <= MESSAGE_MAX
