"""Certificates: loading, validation and pinning."""

import asyncio
import contextlib
import datetime
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.domain.errors import ConfigError
from shoal.transports.link import WRONG_CERTIFICATE, LinkClosed
from shoal.transports.strangers import Strangers
from shoal.transports.tls import (
    context_pinning,
    context_trusting,
    fingerprint_of,
    self_signed_tls,
    server_certificate,
    server_context,
)
from shoal.transports.websocket import accept, connect_websocket
from transports.certificates import Certificate, issue

MESSAGE_MAX = 1000


@asynccontextmanager
async def listening(certificate: Certificate) -> AsyncIterator[int]:
    """Greet every client over TLS; yield the port."""

    async def handle(request: web.Request) -> web.StreamResponse:
        link, response = await accept(request, {}, MESSAGE_MAX, Strangers())
        await link.send("hello")
        await link.close(1000, "")
        return response

    app = web.Application()
    app.router.add_get("/ws", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    context = server_context(certificate.file, certificate.key)
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return issue(tmp_path)


def pem_of(certificate: Certificate) -> str:
    return server_certificate(certificate.file)


async def test_pinned_worker_needs_no_authority(
    certificate: Certificate,
) -> None:
    fingerprint = fingerprint_of(pem_of(certificate))
    async with (
        listening(certificate) as port,
        connect_websocket(
            f"wss://127.0.0.1:{port}/ws", {}, MESSAGE_MAX, fingerprint=fingerprint
        ) as (link, _),
    ):
        assert await link.receive() == ["hello"]


async def test_mismatched_certificate_is_a_permanent_error(
    certificate: Certificate, tmp_path: Path
) -> None:
    other = fingerprint_of(pem_of(issue(tmp_path, "other")))
    async with listening(certificate) as port:
        url = f"wss://127.0.0.1:{port}/ws?token=hunter2"
        with pytest.raises(LinkClosed, match="is not the one in the token") as caught:
            async with connect_websocket(url, {}, MESSAGE_MAX, fingerprint=other):
                pass

    assert caught.value.code == WRONG_CERTIFICATE
    assert "hunter2" not in str(caught.value)


async def test_authority_is_checked_without_a_fingerprint(
    certificate: Certificate,
) -> None:
    async with listening(certificate) as port:
        with pytest.raises(
            LinkClosed, match="is not signed by a trusted authority"
        ) as caught:
            async with connect_websocket(f"wss://127.0.0.1:{port}/ws", {}, MESSAGE_MAX):
                pass

    # Operators may fix it meanwhile.
    assert caught.value.code != WRONG_CERTIFICATE


def connect(port: int, context: ssl.SSLContext, name: str = "127.0.0.1") -> str | None:
    """Complete a handshake; return the version of TLS."""
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain, server_hostname=name) as secure,
    ):
        return secure.version()


async def test_pinned_certificate_is_valid_under_any_name(
    certificate: Certificate, tmp_path: Path
) -> None:
    context = context_pinning(fingerprint_of(pem_of(certificate)))
    async with listening(certificate) as port:
        for name in ("127.0.0.1", "some.where"):
            assert await asyncio.to_thread(connect, port, context, name)

    async with listening(issue(tmp_path, "other")) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(connect, port, context)


async def test_configured_authority_is_limited_to_the_host(
    certificate: Certificate,
) -> None:
    context = context_trusting(certificate.authority)
    async with listening(certificate) as port:
        assert await asyncio.to_thread(connect, port, context)
        with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
            await asyncio.to_thread(connect, port, context, "some.where")


async def test_tls_before_1_2_is_rejected(
    certificate: Certificate,
) -> None:
    context = server_context(certificate.file, certificate.key)

    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_fingerprint_is_that_of_the_first_certificate(certificate: Certificate) -> None:
    pem = pem_of(certificate)

    assert certificate.file.read_text().startswith(pem)
    assert pem.count("BEGIN CERTIFICATE") == 1
    assert len(fingerprint_of(pem)) == 32


NONE = "it holds no certificate in PEM form"


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        ("none", "one-key", "--tls-cert .*none.pem: No such file or directory"),
        ("one", "none", "--tls-key .*none.pem: No such file or directory"),
        ("one", "other-key", "it is not the key of the certificate in .*one.pem"),
        ("one-key", "one", f"--tls-cert .*one-key.pem: {NONE}"),
        ("text", "one-key", f"--tls-cert .*text.pem: {NONE}"),
        ("empty", "one-key", f"--tls-cert .*empty.pem: {NONE}"),
        ("damaged", "one-key", "--tls-cert .*: the certificate is damaged"),
        ("bytes", "one-key", "--tls-cert .*bytes.pem: it is not in PEM form"),
        ("folder", "one-key", "--tls-cert .*folder.pem: Is a directory"),
        ("one", "text", "--tls-key .*: it is damaged, or not in PEM form"),
        ("one", "bytes", "--tls-key .*bytes.pem: it is not in PEM form"),
        ("one", "one", "--tls-key .*: it is damaged, or not in PEM form"),
        ("one", "encrypted", "it is encrypted; write it without a passphrase"),
    ],
)
def test_invalid_file_is_named(tmp_path: Path, cert: str, key: str, said: str) -> None:
    one = issue(tmp_path)
    issue(tmp_path, "other")
    (tmp_path / "folder.pem").mkdir()
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    private = serialization.load_pem_private_key(one.key.read_bytes(), None)
    contents = {
        "text": b"hello",
        "empty": b"",
        "damaged": f"{begin}\nQUJD\n{end}\n".encode(),
        "bytes": b"\xff\xfe\x00",
        "encrypted": private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"hunter2"),
        ),
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.pem").write_bytes(content)

    with pytest.raises(ConfigError, match=said):
        server_context(tmp_path / f"{cert}.pem", tmp_path / f"{key}.pem")


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff\xfe"])
def test_invalid_authority_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "ca.pem"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match=r"--cacert .*ca\.pem: it .* PEM form"):
        context_trusting(file)


def test_generated_certificate_has_the_expected_form() -> None:
    made = self_signed_tls("a-node")
    other = self_signed_tls("a-node")

    shown = x509.load_der_x509_certificate(_presented_certificate(made.context))
    names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    key = shown.public_key()
    now = datetime.datetime.now(datetime.UTC)
    assert shown.subject.rfc4514_string() == "CN=a-node"
    assert names.value.get_values_for_type(x509.DNSName) == ["localhost"]
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    assert shown.not_valid_before_utc < now - datetime.timedelta(minutes=4)
    assert shown.not_valid_after_utc > now + datetime.timedelta(days=365)
    assert made.certificate_hash == shown.fingerprint(hashes.SHA256())
    assert made.certificate_hash != other.certificate_hash
    assert made.context.minimum_version is ssl.TLSVersion.TLSv1_2


def _presented_certificate(context: ssl.SSLContext) -> bytes:
    """Return the certificate that a server presents, in DER form."""
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_context = ssl.create_default_context()
    client_context.check_hostname = False
    client_context.verify_mode = ssl.CERT_NONE
    server = context.wrap_bio(here, there, server_side=True)
    client = client_context.wrap_bio(there, here)
    for side in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    certificate = client.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate
