"""Shards and the machine that runs the model, which meet at the coordinator only."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from msgspec.structs import replace

from gateway.serving import Pool, eventually
from gateway.shoal_worker import shoal_worker
from shoal.domain.errors import Unavailable
from shoal.domain.work import JobKind, ModelAction, ModelOrder, Shard
from shoal.domain.worker import LentShard, MemoryLoan, ModelLibrary, Offer
from shoal.gateway.models import shard_relay
from shoal.ledger.keys import Signer
from shoal.transports.relayed_sockets import OpenRelay, RelayedSockets, TriedUrl
from shoal.worker.shard_hello import RELAY_PATH, write_pass
from shoal.worker.shard_links import ShardLinks
from shoal.worker.shard_port import ShardPort
from worker.fake_shards import GROUP, PROTOCOL, RUNNER, EchoShard
from worker.test_shard_links import echo

LENDER = Signer.from_seed(b"l" * 32)
STRANGER = Signer.from_seed(b"s" * 32)
NAME = "anna"
MACHINE = f"shoal:{NAME}/*models"
PART = Shard(MACHINE, 10, 1_000)
ORDER = ModelOrder(
    ModelAction.LEND,
    "big",
    MACHINE,
    group=GROUP,
    shards=(PART, Shard("shoal:runner", 5, 1)),
    runner=RUNNER.public_key.hex(),
)


def lender(*groups: str) -> Offer:
    """Return the offer of a machine that holds a part of some groups."""
    lent = [LentShard(replace(ORDER, group=each), (), 1, "00" * 32) for each in groups]
    key = LENDER.public_key.hex()
    loan = MemoryLoan(PROTOCOL, key, 10_000, shards=tuple(lent))
    library = ModelLibrary(loan=loan)
    return Offer(frozenset({JobKind.MODEL}), slots=2, library=library)


def relay_of(pool: Pool, signer: Signer) -> OpenRelay:
    def open_relay(group: str) -> RelayedSockets:
        url = TriedUrl([pool.url], RELAY_PATH)
        return RelayedSockets(url, write_pass(signer, group), group=group)

    return open_relay


@asynccontextmanager
async def lent(pool: Pool, process: EchoShard) -> AsyncIterator[Shard]:
    """Lend a shard that no address leads to."""
    port = await ShardPort.open(
        *("127.0.0.1", GROUP, RUNNER.public_key.hex(), process),
        relay=relay_of(pool, LENDER),
        relay_id=MACHINE,
    )
    try:
        yield replace(PART, fingerprint=port.fingerprint)
    finally:
        await port.close()


async def test_connections_are_passed_on(pool: Pool) -> None:
    process = EchoShard()
    async with (
        shoal_worker(pool, lender(GROUP), name=NAME, signer=LENDER),
        lent(pool, process) as shard,
    ):
        links = await ShardLinks.open(
            GROUP, RUNNER, PROTOCOL, [shard], relay_of(pool, RUNNER)
        )
        for _ in range(16):  # as llama.cpp does at its start
            assert await echo(links.ports[0], b"far") == b"far"
        large = bytes(range(256)) * 20_000
        assert await echo(links.ports[0], large) == large
        assert not links.lost.done()

        await links.close()
        await eventually(lambda: not process.open)


async def test_another_certificate_behind_the_relay_is_refused(pool: Pool) -> None:
    """The coordinator cannot put a program of its own between the two."""
    async with (
        shoal_worker(pool, lender(GROUP), name=NAME, signer=LENDER),
        lent(pool, EchoShard()) as shard,
    ):
        forged = replace(shard, fingerprint="00" * 32)
        with pytest.raises(Unavailable, match="another program answers there"):
            await ShardLinks.open(
                GROUP, RUNNER, PROTOCOL, [forged], relay_of(pool, RUNNER)
            )


async def test_group_without_a_machine_ends_its_connections(pool: Pool) -> None:
    async with lent(pool, EchoShard()) as shard:
        async with shoal_worker(pool, lender(GROUP), name=NAME, signer=LENDER):
            links = await ShardLinks.open(
                GROUP, RUNNER, PROTOCOL, [shard], relay_of(pool, RUNNER)
            )
        reason = await links.lost
        await links.close()
    assert reason == f"{MACHINE}: the connection was closed"


@pytest.mark.parametrize(
    ("signer", "query", "status"),
    [
        (LENDER, f"to={MACHINE}", HTTPStatus.NOT_FOUND),
        (RUNNER, f"at={MACHINE}", HTTPStatus.NOT_FOUND),
        (RUNNER, "to=shoal:runner", HTTPStatus.NOT_FOUND),
        (RUNNER, "ticket=one", HTTPStatus.NOT_FOUND),
        (STRANGER, f"to={MACHINE}", HTTPStatus.NOT_FOUND),
        (STRANGER, f"at={MACHINE}", HTTPStatus.NOT_FOUND),
        (RUNNER, "", HTTPStatus.BAD_REQUEST),
    ],
)
async def test_each_key_may_have_its_own_part_only(
    pool: Pool, signer: Signer, query: str, status: HTTPStatus
) -> None:
    async with shoal_worker(pool, lender(GROUP), name=NAME, signer=LENDER):
        assert await refusal(pool, write_pass(signer, GROUP), query) == status


async def test_a_machine_may_be_back_before_the_lender(pool: Pool) -> None:
    """As after a restart of the coordinator: the lender has to ask again."""
    loan = MemoryLoan(PROTOCOL, RUNNER.public_key.hex(), groups=(ORDER,))
    runner = replace(lender(), library=ModelLibrary(loan=loan))
    async with shoal_worker(pool, runner, name="runner", signer=RUNNER):
        for query in (f"at={MACHINE}", "ticket=one"):
            found = await refusal(pool, write_pass(LENDER, GROUP), query)
            assert found == HTTPStatus.SERVICE_UNAVAILABLE


async def test_token_is_for_one_group_that_is_there(pool: Pool) -> None:
    other = f"{GROUP}-2"
    token = write_pass(RUNNER, GROUP)
    found = await refusal(pool, token, f"to={MACHINE}")
    assert found == HTTPStatus.SERVICE_UNAVAILABLE  # it may come
    async with shoal_worker(pool, lender(GROUP, other), name=NAME, signer=LENDER):
        token = write_pass(RUNNER, other)
        assert await refusal(pool, token, f"to={MACHINE}") == HTTPStatus.NOT_FOUND
        for broken in ("", "x.y", token[:-1]):
            found = await refusal(pool, broken, f"to={MACHINE}")
            assert found == HTTPStatus.NOT_FOUND


async def test_connections_of_a_group_are_bounded(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_relay, "PER_SHARD_MAX", 1)
    token = write_pass(RUNNER, GROUP)
    async with shoal_worker(pool, lender(GROUP), name=NAME, signer=LENDER):
        async with dialled(pool, token, f"to={MACHINE}"):  # it waits for the shard
            found = await refusal(pool, token, f"to={MACHINE}")
        assert found == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


def dialled(pool: Pool, token: str, query: str) -> Any:
    """Return a connection to the relay."""
    headers = {"Authorization": f"Bearer {token}"}
    group = quote(GROUP)
    return pool.session.ws_connect(
        f"{pool.url}{RELAY_PATH}?group={group}&{query}", headers=headers
    )


async def refusal(pool: Pool, token: str, query: str) -> int | None:
    """Return the status with which a connection is refused; None: it is accepted."""
    try:
        async with dialled(pool, token, query):
            return None
    except aiohttp.WSServerHandshakeError as error:
        return error.status
