"""Connections between the machine that runs a model, and the shards of others."""

import asyncio
import hashlib
import os
import socket
import sys
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from shoal.domain.errors import Unavailable
from shoal.domain.work import Shard
from shoal.domain.worker import MeasuredLink
from shoal.ledger.keys import Signer
from shoal.transports.tls import context_of_any
from shoal.worker import shard_hello, shard_links, shard_port
from shoal.worker.shard_hello import LINE_MAX, Purpose, write_hello
from shoal.worker.shard_links import ShardLinks, is_own_connection
from shoal.worker.shard_port import ShardPort
from worker.fake_shards import (
    GROUP,
    PROTOCOL,
    RUNNER,
    EchoShard,
    open_port,
    shard_at,
)


async def connect(*shards: Shard, signer: Signer = RUNNER) -> ShardLinks:
    return await ShardLinks.open(GROUP, signer, PROTOCOL, shards)


@pytest.fixture
async def process() -> EchoShard:
    return EchoShard()


@pytest.fixture
async def port(process: EchoShard) -> AsyncIterator[ShardPort]:
    opened = await open_port(process)
    yield opened
    await opened.close()


async def echo(port: int, data: bytes) -> bytes:
    """Send through a loopback port of the links; return what comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await reader.readexactly(len(data))
    finally:
        writer.close()


async def until(condition: object) -> None:
    while not condition():  # type: ignore[operator]  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_each_port_leads_to_its_shard(
    port: ShardPort, process: EchoShard
) -> None:
    other = EchoShard()
    second = await open_port(other)
    links = await connect(shard_at(port), shard_at(second, "ben"))

    for _ in range(16):  # as llama.cpp does at its start
        assert await echo(links.ports[0], b"near") == b"near"
    large = bytes(range(256)) * 20_000
    assert await echo(links.ports[0], large) == large
    assert await echo(links.ports[1], large) == large

    assert (process.connections, other.connections) == (17, 1)
    assert not links.lost.done()
    await links.close()
    await until(lambda: process.open == other.open == 0)
    await second.close()
    assert other.exited.done()


async def test_round_trips_are_measured(port: ShardPort) -> None:
    found: dict[str, MeasuredLink] = {}
    links = await ShardLinks.open(
        GROUP, RUNNER, PROTOCOL, [shard_at(port)], measured=found
    )
    await until(lambda: found)
    await links.close()

    assert [*found] == ["anna"]
    assert 0 <= found["anna"].round_trip <= shard_hello.SILENCE_MAX
    assert found["anna"].rate == 0.0  # nothing was sent


async def test_a_shard_that_is_gone_leaves_no_link_to_the_others(
    port: ShardPort,
) -> None:
    gone = await open_port(EchoShard())
    ben = shard_at(gone, "ben")
    await gone.close()

    with pytest.raises(Unavailable, match="ben cannot be reached"):
        await connect(ben, shard_at(port))

    for _ in range(100):  # in which the other dial would end
        await asyncio.sleep(0)
    begun = [each for each in asyncio.all_tasks() if "ShardLinks" in repr(each)]
    assert not begun


async def test_links_can_be_opened_again(port: ShardPort) -> None:
    for _ in range(3):
        links = await connect(shard_at(port))
        assert await echo(links.ports[0], b"again") == b"again"
        await links.close()


async def test_second_client_is_refused_while_there_is_one(port: ShardPort) -> None:
    first = await connect(shard_at(port))

    with pytest.raises(Unavailable, match="anna refuses: this shard is in use by anot"):
        await connect(shard_at(port))

    assert await echo(first.ports[0], b"mine") == b"mine"
    await first.close()


async def test_another_key_or_version_is_refused(port: ShardPort) -> None:
    other = Signer.from_seed(bytes([1]) * 32)

    with pytest.raises(Unavailable, match=r"anna refuses: .*holder of another key"):
        await connect(shard_at(port), signer=other)
    with pytest.raises(
        Unavailable, match=r"refuses: .* ggml-rpc 8.* ggml-rpc 9.*insta"
    ):
        await ShardLinks.open(GROUP, RUNNER, "ggml-rpc 9.0.0", [shard_at(port)])


async def test_another_program_at_the_port_is_refused(port: ShardPort) -> None:
    shard = replace(shard_at(port), fingerprint="00" * 32)

    with pytest.raises(Unavailable, match=r"127\.0\.0\.1: another program answers th"):
        await connect(shard)


async def test_address_that_answers_is_found_and_kept(port: ShardPort) -> None:
    shard = replace(shard_at(port), hosts=("127.0.0.77", "127.0.0.1"))

    links = await connect(shard)

    assert await echo(links.ports[0], b"there") == b"there"
    await links.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs another loopback address")
async def test_address_that_never_answers_holds_nothing_up(
    port: ShardPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_links, "CONNECT_TIMEOUT", 1e6)
    monkeypatch.setattr(shard_links, "STAGGER", 0.001)
    shard = replace(shard_at(port), hosts=("127.0.0.77", "127.0.0.1"))

    with socket.create_server(("127.0.0.77", port.port)):  # which accepts nothing
        links = await connect(shard)

        assert await echo(links.ports[0], b"there") == b"there"
        await links.close()


async def test_unreachable_shard_is_named(port: ShardPort) -> None:
    shard = shard_at(port)
    await port.close()

    with pytest.raises(Unavailable, match=r"reached: 127\.0\.0\.1: connection refused"):
        await connect(shard)
    with pytest.raises(Unavailable, match="anna cannot be reached: it has no address"):
        await connect(replace(shard, hosts=()))


async def test_fault_of_a_shard_is_a_loss(port: ShardPort, process: EchoShard) -> None:
    links = await connect(shard_at(port))

    process.trouble = "the shard's process is stopped"

    assert await links.lost == "anna: the shard's process is stopped"
    await links.close()


async def test_end_of_a_shard_is_told_at_once(
    port: ShardPort, process: EchoShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_links, "HEARTBEAT", 1e6)
    links = await connect(shard_at(port))

    process.exit("the shard was ended by SIGKILL")

    assert await links.lost == "anna: the shard was ended by SIGKILL"
    await links.close()


async def test_shard_that_is_taken_back_is_a_loss(port: ShardPort) -> None:
    links = await connect(shard_at(port))

    await port.close()

    assert await links.lost == "anna: its machine lends it no more"
    await links.close()


async def test_silent_machine_is_a_loss(
    port: ShardPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_links, "SILENCE_MAX", 0.0)

    links = await connect(shard_at(port))

    assert await links.lost == "anna has been silent for 0 s"
    await links.close()


async def test_silent_runner_leaves_its_place(
    port: ShardPort, process: EchoShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_port, "SILENCE_MAX", 0.05)
    monkeypatch.setattr(shard_links, "HEARTBEAT", 1e6)
    silent = await connect(shard_at(port))

    assert await silent.lost == "anna: the connection was closed"

    monkeypatch.setattr(shard_port, "SILENCE_MAX", 5.0)
    links = await connect(shard_at(port))
    assert await echo(links.ports[0], b"next") == b"next"
    await links.close()
    await silent.close()


async def test_loopback_ports_are_for_this_user_alone(
    port: ShardPort, process: EchoShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = await connect(shard_at(port))
    assert await echo(links.ports[0], b"a") == b"a"

    monkeypatch.setattr(shard_links, "is_own_connection", lambda *ports: False)

    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await echo(links.ports[0], b"a")
    assert process.connections == 1
    await links.close()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux, and once psutil")
@pytest.mark.parametrize("system", ["linux", "elsewhere"])
async def test_connection_of_this_program_is_its_own(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", target)) as connected:
            source = connected.getsockname()[1]
            monkeypatch.setattr(sys, "platform", system)

            assert is_own_connection(source, target)
            assert not is_own_connection(target, source + 1)

            monkeypatch.setattr(os, "getuid", lambda: -1)
            assert is_own_connection(source, target) == (system != "linux")


# Strangers.


async def begin(port: ShardPort) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(
        *("127.0.0.1", port.port), ssl=context_of_any(), server_hostname=""
    )


async def test_data_needs_a_heartbeat(port: ShardPort) -> None:
    reader, writer = await begin(port)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    certificate = hashlib.sha256(shown).digest()
    writer.write(write_hello(RUNNER, GROUP, Purpose.DATA, PROTOCOL, certificate))

    assert b"no heartbeat" in await reader.read()
    assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
    writer.close()


async def test_strangers_get_a_reason_and_are_closed(
    port: ShardPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = await connect(shard_at(port))
    monkeypatch.setattr(shard_port, "HELLO_TIMEOUT", 0.1)

    for sent, reason in (
        (b"GET / HTTP/1.1\r\n", b"no hello of a machine"),
        (b"x" * (LINE_MAX + 1), b"a line of more than 4096 bytes"),
        (b"", b"no hello within 0 s"),
    ):
        reader, writer = await begin(port)
        writer.write(sent)
        assert reason in await reader.read()
        writer.close()

    assert await echo(links.ports[0], b"still") == b"still"
    await links.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs another loopback address")
async def test_strangers_that_wait_keep_nobody_out(port: ShardPort) -> None:
    here, elsewhere = ("127.0.0.1", port.port), ("127.0.0.77", 0)
    silent = [
        await asyncio.open_connection(*here, local_addr=elsewhere) for _ in range(100)
    ]

    links = await connect(shard_at(port))

    assert await echo(links.ports[0], b"served") == b"served"
    await links.close()
    for _, writer in silent:
        writer.close()
