"""Arguments of the join command."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

from shoal.cli.pool.join import (
    check_config,
    command,
    normalize_url,
    parse_privacy,
)
from shoal.config import JoinConfig
from shoal.config.loader import Size
from shoal.domain.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "wire", "meant"),
    [
        ("", "auto", ""),
        ("127.0.0.1:4010", "auto", "http://127.0.0.1:4010"),
        ("localhost:4010", "auto", "http://localhost:4010"),
        ("localhost", "auto", "http://localhost:4010"),
        ("localhost", "macfleet", "localhost"),
        ("192.0.2.7", "auto", "http://192.0.2.7:4010"),
        ("::1", "auto", "http://[::1]:4010"),
        ("[::1]:4011", "auto", "http://[::1]:4011"),
        ("https://host", "auto", "https://host"),
        ("nonsense", "auto", "nonsense"),
        ("192.0.2.7:50051", "macfleet", "192.0.2.7:50051"),
    ],
)
def test_bare_address_means_a_coordinator(url: str, wire: str, meant: str) -> None:
    assert normalize_url(url, wire) == meant


@pytest.mark.parametrize(
    "url", ["http://", "http://[::1", "http://host:99999", "http://h:x"]
)
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        normalize_url(url, "auto")


@pytest.mark.parametrize("given", ["private", "PRIVATE"])
def test_privacy_class_is_read_in_any_case(given: str) -> None:
    assert parse_privacy(given) == "private"


def test_unknown_privacy_class_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected any, public or private"):
        parse_privacy("secret")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (JoinConfig(load="all"), "--load all: expected one of none, local, pull"),
        (JoinConfig(lend_for=("k",)), "--lend-for requires --lend-memory"),
        (JoinConfig(lend_memory=Size(1), lend_for=("k",)), "--lend-for k: expected"),
    ],
)
def test_invalid_limit_of_models_is_refused(config: JoinConfig, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_config(config)


HOSTED = JoinConfig(
    engine=("https://provider/v1",), last_resort=True, price_per_million="0.15,0.60"
)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (
            replace(HOSTED, price_per_million=""),
            "such as --price-per-million 0.15,0.60",
        ),
        (replace(HOSTED, engine=()), "name the provider with --engine URL"),
        (replace(HOSTED, load="local"), "a worker of last resort loads no models"),
        (replace(HOSTED, last_resort=False), "is for --last-resort only"),
        (replace(HOSTED, price_per_million="0.15"), "0.15: expected two amounts"),
        (replace(HOSTED, price_per_million="a,b"), "a,b: expected two amounts"),
        (replace(HOSTED, price_per_million="1,99999"), "expected up to \\$10000"),
    ],
)
def test_wrong_setting_of_a_hosted_provider_is_refused(
    config: JoinConfig, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_config(config)


def test_worker_of_last_resort_offers_no_library() -> None:
    assert check_config(HOSTED).load == "none"


def test_short_help_has_what_a_first_user_needs() -> None:
    short = CliRunner().invoke(command, ["--help"]).output

    for option in ("URL", "--model", "--engine", "--token", "--tasks", "--throttle"):
        assert f"  {option}" in short or f"[{option}]" in short
    assert "  --wire" not in short
    assert "  --macfleet-" not in short
    for option in (" --wire, ", " --macfleet-…"):
        assert option in short


def test_long_help_has_the_settings_of_fleets_in_a_section_of_their_own() -> None:
    everything = CliRunner().invoke(command, ["--help-all"]).output

    assert "  --wire WIRE" in everything
    assert (
        "  --macfleet-token TOKEN"
        in everything.partition("\nmacfleet: MacFleet's nodes:\n")[2]
    )
