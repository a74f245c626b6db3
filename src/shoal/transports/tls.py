"""TLS for both ends: a coordinator's certificate, and how its peers know it again.

A certificate is known by its fingerprint, the SHA-256 of its DER form.
"""

import hashlib
import re
import ssl
from pathlib import Path

from shoal.domain.errors import ConfigError

_CERTIFICATE = re.compile(
    r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL
)


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the server's side, TLS 1.2 or newer.

    ``certificate`` holds the server's own and after it those that lead to an
    authority, ``key`` its private key, both in PEM form.

    Raises ConfigError naming the file that is no good.
    """
    own_certificate(certificate)
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
        why = "it is damaged, or not in PEM form"
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"it is not the key of the certificate in {certificate}"
        raise ConfigError(f"--tls-key {key}: {why}") from error
    return context


def own_certificate(file: Path) -> str:
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
