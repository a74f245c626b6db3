"""Resolves which coordinator a worker joins, by which wire, and as whom."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard
from urllib.parse import urlsplit

from shoal.cli.lan_discovery import find_lan_coordinator
from shoal.config.runtime_file import local_url
from shoal.config.secret_files import CERTIFICATE_FILE, TOKEN_FILE
from shoal.domain.credentials import without_fingerprint
from shoal.domain.errors import ConfigError, Unavailable
from shoal.protocols import discover
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.transports.http_client import CertificateNotTrusted, NotHttp, request_json
from shoal.transports.tls import fingerprint_of

DEFAULT_PORT = 4010  # of a coordinator
HTTP = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
WEB = frozenset({"http", "https"})
SECURE = frozenset({"https", "wss", "tls"})
HEALTH = "/healthz"
SHOAL_KEY = "shoal"  # which our coordinators say, asked how they are
DIRECT_KEY = "direct"  # where they say at which other ports they are, by wire
ASK_TIMEOUT = 5.0  # seconds to find out who answers at a URL

log = logging.getLogger("shoal.worker")


@dataclass(frozen=True, slots=True)
class JoinTarget:
    """A coordinator; ``fingerprint`` is that of its certificate, if that is known.

    ``direct`` is an address at which it is to be had without HTTP, if it says so, or
    stands for one while nobody could be asked: before it is dialled, it is asked for.
    """

    url: str
    protocol: AnyWireProtocol
    token: str
    fingerprint: bytes | None
    direct: str = ""

    @property
    def display_url(self) -> str:
        """The URL without what may hold a token."""
        return self.url.partition("?")[0]

    @property
    def http_url(self) -> str:
        """The URL below which it answers over HTTP."""
        return _web(self.url)


async def resolve_target(url: str, wire: str, token: str, data: Path) -> JoinTarget:
    """Return where to join; without a ``url`` that is the coordinator of this machine.

    That one's token and certificate are read from its ``data`` folder.  If there never
    was one on this machine, or it is away and the token is not its own, it is the one
    on the local network.

    Raises ConfigError if there is no such wire, or the token is for another place, or
    there is not just one coordinator to be found.
    """
    named = None if wire == "auto" else _named(wire)
    if not url:
        return await _here(named, token, data)
    token, fingerprint = without_fingerprint(token)
    if fingerprint is not None and urlsplit(url).scheme not in SECURE:
        raise ConfigError(
            f"{url.partition('?')[0]}: the token is for a coordinator that has a "
            "certificate; its URL begins with https:// or wss://"
        )
    return await _there(url, named, token, fingerprint)


async def _here(named: AnyWireProtocol | None, token: str, data: Path) -> JoinTarget:
    kept = _read(data / TOKEN_FILE)
    certificate = _read(data / CERTIFICATE_FILE)
    given, fingerprint = without_fingerprint(token or kept)
    if certificate and fingerprint is None:
        fingerprint = fingerprint_of(certificate)
    url = local_url(data)
    if fingerprint is not None:
        url = url.replace("http://", "https://", 1)
    wire = named or _preferred() or _by_scheme(url)
    if not wire.preferred:
        return JoinTarget(url, wire, given, fingerprint)
    try:
        health = await _health(url, fingerprint)
    except Unavailable as error:
        if not (kept or certificate):  # there never was one here
            return await _nearby(wire, token, str(error))
        if token not in ("", kept):
            with suppress(ConfigError):  # then it may be for this machine's after all
                return await _nearby(wire, token, str(error))
        # Why, whoever dials says next, and again and again.
        log.warning(
            "the coordinator of this machine is away, and waited for; to join another: "
            "shoal join http://HOST:4010"
        )
        return JoinTarget(url, wire, given, fingerprint, stands_for_direct(url))
    direct = _direct(url, wire, health)
    return JoinTarget(url, wire, given, fingerprint, direct)


async def _nearby(wire: AnyWireProtocol, token: str, why_not_here: str) -> JoinTarget:
    token, fingerprint = without_fingerprint(token)
    secure = fingerprint is not None
    url = await find_lan_coordinator(
        wire.service, secure=secure, why_not_here=why_not_here
    )
    return JoinTarget(url, wire, token, fingerprint)


async def _there(
    url: str, named: AnyWireProtocol | None, token: str, fingerprint: bytes | None
) -> JoinTarget:
    """Find out by which wire, and where else, a coordinator at a URL is to be had.

    One that is away is taken for ours: machines start in any order.

    Raises ConfigError if it is neither one of ours nor of a wire with a face, or has a
    certificate that nobody has vouched for, or speaks no HTTP.
    """
    by_scheme = named or _by_scheme(url)
    parts = urlsplit(url)
    asked = named is None or named.preferred
    if not asked or parts.scheme not in WEB or not parts.netloc:
        return JoinTarget(url, by_scheme, token, fingerprint)
    ours = named or _preferred() or by_scheme
    direct = ""
    try:
        health = await _health(url, fingerprint)
        if _is_ours(health):
            direct = _direct(url, ours, health)
            return JoinTarget(url, ours, token, fingerprint, direct)
        if named is None and fingerprint is None:
            wire = await _with_face(url, ours)
            return JoinTarget(url, wire, token, fingerprint)
    except Unavailable as error:
        if isinstance(error, CertificateNotTrusted) and fingerprint is None:
            raise ConfigError(str(error)) from error
        if isinstance(error, NotHttp):
            raise ConfigError(
                f"{_web(url)}: what answers there speaks no HTTP; give the address "
                "that `shoal serve` tells, or name another wire with --wire"
            ) from error
        direct = stands_for_direct(url) if ours.preferred else ""
        # Nobody else's tokens name a certificate.
        if named is None and fingerprint is None:
            log.warning(
                "%s: taken for a Shoal coordinator that is away, and waited for; if "
                "the address is wrong, stop this and correct it; for another kind give "
                "--wire",
                _web(url),
            )
    return JoinTarget(url, ours, token, fingerprint, direct)


async def _health(url: str, fingerprint: bytes | None) -> object:
    """Return what is answered below a URL's root by whoever is asked how it is.

    Raises Unavailable if nobody answers in time.
    """
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(ASK_TIMEOUT):
            return await request_json(
                f"{parts.scheme}://{parts.netloc}{HEALTH}", fingerprint=fingerprint
            )
    except TimeoutError as error:
        raise Unavailable(f"no answer within {ASK_TIMEOUT:g} s") from error


async def _with_face(url: str, ours: AnyWireProtocol) -> AnyWireProtocol:
    """Return the wire of a coordinator that does not say that it is ours."""
    web = _web(url)
    faces = [each for each in discover().values() if each.face is not None]
    for protocol in faces:
        assert protocol.face is not None
        try:
            async with asyncio.timeout(ASK_TIMEOUT):
                answer = await request_json(web + protocol.face.path)
        except TimeoutError as error:
            raise Unavailable(f"no answer within {ASK_TIMEOUT:g} s") from error
        if _is_ours(answer):
            return ours  # behind a proxy that lets no more of it through
        if protocol.face.is_theirs(answer):
            return protocol
    names = " or ".join([_by_scheme(url).name, *(each.name for each in faces)])
    raise ConfigError(
        f"{web}: what answers there is no coordinator that is known here; if it is "
        f"one, name its wire with --wire {names}"
    )


async def resolve_direct(there: JoinTarget) -> str:
    """Return where a coordinator is to be had without HTTP, as it says by now.

    The port may be another after each of its starts; "" if there is none.

    Raises Unavailable if it cannot be asked.
    """
    health = await _health(there.url, there.fingerprint)
    return _direct(there.url, there.protocol, health)


def _direct(url: str, wire: AnyWireProtocol, health: object) -> str:
    """Return where a coordinator says that it is to be had without HTTP, if it does.

    Where HTTP is encrypted, nothing else will do.
    """
    ports = health
    for part in (DIRECT_KEY, wire.name):
        ports = ports.get(part) if isinstance(ports, Mapping) else None
    if not isinstance(ports, Mapping):
        return ""
    if wire.address is not None:
        known = {str(label): port for label, port in ports.items() if _is_port(port)}
        return wire.address(_host(url), known)
    secure = urlsplit(url).scheme in SECURE
    port = ports.get("tls" if secure else "tcp")
    return _at_port(url, port) if _is_port(port) else ""


def _is_port(port: object) -> TypeGuard[int]:
    return type(port) is int and 0 < port < 1 << 16  # True is an int, too


def stands_for_direct(url: str) -> str:
    """Return what stands for the other port of a coordinator that is away."""
    return _at_port(url, DEFAULT_PORT)


def _at_port(url: str, port: int) -> str:
    scheme = "tls" if urlsplit(url).scheme in SECURE else "tcp"
    return f"{scheme}://{_host(url)}:{port}"


def _host(url: str) -> str:
    """Return the host of a URL, as it stands in URLs."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


def _read(file: Path) -> str:
    """Return what a file holds; nothing if it is not there or not ours to read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _named(name: str) -> AnyWireProtocol:
    """Return the protocol of that name; raises ConfigError if there is none."""
    protocols = discover()
    if name not in protocols:
        known = ", ".join(["auto", *protocols])
        raise ConfigError(f"--wire {name}: there is no such wire; known: {known}")
    return protocols[name]


def _preferred() -> AnyWireProtocol | None:
    """Return the wire by which our own coordinators are joined, if there is one."""
    return next((each for each in discover().values() if each.preferred), None)


def _by_scheme(url: str) -> AnyWireProtocol:
    """Return the wire by which a coordinator at such a URL is joined unasked.

    Raises ConfigError if there is none.
    """
    scheme = urlsplit(url).scheme
    for protocol in discover().values():
        if scheme in protocol.schemes and protocol.face is None:
            return protocol
    raise ConfigError(
        f"{url}: cannot tell the wire; give a URL such as http://HOST:PORT, or --wire"
    )


def _is_ours(answer: object) -> bool:
    return isinstance(answer, Mapping) and (
        SHOAL_KEY in answer or SHOAL_KEY in answer.values()
    )


def _web(url: str) -> str:
    parts = urlsplit(url)
    scheme = HTTP.get(parts.scheme, parts.scheme)
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}"
