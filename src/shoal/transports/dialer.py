"""Opens connections, by the scheme of a URL: TCP, or a WebSocket."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import Enum
from functools import lru_cache
from urllib.parse import urlsplit

from shoal.protocols.seam.session import CloseCode
from shoal.transports.link import (
    CLOSE_TIMEOUT,
    CONNECT_TIMEOUT,
    WRONG_CERTIFICATE,
    Link,
    LinkClosed,
)
from shoal.transports.tcp import TcpLink, describe_socket_error
from shoal.transports.tls import WrongServerKey, context_of_any, context_pinning
from shoal.transports.websocket import connect_websocket


class Scheme(Enum):
    """How to connect to an address, by the scheme of its URL."""

    PLAIN = "tcp"
    VERIFIED = "tls"  # the certificate must be signed by a trusted authority
    ANY = "tls-any"  # any certificate: the session authenticates the peer


SCHEMES = frozenset(each.value for each in Scheme)


@asynccontextmanager
async def connect_tcp(
    url: str, *, fingerprint: bytes | None = None
) -> AsyncIterator[TcpLink]:
    """Connect to ``tcp://HOST:PORT``, or another of the schemes.

    With a ``fingerprint``, only the server with that key is accepted, regardless of who
    issued its certificate; it needs a URL with TLS.

    Raises LinkClosed if the connection fails.
    """
    scheme, host, port = _address_in(url)
    if scheme is Scheme.PLAIN and fingerprint is not None:
        raise LinkClosed(
            f"{url} has no certificate to compare with the token's "
            "fingerprint: give the coordinator's https:// address, or a token without "
            "one"
        )
    context = None
    if fingerprint is not None:
        context = context_pinning(fingerprint)
    elif scheme is not Scheme.PLAIN:
        context = _client_context(verified=scheme is not Scheme.ANY)
    link = await _connect(url, host, port, context)
    try:
        yield link
    finally:
        await link.close(CloseCode.NORMAL, "")


async def _connect(
    url: str, host: str, port: int, context: ssl.SSLContext | None
) -> TcpLink:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            _, link = await asyncio.get_running_loop().create_connection(
                lambda: TcpLink(url),
                host,
                port,
                ssl=context,
                server_hostname=host.partition("%")[0] if context else None,
                ssl_shutdown_timeout=CLOSE_TIMEOUT if context else None,
            )
            return link
    except WrongServerKey as error:
        reason = f"{url}: {error}"
        raise LinkClosed(reason, WRONG_CERTIFICATE, reason) from error
    except ssl.SSLCertVerificationError as error:
        raise LinkClosed(
            f"the certificate of {url} is not signed by a trusted authority "
            f"({error.verify_message}); a token that the coordinator prints names its "
            "certificate"
        ) from error
    except ssl.SSLError as error:
        raise LinkClosed(f"{url} does not speak TLS here") from error
    except TimeoutError as error:
        raise LinkClosed(f"cannot connect to {url}: no answer") from error
    except (OSError, ValueError) as error:
        reason = describe_socket_error(error)
        if context is not None and isinstance(error, ConnectionResetError):
            reason += ": without TLS it is tcp://HOST:PORT"
        raise LinkClosed(f"cannot connect to {url}: {reason}") from error


def _address_in(url: str) -> tuple[Scheme, str, int]:
    """Return the scheme, host and port.  Raises LinkClosed."""
    try:
        parts = urlsplit(url)
        scheme, host, port = Scheme(parts.scheme), parts.hostname, parts.port
    except ValueError as error:
        raise LinkClosed(f"cannot connect to {url}: {error}") from error
    if not host or not port:
        raise LinkClosed(
            f"cannot connect to {url}: expected {scheme.value}://HOST:PORT"
        )
    # The zone of a link-local address: % is escaped in URLs (RFC 6874).
    return scheme, host.replace("%25", "%"), port


@lru_cache
def _client_context(*, verified: bool) -> ssl.SSLContext:
    # Made once: reading the system's authorities takes tens of milliseconds.
    return ssl.create_default_context() if verified else context_of_any()


@asynccontextmanager
async def dial(
    url: str,
    headers: Mapping[str, str],
    message_max: int,
    *,
    fingerprint: bytes | None = None,
) -> AsyncIterator[tuple[Link, Mapping[str, str]]]:
    """Connect to a URL; yield the link and the headers of the answer.

    A TCP link has no headers, and ignores ``message_max``.  ``fingerprint`` is as in
    ``connect_websocket``.

    Raises LinkClosed if the connection fails.
    """
    if url.partition(":")[0].lower() in SCHEMES:
        async with connect_tcp(url, fingerprint=fingerprint) as link:
            yield link, {}
    else:
        async with connect_websocket(
            url, headers, message_max, fingerprint=fingerprint
        ) as opened:
            yield opened
