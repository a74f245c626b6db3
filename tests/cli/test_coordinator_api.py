"""The coordinator that commands query."""

import asyncio
from pathlib import Path

import pytest

from cli.coordinators import Sites
from shoal.cli.coordinator_api import ApiError, CoordinatorApi, Unreachable
from shoal.config.secret_files import CERTIFICATE_FILE
from shoal.domain.credentials import with_fingerprint
from shoal.domain.errors import ConfigError

FINGERPRINT = bytes(range(32))


@pytest.mark.parametrize(("certificate", "scheme"), [(False, "http"), (True, "https")])
def test_local_coordinator_is_queried_at_its_own_url(
    tmp_path: Path, certificate: bool, scheme: str
) -> None:
    if certificate:
        (tmp_path / CERTIFICATE_FILE).touch()

    api = CoordinatorApi(None, "sk", tmp_path)

    assert api.base_url == api.http_url == f"{scheme}://127.0.0.1:4010"


@pytest.mark.parametrize(
    ("given", "key", "url"),
    [
        ("http://pool:1", "sk", "http://pool:1"),
        ("http://pool:1/v1/", "sk", "http://pool:1"),
        ("pool:1/v1", "sk", "http://pool:1"),
        ("pool:1", with_fingerprint("sk", FINGERPRINT), "https://pool:1"),
    ],
)
def test_given_url_is_queried(tmp_path: Path, given: str, key: str, url: str) -> None:
    api = CoordinatorApi(given, key, tmp_path)

    assert (api.base_url, api.http_url) == (given, url)


@pytest.mark.parametrize(
    ("given", "key", "reason"),
    [
        ("ftp://pool", "sk", "--url ftp://pool: expected http://HOST:PORT"),
        ("http://pool:1", with_fingerprint("sk", FINGERPRINT), "https://"),
        ("http://pool:1", None, "no API key: `shoal serve` creates one"),
    ],
)
def test_unusable_address_or_key_is_an_error(
    tmp_path: Path, given: str, key: str | None, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        CoordinatorApi(given, key, tmp_path).request("/healthz")


async def test_other_servers_and_none_are_told_apart(
    tmp_path: Path, sites: Sites
) -> None:
    other = CoordinatorApi(await sites({}, status=404), "sk", tmp_path)
    nothing = CoordinatorApi("http://127.0.0.1:1", "sk", tmp_path)

    with pytest.raises(ApiError, match="HTTP 404 from http"):
        await asyncio.to_thread(other.request, "/healthz")
    with pytest.raises(Unreachable, match="is `shoal serve` running there"):
        await asyncio.to_thread(nothing.request, "/healthz")
    other.close()
    nothing.close()
