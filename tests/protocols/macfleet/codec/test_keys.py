"""A fleet's key, and its service type."""

import pytest

from protocols.macfleet.recorded import Case, recorded
from shoal.domain.errors import ConfigError
from shoal.protocols.macfleet.codec.keys import fleet_key, service_type


@recorded("key_derivation")
def test_keys_and_services_equal_those_of_upstream(case: Case) -> None:
    token, fleet = case["input"]["token"], case["input"]["fleet_id"] or ""
    expected = case["expect"]

    if "error" in expected:
        with pytest.raises(ConfigError, match="at least 8 characters"):
            fleet_key(token, fleet)
        return

    key = None if token is None else fleet_key(token, fleet)
    assert (None if key is None else key.hex()) == expected["fleet_key_hex"]
    assert f"{service_type(key)}.local." == expected["mdns_service_type"]


def test_a_token_that_is_not_utf8_is_rejected() -> None:
    with pytest.raises(ConfigError, match="UTF-8"):
        fleet_key("12345678\udc80")
