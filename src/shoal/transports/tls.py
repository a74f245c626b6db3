"""TLS for both ends: a coordinator's certificate, and how its peers know it again.

A certificate is known by its fingerprint, the SHA-256 of its DER form.
"""

import datetime
import hashlib
import re
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shoal.domain.errors import ConfigError

VALID_BEFORE = datetime.timedelta(minutes=5)  # clocks that are late
VALID_FOR = datetime.timedelta(days=3650)  # longer than anything runs

_CERTIFICATE = re.compile(
    r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's side, and the fingerprint of the certificate that it shows."""

    context: ssl.SSLContext
    fingerprint: bytes


def self_signed_tls(subject: str) -> ServerTls:
    """Return a server's side with a key and a certificate made for it alone.

    ``subject`` is the certificate's common name.  No authority signs it, so
    clients must learn its fingerprint in another way.  It takes
    a tenth of a second, most of it once for all.
    """
    # Imported here, for that takes as long as all the rest of a start.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID_BEFORE)
        .not_valid_after(now + VALID_FOR)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # OpenSSL reads it only from a file: in a directory that only this user can read.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "both.pem")
        file.write_bytes(pem + certificate.public_bytes(Encoding.PEM))
        context.load_cert_chain(file)
    return ServerTls(context, certificate.fingerprint(hashes.SHA256()))


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the server's side, TLS 1.2 or newer.

    ``certificate`` holds the server's own and after it those that lead to an
    authority, ``key`` its private key, both in PEM form.

    Raises ConfigError that names the invalid file.
    """
    server_certificate(certificate)
    if "ENCRYPTED" in _read(key, "--tls-key"):
        raise ConfigError(
            f"--tls-key {key}: it is encrypted; write it without a passphrase, "
            "readable only to you"
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        problem = "it is damaged, or not in PEM form"
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"it is not the key of the certificate in {certificate}"
        raise ConfigError(f"--tls-key {key}: {problem}") from error
    return context


def server_certificate(file: Path) -> str:
    """Return the first certificate of a PEM file: the server's own, in PEM form.

    Raises ConfigError.
    """
    found = _CERTIFICATE.search(_read(file, "--tls-cert"))
    if found is None:
        raise ConfigError(f"--tls-cert {file}: it holds no certificate in PEM form")
    try:
        ssl.create_default_context(cadata=found[0])
    except ssl.SSLError as error:
        raise ConfigError(f"--tls-cert {file}: the certificate is damaged") from error
    return found[0] + "\n"


def fingerprint_of(certificate: str) -> bytes:
    """Return the fingerprint of a certificate in PEM form."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).digest()


def context_trusting(authorities: Path) -> ssl.SSLContext:
    """Return a client's side that trusts the authorities in a PEM file.

    Raises ConfigError.
    """
    text = _read(authorities, "--cacert")
    try:
        if _CERTIFICATE.search(text):  # else the system's would be taken
            return ssl.create_default_context(cadata=text)
    except ssl.SSLError as error:
        raise ConfigError(f"--cacert {authorities}: it is damaged") from error
    raise ConfigError(f"--cacert {authorities}: it holds no certificate in PEM form")


def context_pinning(certificate: str) -> ssl.SSLContext:
    """Return a client's side that trusts this one certificate, under any name."""
    context = ssl.create_default_context(cadata=certificate)
    # It need not lead to an authority, and as it is the only one that is good, it does
    # not matter by which address its owner was reached.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context


def _read(file: Path, flag: str) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {file}: it is not in PEM form") from error
