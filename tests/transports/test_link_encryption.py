"""Encrypted TCP links, over real sockets and with somebody in between."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal.domain.errors import PeerError
from shoal.protocols.seam.encrypted_stream import PREFACE, SECOND_SIZE
from shoal.transports.link import LinkClosed
from shoal.transports.link_encryption import accept_encryption
from shoal.transports.tcp import JOINED_MAX, TcpLink
from shoal.transports.tcp_client import connect_tcp
from shoal.transports.tcp_server import tcp_listener
from transports.certificates import issue
from transports.links import ended, received, serving

SECRET = b"a prompt that nobody else may read "


@asynccontextmanager
async def encrypting() -> AsyncIterator[
    tuple[int, "asyncio.Queue[tuple[TcpLink, bool]]"]
]:
    """Accept links, encrypted or not; yield the port, and each with which it is."""
    links: asyncio.Queue[tuple[TcpLink, bool]] = asyncio.Queue()
    done = asyncio.Event()

    async def serve(link: TcpLink) -> None:
        try:
            encrypted = await accept_encryption(link)
        except (PeerError, LinkClosed):
            return
        links.put_nowait((link, encrypted))
        await done.wait()

    async with tcp_listener("127.0.0.1", 0, serve) as bound:
        yield bound.port, links
        done.set()


@dataclass
class Between:
    """A proxy that records what passes, and changes it."""

    change: Callable[[bytes, bool], bytes] = lambda data, to_server: data
    seen: bytearray = field(default_factory=bytearray)

    @asynccontextmanager
    async def serve(self, port: int) -> AsyncIterator[int]:
        """Forward connections to a port; yield the proxy's."""

        async def forward(client: TcpLink) -> None:
            async with (
                connect_tcp(f"tcp://127.0.0.1:{port}") as server,
                asyncio.TaskGroup() as both,
            ):
                both.create_task(self._copy(client, server, True))
                both.create_task(self._copy(server, client, False))

        async with tcp_listener("127.0.0.1", 0, forward) as bound:
            yield bound.port

    async def _copy(self, source: TcpLink, target: TcpLink, to_server: bool) -> None:
        try:
            while True:
                for piece in await source.receive():
                    assert isinstance(piece, bytes)
                    self.seen += piece
                    await target.send(self.change(piece, to_server))
        except LinkClosed:
            await target.close(1000, "")


def test_bytes_arrive_in_order_both_ways_and_cannot_be_read(run: Any) -> None:
    async def test() -> None:
        between = Between()
        async with (
            encrypting() as (port, links),
            between.serve(port) as proxied,
            connect_tcp(f"noise://127.0.0.1:{proxied}") as ours,
        ):
            theirs, encrypted = await links.get()
            await ours.send(SECRET + b"1")
            await ours.send(SECRET + b"2")
            await theirs.send(SECRET + b"3")

            sent = await received(theirs, 2 * len(SECRET) + 2)
            assert sent == SECRET + b"1" + SECRET + b"2"
            assert await received(ours, len(SECRET) + 1) == SECRET + b"3"
            assert encrypted
            assert ours.binding == theirs.binding != b""
        assert PREFACE in between.seen
        assert SECRET not in between.seen

    run(test)


def test_large_data_arrives_in_full(run: Any) -> None:
    async def test() -> None:
        data = bytes(range(256)) * (20 << 12)  # 20 MiB
        async with (
            encrypting() as (port, links),
            connect_tcp(f"noise://127.0.0.1:{port}") as ours,
        ):
            theirs, _ = await links.get()
            async with asyncio.TaskGroup() as tasks:
                arriving = tasks.create_task(received(theirs, len(data) + 5))
                await ours.send(b"first")
                await ours.write(memoryview(data))
            assert arriving.result() == b"first" + data

    run(test)


def test_what_is_sent_in_one_turn_is_one_record(run: Any) -> None:
    async def test() -> None:
        between = Between()
        async with (
            encrypting() as (port, links),
            between.serve(port) as proxied,
            connect_tcp(f"noise://127.0.0.1:{proxied}") as ours,
        ):
            theirs, _ = await links.get()
            before = len(between.seen)
            assert all(ours.try_send(b"a token") for _ in range(100))
            await received(theirs, 700)
        assert before == len(PREFACE) + 32 + SECOND_SIZE
        assert len(between.seen) == before + 700 + 2 + 16

    run(test)


def test_a_changed_byte_ends_the_connection(run: Any) -> None:
    async def test() -> None:
        def flip(data: bytes, to_server: bool) -> bytes:
            changes = to_server and not data.startswith(PREFACE)
            return data[:-1] + bytes([data[-1] ^ 1]) if changes else data

        between = Between(flip)
        async with (
            encrypting() as (port, links),
            between.serve(port) as proxied,
            connect_tcp(f"noise://127.0.0.1:{proxied}") as ours,
        ):
            theirs, _ = await links.get()
            await ours.send(SECRET)
            assert "not genuine" in str(await ended(theirs))
            await ended(ours)

    run(test)


def test_a_removed_preface_is_no_plain_connection(run: Any) -> None:
    async def test() -> None:
        def strip(data: bytes, to_server: bool) -> bytes:
            return data.removeprefix(PREFACE)

        async with serving() as (url, links):
            port = int(url.rpartition(":")[2])
            async with Between(strip).serve(port) as proxied:
                dialling = asyncio.create_task(dial(f"noise://127.0.0.1:{proxied}"))
                plain = await links.get()
                await received(plain, 32)
                await plain.send(b"in the clear, and long enough to be an answer...")
                with pytest.raises(LinkClosed, match="--plain"):
                    await dialling

    run(test)


async def dial(url: str) -> None:
    async with connect_tcp(url):
        raise AssertionError("it must not be opened")


def test_a_server_that_does_not_encrypt_is_named(run: Any) -> None:
    async def test() -> None:
        async with serving() as (url, links):
            noise = url.replace("tcp://", "noise://")
            dialling = asyncio.create_task(dial(noise))
            link = await links.get()
            await link.close(1000, "")
            with pytest.raises(LinkClosed, match="does not encrypt the connection"):
                await dialling

    run(test)


@pytest.mark.parametrize("first", [b"\0\0\0\2{}", b"s", b"shoal noise 2\nand more"])
def test_a_plain_peer_is_read_from_its_first_byte(run: Any, first: bytes) -> None:
    async def test() -> None:
        async with (
            encrypting() as (port, links),
            connect_tcp(f"tcp://127.0.0.1:{port}") as ours,
        ):
            for at in range(len(first)):
                await ours.send(first[at : at + 1])
                await asyncio.sleep(0)
            await ours.send(b"\0 and more")
            theirs, encrypted = await links.get()
            assert not encrypted
            assert theirs.binding == b""
            assert await received(theirs, len(first) + 10) == first + b"\0 and more"

    run(test)


def test_noise_within_tls_has_a_pinned_certificate(run: Any, tmp_path: Any) -> None:
    async def test() -> None:
        certificate = issue(tmp_path)
        async with serving(certificate.presented) as (url, links):
            noise = url.replace("tls://", "noise+tls://")
            opened = connect_tcp(noise, fingerprint=certificate.fingerprint)
            entering = asyncio.create_task(opened.__aenter__())
            theirs = await links.get()
            assert await accept_encryption(theirs)
            ours = await entering
            await ours.send(SECRET)
            assert await received(theirs, len(SECRET)) == SECRET
            await opened.__aexit__(None, None, None)

    run(test)


def test_many_small_messages_arrive_in_order(run: Any) -> None:
    async def test() -> None:
        async with (
            encrypting() as (port, links),
            connect_tcp(f"noise://127.0.0.1:{port}") as ours,
        ):
            theirs, _ = await links.get()
            pieces = [b"%06d" % number for number in range(50_000)]
            async with asyncio.TaskGroup() as tasks:
                arriving = tasks.create_task(received(theirs, 300_000))
                for piece in pieces:
                    await ours.send(piece)
            assert arriving.result() == b"".join(pieces)
        assert len(pieces) * 6 > JOINED_MAX

    run(test)
