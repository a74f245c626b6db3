"""The local authority: its names, its renewal, and what it may not sign."""

import asyncio
import contextlib
import datetime
import ipaddress
import socket
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from harness.synced import needs_folder_sync, synced_files
from shoal.domain.errors import ConfigError
from shoal.transports.local_authority import (
    AUTHORITY_FILE,
    AUTHORITY_KEY_FILE,
    NAMES_MAX,
    RENEW_BEFORE,
    REPLACE_BEFORE,
    SERVER_FILE,
    SERVER_KEY_FILE,
    SERVER_VALID,
    LocalCertificate,
    ServerNames,
    local_certificate,
    server_names,
)
from shoal.transports.tls import fingerprint_of, server_certificate, server_context

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
NAMES = server_names(["beagle", "beagle.local", "localhost", "192.168.1.10", "::1"])


def issued(
    folder: Path, names: ServerNames = NAMES, at: datetime.datetime = NOW
) -> LocalCertificate:
    return local_certificate(folder / "tls", names, "beagle", at)


def fingerprint(made: LocalCertificate) -> bytes:
    return fingerprint_of(server_certificate(made.certificate))


def refused(made: LocalCertificate, name: str, authority: Path) -> str | None:
    """Return why a client that trusts an authority refuses a server; None: accepted."""
    client = ssl.create_default_context(cafile=authority)
    client.verify_flags |= ssl.VERIFY_X509_STRICT  # the default of newer versions
    there, here = socket.socketpair()

    def serve() -> None:
        context = server_context(made.certificate, made.key)
        try:
            context.wrap_socket(there, server_side=True).close()
        except OSError:
            there.close()

    async def connect() -> str | None:
        serving = asyncio.create_task(asyncio.to_thread(serve))
        try:
            wrapped = await asyncio.to_thread(
                client.wrap_socket, here, server_hostname=name
            )
            wrapped.close()
        except ssl.SSLCertVerificationError as error:
            here.close()
            return error.verify_message
        finally:
            await serving
        return None

    return asyncio.run(connect())


@pytest.mark.parametrize(
    "name", ["beagle", "beagle.local", "localhost", "192.168.1.10", "::1"]
)
def test_client_that_trusts_the_authority_accepts_each_name(
    tmp_path: Path, name: str
) -> None:
    made = issued(tmp_path)

    assert refused(made, name, made.authority) is None
    assert "not valid for" in (refused(made, "other.local", made.authority) or "")


@needs_folder_sync
def test_files_and_their_names_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = synced_files(monkeypatch)

    issued(tmp_path)

    assert synced == {AUTHORITY_FILE, AUTHORITY_KEY_FILE, SERVER_FILE, SERVER_KEY_FILE}


def test_files_are_private(tmp_path: Path) -> None:
    issued(tmp_path)

    folder = tmp_path / "tls"
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()}
    assert modes == dict.fromkeys(
        (AUTHORITY_FILE, AUTHORITY_KEY_FILE, SERVER_FILE, SERVER_KEY_FILE), 0o600
    )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_certificate_is_kept_until_a_month_before_it_expires(tmp_path: Path) -> None:
    first = issued(tmp_path)
    text = first.certificate.read_text()
    almost = SERVER_VALID - RENEW_BEFORE

    assert first.issued
    assert not issued(tmp_path, at=NOW + almost - DAY).issued
    assert first.certificate.read_text() == text
    late = issued(tmp_path, at=NOW + almost + DAY)
    assert late.issued
    assert not late.replaced
    assert late.certificate.read_text() != text


def test_server_keeps_its_fingerprint_for_ever(tmp_path: Path) -> None:
    first = fingerprint(issued(tmp_path))
    authority = (tmp_path / "tls" / AUTHORITY_FILE).read_text()

    renewed = issued(tmp_path, at=NOW + 80 * DAY)
    assert fingerprint(renewed) == first
    assert renewed.authority.read_text() == authority
    replaced = issued(tmp_path, at=NOW + 3650 * DAY - REPLACE_BEFORE + DAY)
    assert fingerprint(replaced) == first
    assert replaced.replaced
    assert replaced.authority.read_text() != authority


def test_another_address_needs_another_certificate_of_the_same_authority(
    tmp_path: Path,
) -> None:
    issued(tmp_path)
    moved = server_names(["beagle", "10.1.2.3"])

    made = issued(tmp_path, moved)

    assert (made.issued, made.replaced) == (True, False)
    assert refused(made, "10.1.2.3", made.authority) is None
    assert not issued(tmp_path, moved).issued
    # What it has too much does no harm: another address may come and go.
    assert not issued(tmp_path, server_names(["beagle"])).issued


@pytest.mark.parametrize("name", ["pool.example.com", "203.0.113.7", "2001:db8::1"])
def test_another_public_name_needs_another_authority(tmp_path: Path, name: str) -> None:
    before = issued(tmp_path)
    first = fingerprint(before)

    made = issued(tmp_path, server_names(["beagle", name]))

    assert made.replaced
    assert refused(made, name, made.authority) is None
    assert fingerprint(made) == first


def test_another_authority_signs_for_the_names_of_the_one_before(
    tmp_path: Path,
) -> None:
    issued(tmp_path)
    first, second = server_names(["one", "203.0.113.7"]), server_names(["two"])
    issued(tmp_path, first)

    assert issued(tmp_path, second).replaced

    # Two machines that have one authority do not replace it in turn.
    for names in (first, second, NAMES):
        assert not issued(tmp_path, names).replaced
    many = [f"host{number}" for number in range(NAMES_MAX)]
    assert issued(tmp_path, server_names(many)).replaced
    assert issued(tmp_path, first).replaced


def sign(folder: Path, name: str) -> LocalCertificate:
    """Sign for another name with the authority's stolen key."""
    made = issued(folder)
    tls = folder / "tls"
    authority = x509.load_pem_x509_certificate(made.authority.read_bytes())
    stolen = serialization.load_pem_private_key(
        (tls / AUTHORITY_KEY_FILE).read_bytes(), None
    )
    assert isinstance(stolen, ec.EllipticCurvePrivateKey)
    own = serialization.load_pem_private_key(made.key.read_bytes(), None)
    assert isinstance(own, ec.EllipticCurvePrivateKey)
    names: list[x509.GeneralName] = [x509.DNSName(name)]
    with contextlib.suppress(ValueError):
        names = [x509.IPAddress(ipaddress.ip_address(name))]
    forged = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.subject)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - DAY)
        .not_valid_after(NOW + DAY)
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(stolen.public_key()),
            critical=False,
        )
        .sign(stolen, hashes.SHA256())
    )
    made.certificate.write_bytes(forged.public_bytes(serialization.Encoding.PEM))
    return made


@pytest.mark.parametrize("name", ["bank.example", "203.0.113.7"])
def test_stolen_authority_can_sign_for_no_other_site(tmp_path: Path, name: str) -> None:
    made = sign(tmp_path, name)

    assert "permitted subtree violation" in (refused(made, name, made.authority) or "")


@pytest.mark.parametrize(
    "name", [AUTHORITY_FILE, AUTHORITY_KEY_FILE, SERVER_FILE, SERVER_KEY_FILE]
)
def test_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    issued(tmp_path)
    (tmp_path / "tls" / name).write_text("hello")

    with pytest.raises(ConfigError, match=f"--tls auto: .*{name} is damaged: restore"):
        issued(tmp_path)


@pytest.mark.parametrize("name", [AUTHORITY_FILE, AUTHORITY_KEY_FILE])
def test_incomplete_authority_is_replaced(tmp_path: Path, name: str) -> None:
    first = fingerprint(issued(tmp_path))
    (tmp_path / "tls" / name).unlink()

    made = issued(tmp_path)

    assert made.issued
    assert fingerprint(made) == first
    assert refused(made, "beagle", made.authority) is None


def test_interrupted_replacement_is_completed(tmp_path: Path) -> None:
    issued(tmp_path)
    other = issued(tmp_path / "other")
    key = (other.authority.parent / AUTHORITY_KEY_FILE).read_bytes()
    (tmp_path / "tls" / AUTHORITY_KEY_FILE).write_bytes(key)

    made = issued(tmp_path)

    assert refused(made, "beagle", made.authority) is None


def test_names_that_no_certificate_can_have_are_left_out() -> None:
    names = server_names(
        ["Beagle", "0.0.0.0", "::", "my_host", "bücher", "", "fe80::1%e"]
    )

    assert names.hosts == {"beagle"}
    assert names.addresses == {ipaddress.ip_address("fe80::1")}
