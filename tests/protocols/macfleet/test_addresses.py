"""URLs that admit machines to a fleet."""

import pytest

from protocols.macfleet.recorded import Case, recorded
from shoal.domain.errors import ConfigError
from shoal.protocols.macfleet.addresses import (
    PAIRING_URL_MAX,
    FleetInvitation,
    pairing_url,
    parse_pairing_url,
)


@recorded("pairing_encode")
def test_pairing_urls_are_encoded_as_upstream_does(case: Case) -> None:
    token, fleet = case["input"]["token"], case["input"]["fleet_id"] or ""

    if "error" in case["expect"]:
        with pytest.raises(ConfigError, match="needs no pairing URL"):
            pairing_url(token, fleet)
    else:
        url = pairing_url(token, fleet)
        assert url == case["expect"]["url"]
        assert parse_pairing_url(url) == FleetInvitation(token, fleet)


@recorded("pairing_parse")
def test_pairing_urls_are_parsed_as_upstream_does(case: Case) -> None:
    url, expected = case["input"]["url"], case["expect"]

    if "error" in expected:
        with pytest.raises(ConfigError, match="pairing URL"):
            parse_pairing_url(url)
    else:
        read = parse_pairing_url(url)
        assert (read.token, read.fleet or None) == (
            expected["token"],
            expected["fleet_id"],
        )


@pytest.mark.parametrize(
    "url",
    [
        "macfleet://[pair?token=abcdefgh",
        "macfleet://pair?token=%ff%fe",
        "macfleet://pair?token=abcdefgh&fleet=\udcff",
        "macfleet://pair?" + "&".join(["token=abcdefgh"] * 100),
        "macfleet://pair?token=" + "x" * PAIRING_URL_MAX,
    ],
    ids=lambda url: url[:40],
)
def test_invalid_pairing_urls_are_rejected_without_showing_the_token(url: str) -> None:
    with pytest.raises(ConfigError, match="pairing URL") as caught:
        parse_pairing_url(url)

    assert "abcdefgh" not in str(caught.value)
