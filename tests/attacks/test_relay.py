"""Nodes that attack the relay, its nodes, or the coordinator behind it."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientWebSocketResponse, WSMsgType

from attacks.raw import TEXT, frame, upgraded
from attacks.siege import besieged, standing
from gateway.serving import WAIT_MAX, Pool
from shoal.ledger.keys import Signer
from shoal.protocols.tealenet.codec.relay_messages import MESSAGE_MAX
from shoal.transports.strangers import MESSAGE_MAX as STRANGER_MAX

pytestmark = pytest.mark.asyncio(loop_scope="module")

SESSION = "550e8400-e29b-41d4-a716-446655440000"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing_pool(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Pool]:
    """A coordinator whose relay any node may use."""
    folder = tmp_path_factory.mktemp("coordinator")
    async with standing(folder, relay_open=True) as running:
        yield running


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    return shared_pool


@pytest_asyncio.fixture(loop_scope="module")
async def closed_pool(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Pool]:
    """A coordinator whose relay is for its own workers, as by default."""
    async with besieged(tmp_path, caplog) as running:
        yield running


def signer(seed: int) -> Signer:
    return Signer.from_seed(bytes([seed]) * 32)


def id_of(seed: int) -> str:
    return signer(seed).public_key.hex()


def registration(seed: int, **fields: Any) -> dict[str, Any]:
    key = id_of(seed)
    payload = {
        "nodeID": key,
        "publicKey": key,
        "displayName": f"node {seed}",
        "capabilities": {"isAvailable": False, "loadedModels": []},
        "signature": signer(seed).sign(key.encode()).hex(),
    }
    return {"register": payload | fields}


def message(kind: str, sender: int, target: int, **fields: Any) -> dict[str, Any]:
    ends = {"fromNodeID": id_of(sender), "toNodeID": id_of(target)}
    return {kind: ends | {"sessionID": SESSION} | fields}


@dataclass(slots=True)
class Node:
    """A connection to the relay."""

    socket: ClientWebSocketResponse

    async def send(self, *messages: Any) -> None:
        for each in messages:
            text = each if isinstance(each, str) else json.dumps(each)
            await self.socket.send_str(text)

    async def receive(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the next message of each of these kinds, in order."""
        found: list[dict[str, Any]] = []
        async with asyncio.timeout(WAIT_MAX):
            while len(found) < len(kinds):
                reply = await self.socket.receive_json()
                assert "error" not in reply or "error" in kinds, reply
                if kinds[len(found)] in reply:
                    found.append(reply[kinds[len(found)]])
        return found

    async def refused(self, message: Any) -> str:
        """Return the error code that a message causes."""
        await self.send(message)
        (error,) = await self.receive("error")
        code: str = error["code"]
        return code

    async def hung_up(self) -> None:
        """Wait until the relay disconnects."""
        async with asyncio.timeout(WAIT_MAX):
            while (await self.socket.receive()).type is WSMsgType.TEXT:
                pass


@asynccontextmanager
async def connected(pool: Pool) -> AsyncIterator[Node]:
    async with pool.session.ws_connect(f"{pool.url}/ws?node=x") as socket:
        yield Node(socket)


@asynccontextmanager
async def node(pool: Pool, seed: int, **fields: Any) -> AsyncIterator[Node]:
    """Join the relay."""
    async with connected(pool) as joined:
        await joined.send(registration(seed, **fields))
        await joined.receive("registerAck")
        yield joined


@asynccontextmanager
async def talking(pool: Pool) -> AsyncIterator[tuple[Node, Node]]:
    """Let two honest nodes communicate before and after the block."""
    async with node(pool, 1) as one, node(pool, 2) as two:
        await one.send(message("relayOpen", 1, 2))
        await two.receive("relayOpen")
        await two.send(message("relayReady", 2, 1))
        await one.receive("relayReady")
        yield one, two
        for data in ("e30=", "e31="):
            await one.send(message("relayData", 1, 2, data=data))
            await two.send(message("relayData", 2, 1, data=data))
        for end in (one, two):
            reply = await end.receive("relayData", "relayData")
            assert [each["data"] for each in reply] == ["e30=", "e31="]
            assert not end.socket.closed


@pytest.mark.parametrize(
    "killer",
    ["null", '{"relayData":null}', '{"register":{"nodeID":5}}'],
)
async def test_input_that_kills_the_original_relay_is_an_error(
    pool: Pool, killer: str
) -> None:
    async with talking(pool), connected(pool) as attacker:
        code = await attacker.refused(killer)

        assert code in {"invalid_message", "invalid_register"}
        await attacker.send(registration(3))
        await attacker.receive("registerAck")


GARBAGE = (
    "",
    "not json",
    "[]",
    "5",
    '"s"',
    "[" * 100_000,
    '{"a":{},"b":{}}',
    '{"relayData":{"fromNodeID":[],"toNodeID":{},"sessionID":5}}',
    '{"x":[' + "0," * 1_000_000 + "0]}",
    '{"\\u0000":{}}',
)


async def test_garbage_is_an_error_for_its_sender_only(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    async with talking(pool), node(pool, 3) as attacker:
        for garbage in GARBAGE:
            with subtests.test(garbage=garbage[:20]):
                assert await attacker.refused(garbage) in {
                    "invalid_json",
                    "invalid_message",
                    "unsupported_message",
                }


async def test_binary_garbage_is_an_error_too(pool: Pool) -> None:
    async with talking(pool), node(pool, 3) as attacker:
        await attacker.socket.send_bytes(b"\xff\x00")

        (error,) = await attacker.receive("error")

        assert error["code"] == "invalid_json"


async def test_oversized_message_ends_its_own_connection(pool: Pool) -> None:
    async with talking(pool), node(pool, 3) as attacker:
        with suppress(ConnectionError):
            await attacker.send("x" * (MESSAGE_MAX + 1))

        await attacker.hung_up()


async def test_forged_sender_is_rejected(pool: Pool) -> None:
    async with talking(pool), node(pool, 3) as attacker:
        for kind in ("relayData", "relayOpen", "relayClose", "offer"):
            assert await attacker.refused(message(kind, 1, 2, data="e30=")) == (
                "wrong_sender"
            )


async def test_third_party_cannot_inject_into_a_session(pool: Pool) -> None:
    async with talking(pool), node(pool, 3) as attacker:
        for target in (1, 2):
            for kind, code in (
                ("relayData", "session_not_found"),
                ("relayReady", "session_not_found"),
                ("relayOpen", "session_taken"),
            ):
                sent = message(kind, 3, target, data="e30=")
                assert await attacker.refused(sent) == code
            await attacker.send(message("relayClose", 3, target))


async def test_unregistered_node_reaches_no_peer(pool: Pool) -> None:
    async with talking(pool), connected(pool) as attacker:
        sent = message("relayData", 3, 1, data="e30=")

        await attacker.send({"discover": {}})  # gets no answer
        assert await attacker.refused(sent) == "not_registered"


async def test_node_cannot_register_under_another_id(pool: Pool) -> None:
    async with talking(pool), connected(pool) as thief:
        forged = registration(3, nodeID=id_of(1), publicKey=id_of(1))

        assert await thief.refused(forged) == "invalid_register"


@pytest.mark.parametrize("size", [32, 50, 79])
async def test_short_handshake_is_not_relayed(pool: Pool, size: int) -> None:
    data = base64.b64encode(b"\x01" + bytes(size)).decode()
    async with talking(pool), node(pool, 3) as attacker:
        await attacker.send(message("relayOpen", 3, 2, sessionID="other"))

        sent = message("relayData", 3, 2, sessionID="other", data=data)

        assert await attacker.refused(sent) == "invalid_message"


async def test_session_flood_is_rate_limited(pool: Pool) -> None:
    async with talking(pool), node(pool, 3) as attacker:
        flood = [
            message("relayOpen", 3, 2, sessionID=str(number)) for number in range(1200)
        ]
        await attacker.send(*flood)

        (error,) = await attacker.receive("error")

        assert error["code"] == "rate_limited"
        assert error["retryAfterSeconds"] >= 1


async def test_registration_flood_is_rate_limited(pool: Pool) -> None:
    async with talking(pool), node(pool, 3) as attacker:
        await attacker.send(*[registration(3)] * 100)

        (error,) = await attacker.receive("error")

        assert error["code"] == "rate_limited"


async def test_garbage_flood_delays_no_other_node(pool: Pool) -> None:
    async with talking(pool), node(pool, 3) as attacker:
        await attacker.send(*["null"] * 2000)


async def test_unread_node_is_disconnected(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.peers.relay.OUTBOX_MAX", 1 << 20)
    async with talking(pool), node(pool, 3) as sender:
        async with upgraded(pool, "/ws?node=x", deaf=True) as deaf:
            await deaf.send(frame(TEXT, json.dumps(registration(5)).encode()))
            await sender.receive("peerJoined")
            await sender.send(message("relayOpen", 3, 5, sessionID="deaf"))
            blob = message("relayData", 3, 5, sessionID="deaf", data="A" * 500_000)

            async def flood() -> None:
                for _ in range(40):
                    await sender.send(blob)

            flooding = asyncio.create_task(flood())
            (error,) = await sender.receive("error")
            await flooding

        assert error["code"] == "peer_not_found"


async def test_one_connection_stands_for_one_node(pool: Pool) -> None:
    async with talking(pool), node(pool, 3) as attacker:
        assert await attacker.refused(registration(4)) == "invalid_register"


async def test_unregistered_connections_are_forgotten(pool: Pool) -> None:
    async with talking(pool):
        for _ in range(20):
            async with connected(pool):
                pass


# A relay that is not open.


async def test_closed_relay_tells_strangers_which_flag_is_missing(
    closed_pool: Pool,
) -> None:
    async with connected(closed_pool) as stranger:
        await stranger.send(registration(3))
        (error,) = await stranger.receive("error")
        await stranger.hung_up()

    assert error["code"] == "invalid_register"
    assert "shoal serve --relay-open" in error["message"]
    assert stranger.socket.close_code == 1008


async def test_unregistered_node_may_send_little(closed_pool: Pool) -> None:
    async with connected(closed_pool) as attacker:
        with suppress(ConnectionError):
            await attacker.send("x" * (2 * STRANGER_MAX))

        await attacker.hung_up()

    assert attacker.socket.close_code == 1009


async def test_status_counts_those_who_are_not_admitted(closed_pool: Pool) -> None:
    async with connected(closed_pool), connected(closed_pool):
        url = f"{closed_pool.url}/admin/status"
        async with closed_pool.session.get(url, headers=closed_pool.headers()) as reply:
            (relay,) = (await reply.json())["relays"]

    counts = {"guests": 0, "strangers": 2}
    assert relay == {"wire": "tealenet", "open": False} | counts
