"""A local certificate authority: its files, and the server certificate that it signs.

The authority may sign only for this machine's names, its public addresses and private
ones (name constraints: RFC 5280, section 4.2.1.10), so that trusting it trusts nothing
else; one that replaces another also for the names of that one.  The server's key never
changes, and neither does its fingerprint.
"""

import datetime
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal.config.private_files import make_private_folder, replace_private
from shoal.domain.errors import ConfigError

AUTHORITY_FILE = "authority.pem"
AUTHORITY_KEY_FILE = "authority-key.pem"
SERVER_FILE = "server.pem"
SERVER_KEY_FILE = "server-key.pem"

VALID_BEFORE = datetime.timedelta(minutes=5)  # clocks that are late
AUTHORITY_VALID = datetime.timedelta(days=3650)
SERVER_VALID = datetime.timedelta(days=90)  # browsers accept up to 825
RENEW_BEFORE = datetime.timedelta(days=30)  # of the server's certificate
REPLACE_BEFORE = datetime.timedelta(days=180)  # of the authority's
SUBJECT_MAX = 64  # characters of a common name (RFC 5280, appendix A.1)

PRIVATE_NETWORKS = tuple(
    ipaddress.ip_network(each)
    for each in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
        *("169.254.0.0/16", "100.64.0.0/10", "::1/128", "fc00::/7", "fe80::/10"),
    )
)
"""Networks whose addresses machines get and lose; the authority may sign for all."""

NAMES_MAX = 100  # of an authority that takes over those of the one before

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class ServerNames:
    """The names and addresses by which clients call a server."""

    hosts: frozenset[str]
    addresses: frozenset[Address]


@dataclass(frozen=True, slots=True)
class LocalCertificate:
    """The files of a server's certificate, in PEM form.

    ``certificate`` has the server's own, followed by the authority's.  ``issued`` says
    whether it is new, and ``replaced`` whether the authority is new in place of another
    one, so that clients must be configured to trust it.
    """

    certificate: Path
    key: Path
    authority: Path
    issued: bool
    replaced: bool


def server_names(names: Iterable[str]) -> ServerNames:
    """Sort names and addresses; leaves out what no certificate can name."""
    hosts, addresses = set(), set()
    for name in names:
        try:
            address = ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            if name.isascii() and name.replace("-", "").replace(".", "").isalnum():
                hosts.add(name.lower())
        else:
            if not address.is_unspecified:
                addresses.add(address)
    return ServerNames(frozenset(hosts), frozenset(addresses))


def local_certificate(
    folder: Path, names: ServerNames, machine: str, now: datetime.datetime
) -> LocalCertificate:
    """Return a certificate for all ``names`` that is valid for a month or more.

    Creates the authority in the ``folder``, named after the ``machine``, or another one
    if it expires or may not sign for the names.  Blocks for some milliseconds.

    Raises ConfigError if a file is damaged or cannot be written.
    """
    try:
        make_private_folder(folder)
        kept = _load_authority(folder)
        authority = kept
        if authority is None or not _may_sign(authority.certificate, names, now):
            # Other machines of the pool need the earlier names.
            authority = _new_authority(_with_permitted(names, kept), machine, now)
            replace_private(folder / AUTHORITY_KEY_FILE, pem_of(authority.key))
            public = authority.certificate.public_bytes(Encoding.PEM)
            replace_private(folder / AUTHORITY_FILE, public.decode())
        key = _load_key(folder / SERVER_KEY_FILE)
        if key is None:
            key = ec.generate_private_key(ec.SECP256R1())
            replace_private(folder / SERVER_KEY_FILE, pem_of(key))
        server = _load_certificate(folder / SERVER_FILE)
        issued = authority is not kept or server is None
        if server is None or issued or _is_outdated(server, key, names, now):
            issued = True
            server = _new_server(key, authority, names, now)
            chain = [server, authority.certificate]
            pem = b"".join(each.public_bytes(Encoding.PEM) for each in chain)
            replace_private(folder / SERVER_FILE, pem.decode())
    except OSError as error:
        raise ConfigError(f"--tls auto: {folder}: {error.strerror}") from error
    return LocalCertificate(
        folder / SERVER_FILE,
        folder / SERVER_KEY_FILE,
        folder / AUTHORITY_FILE,
        issued,
        replaced=authority is not kept and kept is not None,
    )


# Private parts, in the order in which they are called.


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def _load_authority(folder: Path) -> _Authority | None:
    """Return the authority in a folder; None without a complete one."""
    certificate = _load_certificate(folder / AUTHORITY_FILE)
    key = _load_key(folder / AUTHORITY_KEY_FILE)
    if certificate is None or key is None:
        return None
    if certificate.public_key() != key.public_key():
        return None  # its replacement was interrupted
    return _Authority(certificate, key)


def _load_certificate(file: Path) -> x509.Certificate | None:
    """Return the first certificate in a file; None without one."""
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(file) from error


def _load_key(file: Path) -> ec.EllipticCurvePrivateKey | None:
    try:
        key = load_pem_private_key(file.read_bytes(), None)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise _damaged(file) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise _damaged(file)
    return key


def _damaged(file: Path) -> ConfigError:
    # A new key in its place would look like an impostor's to all that know the old one.
    return ConfigError(
        f"--tls auto: {file} is damaged: restore it from a backup, or delete the "
        f"folder {file.parent} and give new tokens to workers and new keys to programs"
    )


def _may_sign(
    authority: x509.Certificate, names: ServerNames, now: datetime.datetime
) -> bool:
    if now > authority.not_valid_after_utc - REPLACE_BEFORE:
        return False
    hosts, networks = _permitted(authority)
    return names.hosts <= hosts and all(
        any(address in network for network in networks) for address in names.addresses
    )


def _permitted(authority: x509.Certificate) -> tuple[set[str], list[Network]]:
    found = authority.extensions.get_extension_for_class(x509.NameConstraints)
    permitted = found.value.permitted_subtrees or ()
    hosts = {each.value for each in permitted if isinstance(each, x509.DNSName)}
    networks = [
        each.value
        for each in permitted
        if isinstance(each, x509.IPAddress)
        and isinstance(each.value, ipaddress.IPv4Network | ipaddress.IPv6Network)
    ]
    return hosts, networks


def _with_permitted(names: ServerNames, kept: _Authority | None) -> ServerNames:
    """Return names, and those for which an authority may sign; not if they are many."""
    if kept is None:
        return names
    hosts, networks = _permitted(kept.certificate)
    public = {each[0] for each in networks if each not in PRIVATE_NETWORKS}
    both = ServerNames(names.hosts | hosts, names.addresses | public)
    return both if len(both.hosts) + len(both.addresses) <= NAMES_MAX else names


def _new_authority(
    names: ServerNames, machine: str, now: datetime.datetime
) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = subject_of(f"Shoal on {machine}")
    public = [
        ipaddress.ip_network(each)
        for each in sorted(names.addresses, key=str)
        if not any(each in network for network in PRIVATE_NETWORKS)
    ]
    permitted = [
        *map(x509.DNSName, sorted(names.hosts)),
        *map(x509.IPAddress, (*PRIVATE_NETWORKS, *public)),
    ]
    certificate = (
        certificate_builder(subject, subject, key, now, AUTHORITY_VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.NameConstraints(permitted, None), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _Authority(certificate, key)


def _is_outdated(
    server: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    names: ServerNames,
    now: datetime.datetime,
) -> bool:
    found = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    hosts = frozenset(found.get_values_for_type(x509.DNSName))
    addresses = frozenset(found.get_values_for_type(x509.IPAddress))
    return (
        now > server.not_valid_after_utc - RENEW_BEFORE
        or now < server.not_valid_before_utc
        or not (names.hosts <= hosts and names.addresses <= addresses)
        or server.public_key() != key.public_key()
    )


def _new_server(
    key: ec.EllipticCurvePrivateKey,
    authority: _Authority,
    names: ServerNames,
    now: datetime.datetime,
) -> x509.Certificate:
    alternatives = [
        *map(x509.DNSName, sorted(names.hosts)),
        *map(x509.IPAddress, sorted(names.addresses, key=str)),
    ]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(
        authority.key.public_key()
    )
    server_auth = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    return (
        certificate_builder(
            subject_of("Shoal"), authority.certificate.subject, key, now, SERVER_VALID
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(server_auth, critical=False)
        .add_extension(issuer, critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def certificate_builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime.datetime,
    valid: datetime.timedelta,
) -> x509.CertificateBuilder:
    """Return what every certificate has, valid for so long."""
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID_BEFORE)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
    )


def subject_of(name: str) -> x509.Name:
    """Return a subject with a common name, whose end may be cut off."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:SUBJECT_MAX])])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def pem_of(key: ec.EllipticCurvePrivateKey) -> str:
    """Return a private key in PEM form, not encrypted."""
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem.decode()
