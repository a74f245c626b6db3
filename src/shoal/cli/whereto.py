"""Which coordinator a worker joins, by which wire, and as whom."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from shoal.domain.credentials import without_fingerprint
from shoal.domain.errors import ConfigError, Unavailable
from shoal.protocols import Protocol, discover
from shoal.runtime.secret_files import CERTIFICATE_FILE, TOKEN_FILE
from shoal.transports.http import ask_json
from shoal.transports.tls import fingerprint_of

PORT = 4010  # of a coordinator
HTTP = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
SECURE = frozenset({"https", "wss"})
HEALTH = "/healthz"
OURS = "shoal"  # which our coordinators say, asked how they are
ASK_LIMIT = 5.0  # seconds to find out who answers at a URL

log = logging.getLogger("shoal.worker")


@dataclass(frozen=True, slots=True)
class Target:
    """A coordinator; ``fingerprint`` is that of its certificate, if that is known."""

    url: str
    protocol: Protocol
    token: str
    fingerprint: bytes | None

    @property
    def shown(self) -> str:
        """The URL without what may hold a token."""
        return self.url.partition("?")[0]

    @property
    def web(self) -> str:
        """The URL below which it answers over HTTP."""
        return _web(self.url)


async def target(url: str, wire: str, token: str, data: Path) -> Target:
    """Return where to join; without a ``url`` that is the coordinator of this machine.

    That one's token and certificate are read from its ``data`` folder.

    Raises ConfigError if there is no such wire, or the token is for another place.
    """
    if not url:
        return _here(wire, token, data)
    token, fingerprint = without_fingerprint(token)
    if fingerprint is not None and urlsplit(url).scheme not in SECURE:
        raise ConfigError(
            f"{url.partition('?')[0]}: the token is for a coordinator that has a "
            "certificate; its URL begins with https:// or wss://"
        )
    protocol = _named(wire) if wire != "auto" else await _found(url, fingerprint)
    return Target(url, protocol, token, fingerprint)


def _here(wire: str, token: str, data: Path) -> Target:
    token, fingerprint = without_fingerprint(token or _read(data / TOKEN_FILE))
    certificate = _read(data / CERTIFICATE_FILE)
    if certificate and fingerprint is None:
        fingerprint = fingerprint_of(certificate)
    scheme = "http" if fingerprint is None else "https"
    url = f"{scheme}://127.0.0.1:{PORT}"
    protocol = _named(wire) if wire != "auto" else _by_scheme(url)
    return Target(url, protocol, token, fingerprint)


def _read(file: Path) -> str:
    """Return what a file holds; nothing if it is not there or not ours to read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _named(name: str) -> Protocol:
    """Return the protocol of that name; raises ConfigError if there is none."""
    protocols = discover()
    if name not in protocols:
        known = ", ".join(["auto", *protocols])
        raise ConfigError(f"--wire {name}: there is no such wire; known: {known}")
    return protocols[name]


def _by_scheme(url: str) -> Protocol:
    """Return the wire by which our own coordinators are joined at such a URL.

    Raises ConfigError if there is none.
    """
    scheme = urlsplit(url).scheme
    for protocol in discover().values():
        if scheme in protocol.schemes and protocol.face is None:
            return protocol
    raise ConfigError(
        f"{url}: cannot tell the wire; give a URL such as http://HOST:PORT, or --wire"
    )


async def _found(url: str, fingerprint: bytes | None) -> Protocol:
    """Return the wire that a coordinator speaks, which is asked if a URL fits several.

    Raises ConfigError if it is neither one of ours nor of a wire with a face.
    """
    ours = _by_scheme(url)
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        return ours
    if fingerprint is not None:
        return ours  # nobody else's tokens name a certificate
    try:
        async with asyncio.timeout(ASK_LIMIT):
            return await _asked(url, ours)
    except (TimeoutError, Unavailable) as error:
        why = str(error) or f"no answer within {ASK_LIMIT:g} s"
        log.warning("taken for a coordinator of Shoal's; else give --wire: %s", why)
        return ours


async def _asked(url: str, ours: Protocol) -> Protocol:
    web = _web(url)
    root = f"{urlsplit(web).scheme}://{urlsplit(web).netloc}"
    if _is_ours(await ask_json(root + HEALTH)):
        return ours
    faces = [each for each in discover().values() if each.face is not None]
    for protocol in faces:
        assert protocol.face is not None
        answer = await ask_json(web + protocol.face.path)
        if _is_ours(answer):
            return ours  # behind a proxy that lets no more of it through
        if protocol.face.is_theirs(answer):
            return protocol
    names = " or ".join([ours.name, *(each.name for each in faces)])
    raise ConfigError(
        f"{web}: what answers there is no coordinator that is known here; if it is "
        f"one, name its wire with --wire {names}"
    )


def _is_ours(answer: object) -> bool:
    return isinstance(answer, Mapping) and (OURS in answer or OURS in answer.values())


def _web(url: str) -> str:
    parts = urlsplit(url)
    scheme = HTTP.get(parts.scheme, parts.scheme)
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}"
