"""HTTPS by a local authority: options, names, renewal, and the warning without it."""

import asyncio
import contextlib
import datetime
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from gateway.serving import eventually
from shoal.app import https as module
from shoal.app.https import Https, keep_valid, open_https
from shoal.config import ServeConfig
from shoal.config.secret_files import CERTIFICATE_FILE, store_certificate
from shoal.domain.errors import ConfigError
from shoal.transports import mdns
from shoal.transports.clock import LoopClock
from shoal.transports.tls import certificate_hash

DAY = 86_400.0  # seconds
LAN = {"0.0.0.0": ("10.1.2.3", "192.168.1.10"), "::": ("fd00::7",)}
NAMES = frozenset({"beagle", "beagle.local", "0.0.0.0"})


def now() -> float:
    return datetime.datetime.now(datetime.UTC).timestamp()


@pytest.fixture(autouse=True)
def lan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "addresses_of", lambda host: LAN[host])


def opened(folder: Path, **settings: Any) -> Https | None:
    config = ServeConfig(data_dir=folder / "data", **settings)
    return open_https(config, NAMES, now())


def local(folder: Path, **settings: Any) -> Https:
    https = opened(folder, tls="auto", **settings)
    assert https is not None
    return https


def names_in(certificate: str) -> set[str]:
    shown = x509.load_pem_x509_certificate(certificate.encode())
    found = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = found.get_values_for_type(x509.IPAddress)
    return {*found.get_values_for_type(x509.DNSName), *map(str, addresses)}


def test_certificate_has_all_names_by_which_the_coordinator_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed = lambda host, port, *, secure: "https://172.16.0.9:0"  # noqa: E731
    monkeypatch.setattr(module, "public_url", routed)
    own = {"localhost", "127.0.0.1", "::1", "beagle", "beagle.local"}

    assert names_in(local(tmp_path).certificate) == own
    everywhere = local(tmp_path, host="0.0.0.0").certificate
    assert names_in(everywhere) == own | {*LAN["0.0.0.0"], *LAN["::"], "172.16.0.9"}


def test_authority_and_fingerprint_outlive_a_restart(tmp_path: Path) -> None:
    first, second = local(tmp_path), local(tmp_path)

    assert first.fingerprint == second.fingerprint
    assert first.certificate == second.certificate
    assert first.authority == tmp_path / "data" / "tls" / "authority.pem"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls": "on"}, "--tls on: expected auto or off"),
        ({"tls": "auto", "tls_cert": Path("c")}, "--tls-cert and --tls-key name an"),
        ({"tls_cert": Path("c")}, "--tls-cert takes --tls-key beside it"),
        ({"tls_key": Path("k")}, "--tls-key takes --tls-cert beside it"),
    ],
)
def test_contradictory_options_are_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({"host": "0.0.0.0"}, 1),
        ({"host": "192.168.1.10"}, 1),
        ({"host": "127.0.0.1"}, 0),
        ({"host": "localhost"}, 0),
        ({"host": "0.0.0.0", "tls": "auto"}, 0),
    ],
)
def test_one_line_warns_if_other_machines_can_read_http(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    lines: int,
) -> None:
    opened(tmp_path, **settings)

    said = [each.getMessage() for each in caplog.records]
    assert len(said) == lines
    for line in said:
        assert "can read API keys, prompts and answers; give --tls auto" in line
        assert "\n" not in line


def presented(context: ssl.SSLContext) -> str:
    """Return the certificate that a server presents, in PEM form."""
    there, here = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    server = context.wrap_bio(here, there, server_side=True)
    client = trusting.wrap_bio(there, here)
    for side in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return ssl.DER_cert_to_PEM_cert(client.getpeercert(binary_form=True) or b"")


def test_certificate_is_renewed_in_the_open_port(tmp_path: Path) -> None:
    https = local(tmp_path)
    assert https.renew is not None
    assert https.renew(now() + 10 * DAY) is None
    assert presented(https.context) == https.certificate

    renewed = https.renew(now() + 61 * DAY)

    assert renewed is not None
    assert certificate_hash(renewed) != certificate_hash(https.certificate)
    assert presented(https.context) == renewed


async def test_commands_find_the_renewed_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECK_INTERVAL", 0.0)
    https, folder = local(tmp_path), tmp_path / "data"
    store_certificate(folder, https.certificate)
    stored = folder / CERTIFICATE_FILE
    later = LoopClock(lambda: now() + 61 * DAY)

    keeping = asyncio.create_task(keep_valid(https, folder, later))
    await eventually(lambda: stored.read_text() not in ("", https.certificate))
    keeping.cancel()

    assert presented(https.context) == await asyncio.to_thread(stored.read_text)


def test_addresses_of_every_listener_are_known() -> None:
    assert LAN.keys() == mdns.ANY_ADDRESS
