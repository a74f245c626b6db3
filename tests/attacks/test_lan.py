"""Peers of the local network that break the wire's rules, admitted or not."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from attacks.lan import (
    MAC,
    PASSCODE,
    LanPeer,
    beating,
    chunk,
    dialled,
    ending,
    mac,
)
from attacks.siege import CHAT, ask, join, standing
from gateway.serving import Pool, eventually
from protocols.tealenet.peers import heartbeat, hello
from shoal.coordinator.answer import TOKENS_MAX
from shoal.domain.facts import Fact, WorkerJoined, WorkerLeft
from shoal.peers.peer_models import CHANGES_AT_ONCE
from shoal.protocols.seam.framing import LENGTH
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.codec.scalars import passcode_hash
from shoal.protocols.tealenet.connections import HELLO_MAX
from shoal.protocols.tealenet.local_node import Config

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUEST = "AAAAAAAA-0000-4000-8000-0000000000{:02X}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing_pool(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Pool]:
    folder = tmp_path_factory.mktemp("coordinator")
    with pytest.MonkeyPatch.context() as patch:
        # No Mac is here to wait for.
        patch.setattr("shoal.protocols.tealenet.handshake.ACK_DELAY", 0.0)
        wires = {"tealenet": Config(passcode=PASSCODE)}
        async with standing(folder, wires=wires) as running:
            yield running


@pytest.fixture
def pool(shared_pool: Pool, caplog: pytest.LogCaptureFixture) -> Iterator[Pool]:
    yield shared_pool
    hashed = passcode_hash(PASSCODE)
    for record in caplog.get_records("call"):
        assert PASSCODE not in record.getMessage()
        assert hashed not in record.getMessage()


@asynccontextmanager
async def talking(pool: Pool) -> AsyncIterator[None]:
    """Let two honest peers communicate before, in and after the block."""
    async with (
        mac(pool, 1) as client,
        mac(pool, 2, "honest-model") as doer,
        beating(client, doer),
    ):
        await pool.wait_joined()
        await request(client, 1, "honest-model")
        first = await doer.receive("inferenceRequest")
        await doer.send_messages(chunk(first["requestID"], "one "))
        await client.receive("inferenceChunk")
        yield
        await doer.send_messages(chunk(first["requestID"], "two"))
        await doer.send_messages(*ending(first["requestID"]))
        await client.receive("inferenceComplete")
        assert answer_to(client, 1) == "one two"
        await request(client, 2, "honest-model")
        await doer.answer("three", number=1)
        await client.receive("inferenceComplete", 1)
        assert answer_to(client, 2) == "three"
        assert not client.of("inferenceError")
        assert not client.over
        assert not doer.over


async def request(peer: LanPeer, number: int, model: str, **more: Any) -> None:
    """Request a chat."""
    request_body = {
        "model": model,
        "messages": [{"role": "user", "content": "hi"}],
        **more,
    }
    await peer.send_messages(
        {
            "inferenceRequest": {
                "_0": {
                    "requestID": REQUEST.format(number),
                    "streaming": True,
                    "request": request_body,
                }
            }
        }
    )


def answer_to(peer: LanPeer, number: int) -> str:
    """Return the received text of a request."""
    return "".join(
        choice["delta"].get("content") or ""
        for each in peer.of("inferenceChunk")
        if each["requestID"] == REQUEST.format(number)
        for choice in each["chunk"]["choices"]
    )


# Before anybody is let in.


@pytest.mark.parametrize(
    "size", [0xFFFFFFFF, 64 << 20, HELLO_MAX + 1], ids=["4 GiB", "64 MiB", "hello"]
)
async def test_oversized_announcement_is_disconnected(pool: Pool, size: int) -> None:
    async with talking(pool), dialled(pool) as stranger:
        await stranger.send(LENGTH.pack(size) + b"x" * 1000)

        await stranger.hung_up()


GARBAGE = (
    b"",
    b"null",
    b"5",
    b"[]",
    b'"x"',
    b"not JSON",
    b"\xff\xfe\xfd",
    b"{}",
    b'{"hello":null}',
    b'{"hello":{"_0":null}}',
    b'{"hello":{},"helloAck":{}}',
    b'{"hello":{"_0":{"deviceInfo":{"id":5}}}}',
    b'{"modelQuery":{"_0":{"modelID":"m"}}}',
    b"[" * 60_000,
    b'{"hello":' * 7_000,
)


async def test_garbage_is_no_handshake(pool: Pool, subtests: pytest.Subtests) -> None:
    async with talking(pool):
        for garbage in GARBAGE:
            with subtests.test(garbage=garbage[:20]):
                async with dialled(pool) as stranger:
                    await stranger.send_messages(garbage, garbage)
                    await stranger.send_messages(
                        encode(hello(passcode_hash(PASSCODE), (), MAC.format(9)))
                    )

                    await stranger.receive("helloAck")


async def test_peer_that_sends_only_garbage_is_disconnected(pool: Pool) -> None:
    async with talking(pool), dialled(pool) as stranger:
        await stranger.send_messages(*[b"null"] * 200)

        await stranger.hung_up()


async def test_only_a_handshake_is_accepted_before_admission(pool: Pool) -> None:
    async with talking(pool), dialled(pool) as stranger:
        await stranger.send_messages(encode(heartbeat(("mine",))))
        await request(stranger, 3, "honest-model")
        await stranger.send_messages({"modelQuery": {"_0": {"modelID": "m"}}})
        await stranger.send_messages(
            {"loadModel": {"_0": {"requestID": "r", "modelID": "m"}}}
        )
        await stranger.send_messages(encode(hello("0" * 64)))

        await stranger.hung_up()
        assert stranger.received == []
        assert len(pool.hub.pool.workers) == 1


# Let in, and no better.


INVALID = (
    (b"null", None),
    (b'{"heartbeat":{"_0":{}},"inferenceComplete":{"_0":{}}}', None),
    (b'{"heartbeat":{"_0":{"deviceID":5}}}', None),
    (b'{"modelTransferChunk":{"_0":{"offset":-1}}}', None),
    (b'{"inferenceComplete":{"_0":{"requestID":"never heard of"}}}', None),
    (b'{"inferenceRequest":{"_0":{"requestID":"bad","request":5}}}', "bad"),
    (b'{"inferenceRequest":{"_0":{"requestID":5,"request":{}}}}', None),
    (
        b'{"inferenceRequest":{"_0":{"requestID":"deep","request":{"messages":[],'
        b'"tools":[{"a":' + b"[" * 200 + b"]" * 200 + b"}]}}}}",
        "deep",
    ),
)


async def test_invalid_message_does_not_affect_the_next(
    pool: Pool, subtests: pytest.Subtests
) -> None:
    async with talking(pool):
        for message, answer in INVALID:
            with subtests.test(message=message[:60]):
                async with mac(pool, 3) as peer:
                    await peer.send_messages(message)
                    await peer.send_messages(
                        {"loadModel": {"_0": {"requestID": "r", "modelID": "m"}}}
                    )
                    await peer.receive("modelLoadError")

                    refused = [each["requestID"] for each in peer.of("inferenceError")]
                    assert refused == ([] if answer is None else [answer])


async def test_messages_about_foreign_jobs_are_ignored(pool: Pool) -> None:
    async with talking(pool), mac(pool, 3, "evil") as evil:
        await pool.wait_joined(2)
        pending = asyncio.create_task(ask(pool, CHAT, "evil"))
        request_body = await evil.receive("inferenceRequest")
        for other in (REQUEST.format(1), REQUEST.format(1).lower(), "x", "job1"):
            await evil.send_messages(chunk(other, "injected"))
            await evil.send_messages(*ending(other))
            error = {"requestID": other, "errorMessage": "injected"}
            await evil.send_messages({"inferenceError": {"_0": error}})
        await evil.send_messages(chunk(request_body["requestID"], "mine"))
        done = ending(request_body["requestID"], tokensOut=2**53)
        await evil.send_messages(*done)
        await evil.send_messages(chunk(request_body["requestID"], "too late"))
        error = {"requestID": request_body["requestID"], "errorMessage": "too late"}
        await evil.send_messages({"inferenceError": {"_0": error}})
        await evil.send_messages(*done)

        response = json.loads(await pending)

        assert response["choices"][0]["message"]["content"] == "mine"


@pytest.mark.parametrize("tokens", [2**53, 10**18, -1, 1.5, "x"])
async def test_implausible_usage_is_not_recorded(pool: Pool, tokens: Any) -> None:
    async with talking(pool), mac(pool, 3, "evil") as evil:
        await pool.wait_joined(2)
        pending = asyncio.create_task(ask(pool, CHAT, "evil"))
        request_body = await evil.receive("inferenceRequest")
        response = chunk(request_body["requestID"], "x")
        counts = {"prompt_tokens": tokens, "completion_tokens": tokens}
        usage = counts | {"total_tokens": tokens}
        response["inferenceChunk"]["_0"]["chunk"]["usage"] = usage
        await evil.send_messages(response)
        await evil.send_messages(*ending(request_body["requestID"]))
        if tokens != 2**53:  # it did not do the job, which another is given
            async with mac(pool, 4, "evil") as other:
                await other.answer("x")

        told = json.loads(await pending)
        assert told["choices"][0]["message"]["content"] == "x"
        assert told["usage"]["completion_tokens"] <= TOKENS_MAX


@pytest.mark.parametrize("number", [2**53, -(10**20), 10**400])
async def test_unencodable_numbers_are_contained(pool: Pool, number: int) -> None:
    async with talking(pool), mac(pool, 3, "evil") as evil:
        await pool.wait_joined(2)
        pending = asyncio.create_task(ask(pool, CHAT, "evil"))
        request_body = await evil.receive("inferenceRequest")
        response = chunk(request_body["requestID"], "x")
        (choice,) = response["inferenceChunk"]["_0"]["chunk"]["choices"]
        choice["delta"] |= {"odd": number, "tool_calls": [{"index": 0, "odd": number}]}
        choice["logprobs"] = {"content": [{"logprob": number}]}
        await evil.send_messages(response)
        await evil.send_messages(*ending(request_body["requestID"]))

        assert '"x"' in await pending


async def test_models_with_reserved_names_get_no_jobs(pool: Pool) -> None:
    names = ["*", "*task", "", "honest-model,x", "a/b", "\x1b[2J\n", "x" * 256]
    async with talking(pool), mac(pool, 3, *names) as peer:
        await eventually(lambda: len(pool.hub.pool.workers) > 1)

        assert not peer.of("inferenceRequest")


async def test_constantly_changing_models_cost_little(
    pool: Pool,
) -> None:
    # Of a peer that no other test is, for its limit outlives its connection.
    joined = 0

    def count(batch: Sequence[Fact]) -> None:
        nonlocal joined
        joined += sum(isinstance(each, WorkerJoined) for each in batch)

    pool.hub.subscribe(count)
    async with talking(pool), mac(pool, 99) as peer:
        for number in range(40):
            names = tuple(f"m{number}-{each}" for each in range(50))
            await peer.send_messages(encode(heartbeat(names, device_id=MAC.format(99))))
        await peer.receive("heartbeatAck", 40)

        assert joined <= CHANGES_AT_ONCE + 2 * 50 + 10


async def test_requests_beyond_a_limit_are_rejected_at_once(pool: Pool) -> None:
    async with talking(pool), mac(pool, 4, "slow"), mac(pool, 3) as peer:
        await pool.wait_joined(2)
        for number in range(300):
            await request(peer, number, "slow")
        await eventually(lambda: len(peer.of("inferenceError")) >= 300 - 64)

        reasons = {each["code"] for each in peer.of("inferenceError")}
        # The last until the peer was told what there is, within a second.
        assert reasons <= {"queue_full", "unavailable", "model_not_loaded"}


async def test_unrequested_model_messages_have_no_effect(
    pool: Pool,
) -> None:
    piece = {
        "transferID": MAC.format(0),
        "fileName": "x",
        "offset": 0,
        "data": "A" * (1 << 20),
        "isLastChunk": True,
    }
    done = {"transferID": MAC.format(0), "modelID": "../../x"}
    async with talking(pool), mac(pool, 3) as peer:
        for number in range(4):
            await peer.send_messages({"modelTransferChunk": {"_0": piece}})
            await peer.send_messages({"modelTransferComplete": {"_0": done}})
            await peer.send_messages(
                *[{"modelQuery": {"_0": {"modelID": "../x"}}}] * 50
            )
            request_body = {"transferID": MAC.format(number), "modelID": "../../etc"}
            await peer.send_messages({"modelTransferRequest": {"_0": request_body}})
        await peer.send_messages(
            {"loadModel": {"_0": {"requestID": "r", "modelID": "m"}}}
        )
        await peer.receive("modelLoadError")

        assert not any(each["available"] for each in peer.of("modelQueryResponse"))
        assert not peer.of("modelTransferChunk")


@pytest.mark.long
@pytest.mark.usefixtures("small_outbox")
async def test_peer_that_reads_nothing_is_disconnected(pool: Pool) -> None:
    ends: list[str] = []

    def note(batch: Sequence[Fact]) -> None:
        ends.extend(each.reason for each in batch if isinstance(each, WorkerLeft))

    pool.hub.subscribe(note)
    async with talking(pool), mac(pool, 3, "deaf", deaf=True) as peer:
        await pool.wait_joined(2)
        peer.deaf = True
        wish = {"requestID": "r" * 100, "modelID": "m" * 256}
        wishes = [{"loadModel": {"_0": wish}}] * 100  # each answer names the model
        while not ends:
            await peer.send_messages(*wishes)
            await asyncio.sleep(0)

        assert ends == ["peer stopped reading"]
        assert len(pool.hub.pool.workers) == 1


@pytest.mark.long
async def test_many_short_connections_leak_nothing(pool: Pool) -> None:
    async with talking(pool):
        for number in range(50):
            async with mac(pool, 3 + number % 5, "m"):
                pass
            async with dialled(pool) as stranger:
                await stranger.send(b"\0\0")
        await pool.wait_joined()
    await eventually(lambda: not pool.hub.pool.workers)


async def test_only_an_admitted_peer_replaces_its_namesake(
    pool: Pool,
) -> None:
    async with talking(pool):
        device = MAC.format(2)  # an honest peer's
        async with dialled(pool) as evil:
            await evil.send_messages(encode(hello("0" * 64, ("m",), device)))
            await evil.hung_up()
        assert len(pool.hub.pool.workers) == 1
        async with join(pool, "n", "m"):
            await pool.wait_joined(2)
