"""Ranks that reach each other over the coordinator only."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from typing import Any

import numpy as np
import pytest
from aiohttp import WSMsgType, WSServerHandshakeError

from gateway.runs.test_endpoints import RUN, TOKEN, beside, open_run, socket
from gateway.serving import WAIT_MAX, Pool
from shoal.gateway.http import relay as relays
from shoal.gateway.http.relay import BytePace
from shoal.protocols import discover
from shoal.training import rank_port
from shoal.training.group import RankGroup
from shoal.training.meeting import join_run
from shoal.training.rank_port import (
    GroupEnded,
    GroupMembership,
    RankAddress,
    RankPort,
)
from shoal.training.run_link import relay_of
from shoal.transports.blocking.rank_socket import Disconnected, RankListener, RankSocket
from shoal.transports.relayed_sockets import (
    ENDED,
    NOT_LISTENING,
    REPLACED,
)

pytestmark = pytest.mark.shared_pool

SECRET = "known to the ranks only"
TLS_HANDSHAKE = 22  # the kind of a record (RFC 8446, section 5.1)


def open_port(pool: Pool) -> RankPort:
    wire = next(each.ranks for each in discover().values() if each.ranks)
    relay = relay_of(pool.url, TOKEN)
    return RankPort(wire(), RankListener("127.0.0.1"), encrypts=False, relay=relay)


def rank_group(
    rank: int, ports: list[RankPort], hosts: list[str], timeout: float = WAIT_MAX
) -> RankGroup:
    membership = GroupMembership(RUN, 0, rank, len(ports), SECRET)
    links = ports[rank].open_group(membership, timeout)
    links.set_addresses(
        {
            number: RankAddress(hosts, ports[rank].port, port.id)
            for number, port in enumerate(ports)
        }
    )
    return RankGroup(links, timeout)


@asynccontextmanager
async def relayed(
    pool: Pool, size: int, hosts: list[str] | None = None
) -> AsyncIterator[list[RankGroup]]:
    """Yield the ranks of a group whose addresses lead nowhere, or to a wrong rank."""
    ports = [await beside(open_port, pool) for _ in range(size)]
    groups = [rank_group(rank, ports, hosts or []) for rank in range(size)]
    try:
        yield groups
    finally:
        for group in groups:
            await beside(group.close)
        for port in ports:
            await beside(port.close)


async def together(groups: list[RankGroup], call: Any) -> list[Any]:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(len(groups)) as threads:
        calls = [loop.run_in_executor(threads, call, each) for each in groups]
        return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("hosts", [[], ["127.0.0.1"]], ids=["none", "wrong"])
async def test_ranks_add_up_over_the_coordinator(pool: Pool, hosts: list[str]) -> None:
    # The wrong address is the rank's own port, which proves another id.
    arrays = [np.arange(200_000, dtype=np.float32) * rank for rank in range(3)]
    async with open_run(pool, 3), relayed(pool, 3, hosts) as groups:
        sums = await together(
            groups, lambda group: group.all_reduce(arrays[group.place.rank].copy())
        )
    assert all((each == sum(arrays)).all() for each in sums)


async def test_what_was_sent_last_arrives_before_the_end(pool: Pool) -> None:
    sent = np.arange(400_000, dtype=np.float32)

    def exchange(group: RankGroup) -> Any:
        if group.place.rank == 0:
            with closing(group):
                group.send(sent, 1)
            return None
        return group.receive(np.empty_like(sent), 0)

    async with open_run(pool, 2), relayed(pool, 2) as groups:
        _, received = await together(groups, exchange)
    assert (received == sent).all()


async def test_a_rank_that_leaves_ends_relayed_connections(pool: Pool) -> None:
    def leave_or_wait(group: RankGroup) -> Any:
        group.barrier()
        if group.place.rank == 0:
            group.abort("enough")
            return None
        return group.barrier()

    async with open_run(pool, 2), relayed(pool, 2) as groups:
        _, ended = await together(groups, leave_or_wait)
    assert isinstance(ended, GroupEnded)


async def test_bytes_pass_in_both_directions(pool: Pool) -> None:
    async with (
        open_run(pool, 1),
        socket(pool, "relay?at=listener") as listener,
        socket(pool, "relay?to=listener") as dialler,
    ):
        ticket = (await listener.receive_json(timeout=WAIT_MAX))["ticket"]
        async with socket(pool, f"relay?ticket={ticket}") as accepted:
            await dialler.send_bytes(b"there")
            assert await accepted.receive_bytes(timeout=WAIT_MAX) == b"there"
            await accepted.send_bytes(b"and back")
            assert await dialler.receive_bytes(timeout=WAIT_MAX) == b"and back"


def client_hello() -> bytes:
    context = ssl.create_default_context()
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="rank")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


async def test_ranks_speak_tls_over_the_relay_also_on_loopback(pool: Pool) -> None:
    async with open_run(pool, 1):
        port = await beside(open_port, pool)
        async with socket(pool, f"relay?to={port.id}") as dialler:
            await dialler.send_bytes(client_hello())
            answer = await dialler.receive_bytes(timeout=WAIT_MAX)
        await beside(port.close)
    assert answer[0] == TLS_HANDSHAKE


@pytest.mark.parametrize("query", ["to=nobody", "ticket=unknown"])
async def test_where_nobody_listens_connections_are_closed(
    pool: Pool, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "ANSWER_TIMEOUT", 0.1)
    async with open_run(pool, 1), socket(pool, f"relay?{query}") as opened:
        closing = await opened.receive(timeout=WAIT_MAX)
        assert (closing.type, closing.data) == (WSMsgType.CLOSE, NOT_LISTENING)


async def test_the_newer_of_two_listeners_is_called(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "ANSWER_TIMEOUT", 0.5)  # nobody takes the ticket
    async with (
        open_run(pool, 1),
        socket(pool, "relay?at=here") as older,
        socket(pool, "relay?at=here") as newer,
    ):
        assert (await older.receive(timeout=WAIT_MAX)).data == REPLACED
        async with socket(pool, "relay?to=here"):
            assert "ticket" in await newer.receive_json(timeout=WAIT_MAX)


async def test_the_end_of_a_run_ends_its_connections(pool: Pool) -> None:
    async with AsyncExitStack() as sockets:
        async with open_run(pool, 1):
            listener = await sockets.enter_async_context(socket(pool, "relay?at=here"))
            dialler = await sockets.enter_async_context(socket(pool, "relay?to=here"))
            await listener.receive_json(timeout=WAIT_MAX)
        assert (await listener.receive(timeout=WAIT_MAX)).data == ENDED
        assert (await dialler.receive(timeout=WAIT_MAX)).data == ENDED


@pytest.mark.parametrize("query", ["", "?at=", "?at=a&to=b", f"?at={'a' * 257}"])
async def test_what_a_rank_wants_must_be_clear(pool: Pool, query: str) -> None:
    async with open_run(pool, 1):
        with pytest.raises(WSServerHandshakeError) as refused:
            async with socket(pool, f"relay{query}"):
                pass
    assert refused.value.status == 400


def test_so_many_bytes_pass_in_a_second() -> None:
    pace = BytePace(rate=100)
    assert pace.delay(50, now=7.0) == 0.0
    assert pace.delay(100, now=7.0) == 0.5  # after those before
    assert pace.delay(1, now=8.0) == 0.5
    assert pace.delay(1, now=60.0) == 0.0


async def test_a_run_trains_whose_ranks_do_not_reach_each_other(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(host: str, *_: object, **__: object) -> RankSocket:
        raise Disconnected(f"{host}: there is no route")

    def train(rank: int) -> Any:
        variables = {
            "RANK": f"{rank}",
            "WORLD_SIZE": "2",
            "SHOAL_RUN": RUN,
            "SHOAL_RUN_URL": pool.url,
            "SHOAL_RUN_TOKEN": TOKEN,
        }
        with closing(join_run(environment=variables)) as group:
            return group.all_reduce(np.arange(5000, dtype=np.float32))

    monkeypatch.setattr(rank_port, "dial", unreachable)
    async with open_run(pool, 2):
        sums = await asyncio.gather(*(beside(train, rank) for rank in range(2)))
    assert all((each == 2 * np.arange(5000)).all() for each in sums)
