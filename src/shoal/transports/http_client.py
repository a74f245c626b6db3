"""Requests JSON from a web server, and explains connection errors."""

import os
import socket
from collections.abc import Mapping

import aiohttp
import msgspec
from yarl import URL

from shoal.domain.errors import LimitExceeded, Unavailable
from shoal.transports.tls import WrongServerKey, context_pinning

HANG_UP_HINT = (
    "it closes the connection: with a certificate, its URL begins with https:// or "
    "wss://, without one with http:// or ws://"
)


def describe_http_error(error: Exception) -> str:
    """Return what an error of ``aiohttp`` means, and what may help."""
    match error:
        case aiohttp.ClientConnectorCertificateError(
            certificate_error=WrongServerKey()
        ):
            return str(error.certificate_error)
        case aiohttp.ClientConnectorCertificateError():
            cause = error.certificate_error
            return (
                "its certificate is not signed by a trusted authority "
                f"({getattr(cause, 'verify_message', cause)}); a token or API key "
                "with a fingerprint, as the coordinator prints them, needs none"
            )
        case aiohttp.ClientConnectorSSLError():
            return (
                "it does not speak TLS: without, its URL begins with http:// or ws://"
            )
        case aiohttp.ServerDisconnectedError():
            return HANG_UP_HINT
        case aiohttp.ClientConnectorError():
            return _of_system(error.os_error)
        case TimeoutError():
            return "no answer"
        case _:
            return str(error) or type(error).__name__


def _of_system(error: OSError) -> str:
    # The event loop's text, in place of the system's, repeats the address.
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionError):
        return HANG_UP_HINT
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)


ANSWER_MAX = 1 << 16  # bytes; a longer response is not a coordinator's
SERVER_ERRORS = 500  # the first HTTP status of server errors


class CertificateNotTrusted(Unavailable):
    """The server cannot prove that it is the intended one."""


class NotHttp(Unavailable):
    """The server does not speak HTTP."""


class NotTls(Unavailable):
    """The server does not speak TLS."""


def as_given(url: str) -> URL:
    """Return a URL for aiohttp with the escapes that it has.

    Else some are changed on the way, and what was signed, or stands for a name with a
    slash, is not found.  A name of a host in another script is encoded.
    """
    return URL(url, encoded=url.isascii())


async def request_json(
    url: str,
    body: Mapping[str, object] | None = None,
    *,
    fingerprint: bytes | None = None,
    named: str = "",
) -> object:
    """Return the JSON that a server answers; None if it is none.

    With a ``body`` the request is a POST.  The answer's HTTP status does not matter,
    unless it is a server error.  The caller limits the time.
    ``fingerprint`` is as in ``connect_websocket``.  Errors begin with ``named``, or
    else the URL.

    Raises Unavailable if the server cannot be asked now: CertificateNotTrusted if that
    is because of its certificate, NotTls if it has none, and NotHttp if it is something
    else that answers.
    """
    named = named or url
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        try:
            async with session.request(
                "GET" if body is None else "POST",
                as_given(url),
                json=body,
                # A secret must not follow a redirect to another server.
                allow_redirects=False,
                ssl=True if fingerprint is None else context_pinning(fingerprint),
            ) as response:
                if response.status >= SERVER_ERRORS:
                    raise Unavailable(f"{named}: it answers HTTP {response.status}")
                answer = await read_body(response, ANSWER_MAX)
        except aiohttp.ClientConnectorCertificateError as error:
            raise CertificateNotTrusted(
                f"{named}: {describe_http_error(error)}"
            ) from error
        except aiohttp.ClientConnectorSSLError as error:
            raise NotTls(f"{named}: {describe_http_error(error)}") from error
        except aiohttp.ClientResponseError as error:
            # Raised only if the response is not HTTP.
            raise NotHttp(f"{named}: the server there does not speak HTTP") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(f"{named}: {describe_http_error(error)}") from error
        except LimitExceeded:
            return None
    try:
        return msgspec.json.decode(answer)
    except (ValueError, RecursionError):
        return None


async def read_body(
    response: aiohttp.ClientResponse, size_max: int, what: str = "response"
) -> bytes:
    """Return the body of a response.

    Raises LimitExceeded, naming ``what``, if it exceeds ``size_max`` bytes.
    """
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > size_max:
            raise LimitExceeded(what, len(body), size_max)
    return bytes(body)
