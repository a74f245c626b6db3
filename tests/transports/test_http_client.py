"""Connection errors of HTTP clients, with real servers on 127.0.0.1."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shoal.domain.errors import Unavailable
from shoal.transports import websocket
from shoal.transports.http_client import CertificateNotTrusted, request_json
from shoal.transports.link import LinkClosed
from transports.certificates import issue

Ask = Callable[[str], Awaitable[object]]


@asynccontextmanager
async def server(context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Disconnect each client at its first data."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(
        serve, "127.0.0.1", 0, ssl=context
    ) as listening:
        port: int = listening.sockets[0].getsockname()[1]
        yield port


def secure(folder: Path) -> ssl.SSLContext:
    certificate = issue(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.file, certificate.key)
    return context


async def link(url: str) -> None:
    async with websocket.connect_websocket(url.replace("http", "ws"), {}, 1000):
        raise AssertionError("there is no such server")


@pytest.fixture(params=[request_json, link], ids=["HTTP", "WebSocket"])
def ask(request: pytest.FixtureRequest) -> Ask:
    found: Ask = request.param
    return found


async def refusal(ask: Ask, url: str) -> str:
    with pytest.raises((Unavailable, LinkClosed)) as caught:
        await ask(url)
    said = str(caught.value)
    assert "ssl:" not in said, "that is a library's word"
    assert "Errno" not in said
    return said


async def test_missing_server_refuses(ask: Ask) -> None:
    assert (await refusal(ask, "http://127.0.0.1:1/")).endswith("connection refused")


async def test_unreachable_network_is_named(ask: Ask) -> None:
    # Addresses of this kind are never routed (RFC 1122, section 3.2.1.3).
    said = await refusal(ask, "http://255.255.255.255:1/")

    assert "255.255.255.255" in said
    assert "Connect call failed" not in said


async def test_plain_server_is_suggested(
    ask: Ask,
) -> None:
    async with server() as port:
        said = await refusal(ask, f"https://127.0.0.1:{port}/")

    assert "without one with http:// or ws://" in said


async def test_tls_server_is_suggested(ask: Ask, tmp_path: Path) -> None:
    async with server(secure(tmp_path)) as port:
        said = await refusal(ask, f"http://127.0.0.1:{port}/")

    assert "https://" in said


async def test_untrusted_certificate_is_rejected(
    tmp_path: Path,
) -> None:
    async with server(secure(tmp_path)) as port:
        url = f"https://127.0.0.1:{port}/"
        with pytest.raises(
            CertificateNotTrusted, match="as the coordinator prints them"
        ):
            await request_json(url)
        with pytest.raises(CertificateNotTrusted, match="ask its operator for a new"):
            await request_json(url, fingerprint=bytes(32))
