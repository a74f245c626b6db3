"""The coordinator that commands query."""

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine
from itertools import chain, repeat
from pathlib import Path
from traceback import format_exception
from typing import Protocol

import pytest

from shoal.client.coordinator import CoordinatorApi, find_coordinator
from shoal.client.errors import ConnectionLost
from shoal.config.secret_files import CERTIFICATE_FILE
from shoal.domain.credentials import with_fingerprint
from shoal.domain.errors import (
    ConfigError,
    Forbidden,
    JobError,
    NotFound,
    PeerError,
    Unavailable,
)

FINGERPRINT = bytes(range(32))


@pytest.mark.parametrize(("certificate", "scheme"), [(False, "http"), (True, "https")])
def test_local_coordinator_is_queried_at_its_own_url(
    tmp_path: Path, certificate: bool, scheme: str
) -> None:
    if certificate:
        (tmp_path / CERTIFICATE_FILE).touch()

    api = CoordinatorApi(None, "sk", tmp_path)

    assert api.base_url == api.http_url == f"{scheme}://127.0.0.1:4010"


@pytest.mark.parametrize(
    ("given", "key", "url"),
    [
        ("http://pool:1", "sk", "http://pool:1"),
        ("http://pool:1/v1/", "sk", "http://pool:1"),
        ("pool:1/v1", "sk", "http://pool:1"),
        ("pool:1", with_fingerprint("sk", FINGERPRINT), "https://pool:1"),
    ],
)
def test_given_url_is_queried(tmp_path: Path, given: str, key: str, url: str) -> None:
    api = CoordinatorApi(given, key, tmp_path)

    assert (api.base_url, api.http_url) == (given, url)


def test_several_urls_are_read_as_one_is(tmp_path: Path) -> None:
    key = with_fingerprint("sk", FINGERPRINT)
    api = CoordinatorApi("one:1/v1, two:2,one:1/v1", key, tmp_path)

    address = find_coordinator(**api.options, in_shell=True)
    assert address.urls == ("https://one:1", "https://two:2")
    assert address.url == api.base_url == "https://one:1"


@pytest.mark.parametrize(
    ("given", "key", "reason"),
    [
        ("http://one,https://two", "sk", "--url https://two: the addresses of one"),
        ("http://one,ftp://two", "sk", "--url ftp://two: expected http://HOST:PORT"),
        ("ftp://pool", "sk", "--url ftp://pool: expected http://HOST:PORT"),
        ("http://pool:1", with_fingerprint("sk", FINGERPRINT), "https://"),
        ("http://pool:x", "sk", "--url http://pool:x: expected http://HOST:PORT"),
        ("http://pool:1", None, "no API key: `shoal serve` creates one"),
    ],
)
def test_unusable_address_or_key_is_an_error(
    tmp_path: Path, given: str, key: str | None, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        CoordinatorApi(given, key, tmp_path).request("/healthz")


class Serve(Protocol):
    """Starts a server; returns its URL.

    It answers with the given bytes in turn, and each further request with the last.
    """

    def __call__(
        self, *answers: bytes, port: int = 0
    ) -> Coroutine[None, None, str]: ...


@pytest.fixture
def requests() -> list[bytes]:
    """The heads of the requests that servers got."""
    return []


@pytest.fixture
async def serve(requests: list[bytes]) -> AsyncIterator[Serve]:
    servers: list[asyncio.Server] = []

    async def start(*answers: bytes, port: int = 0) -> str:
        turns = chain(answers, repeat(answers[-1]))

        async def handle(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            # What is left unread when it closes would reset the connection.
            length = re.search(rb"Content-Length: ([0-9]+)", requests[-1])
            await reader.readexactly(int(length[1]) if length else 0)
            writer.write(next(turns))
            writer.close()

        servers.append(await asyncio.start_server(handle, "127.0.0.1", port))
        port = servers[-1].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    yield start
    for each in servers:
        each.close()


def answer_of(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (answer_of(b"", "404 Not Found"), NotFound, "^HTTP 404 from http://.*/healthz"),
        (answer_of(b'{"error": {"message": "no"}}', "403 No"), Forbidden, "^no$"),
        (answer_of(b'{"error": "later"}', "503 No"), Unavailable, "^later$"),
        (answer_of(b"hello"), PeerError, "is not a Shoal coordinator"),
        (
            answer_of(b"[]")[:-1],
            ConnectionLost,
            "connection: the answer is incomplete$",
        ),
        (b"", ConnectionLost, "ended the connection: .*URL begins with https://"),
    ],
)
async def test_what_is_no_answer_is_an_error(
    tmp_path: Path, serve: Serve, answer: bytes, error: type[Exception], reason: str
) -> None:
    api = CoordinatorApi(await serve(answer), "sk", tmp_path)

    with pytest.raises(error, match=reason):
        await asyncio.to_thread(api.request, "/healthz")


def test_unreachable_coordinator_is_an_error(tmp_path: Path) -> None:
    api = CoordinatorApi("http://127.0.0.1:1", "sk", tmp_path)

    with pytest.raises(ConnectionLost, match="is `shoal serve` running there"):
        api.request("/healthz")


OK = answer_of(b"[]")
PROXY = answer_of(b"<html>", "502 Bad Gateway")
LATER = b"HTTP/1.1 503 No\r\nx-shoal-coordinator: 1\r\nContent-Length: 2\r\n\r\n{}"
ENGINE = LATER.replace(b"503", b"502")
STOPS = LATER.replace(b"\r\n\r\n", b"\r\nx-shoal-stopping: 1\r\n\r\n")
KEYED = {"Idempotency-Key": "k"}


@pytest.mark.parametrize(
    ("first", "method", "headers", "sent"),
    [
        (b"", "GET", {}, 2),
        (OK[:-1], "DELETE", {}, 2),
        (PROXY, "GET", {}, 2),
        (PROXY, "POST", KEYED, 2),
        (STOPS, "POST", {}, 2),
        (PROXY, "POST", {}, 1),  # what the proxy sent on may have had an effect
        (b"", "POST", {}, 1),
        (ENGINE, "GET", {}, 1),  # it is the coordinator that says so
        (LATER, "GET", KEYED, 1),
    ],
)
async def test_request_is_repeated_where_that_has_no_further_effect(
    tmp_path: Path,
    serve: Serve,
    requests: list[bytes],
    first: bytes,
    method: str,
    headers: dict[str, str],
    sent: int,
) -> None:
    waits: list[str] = []
    api = CoordinatorApi(await serve(first, OK), "sk", tmp_path, on_wait=waits.append)

    def request() -> object:
        try:
            return api.request("/v1/jobs", {}, method, headers)
        except Unavailable as error:
            return error

    answer = await asyncio.to_thread(request)

    assert len(requests) == sent
    assert (answer == []) == (sent == 2)
    assert len(waits) == sent - 1  # a line for the user


async def test_coordinator_that_starts_is_waited_for(
    tmp_path: Path, serve: Serve, unused_tcp_port: int
) -> None:
    loop, waits = asyncio.get_running_loop(), list[str]()

    def start(text: str) -> None:
        waits.append(text)
        starting = serve(OK, port=unused_tcp_port)
        asyncio.run_coroutine_threadsafe(starting, loop).result()

    url = f"http://127.0.0.1:{unused_tcp_port}"
    api = CoordinatorApi(url, "sk", tmp_path, on_wait=start)

    assert await asyncio.to_thread(api.request, "/v1/jobs", {}, "POST") == []
    (line,) = waits
    assert line.startswith(f"cannot reach {url}: Connection refused")


def test_name_that_cannot_be_resolved_is_an_error_at_once(tmp_path: Path) -> None:
    waits: list[str] = []
    url = f"http://{'x' * 64}.example:1"  # longer than a name can be
    api = CoordinatorApi(url, "sk", tmp_path, on_wait=waits.append)

    with pytest.raises(ConnectionLost, match="cannot reach"):
        api.request("/healthz")

    assert waits == []


EVENTS = b'HTTP/1.1 200 OK\r\n\r\ndata: {"n": 1}\n\ndata: {"n": 2}\n\n'


async def test_events_are_read_to_their_end(tmp_path: Path, serve: Serve) -> None:
    api = CoordinatorApi(await serve(EVENTS + b"data: [DONE]\n\n"), "sk", tmp_path)

    assert await asyncio.to_thread(numbers, api) == [1, 2]


async def test_comments_of_a_stream_are_read(tmp_path: Path, serve: Serve) -> None:
    comments = b": waits for a worker, jobs ahead: 2\n\n:keep-alive\n\n"
    head, data = EVENTS.split(b"data", 1)
    body = head + comments + b"data" + data + b"data: [DONE]\n\n"
    api = CoordinatorApi(await serve(body), "sk", tmp_path)

    def read() -> list[object]:
        with api.stream_events("/v1/chat/completions", {}) as (_, events):
            return list(events)

    assert await asyncio.to_thread(read) == [
        b"waits for a worker, jobs ahead: 2",
        b"keep-alive",
        {"n": 1},
        {"n": 2},
    ]


@pytest.mark.parametrize(
    ("rest", "error", "reason"),
    [
        (b"", ConnectionLost, "the answer is incomplete"),
        (b'data: {"error": {"message": "broken"}}\n\n', JobError, "^broken$"),
    ],
)
async def test_events_without_their_end_are_an_error(
    tmp_path: Path, serve: Serve, rest: bytes, error: type[Exception], reason: str
) -> None:
    api = CoordinatorApi(await serve(EVENTS + rest), "sk", tmp_path)

    with pytest.raises(error, match=reason):
        await asyncio.to_thread(numbers, api)


def numbers(api: CoordinatorApi) -> list[int]:
    with api.stream_events("/v1/chat/completions", {}) as (_, events):
        return [each["n"] for each in events]


@pytest.mark.parametrize(
    "proxy",
    ["me:pass/w0rd@proxy:1", "http://me:w0rd@pro xy:1", "http://me:w0rd@", "[w0rd"],
)
def test_invalid_proxy_of_the_environment_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(ConfigError, match="http://HOST:PORT") as caught:
        CoordinatorApi("http://pool:1", "sk", tmp_path).request("/v1/models")

    assert "w0rd" not in "".join(format_exception(caught.value))


async def test_proxy_of_the_environment_gets_the_request(
    tmp_path: Path,
    serve: Serve,
    requests: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy = await serve(answer_of(b"[]"))
    monkeypatch.setenv("http_proxy", proxy.replace("//", "//me:sec%20ret@"))
    near = CoordinatorApi(await serve(answer_of(b"{}")), "sk", tmp_path)
    monkeypatch.setenv("no_proxy", f"other,{near.http_url.removeprefix('http://')}")
    far = CoordinatorApi("http://pool.example:4010", "sk", tmp_path)

    assert await asyncio.to_thread(far.request, "/v1/models") == []
    assert await asyncio.to_thread(near.request, "/v1/models") == {}

    to_proxy, direct = requests
    assert to_proxy.startswith(b"GET http://pool.example:4010/v1/models HTTP/1.1\r\n")
    assert b"\r\nHost: pool.example:4010\r\n" in to_proxy
    assert b"\r\nProxy-Authorization: Basic bWU6c2VjIHJldA==\r\n" in to_proxy
    assert direct.startswith(b"GET /v1/models HTTP/1.1\r\n")
    assert b"Proxy-Authorization" not in direct
