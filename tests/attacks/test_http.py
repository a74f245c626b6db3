"""Requests that no library would send."""

import asyncio
import gzip
import json
import re
import zlib
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from attacks.raw import frame, post, request, upgrade, upgraded, wire
from attacks.siege import CHAT, OLD_CHAT, PROMPT, address, ask, besieged, body, join
from gateway.serving import KEY, Pool, eventually
from harness.speed import scaled

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = json.dumps(body()).encode()
AUTH = f"Authorization: Bearer {KEY}"
MODELS = "GET /v1/models HTTP/1.1"
SIZE = f"Content-Length: {len(BODY)}"
REGISTER = json.dumps(
    {
        "type": "register",
        "provider_pubkey": "ab" * 32,
        "provider_type": "DESKTOP",
        "capabilities": ["TASK"],
    }
).encode()

# What cannot be read is answered in the oldest words.
REFUSED = re.compile(rb"HTTP/\d\.\d 4")
ANSWERED = re.compile(rb"HTTP/\d\.\d [24]")

GARBAGE = {
    "HTTP/0.9": b"GET /none\r\n",
    "HTTP/0.9 with a path": b"GET /v1/models\r\n\r\n",
    "HTTP/2 without asking": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9.9": request("GET / HTTP/9.9", AUTH),
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(200),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n",
    "zeros": bytes(5000),
    "all bytes": bytes(range(256)) * 8,
    "a long line": b"G" * 100_000,
    "a long target": request(f"GET /{'a' * 60_000} HTTP/1.1"),
    "a long header": request(MODELS, AUTH, "X-Long: " + "a" * 65_536),
    "a long key": request(MODELS, f"Authorization: Bearer {'a' * 65_536}"),
    "many headers": request(MODELS, AUTH, *(f"X-{n}: {n}" for n in range(20_000))),
    "NUL in a header": request(MODELS, AUTH + "\0"),
    "NUL in a name": request(MODELS, AUTH, "X\0Y: z"),
    "NUL in the key": request(MODELS, f"Authorization: Bearer \0{KEY}"),
    "a bare CR": request(MODELS, AUTH + "\rX: y"),
    "a header without a colon": request(MODELS, AUTH, "nonsense"),
    "a header with a space": request(MODELS, AUTH, "X : y"),
    "a folded header": request(MODELS, AUTH, "X: y", " z"),
    "a folded key": request(MODELS, "Authorization: Bearer", f" {KEY}\0"),
    "no method": request(" /v1/models HTTP/1.1", AUTH),
    "an odd method": request("G(ET /v1/models HTTP/1.1", AUTH),
    "a space in the target": request("GET /v1/mo dels HTTP/1.1", AUTH),
    "a control in the target": request("GET /v1/\x01\x7f HTTP/1.1", AUTH),
    "two lengths": post("Content-Length: 5", "Content-Length: 6", body=b"123456"),
    "length and chunks": post("Content-Length: 4", "Transfer-Encoding: chunked"),
    "chunks twice": post("Transfer-Encoding: chunked, chunked", body=b"0\r\n\r\n"),
    "chunked and more": post("Transfer-Encoding: chunked, gzip", body=b"0\r\n\r\n"),
    "an unknown encoding": post("Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "a hidden encoding": post("Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"),
    "a negative length": post("Content-Length: -1"),
    "a length that is none": post("Content-Length: +5", body=b"12345"),
    "a hexadecimal length": post("Content-Length: 0x5", body=b"12345"),
    "an endless length": post("Content-Length: " + "9" * 30),
    "a chunk size that is none": post("Transfer-Encoding: chunked", body=b"zz\r\n"),
    "an endless chunk": post("Transfer-Encoding: chunked", body=b"f" * 17 + b"\r\n"),
    "a negative chunk": post("Transfer-Encoding: chunked", body=b"-1\r\n"),
    "a chunk with bare LF": post(
        "Transfer-Encoding: chunked", body=b"5\n12345\r\n0\r\n\r\n"
    ),
    "a chunk that overflows": post(
        "Transfer-Encoding: chunked", body=b"2\r\n12345\r\n0\r\n\r\n"
    ),
    "a bad chunk after a good one": post(
        "Transfer-Encoding: chunked", body=b"5\r\n12345\r\nzz\r\n"
    ),
}

ODD = {
    "dots": "GET /v1/models/../../x HTTP/1.1",
    "encoded dots": "GET /v1/models/%2e%2e/%2e%2e/x HTTP/1.1",
    "encoded slashes": "GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1",
    "backslashes": "GET /v1\\models\\..\\x HTTP/1.1",
    "encoded NUL": "GET /v1/models/%00 HTTP/1.1",
    "half an escape": "GET /v1/models/% HTTP/1.1",
    "no escape": "GET /v1/models/%zz HTTP/1.1",
    "an escape that is no UTF-8": "GET /v1/models/%ff%fe HTTP/1.1",
    "an escaped surrogate": "GET /v1/models/%ed%a0%80 HTTP/1.1",
    "escaped line ends": "GET /v1/models/a%0d%0aSet-Cookie:%20b HTTP/1.1",
    "two slashes": "GET //v1//models HTTP/1.1",
    "only slashes": "GET ////////// HTTP/1.1",
    "another host": "GET //example.org/v1/models HTTP/1.1",
    "a URL": "GET http://example.org/v1/models HTTP/1.1",
    "a URL with no host": "GET http:///v1/models HTTP/1.1",
    "a broken URL": "GET http://[::1/v1/models HTTP/1.1",
    "a URL with a bad port": "GET http://localhost:99999/ HTTP/1.1",
    "a star": "OPTIONS * HTTP/1.1",
    "a tunnel": "CONNECT example.org:443 HTTP/1.1",
    "no slash": "GET v1/models HTTP/1.1",
    "a query of marks": "GET /v1/models?????&&&=== HTTP/1.1",
    "a fragment": "GET /v1/models#x HTTP/1.1",
    "bytes above ASCII": "GET /v1/models/\udcff\udcfe HTTP/1.1",
    "an unknown method": "BREW /v1/models HTTP/1.1",
    "a trace": "TRACE /v1/models HTTP/1.1",
    "a job of dots": "GET /admin/jobs/.. HTTP/1.1",
    "a job of NULs": "GET /admin/jobs/%00%00/explain HTTP/1.1",
    "a job of quotes": "GET /admin/jobs/';--/explain HTTP/1.1",
    "a job that is no UTF-8": "DELETE /admin/jobs/%ff HTTP/1.1",
    "a long job": f"GET /admin/jobs/{'9' * 7000} HTTP/1.1",
    "10,000 parameters": "GET /v1/models?" + "&" * 8000 + " HTTP/1.1",
}

KEYS = {
    "none": (),
    "empty": ("Authorization: ",),
    "empty bearer": ("Authorization: Bearer ",),
    "bearer only": ("Authorization: Bearer",),
    "spaces": ("Authorization: Bearer    ",),
    "constructor": ("Authorization: Bearer constructor",),
    "__proto__": ("Authorization: Bearer __proto__",),
    "toString": ("Authorization: Bearer toString",),
    "undefined": ("Authorization: Bearer undefined",),
    "None": ("Authorization: Bearer None",),
    "basic": ("Authorization: Basic c2s6dGVzdA==",),
    "prefix": (f"Authorization: Bearer {KEY[:-1]}",),
    "more": (f"Authorization: Bearer {KEY}x",),
    "two keys": (f"Authorization: Bearer {KEY},{KEY}",),
    "wrong then right": ("Authorization: Bearer x", AUTH),
    "no scheme": (f"Authorization: {KEY}",),
    "scheme twice": (f"Authorization: Bearer Bearer {KEY}",),
    "bytes": ("Authorization: Bearer \udcff\udcfe",),
    "another header": (f"X-Token: {KEY}",),
    "wrong, then right elsewhere": ("Authorization: Bearer x", f"X-API-Key: {KEY}"),
    "a prefix elsewhere": (f"X-API-Key: {KEY[:-1]}",),
    "a long key": (f"Authorization: Bearer {'a' * 6000}",),
}


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    return shared_pool


async def test_garbage_is_rejected_and_forgotten(pool: Pool) -> None:
    async def send(attack: bytes) -> bytes:
        async with wire(pool) as bare:
            # What would be waited for comes as well.
            await bare.send(attack + b"\r\n\r\n")
            return await bare.rest()

    answers = await asyncio.gather(*map(send, GARBAGE.values()))

    for name, answer in zip(GARBAGE, answers, strict=True):
        assert REFUSED.match(answer), (name, answer)


async def test_unusual_targets_are_answered(pool: Pool) -> None:
    for name, line in ODD.items():
        async with wire(pool) as bare:
            await bare.send(request(line, AUTH, "Connection: close"))
            answer = await bare.rest()

            assert ANSWERED.match(answer), (name, answer)
            assert b"Set-Cookie" not in answer.partition(b"\r\n\r\n")[0]


@pytest.mark.parametrize("path", [CHAT, OLD_CHAT])
async def test_similar_keys_are_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    async with besieged(tmp_path, caplog) as pool, join(pool) as node:
        await pool.wait_joined()
        for name, headers in KEYS.items():
            async with wire(pool) as bare:
                await bare.send(
                    request(f"POST {path} HTTP/1.1", *headers, SIZE, body=BODY)
                )
                answer = await bare.head()
                if path == CHAT:
                    # After ten wrong ones nobody is listened to.
                    assert re.match(rb"HTTP/1\.1 (401|429) ", answer), (name, answer)
                else:
                    assert b"ndjson" in answer, (name, answer)

        assert not pool.hub.pool.jobs
        assert node.tasks == []


async def test_request_inside_a_body_is_not_a_request(pool: Pool) -> None:
    inner = request("DELETE /v1/models HTTP/1.1", AUTH)
    attacks = [
        # The body is one request by its length, and another by its chunks.
        post(f"Content-Length: {len(inner)}", body=inner),
        post(
            "Transfer-Encoding: chunked",
            body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner),
        ),
        post(
            f"Content-Length: {len(inner) + 5}",
            "Transfer-Encoding: chunked",
            body=b"0\r\n\r\n" + inner,
        ),
        request(
            "GET /v1/models HTTP/1.1",
            AUTH,
            f"Content-Length: {len(inner)}",
            body=inner,
        ),
        request(
            "GET /healthz HTTP/1.0",
            "Transfer-Encoding: chunked",
            body=b"0\r\n\r\n" + inner,
        ),
    ]
    for attack in attacks:
        async with wire(pool) as bare:
            # If the connection is still good for that, what comes last ends it.
            await bare.send(attack + request("GET / HTTP/1.1", "Connection: close"))
            answer = await bare.rest()

            assert b"HTTP/1.1 405" not in answer, (attack, answer)


async def test_pipelined_requests_are_answered_in_order(pool: Pool) -> None:
    paths = ["/healthz", "/v1/models", "/nothing"] * 20
    async with wire(pool) as bare:
        for path in paths:
            bare.writer.write(request(f"GET {path} HTTP/1.1", AUTH))
        await bare.send(request("GET /healthz HTTP/1.1", "Connection: close"))
        answer = await bare.rest()

    statuses = [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 200, 404] * 20 + [200]


@pytest.mark.parametrize("version", ["0", "", "14", "abc", "13, 8"])
async def test_upgrade_of_another_version_is_a_bad_request(
    pool: Pool, version: str
) -> None:
    async with wire(pool) as bare:
        await bare.send(upgrade(address(), version=version))
        answer = await bare.head()

    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 426 ")), answer


@pytest.mark.parametrize(
    ("line", "headers"),
    [
        (f"GET {address()} HTTP/1.1", ["Upgrade: websocket"]),
        (f"GET {address()} HTTP/1.1", ["Upgrade: websocket", "Connection: close"]),
        (f"GET {address()} HTTP/1.0", ["Upgrade: websocket", "Connection: upgrade"]),
        (
            f"GET {address()} HTTP/1.1",
            [
                "Upgrade: websocket",
                "Connection: upgrade",
                "Sec-WebSocket-Version: 13",
                "Sec-WebSocket-Key: short",
            ],
        ),
        (
            f"POST {address(path=CHAT)} HTTP/1.1",
            ["Upgrade: websocket", "Connection: upgrade", "Content-Length: 5"],
        ),
        (f"GET {CHAT} HTTP/1.1", ["Upgrade: websocket", "Connection: upgrade"]),
        (f"GET {CHAT} HTTP/1.1", ["Upgrade: h2c", "Connection: upgrade"]),
        ("GET /ws HTTP/1.1", ["Upgrade: WebSocket\t", "Connection: keep-alive"]),
    ],
)
async def test_malformed_upgrade_is_a_bad_request(
    pool: Pool, line: str, headers: list[str]
) -> None:
    async with wire(pool) as bare:
        await bare.send(request(line, AUTH, *headers, body=b"12345"))
        answer = await bare.head()

    assert REFUSED.match(answer), answer
    assert not pool.hub.pool.workers


async def test_upgrade_of_the_chat_path_registers_nobody(pool: Pool) -> None:
    async with wire(pool) as bare:
        await bare.send(upgrade(CHAT, AUTH))
        assert (await bare.head()).startswith(b"HTTP/1.1 426 ")
        await bare.send(frame(1, REGISTER) + frame(8, b"\x03\xe8"))

        assert b"register_ack" not in await bare.rest()
    assert not pool.hub.pool.workers

    assert not pool.hub.pool.workers


async def test_node_may_have_ten_thousand_parameters(pool: Pool) -> None:
    # As many as a line may hold: the real ones count, wherever they are.
    async with upgraded(pool, address() + "&a" * 3500) as bare:
        await pool.wait_joined()
        await bare.send(frame(8, b"\x03\xe8"))
        await bare.rest()
    async with wire(pool) as bare:
        await bare.send(upgrade(address() + "&a=b" * 10_000))
        assert REFUSED.match(await bare.rest())


async def test_aborted_upgrade_is_forgotten(pool: Pool) -> None:
    for attack in (upgrade(address()), upgrade("/ws"), upgrade(address())[:-2]):
        for _ in range(10):
            async with wire(pool) as bare:
                bare.writer.write(attack)
                bare.abort()


@pytest.mark.parametrize("path", [CHAT, OLD_CHAT])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_decompression_bomb_is_rejected(
    pool: Pool, path: str, encoding: str
) -> None:
    plain = b'{"model":"' + b"a" * 20_000_000 + b'"}'
    bomb = gzip.compress(plain, 1) if encoding == "gzip" else zlib.compress(plain, 1)
    async with wire(pool) as bare:
        await bare.send(
            post(
                f"Content-Encoding: {encoding}",
                f"Content-Length: {len(bomb)}",
                "Connection: close",
                body=bomb,
                path=path,
            )
        )
        answer = await bare.rest()

    if path == CHAT:
        assert answer.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 400 ")), answer[:300]
    else:
        assert b'{"err":"' in answer


@pytest.mark.parametrize("announced", [True, False])
async def test_body_of_100_megabytes_is_an_error_line(
    pool: Pool, announced: bool
) -> None:
    head = (
        post("Content-Length: 100000000", path=OLD_CHAT)
        if announced
        else post("Transfer-Encoding: chunked", path=OLD_CHAT)
    )
    async with wire(pool) as bare:
        await bare.send(head)
        sending = asyncio.create_task(_send_all(bare.writer, chunked=not announced))
        answer = await bare.head()
        line = await bare.reader.readuntil(b"\n{")
        assert b"200 OK" in answer
        assert b'"err":"request too large"' in await bare.reader.readuntil(b"}"), line
        bare.abort()
        await asyncio.gather(sending, return_exceptions=True)


async def test_slow_upload_delays_no_other_client(pool: Pool) -> None:
    attack = post(SIZE, "Connection: close", body=BODY)
    async with join(pool) as node, AsyncExitStack() as stack:
        await pool.wait_joined()
        slow = [await stack.enter_async_context(wire(pool)) for _ in range(20)]
        for at in range(len(attack) - 1):
            for bare in slow:
                bare.writer.write(attack[at : at + 1])
            if at % 50 == 0:
                pending = asyncio.create_task(ask(pool))
                await node.answer("quick", number=at // 50)
                assert "quick" in await pending
        served = len(node.tasks)
        for bare in slow:
            await bare.send(attack[-1:])
        for number in range(20):
            await node.answer("slow", number=served + number)
        for bare in slow:
            assert b"slow" in await bare.rest()


async def test_a_hundred_idle_connections_delay_no_other_client(pool: Pool) -> None:
    beginnings = [b"", b"G", MODELS.encode(), post(SIZE), post(SIZE, body=BODY[:9])]
    async with join(pool) as node, AsyncExitStack() as stack:
        await pool.wait_joined()
        for number in range(100):
            bare = await stack.enter_async_context(wire(pool))
            await bare.send(beginnings[number % len(beginnings)])
        pending = asyncio.create_task(ask(pool))
        await node.answer("here")

        assert "here" in await pending
        assert PROMPT in node.texts[0]


@pytest.mark.parametrize("beginning", [b"", b"G", MODELS.encode(), post(SIZE)[:-2]])
async def test_request_head_has_a_timeout(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    beginning: bytes,
) -> None:
    monkeypatch.setattr("shoal.transports.http_server.IDLE_MAX", scaled(0.2))
    async with besieged(tmp_path, caplog) as pool, wire(pool) as bare:
        await bare.send(beginning)

        assert await bare.rest() == b""


async def test_client_that_never_reads_is_disconnected(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.gateway.app.RESPONSE_TIMEOUT", 0.0)
    async with join(pool) as node:
        await pool.wait_joined()
        async with wire(pool, deaf=True) as bare:
            await bare.send(post(SIZE, body=BODY))
            await node.answer(*["x" * 500_000] * 16)
            await eventually(lambda: not pool.hub.pool.jobs)
            assert not (await bare.rest()).endswith(b"}")


async def _send_all(writer: asyncio.StreamWriter, *, chunked: bool) -> None:
    piece = b" " * 1_000_000
    if chunked:
        piece = b"f4240\r\n" + piece + b"\r\n"
    for _ in range(100):
        writer.write(piece)
        await writer.drain()
