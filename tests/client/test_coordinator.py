"""The choice of the coordinator and its API key."""

import os
from pathlib import Path

import pytest
import trustme

from shoal.client.coordinator import find_coordinator
from shoal.config.runtime_file import publish_url
from shoal.config.secret_files import CERTIFICATE_FILE, KEY_FILE
from shoal.domain.credentials import with_fingerprint
from shoal.domain.errors import ConfigError
from shoal.tasks.running_call import (
    COORDINATOR_FINGERPRINT,
    COORDINATOR_URL,
    RUNNING,
    set_openai_variables,
)

VARIABLES = ("SHOAL_URL", "SHOAL_API_KEY", "SHOAL_DATA_DIR", "SHOAL_CACERT")


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_local_coordinator_gets_its_own_key(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).write_text("sk-here\n")

    address = find_coordinator(data_dir=tmp_path)

    assert (address.url, address.api_key) == ("http://127.0.0.1:4010", "sk-here")


def test_variables_are_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOAL_URL", "pool:4010")
    monkeypatch.setenv("SHOAL_API_KEY", "sk-env")

    assert find_coordinator().url == "http://pool:4010"
    assert find_coordinator().api_key == "sk-env"
    assert find_coordinator("https://other", "sk-given").api_key == "sk-given"


@pytest.mark.parametrize(
    "url", ["http://pool:1/", "http://pool:1/v1", "pool:1", " pool:1\n"]
)
def test_url_is_accepted_in_every_common_form(url: str) -> None:
    assert find_coordinator(url, "sk").url == "http://pool:1"


def test_missing_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SHOAL_API_KEY"):
        find_coordinator(data_dir=tmp_path)


@pytest.mark.parametrize("url", ["ftp://pool", "http://", "http://po ol", "pool/a b"])
def test_unsupported_url_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http"):
        find_coordinator(url, "sk")


def test_stored_key_requires_the_pinned_certificate(
    tmp_path: Path,
) -> None:
    (tmp_path / KEY_FILE).write_text("sk-here")
    (tmp_path / CERTIFICATE_FILE).write_bytes(trustme.CA().cert_pem.bytes())

    address = find_coordinator(data_dir=tmp_path)

    assert address.url == "https://127.0.0.1:4010"
    assert address.tls is not None
    assert find_coordinator("https://pool", "sk").tls is None


PINNED = with_fingerprint("sk", bytes(32))


@pytest.mark.parametrize("url", ["https://pool:1/v1", "pool:1"])
def test_key_with_a_fingerprint_is_for_one_server_only(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("SHOAL_CACERT", "none.pem")  # the fingerprint says more

    address = find_coordinator(url, PINNED)

    assert (address.url, address.api_key) == ("https://pool:1", "sk")
    assert address.tls is not None
    assert not address.tls.check_hostname


def test_key_with_a_fingerprint_is_never_sent_in_plaintext() -> None:
    with pytest.raises(ConfigError, match="whose URL begins with https://"):
        find_coordinator("http://pool:1", PINNED)


def test_damaged_certificate_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).write_text("sk-here")
    (tmp_path / CERTIFICATE_FILE).write_text("hello")

    with pytest.raises(ConfigError, match=r"certificate\.pem: .*`shoal serve` writes"):
        find_coordinator(data_dir=tmp_path)


def test_repr_hides_the_key() -> None:
    assert "sk-secret" not in repr(find_coordinator("http://pool", "sk-secret"))


def test_local_coordinator_is_found_by_its_runtime_file(
    tmp_path: Path,
) -> None:
    with publish_url(tmp_path, "0.0.0.0", 4711, secure=False):
        address = find_coordinator(api_key="sk", data_dir=tmp_path)

    assert (address.url, address.explicit) == ("http://127.0.0.1:4711", False)
    assert (
        find_coordinator(api_key="sk", data_dir=tmp_path).url == "http://127.0.0.1:4010"
    )
    assert find_coordinator("http://pool", "sk").explicit


def test_task_uses_the_access_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_URL", "http://of-the-worker:1")
    monkeypatch.setenv("SHOAL_API_KEY", "sk-of-the-worker")
    monkeypatch.setenv(COORDINATOR_URL, "https://joined:4010,https://other:4010")
    monkeypatch.setenv(COORDINATOR_FINGERPRINT, "ab" * 32)
    monkeypatch.setattr(RUNNING, "grant", "sk-shoal-call-job1.2.secret")

    found = find_coordinator()
    other = find_coordinator("http://other:1", "sk-other")

    assert found.urls == ("https://joined:4010", "https://other:4010")
    assert found.api_key.startswith("sk-shoal-call-job1.2.0.")
    assert "secret" not in found.api_key
    assert found.tls is not None
    assert (other.url, other.api_key) == ("http://other:1", "sk-other")


def test_clients_of_openai_get_the_address_that_the_worker_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(COORDINATOR_URL, "https://joined:4010,https://other:4010")
    monkeypatch.setattr(RUNNING, "grant", "sk-shoal-call-job1.2.secret")
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "")

    set_openai_variables()

    assert os.environ["OPENAI_BASE_URL"] == "https://joined:4010/v1"
