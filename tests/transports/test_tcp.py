"""TCP links, with real sockets on 127.0.0.1, on every event loop that Shoal runs on."""

import asyncio
import socket
import struct
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from harness.ports import free_port
from harness.speed import scaled
from shoal.domain.errors import ConfigError
from shoal.transports import dialer, strangers, tcp_server
from shoal.transports.dialer import connect_tcp
from shoal.transports.link import WRONG_CERTIFICATE, LinkClosed
from shoal.transports.message_splitter import READ_SIZE
from shoal.transports.tcp import (
    UNREAD_MAX,
    UNSENT_MAX,
    TcpLink,
)
from shoal.transports.tcp_server import ConnectionPolicy, tcp_listener
from transports.certificates import issue
from transports.links import ended, pair, received, serving

ONE_READ = 256 << 10  # bytes: the largest read of the event loops


def test_bytes_arrive_in_order_both_ways(run: Any) -> None:
    async def test() -> None:
        async with pair() as (ours, theirs):
            for number in range(1000):
                await ours.send(b"%04d" % number)
            expected = b"".join(b"%04d" % number for number in range(1000))
            assert await received(theirs, 4000) == expected

            await theirs.send(b"and back")
            assert await received(ours, 8) == b"and back"

    run(test)


def test_data_beyond_all_buffers_arrives_in_full(run: Any) -> None:
    async def test() -> None:
        data = bytes(range(256)) * (4 * (UNREAD_MAX + UNSENT_MAX) // 256)
        async with pair() as (ours, theirs), asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(received(theirs, 8 * len(data)))
            for _ in range(8):
                await ours.send(data)

        assert reading.result() == 8 * data

    run(test)


def test_sender_waits_for_a_slow_reader(run: Any) -> None:
    async def test() -> None:
        async with pair() as (ours, theirs):
            sending = asyncio.create_task(_send_forever(ours))
            while not (ours._writing_paused and theirs._reading_paused):  # noqa: ASYNC110  # none tells
                await asyncio.sleep(0)

            assert len(theirs._unread) <= UNREAD_MAX + ONE_READ
            assert ours.transport.get_write_buffer_size() <= 2 * UNSENT_MAX
            # It resumes when data is read.
            await received(theirs, 8 * (UNREAD_MAX + ONE_READ + UNSENT_MAX))
            assert not sending.done()
            sending.cancel()
            await asyncio.wait([sending])

    run(test)


async def test_stranger_is_not_read_beyond_a_message() -> None:
    async with serving() as (url, links), connect_tcp(url) as ours:
        sending = asyncio.create_task(_send_forever(ours))
        theirs = await links.get()
        assert theirs.is_stranger
        while not theirs._reading_paused:  # noqa: ASYNC110  # none tells
            await asyncio.sleep(0)

        assert theirs._unread_size <= strangers.MESSAGE_MAX + READ_SIZE + 1000
        sending.cancel()
        await asyncio.wait([sending])


def test_last_data_arrives_before_the_end(run: Any) -> None:
    async def test() -> None:
        async with pair() as (ours, theirs):
            await ours.send(b"x" * 3_000_000)
            await ours.send(b"the last")
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ours.close(1000, "bye"))
                data = await received(theirs, 3_000_008)

            assert data.endswith(b"the last")
            with pytest.raises(LinkClosed, match="closed by peer") as caught:
                await theirs.receive()
            assert caught.value.code == 1005
            with pytest.raises(LinkClosed, match="closed here: bye"):
                await ours.receive()

    run(test)


def test_send_fails_after_close_and_close_is_idempotent(
    run: Any,
) -> None:
    async def test() -> None:
        async with pair() as (ours, theirs):
            await ours.close(1000, "")
            await ours.close(1000, "")
            with pytest.raises(LinkClosed):
                await ours.send(b"late")
            with pytest.raises(LinkClosed):
                await theirs.receive()

    run(test)


def test_broken_connection_ends_reader_and_writer(run: Any) -> None:
    async def test() -> None:
        async with pair() as (ours, theirs):
            writing = asyncio.create_task(_send_forever(theirs))
            ours.abort()

            end = await ended(theirs)
            assert end.code in (1005, 1006)
            with pytest.raises(LinkClosed):
                await writing

    run(test)


def test_half_closed_end_still_receives(run: Any) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with serving() as (url, links):
            port = int(url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as theirs:
                theirs.setblocking(False)
                link = await links.get()
                await loop.sock_sendall(theirs, b"a line without an end")
                theirs.shutdown(socket.SHUT_WR)

                assert await received(link, 21) == b"a line without an end"
                with pytest.raises(LinkClosed, match="closed by peer") as caught:
                    await link.receive()
                assert caught.value.code == 1005
                await link.send(b"an answer")
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(link.close(1000, "said"))
                    answer = await loop.sock_recv(theirs, 100)
                    rest = await loop.sock_recv(theirs, 100)

            assert (answer, rest) == (b"an answer", b"")

    run(test)


def test_half_closed_end_that_leaves_ends_the_writer(run: Any) -> None:
    async def test() -> None:
        async with serving() as (url, links):
            port = int(url.rpartition(":")[2])
            theirs = socket.create_connection(("127.0.0.1", port))
            link = await links.get()
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(LinkClosed):
                await link.receive()
            writing = asyncio.create_task(_send_forever(link))
            theirs.close()

            with pytest.raises(LinkClosed):
                await writing

    run(test)


async def _send_forever(link: TcpLink) -> None:
    while True:
        await link.send(bytes(UNSENT_MAX))


def test_reset_is_an_end_with_its_cause(run: Any) -> None:
    async def test() -> None:
        async with serving() as (url, links):
            port = int(url.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as peer:
                link = await links.get()
                now = struct.pack("ii", 1, 0)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)

            with pytest.raises(LinkClosed, match=r"connection lost: .*reset") as caught:
                await link.receive()
            assert caught.value.code == 1006

    run(test)


def test_socket_has_nodelay_and_keepalive(run: Any) -> None:
    async def test() -> None:
        async with pair() as both:
            for link in both:
                sock = link.transport.get_extra_info("socket")
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                if sys.platform == "linux":
                    idle = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
                    assert idle == 10

    run(test)


def test_ipv6_is_supported(run: Any) -> None:
    async def test() -> None:
        async with serving(host="::1") as (url, links), connect_tcp(url) as ours:
            assert url.startswith("tcp://[::1]:")
            theirs = await links.get()
            assert theirs.peer == "::1"
            await ours.send(b"six")
            assert await received(theirs, 3) == b"six"

    run(test)


def test_schemes_give_equivalent_links(run: Any) -> None:
    async def test() -> None:
        async with (
            serving() as (url, links),
            dialer.dial(url, {"X": "not sent"}, 1000) as (ours, headers),
        ):
            assert headers == {}
            assert ours.peer == url
            await ours.send(b"hello")
            assert await received(await links.get(), 5) == b"hello"

    run(test)


# Over TLS.


def test_pinned_certificate_needs_no_authority(run: Any, tmp_path: Path) -> None:
    certificate = issue(tmp_path, host="elsewhere.example")
    fingerprint = certificate.fingerprint
    context = certificate.presented

    async def test() -> None:
        async with (
            serving(context) as (url, links),
            connect_tcp(url, fingerprint=fingerprint) as ours,
        ):
            theirs = await links.get()
            data = bytes(range(256)) * 8192
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ours.send(data))
                assert await received(theirs, len(data)) == data
                tasks.create_task(theirs.send(data))
                assert await received(ours, len(data)) == data

    run(test)


def test_end_after_the_own_close_is_no_error(run: Any, tmp_path: Path) -> None:
    certificate = issue(tmp_path)
    context, fingerprint = certificate.presented, certificate.fingerprint

    async def test() -> None:
        async with (
            serving(context) as (url, links),
            connect_tcp(url, fingerprint=fingerprint) as ours,
        ):
            await links.get()
            for _ in range(2):  # after the second, asyncio forgets the connection
                ours.transport.close()

            assert not ours.eof_received()  # the peer's end was on its way

    run(test)


def test_other_certificate_is_rejected_before_sending(run: Any, tmp_path: Path) -> None:
    certificate = issue(tmp_path)
    context = certificate.presented

    async def test() -> None:
        async with serving(context) as (url, links):
            with pytest.raises(
                LinkClosed, match="is not the one in the token"
            ) as caught:
                async with connect_tcp(url, fingerprint=bytes(32)):
                    pass
            assert caught.value.code == WRONG_CERTIFICATE
            assert links.empty()  # the handshake was not completed

    run(test)


def test_unknown_authority_is_named(run: Any, tmp_path: Path) -> None:
    certificate = issue(tmp_path)
    context = certificate.presented

    async def test() -> None:
        async with serving(context) as (url, _):
            with pytest.raises(
                LinkClosed, match="is not signed by a trusted authority"
            ):
                async with connect_tcp(url):
                    pass

    run(test)


def test_fingerprint_without_tls_is_rejected(run: Any) -> None:
    async def test() -> None:
        with pytest.raises(LinkClosed, match="has no certificate to compare"):
            async with connect_tcp("tcp://127.0.0.1:1", fingerprint=bytes(32)):
                pass

    run(test)


def test_plain_port_is_named_when_tls_fails(run: Any) -> None:
    async def test() -> None:
        async def answer(link: TcpLink) -> None:
            await link.receive()
            await link.send(b"what is that?")

        async with tcp_listener("127.0.0.1", 0, answer) as bound:
            with pytest.raises(LinkClosed, match="does not speak TLS here"):
                async with connect_tcp(f"tls://127.0.0.1:{bound.port}"):
                    pass

    run(test)


def test_invalid_or_missing_handshake_is_isolated(run: Any, tmp_path: Path) -> None:
    certificate = issue(tmp_path)
    context = certificate.presented
    fingerprint = certificate.fingerprint
    hasty = ConnectionPolicy(handshake_timeout=scaled(0.5))

    async def test() -> None:
        async with serving(context, entrance=hasty) as (url, links):
            plain = url.replace("tls:", "tcp:")
            async with connect_tcp(plain) as garbage, connect_tcp(plain) as silent:
                await garbage.send(b"GET / HTTP/1.1\r\n\r\n")
                for link in (garbage, silent):
                    await ended(link)
            async with connect_tcp(url, fingerprint=fingerprint) as honest:
                await honest.send(b"hello")
                assert await received(await links.get(), 5) == b"hello"

    run(test)


# Unreachable addresses.


def test_closed_port_is_named(run: Any) -> None:
    port = free_port()

    async def test() -> None:
        refused = f"cannot connect to tcp://127.0.0.1:{port}: connection refused"
        with pytest.raises(LinkClosed, match=refused):
            async with connect_tcp(f"tcp://127.0.0.1:{port}"):
                pass

    run(test)


@pytest.mark.parametrize(
    "url",
    [
        "tcp://host.invalid:1",
        "tcp://127.0.0.1:99999",
        "tcp://127.0.0.1",
        "tcp://",
        "tcp://[::1:4010",
        "tls://" + "x" * 300 + ":1",
    ],
)
def test_invalid_address_is_an_end(run: Any, url: str) -> None:
    async def test() -> None:
        with pytest.raises(LinkClosed, match="cannot connect"):
            async with connect_tcp(url):
                pass

    run(test)


# Incoming connections.


async def test_address_with_too_many_connections_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(strangers, "PER_ADDRESS_MAX", 2)
    monkeypatch.setattr(strangers, "is_loopback", lambda address: False)
    caplog.set_level("INFO")
    async with serving() as (url, links), connect_tcp(url), connect_tcp(url) as second:
        await links.get()
        theirs = await links.get()
        async with connect_tcp(url) as third:
            with pytest.raises(LinkClosed):
                await third.receive()
        await second.send(b"still here")
        assert await received(theirs, 10) == b"still here"
        theirs.admit()  # which makes room
        async with connect_tcp(url):
            await links.get()
    (refused,) = [each.message for each in caplog.records if "refused" in each.message]
    assert refused == "refused peer=127.0.0.1 reason='too many connections'"


async def test_connections_close_with_their_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_server, "CLOSE_GRACE", 0.0)
    ended = []

    async def serve(link: TcpLink) -> None:
        try:
            await link.send(await received(link, 5))
            await link.receive()
        finally:
            ended.append(link.peer)

    async with tcp_listener("127.0.0.1", 0, serve) as bound:
        url = f"tcp://127.0.0.1:{bound.port}"
        opened = connect_tcp(url)
        link = await opened.__aenter__()
        await link.send(b"hello")
        assert await received(link, 5) == b"hello"

    with pytest.raises(LinkClosed):
        await link.receive()
    await opened.__aexit__(None, None, None)
    assert ended == ["127.0.0.1"]


async def test_used_port_is_named_with_its_program() -> None:
    async def nobody(link: TcpLink) -> Awaitable[None] | None:
        return None

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: it is used by"):
            async with tcp_listener("127.0.0.1", port, nobody):
                pass
    with pytest.raises(ConfigError, match="at most 65535"):
        async with tcp_listener("127.0.0.1", 70_000, nobody):
            pass


def test_failed_tls_suggests_a_plain_server(run: Any) -> None:
    async def test() -> None:
        async def reset(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            await reader.read(1)
            # Unread data, or a linger time of 0, makes it a reset.
            sock = writer.get_extra_info("socket")
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            writer.close()

        async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(LinkClosed, match="without TLS it is tcp://"):
                async with connect_tcp(f"tls://127.0.0.1:{port}"):
                    raise AssertionError("it hangs up")

    run(test)
