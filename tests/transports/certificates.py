"""Certificates for 127.0.0.1, made for one test."""

from dataclasses import dataclass
from pathlib import Path

import trustme

from shoal.transports.tls import (
    ServerTls,
    certificate_hash,
    fingerprint_of,
    server_context,
)


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files of a certificate, its private key and its authority, in PEM form."""

    file: Path
    key: Path
    authority: Path

    @property
    def flags(self) -> tuple[str, str, str, str]:
        """The flags of a coordinator with this certificate."""
        return "--tls-cert", str(self.file), "--tls-key", str(self.key)

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of its key."""
        return fingerprint_of(self.file.read_text())

    @property
    def presented(self) -> ServerTls:
        """The TLS context of a server that presents it."""
        context = server_context(self.file, self.key)
        return ServerTls(context, certificate_hash(self.file.read_text()))


def issue(folder: Path, name: str = "one", host: str = "127.0.0.1") -> Certificate:
    """Create a certificate under its own authority."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    leaf = authority.issue_cert(host)
    made = Certificate(
        folder / f"{name}.pem", folder / f"{name}-key.pem", folder / f"{name}-ca.pem"
    )
    made.file.write_bytes(b"".join(each.bytes() for each in leaf.cert_chain_pems))
    leaf.private_key_pem.write_to_path(made.key)
    authority.cert_pem.write_to_path(made.authority)
    return made
