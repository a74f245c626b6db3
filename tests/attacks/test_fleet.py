"""The heartbeat port under attack on real sockets; honest nodes still get answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.serving import WAIT_MAX, eventually
from protocols.macfleet.fleet_members import KEY, member
from protocols.macfleet.recorded import case_of
from protocols.macfleet.served_nodes import (
    HOST,
    ServedNode,
    connected,
    many_connected,
    ping,
    served,
)
from shoal.protocols.macfleet.codec.heartbeat_lines import HeartbeatLine, encode_ping
from shoal.protocols.macfleet.codec.keys import fleet_key
from shoal.protocols.macfleet.member import FleetMember
from shoal.protocols.macfleet.membership import NodeAddress
from shoal.protocols.macfleet.rate_limiter import BANNED_AFTER
from shoal.transports.tls import self_signed_tls

CROWD = 60  # parallel connections, below the limit of 64 for one address
BARRED = "this address is banned"


def honest() -> FleetMember:
    return member("honest", nonces=1 << 61)


def guess(number: int = 0) -> bytes:
    """Return a ping signed with another token."""
    heard = HeartbeatLine("guesser", number.to_bytes(16))
    return encode_ping(fleet_key(f"guess number {number}"), heard)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the loopback address as a remote one."""
    place = "shoal.transports.strangers.is_loopback"
    monkeypatch.setattr(place, lambda address: False)


@asynccontextmanager
async def besieged(
    key: bytes | None = KEY, *, spares_loopback: bool = False
) -> AsyncIterator[ServedNode]:
    """Serve a node; afterwards it still works and holds no connection."""
    own = member("node", key, nonces=1 << 60)
    async with served(own, spares_loopback=spares_loopback) as node:
        yield node
        node.limiter._records.clear()
        assert await ping(node, member("honest", key, nonces=1 << 62)) is not None
        await eventually(lambda: not node.undecided())


async def test_slow_line_is_disconnected_while_others_are_answered() -> None:
    # The others would have other addresses.
    attacked = besieged(spares_loopback=True)
    async with attacked as node, many_connected(node, CROWD) as lines:
        for line in lines:
            await line.send(b"APING slow")

        assert await ping(node, honest()) is not None
        for line in lines:
            assert await line.rest() == b""
        await eventually(lambda: len(node.ends) == CROWD + 1)
        assert set(node.ends) == {"answered", "no line within 1 s"}


async def test_overlong_line_is_rejected_and_counts() -> None:
    async with besieged() as node, connected(node) as line:
        assert await line.say(b"APING " + 65 * 1024 * b"a" + b"\n") == b""

        await eventually(lambda: bool(node.ends))
        assert "exceeds the limit" in node.ends[0]
        assert node.failures() == 1


async def test_endless_line_is_buffered_only_in_part() -> None:
    async with besieged() as node, connected(node) as line:
        for _ in range(64):
            await line.send(b"a" * (1 << 20))

        assert await line.rest() == b""
        await eventually(lambda: node.failures() == 1)


@pytest.mark.usefixtures("away")
async def test_idle_connections_ban_no_address_in_an_open_fleet() -> None:
    async with besieged(None) as node, many_connected(node, CROWD) as lines:
        for line in lines:
            assert await line.rest() == b""

        assert node.failures() == 0
        assert await ping(node, member("honest", None)) is not None


@pytest.mark.usefixtures("away")
async def test_silent_connections_ban_their_address() -> None:
    async with besieged() as node:
        async with many_connected(node, BANNED_AFTER) as lines:
            for line in lines:
                assert await line.rest() == b""
        await eventually(lambda: node.failures() == BANNED_AFTER)

        with pytest.raises(OSError):  # noqa: PT011  # TLS says it in many ways
            await ping(node, honest())


@pytest.mark.usefixtures("away")
async def test_parallel_guesses_do_not_outrun_the_ban(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All are connected before the first has to speak.
    monkeypatch.setattr("shoal.protocols.macfleet.heartbeat.LINE_TIMEOUT", WAIT_MAX)
    async with besieged() as node, many_connected(node, CROWD) as lines:
        sure = honest()
        for number, line in enumerate(lines[:-1]):
            await line.send(guess(number))
        await eventually(lambda: node.failures() == BANNED_AFTER)

        # The right line comes too late, and so would the right guess.
        assert (
            await lines[-1].say(encode_ping(KEY, sure.own_line(hardware=True))) == b""
        )
        for line in lines:
            assert await line.rest() == b""
        await eventually(lambda: len(node.ends) == CROWD)
        assert node.failures() == BANNED_AFTER
        assert node.ends.count(BARRED) == CROWD - BANNED_AFTER


async def test_wrong_guesses_from_loopback_ban_it_where_there_is_a_token() -> None:
    async with besieged() as node, many_connected(node, BANNED_AFTER) as lines:
        for number, line in enumerate(lines):
            assert await line.say(guess(number)) == b""

        await eventually(lambda: node.failures() == BANNED_AFTER)
        with pytest.raises(OSError):  # noqa: PT011  # TLS says it in many ways
            await ping(node, honest())


@pytest.mark.parametrize(
    "data",
    [b"PING stranger\n", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", bytes(100)],
    ids=["ping", "http", "zeros"],
)
async def test_plain_text_on_the_tls_port_is_disconnected_and_not_a_guess(
    data: bytes,
) -> None:
    async with besieged() as node, connected(node, secure=False) as line:
        answer = await line.say(data)

        assert b"PONG" not in answer
        assert not node.ends
        assert node.failures() == 0


async def test_transport_frames_are_rejected() -> None:
    frame = bytes.fromhex(case_of("hb/binary transport frame")["input"]["request_hex"])
    async with besieged() as node, connected(node) as line:
        await line.send(frame)
        line.writer.write(b"\n")

        assert await line.rest() == b""
        await eventually(lambda: node.failures() == 1)


async def test_replayed_ping_is_not_answered() -> None:
    overheard = encode_ping(KEY, honest().own_line(hardware=True))
    async with besieged() as node:
        async with connected(node) as line:
            assert (await line.say(overheard)).startswith(b"APONG node ")
        async with connected(node) as line:
            assert await line.say(overheard) == b""

        assert node.failures() == 1


@pytest.mark.parametrize("key", [KEY, None], ids=["secure", "open"])
async def test_mirrored_handshake_is_not_registered(
    key: bytes | None,
) -> None:
    heard: list[bytes] = []

    async def mirror(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        heard.append(await reader.readline())
        writer.write(heard[-1].replace(b"PING", b"PONG"))
        await writer.drain()
        writer.close()

    tls = None if key is None else self_signed_tls("mirror").context
    async with await asyncio.start_server(mirror, HOST, ssl=tls) as server:
        port = server.sockets[0].getsockname()[1]
        async with served(member("node", key), [NodeAddress(HOST, port)]) as node:
            await eventually(lambda: len(heard) > 1)

            assert not node.fleet.nodes


async def test_half_a_line_and_a_disconnect_count_as_a_guess() -> None:
    async with besieged() as node, connected(node) as line:
        await line.send(b"APING half")
        line.writer.close()
        await eventually(lambda: node.failures() == 1)


async def test_empty_connection_is_not_a_guess() -> None:
    async with besieged() as node:
        async with connected(node) as line:
            line.writer.close()
            await eventually(lambda: node.ends == ["sent nothing"])

        assert node.failures() == 0
        assert not node.undecided()
