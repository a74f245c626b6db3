"""Nodes that break the WebSocket protocol or the wire's, admitted or not."""

import asyncio

import pytest

from attacks.raw import BINARY, CLOSE, PING, TEXT, frame, upgraded
from attacks.siege import address, ask, join
from gateway.serving import Pool, eventually
from protocols.dispatch.recorded import CASES

pytestmark = pytest.mark.asyncio(loop_scope="module")

BROKEN = {
    "reserved opcode": frame(3, b"x"),
    "reserved control opcode": frame(0xF, b"x"),
    "reserved bits": frame(TEXT, b"x", reserved=4),
    "all reserved bits": frame(BINARY, b"12345", reserved=7),
    "2^63 bytes announced": frame(BINARY, b"x", length=1 << 63),
    "2^64 bytes announced": frame(TEXT, b"x", length=(1 << 64) - 1),
    "2 GiB announced": frame(BINARY, b"x", length=1 << 31),
    "text that is no UTF-8": frame(TEXT, b"\xff\xfe\xfd"),
    "text with a surrogate": frame(TEXT, b"\xed\xa0\x80"),
    "oversized ping": frame(PING, bytes(126)),
    "fragmented ping": frame(PING, b"x", fin=False),
    "continuation of nothing": frame(0, b"x"),
    "text inside a text": frame(TEXT, b"x", fin=False) + frame(TEXT, b"y"),
    "close with half a code": frame(CLOSE, b"\x03"),
    "close with a bad code": frame(CLOSE, b"\x00\x01"),
    "close with a bad reason": frame(CLOSE, b"\x03\xe8\xff"),
    "no frame at all": b"GET / HTTP/1.1\r\n\r\n" * 10,
}
UNMASKED = {
    "unmasked": frame(TEXT, b"hello", masked=False),
    "unmasked binary": frame(BINARY, b"12345", masked=False),
}

REFUSED = {
    "wrong token": (address(token="wrong"), 4002),
    "no parameters": ("/ws", 4001),
    "no model": (address(model=""), 4001),
    "no name": (address(name=""), 4001),
    "no token": (address(token=""), 4001),
    "no slots": (address(slots=""), 4001),
    "half of the parameters": ("/ws?token=x", 4001),
    "long name": (address(name="x" * 300), 4001),
    "long model": (address(model="x" * 300), 4001),
}


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    return shared_pool


@pytest.mark.parametrize("name", REFUSED)
async def test_unauthenticated_peer_gets_a_close_code(pool: Pool, name: str) -> None:
    target, code = REFUSED[name]

    async with upgraded(pool, target) as wire:
        received = await wire.rest()

    assert received[0] == 0x80 | CLOSE
    assert int.from_bytes(received[2:4], "big") == code
    assert not pool.hub.pool.workers


async def test_malformed_frame_of_an_unauthenticated_peer_is_contained(
    pool: Pool,
) -> None:
    async def attack(data: bytes) -> None:
        # Not by a wrong token, for after ten of these nobody is listened to.
        async with upgraded(pool, address(model="")) as wire:
            await wire.send(data * 3)
            await wire.rest()

    await asyncio.gather(*map(attack, (BROKEN | UNMASKED).values()))


@pytest.mark.parametrize("name", BROKEN)
async def test_malformed_frame_of_a_node_ends_its_connection(
    pool: Pool, name: str
) -> None:
    async with upgraded(pool) as wire, join(pool, "n2") as other:
        await pool.wait_joined(2)
        pending = asyncio.create_task(ask(pool))
        await eventually(lambda: bool(pool.hub.pool.jobs))
        await wire.send(BROKEN[name])
        await wire.rest()

        await pool.wait_joined(1)
        await other.answer("taken over")

        assert "taken over" in await pending


@pytest.mark.parametrize("name", UNMASKED)
async def test_unmasked_frame_is_accepted(pool: Pool, name: str) -> None:
    async with upgraded(pool) as wire:
        await pool.wait_joined()
        await wire.send(UNMASKED[name] + frame(BINARY, b"123"))
        received = await wire.rest()

    assert b"\x03\xea" in received  # 1002, for the short frame that came after


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x00\x00\x00"])
async def test_frame_without_a_task_ends_the_connection(
    pool: Pool, data: bytes
) -> None:
    async with join(pool) as node, join(pool, "n2") as other:
        await pool.wait_joined(2)
        pending = asyncio.create_task(ask(pool))
        await eventually(lambda: bool(node.tasks or other.tasks))
        first, second = (node, other) if node.tasks else (other, node)

        await first.send(data)
        await second.answer("taken over")

        assert "taken over" in await pending
        await eventually(lambda: first.closed is not None)
        assert first.closed is not None
        assert first.closed[0] == 1002


@pytest.mark.parametrize("slots", ["abc", "NaN", "0", "-5", "0x", "1e-400", "\ud55c"])
async def test_node_with_invalid_slots_gets_no_jobs(pool: Pool, slots: str) -> None:
    async with join(pool, "odd", slots=slots) as odd, join(pool, "n2") as other:
        await pool.wait_joined(2)
        pending = asyncio.create_task(ask(pool))
        await other.answer("mine")

        assert "mine" in await pending
        assert odd.tasks == []


@pytest.mark.parametrize("slots", ["Infinity", "1e308", "9" * 4000, "0x" + "f" * 4000])
async def test_excessive_slots_are_clamped(pool: Pool, slots: str) -> None:
    async with join(pool, slots=slots):
        await pool.wait_joined()
        (worker,) = pool.hub.pool.workers.values()

        assert worker.offer.slots == 1024


TEXTS = [
    "not JSON",
    "{",
    "[" * 100_000,
    '{"id":' + "9" * 5000 + "}",
    '{"id":0,"failed":"x"}',
    "\x00\x1b[2J\r\nERROR injected",
    "null",
    "x" * 1_000_000,
]


async def test_meaningless_text_affects_only_its_node(pool: Pool) -> None:
    async with join(pool) as other:
        for number, text in enumerate(TEXTS):
            target = pool.url + address("odd")
            async with pool.session.ws_connect(target) as odd:
                await pool.wait_joined(2)
                await odd.send_str(text)
                await odd.send_bytes(b"123")  # whoever got this far is hung up on
                await pool.wait_joined(1)
            pending = asyncio.create_task(ask(pool))
            await other.answer("mine", number=number)

            assert "mine" in await pending, text[:40]


RECORDED = {
    name: case["transcript"][0]
    for name, case in CASES.items()
    if name.startswith("crash-frame-")
}


@pytest.mark.parametrize("name", RECORDED)
async def test_frames_that_ended_an_original_coordinator_end_a_connection(
    pool: Pool, name: str
) -> None:
    step = RECORDED[name]
    expected = bytes.fromhex(step["server_bytes_hex"])
    async with upgraded(pool, "/") as wire:
        await wire.send(bytes.fromhex(step["raw_ws_bytes_hex"]))
        if name == "crash-frame-unmasked":
            # It is read like any other, and is no JSON; a bad one ends it all the same.
            expected = expected[-2:]
            await wire.send(frame(3, b"x"))
        received = await wire.rest()

    assert expected[-2:] in received
    async with join(pool, "n2") as other:
        await pool.wait_joined()
        pending = asyncio.create_task(ask(pool))
        await other.answer("still there")
        assert "still there" in await pending
