"""TLS for both ends: a coordinator's certificate, and how its peers know it again.

A server is known by its fingerprint, the SHA-256 of its public key
(SubjectPublicKeyInfo in DER form, RFC 7469, section 2.4): it stays the same when the
certificate is renewed.  Tokens and API keys carry it (``domain/credentials.py``).
"""

import datetime
import hashlib
import os
import re
import ssl
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shoal.config.secret_files import CERTIFICATE_FILE
from shoal.domain.errors import ConfigError

VALID_FOR = datetime.timedelta(days=3650)  # longer than anything runs

_CERTIFICATE = re.compile(
    r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's side, and the SHA-256 of the certificate that it shows, in DER form.

    The latter identifies a connection, not a server: handshakes are bound to it.
    """

    context: ssl.SSLContext
    certificate_hash: bytes


def self_signed_tls(subject: str) -> ServerTls:
    """Return a server's side with a key and a certificate made for it alone.

    ``subject`` is the certificate's common name.  No authority signs it, so
    clients must learn its fingerprint in another way.  It takes
    a tenth of a second, most of it once for all.
    """
    # Imported here, because that takes as long as all the rest of a start.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    from shoal.transports.local_authority import certificate_builder, pem_of, subject_of

    key, name = ec.generate_private_key(ec.SECP256R1()), subject_of(subject)
    now = datetime.datetime.now(datetime.UTC)  # noqa: TID251  # of the certificate
    alternatives = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    certificate = (
        certificate_builder(name, name, key, now, VALID_FOR)
        .add_extension(alternatives, critical=False)
        .sign(key, hashes.SHA256())
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # OpenSSL reads it only from a file: in a directory that only this user can read.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "both.pem")
        file.write_text(pem_of(key) + certificate.public_bytes(Encoding.PEM).decode())
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


def certificate_hash(certificate: str) -> bytes:
    """Return the SHA-256 of the first certificate in a text in PEM form."""
    return hashlib.sha256(_der_of(certificate)).digest()


def fingerprint_of(certificate: str) -> bytes:
    """Return the fingerprint of the server whose certificate is first in a PEM text.

    Raises ValueError if it is damaged.
    """
    return _fingerprint(_der_of(certificate))


def _der_of(certificate: str) -> bytes:
    found = _CERTIFICATE.search(certificate)
    return ssl.PEM_cert_to_DER_cert(found[0] if found else "")


def _fingerprint(certificate: bytes) -> bytes:
    """Return the fingerprint of a server by its certificate.  Raises ValueError."""
    # Imported here, because that takes as long as all the rest of a start.
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from cryptography.x509 import load_der_x509_certificate

    try:
        key = load_der_x509_certificate(certificate).public_key()
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error
    public = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(public).digest()


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


class WrongServerKey(ssl.SSLCertVerificationError):
    """Another server answers than the one with the expected fingerprint."""

    def __str__(self) -> str:
        return (
            "its key is not the one in the token or API key: it is an impostor, or the "
            "coordinator has a new key; ask its operator for a new token or API key"
        )


def context_pinning(fingerprint: bytes) -> ssl.SSLContext:
    """Return a client's side that accepts the server with a fingerprint, and no other.

    Its name, its authority and the dates of its certificate do not matter.  Handshakes
    with others end with WrongServerKey, before anything is sent to them.
    """
    context = _PinningContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the handshake checks the key instead
    context.fingerprint = fingerprint
    context.sslsocket_class = _PinningSocket
    context.sslobject_class = _PinningObject
    return context


def context_of_system() -> ssl.SSLContext:
    """Return a client's side that trusts the authorities that the system trusts."""
    named = {"SSL_CERT_FILE", "SSL_CERT_DIR"} & os.environ.keys()
    if sys.platform in ("darwin", "win32") and not named:
        # Python knows the files of OpenSSL alone on macOS, and on Windows only the
        # authorities that some program has used before.
        import truststore

        return truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return ssl.create_default_context()


def context_of_any() -> ssl.SSLContext:
    """Return a client's side that accepts any server: the session authenticates it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_url(url: str, fingerprint: bytes | None) -> None:
    """Raise ConfigError if a key with a fingerprint would be sent in plaintext."""
    if fingerprint is not None and not url.startswith("https://"):
        raise ConfigError(
            f"{url}: the API key is for a coordinator with a certificate, whose URL "
            "begins with https://"
        )


def context_of_folder(folder: Path) -> ssl.SSLContext | None:
    """Return a client's side that accepts only the coordinator of a data folder.

    Returns None if that has no certificate: a reverse proxy may serve HTTPS.

    Raises ConfigError if it is damaged.
    """
    file = folder / CERTIFICATE_FILE
    try:
        return context_pinning(fingerprint_of(file.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: {error}; `shoal serve` writes it when it starts"
        ) from error


class _PinningContext(ssl.SSLContext):
    """A context whose handshakes compare the server's key."""

    fingerprint: bytes


class _PinningSocket(ssl.SSLSocket):
    """A connection of blocking programs."""

    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        _check_server(self)


class _PinningObject(ssl.SSLObject):
    """A connection of an event loop."""

    def do_handshake(self) -> None:
        super().do_handshake()
        _check_server(self)


def _check_server(end: ssl.SSLSocket | ssl.SSLObject) -> None:
    context = end.context
    assert isinstance(context, _PinningContext), "it made the connection"
    certificate = end.getpeercert(binary_form=True)
    try:
        found = _fingerprint(certificate or b"")
    except ValueError as error:
        raise WrongServerKey from error
    if found != context.fingerprint:
        raise WrongServerKey


def _read(file: Path, flag: str) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {file}: it is not in PEM form") from error
