"""Resolves the coordinator or fleet that a worker joins: its URL, wire and token."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeGuard
from urllib.parse import SplitResult, urlsplit

from shoal.app.fleet_files import with_fleet
from shoal.app.worker_ports import listening_wires
from shoal.cli.worker.lan_discovery import find_lan_coordinator
from shoal.config import JoinConfig
from shoal.config.loader import flag, load
from shoal.config.runtime_file import local_url
from shoal.config.secret_files import CERTIFICATE_FILE, TOKEN_FILE
from shoal.coordinator.admission import ANY_TOKEN
from shoal.domain.addresses import is_loopback, is_own_host, split_addresses
from shoal.domain.credentials import without_fingerprint
from shoal.domain.errors import ConfigError, Unavailable
from shoal.protocols import discover
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.transports import http_client
from shoal.transports.dialer import Scheme
from shoal.transports.mdns import ANY_ADDRESS, addresses_of
from shoal.transports.tls import fingerprint_of
from shoal.worker.identity import known_coordinator

DEFAULT_PORT = 4010  # of a coordinator
HTTP = {"http": "http", "https": "https", "ws": "http", "wss": "https"}
WEB = frozenset({"http", "https"})
SECURE = frozenset({"https", "wss", "tls"})
HEALTH = "/healthz"
SHOAL_KEY = "shoal"  # in the health report of Shoal's coordinators
DIRECT_KEY = "direct"  # in that report: other ports, by wire
ADDRESS = re.compile(r"[^/@\s]+:[0-9]+")  # HOST:PORT
HEALTH_TIMEOUT = 5.0  # seconds to identify the server at a URL

START = (
    "start it with `shoal serve`, or give the address of another: shoal join "
    "http://HOST:4010"
)


@dataclass(frozen=True, slots=True)
class JoinTarget:
    """A coordinator, with the fingerprint of its TLS key if that is known.

    ``direct`` is its address on a wire with ports of its own.  While the coordinator is
    unreachable it is a placeholder, which is resolved before each connection.
    ``plain``: connections need not be encrypted.  ``is_shoal``: it is a coordinator of
    Shoal's, as far as is known.  ``unreachable`` is why nothing answered at the URL, if
    so, and ``advice`` what the user can do then.  ``token_file`` is where the token was
    found, if it was not given.  ``coordinator_key`` is that of a coordinator that has
    admitted this machine before, if no token is known: each end proves its key then.
    ``others`` are further URLs of its pool.
    """

    url: str
    protocol: AnyWireProtocol
    token: str
    fingerprint: bytes | None
    direct: str = ""
    plain: bool = False
    is_shoal: bool = False
    unreachable: str = ""
    advice: str = ""
    token_file: Path | None = None
    coordinator_key: str = ""
    others: tuple[str, ...] = ()

    @property
    def tells_admission(self) -> bool:
        """Whether a worker learns whether it is admitted without getting jobs.

        Coordinators of other programs cannot express that.  Only Shoal's have join
        tokens on wires that its workers can encrypt.
        """
        secret = bool(self.token or self.coordinator_key)
        return self.is_shoal or (self.protocol.encrypts and secret)

    @property
    def display_url(self) -> str:
        """The URL without its query, which may hold a token."""
        return self.url.partition("?")[0]

    @property
    def http_url(self) -> str:
        """The base URL of its HTTP API."""
        return _web_url(self.url)

    @property
    def http_urls(self) -> Sequence[str]:
        """The base URLs of its pool's HTTP API, this one first."""
        return [*map(_web_url, (self.url, *self.others))]


async def resolve_target(url: str, wire: str, token: str, data: Path) -> JoinTarget:
    """Return the coordinator to join; without a ``url``, that of this machine.

    Of several URLs, separated by commas, it is the first that answers.
    Its token and certificate are read from its ``data`` folder, also if the URL is its
    own.  If this machine never ran a coordinator, or it is down and the token is
    another one, the result is the coordinator on the local network.

    Raises ConfigError if the wire is unknown, the token does not fit the URL, or the
    local network has no coordinator or several.
    """
    addresses = split_addresses(url)
    if len(addresses) > 1:
        return await _first_to_answer(addresses, wire, token, data)
    chosen = None if wire == "auto" else _wire_named(wire)
    if not url:
        return await _on_this_machine(chosen, token, data)
    token, fingerprint = split_token(token)
    if fingerprint is not None and urlsplit(url).scheme not in SECURE:
        raise ConfigError(
            f"{url.partition('?')[0]}: the token is for a coordinator with a "
            "certificate, whose URL begins with https:// or wss://"
        )
    if token or fingerprint is not None:
        return await _at_url(url, chosen, token, fingerprint)
    token, fingerprint = await _own_credentials(url, data)
    if token or fingerprint is not None:
        target = await _at_url(url, chosen, token, fingerprint)
        return replace(target, token_file=data / TOKEN_FILE) if token else target
    known = known_coordinator(data, _web_url(url))
    if known is None:
        return await _at_url(url, chosen, "", None)
    fingerprint = bytes.fromhex(known.fingerprint) or None
    target = await _at_url(url, chosen, "", fingerprint)
    return replace(target, coordinator_key=known.key)


async def _first_to_answer(
    addresses: Sequence[str], wire: str, token: str, data: Path
) -> JoinTarget:
    """Return the first of a pool's addresses that answers, else the first one."""
    if len({urlsplit(each).scheme in SECURE for each in addresses}) > 1:
        raise ConfigError(
            f"{addresses[0]}: the addresses of one pool are all https://, or none"
        )
    found = [await resolve_target(addresses[0], wire, token, data)]
    for each in addresses[1:]:
        if not found[-1].unreachable:
            break
        found.append(await resolve_target(each, wire, token, data))
    target = found[0] if found[-1].unreachable else found[-1]
    others = tuple(each for each in addresses if each != target.url)
    return replace(target, others=others)


def split_token(token: str) -> tuple[str, bytes | None]:
    """Split what an invitation names: the token, and a certificate's fingerprint.

    The token is empty if the coordinator asks for none.
    """
    token, fingerprint = without_fingerprint(token)
    return "" if fingerprint and token == ANY_TOKEN else token, fingerprint


async def _on_this_machine(
    chosen: AnyWireProtocol | None, token: str, data: Path
) -> JoinTarget:
    stored_token = _read(data / TOKEN_FILE)
    certificate = _read(data / CERTIFICATE_FILE)
    plain_token, fingerprint = split_token(token or stored_token)
    token_file = data / TOKEN_FILE if stored_token and not token else None
    if certificate and fingerprint is None:
        fingerprint = fingerprint_of(certificate)
    url = local_url(data)
    if fingerprint is not None:
        url = url.replace("http://", "https://", 1)
    wire = chosen or _preferred() or _by_scheme(url)
    target = JoinTarget(url, wire, plain_token, fingerprint, is_shoal=True)
    if not wire.encrypts:
        return target
    target = replace(target, token_file=token_file)
    try:
        await _health(url, fingerprint)
    except Unavailable as error:
        if not (stored_token or certificate):  # this machine never ran one
            return await _on_local_network(chosen, token, str(error))
        if token not in ("", stored_token):  # No secret: both are the user's own.
            # The token may be for this machine's coordinator after all.
            with suppress(ConfigError):
                return await _on_local_network(chosen, token, str(error))
        return replace(target, unreachable=str(error), advice=START)
    return target


async def _own_credentials(url: str, data: Path) -> tuple[str, bytes | None]:
    """Return the token and the fingerprint of this machine's coordinator.

    Both are absent if the URL is not its own: if the port is another one, the host is
    not this machine, or something else answers there.

    Raises ConfigError if the coordinator has a certificate, and the URL no TLS.
    """
    token, certificate = _read(data / TOKEN_FILE), _read(data / CERTIFICATE_FILE)
    local = local_url(data)
    given, own = urlsplit(url), urlsplit(local)
    if (
        not (token or certificate)
        or given.scheme not in HTTP
        or _port(given) != own.port
        or not await _is_this_machine(given.hostname or "")
    ):
        return "", None
    fingerprint = fingerprint_of(certificate) if certificate else None
    if own.scheme in SECURE and given.scheme not in SECURE:
        raise ConfigError(
            f"{url.partition('?')[0]}: the coordinator of this machine has a "
            f"certificate: join https://{given.netloc}"
        )
    with suppress(Unavailable):
        if await _health(_web_url(url), fingerprint) != await _health(
            local, fingerprint
        ):
            return "", None
    return split_token(token)[0], fingerprint


def _port(url: SplitResult) -> int | None:
    """Return the port of a URL; None if it is invalid."""
    try:
        return url.port or (443 if url.scheme in SECURE else 80)
    except ValueError:
        return None


async def _is_this_machine(host: str) -> bool:
    """Return whether a name or an address is one of this machine."""
    if is_own_host(host):
        return True
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT):
            found = await loop.getaddrinfo(host, None)
    except (OSError, UnicodeError, TimeoutError):
        return False
    own = {address for each in ANY_ADDRESS for address in addresses_of(each)}
    return any(is_loopback(str(each[4][0])) or each[4][0] in own for each in found)


async def _on_local_network(
    chosen: AnyWireProtocol | None, token: str, local_error: str
) -> JoinTarget:
    announced = next(each.service for each in discover().values() if each.service)
    token, fingerprint = split_token(token)
    secure = fingerprint is not None
    url = await find_lan_coordinator(announced, secure=secure, local_error=local_error)
    return await _at_url(url, chosen, token, fingerprint)


async def _at_url(
    url: str, chosen: AnyWireProtocol | None, token: str, fingerprint: bytes | None
) -> JoinTarget:
    """Detect the wire of the coordinator at a URL.

    An unreachable one is assumed to be Shoal's: machines start in any order.

    Raises ConfigError if its program is unknown, its certificate is not trusted, or it
    does not speak HTTP.
    """
    by_scheme = chosen or _by_scheme(url)
    parts = urlsplit(url)
    detects = chosen is None or chosen.encrypts
    if not detects or parts.scheme not in WEB or not parts.netloc:
        known = parts.scheme in HTTP and await _answers_as_shoal(url, fingerprint)
        return JoinTarget(url, by_scheme, token, fingerprint, is_shoal=known)
    preferred = chosen or _preferred() or by_scheme
    target = JoinTarget(url, preferred, token, fingerprint)
    # Only Shoal's tokens name a certificate.
    guessed = chosen is None and fingerprint is None
    try:
        if _is_shoal(await _health(url, fingerprint)):
            return replace(target, is_shoal=True)
        if guessed:
            return replace(target, protocol=await _by_probe(url, preferred))
    except Unavailable as error:
        if isinstance(error, http_client.CertificateNotTrusted | http_client.NotTls):
            raise ConfigError(str(error)) from error
        if isinstance(error, http_client.NotHttp):
            raise ConfigError(
                f"{_web_url(url)}: the server there does not speak HTTP; give the "
                "address that `shoal serve` printed"
            ) from error
        return replace(
            target,
            is_shoal=preferred.encrypts,
            unreachable=str(error),
            advice=_advice(parts, guessed=guessed),
        )
    return target


def _advice(url: SplitResult, *, guessed: bool) -> str:
    """Return what to do if a coordinator stays unreachable.

    ``guessed``: it may be another program's.
    """
    if url.port is None:
        return (
            f"the URL has no port, so it is {_port(url)}; `shoal serve` uses "
            f"{DEFAULT_PORT}"
        )
    other = ", and give --wire for a coordinator of another program"
    return f"check the address{other if guessed else ''}"


async def _answers_as_shoal(url: str, fingerprint: bytes | None) -> bool:
    """Return whether a coordinator of Shoal's answers at a URL now."""
    try:
        return _is_shoal(await _health(_web_url(url), fingerprint))
    except Unavailable:
        return False


async def reason_unreachable(target: JoinTarget) -> str:
    """Return why nothing answers at a coordinator's URL now; empty if it does."""
    try:
        await _health(target.http_url, target.fingerprint)
    except Unavailable as error:
        return str(error)
    return ""


async def _health(url: str, fingerprint: bytes | None) -> object:
    """Return the health report of the server at a URL.  Raises as ``_ask``."""
    parts = urlsplit(url)
    place = f"{parts.scheme}://{parts.netloc}{HEALTH}"
    return await _ask(place, url, fingerprint)


async def _ask(url: str, named: str, fingerprint: bytes | None = None) -> object:
    """Return the JSON at a URL.  Raises Unavailable if there is none in time."""
    try:
        async with asyncio.timeout(HEALTH_TIMEOUT):
            return await http_client.request_json(
                url, fingerprint=fingerprint, named=named
            )
    except TimeoutError as error:
        raise Unavailable(f"{named}: no answer within {HEALTH_TIMEOUT:g} s") from error


async def _by_probe(url: str, preferred: AnyWireProtocol) -> AnyWireProtocol:
    """Return the wire of a coordinator of another program."""
    web = _web_url(url)
    for protocol in discover().values():
        if protocol.coordinator_probe is None:
            continue
        answer = await _ask(web + protocol.coordinator_probe.path, web)
        if _is_shoal(answer):
            return preferred  # behind a proxy that hides its health report
        if protocol.coordinator_probe.is_theirs(answer):
            return protocol
    raise ConfigError(
        f"{web}: it is not a coordinator that Shoal recognises; give the address that "
        "`shoal serve` printed, or --wire for another program's"
    )


def check_encryption(target: JoinTarget) -> None:
    """Raise ConfigError if prompts and the token could be read on the network.

    On wires with ports of their own, ``resolve_direct`` checks that.
    """
    protocol, parts = target.protocol, urlsplit(target.url)
    if target.plain or protocol.encrypts or protocol.address is not None:
        return
    host = parts.hostname
    if host and parts.scheme not in SECURE and not is_own_host(host):
        raise ConfigError(
            f"{target.display_url}: the protocol {protocol.name} is not encrypted, so "
            "the token, prompts and answers could be read on the network; give an "
            "https:// or wss:// address, leave out --wire for a coordinator of `shoal "
            "serve`, or give --plain"
        )


async def resolve_direct(target: JoinTarget) -> str:
    """Return a coordinator's current address without HTTP; "" if it has none.

    Its port may change with each start.

    Raises Unavailable if the coordinator is unreachable, or the port is not encrypted
    and not on this machine: an attacker who changes the response must not choose that.
    """
    health = await _health(target.url, target.fingerprint)
    direct = direct_address(target.url, target.protocol, health)
    parts = urlsplit(direct)
    if (
        parts.scheme == Scheme.PLAIN.value
        and not target.plain
        and not is_own_host(parts.hostname or "")
    ):
        raise Unavailable(
            f"the port of {target.display_url} for the protocol {target.protocol.name} "
            "is not encrypted, as in a fleet without a token; to join anyway, give "
            "--plain"
        )
    return direct


def direct_address(url: str, wire: AnyWireProtocol, health: object) -> str:
    """Return the address on a wire from a health report; "" if it has no ports."""
    ports = health
    for part in (DIRECT_KEY, wire.name):
        ports = ports.get(part) if isinstance(ports, Mapping) else None
    if not isinstance(ports, Mapping):
        return ""
    if wire.address is None:
        return ""
    known = {str(label): port for label, port in ports.items() if _is_port(port)}
    return wire.address(_host(url), known)


def _is_port(port: object) -> TypeGuard[int]:
    return type(port) is int and 0 < port < 1 << 16  # True is an int, too


def placeholder_direct(url: str) -> str:
    """Return a placeholder for the address of an unreachable coordinator on a wire."""
    scheme = Scheme.VERIFIED if urlsplit(url).scheme in SECURE else Scheme.PLAIN
    return f"{scheme.value}://{_host(url)}:{DEFAULT_PORT}"


def _host(url: str) -> str:
    """Return the host of a URL, with brackets around IPv6."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


def _read(file: Path) -> str:
    """Return the content of a file; empty if it is missing or not readable."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _wire_named(name: str) -> AnyWireProtocol:
    """Return the protocol of that name; raises ConfigError for an unknown one."""
    protocols = discover()
    if name not in protocols:
        known = ", ".join(["auto", *protocols])
        raise ConfigError(f"--wire {name}: unknown protocol; known: {known}")
    return protocols[name]


def _preferred() -> AnyWireProtocol | None:
    """Return the wire of Shoal's own coordinators, if it is installed."""
    return next((each for each in discover().values() if each.preferred), None)


def _by_scheme(url: str) -> AnyWireProtocol:
    """Return the default wire for the scheme of a URL.

    Raises ConfigError if there is none.
    """
    scheme = urlsplit(url).scheme
    for protocol in discover().values():
        if scheme in protocol.schemes and protocol.coordinator_probe is None:
            return protocol
    raise ConfigError(
        f"{url}: unknown protocol; give a URL such as http://HOST:PORT, or --wire"
    )


def _is_shoal(answer: object) -> bool:
    return isinstance(answer, Mapping) and (
        SHOAL_KEY in answer or SHOAL_KEY in answer.values()
    )


def _web_url(url: str) -> str:
    parts = urlsplit(url)
    scheme = HTTP.get(parts.scheme, parts.scheme)
    return f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}"


@dataclass(frozen=True, slots=True)
class ListeningTarget:
    """The fleet in which a worker listens: ``shoal join --listen``.

    ``settings`` is the wire's configuration.  ``target.url`` is HOST:PORT of a node to
    dial; empty: only those that are found.
    """

    target: JoinTarget
    settings: object


def listening_target(
    url: str,
    config: JoinConfig,
    flags: Mapping[str, Mapping[str, object]],
    config_file: Path,
    data: Path,
    *,
    with_models: bool,
) -> ListeningTarget | None:
    """Return the fleet in which to listen; None without ``--listen``.

    ``flags`` are the command line's values for the fleets' configurations.  The token
    is that of the wire's settings, else of ``--token``, else of the fleet that this
    machine is paired with.  Without a ``--wire``, ``with_models`` decides: fleets run
    functions only.

    Raises ConfigError if the settings contradict each other.
    """
    wires = listening_wires()
    if not config.listen:
        _reject_fleet_flags(flags)
        return None
    if config.wire != "auto" and config.wire not in wires:
        raise ConfigError(
            f"--listen: the protocol {config.wire} has no listening workers; use "
            f"--wire {' or '.join(wires)}"
        )
    fleet = next(name for name, each in wires.items() if each.fleets is not None)
    own = next(name for name, each in wires.items() if each.preferred)
    by_default = own if with_models else fleet
    protocol = wires[by_default if config.wire == "auto" else config.wire]
    token, _ = without_fingerprint(config.token)
    if protocol.fleets is None:
        if url or not token:
            raise ConfigError(
                "--listen: coordinators dial this worker at http://HOST:"
                f"{config.listen_port}, named by --shoal-workers, and prove the token "
                "that both know: give no URL, and their join token as --token"
            )
        _reject_fleet_flags(flags)
        return ListeningTarget(
            JoinTarget("", protocol, token, None, is_shoal=True), protocol.config()
        )
    if url and not ADDRESS.fullmatch(url):
        raise ConfigError(
            f"--listen: {url.partition('?')[0]}: expected HOST:PORT of a node of "
            "the fleet, or no URL; a worker that joins a coordinator of `shoal serve` "
            "by its URL needs no port"
        )
    settings = load(protocol.config, protocol.name, flags[protocol.name], config_file)
    fleets = protocol.fleets
    if not token:
        settings = with_fleet(settings, fleets, data)
    token = "" if fleets.is_open(settings) else token
    token = fleets.credentials(settings)[0] or token
    target = JoinTarget(url, protocol, token, None)
    return ListeningTarget(target, settings)


def _reject_fleet_flags(flags: Mapping[str, Mapping[str, object]]) -> None:
    """Raise ConfigError if a flag of a fleet is given, and no fleet is joined."""
    for name, given in flags.items():
        for each in fields(discover()[name].config):
            if given[each.name] is not None:
                raise ConfigError(
                    f"{flag(name, each)} only has an effect with --listen in a fleet"
                )
