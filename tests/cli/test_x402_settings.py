"""Settings that payments need."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shoal.config import X402Config, check_x402
from shoal.config.loader import check_file, load
from shoal.domain.errors import ConfigError

WHOLE = X402Config("https://f.example", "payee", "solana:x", "token")


def test_payment_settings_are_a_separate_table(tmp_path: Path) -> None:
    file = tmp_path / "shoal.toml"
    file.write_text('[x402]\npay_to = "payee"\n')
    check_file(file, {"x402"})

    loaded = load(
        X402Config, "x402", {"asset": "a"}, file, {"SHOAL_X402_NETWORK": "solana:x"}
    )

    assert loaded == X402Config(pay_to="payee", asset="a", network="solana:x")


@pytest.mark.parametrize("chain", ["solana:x", "eip155:8453"])
def test_complete_settings_are_valid(chain: str) -> None:
    check_x402(replace(WHOLE, network=chain, name="USD Coin", version="2"))


@pytest.mark.parametrize("field", ["facilitator", "pay_to", "network", "asset"])
def test_missing_setting_is_named_with_related_ones(field: str) -> None:
    flag = f"--x402-{field.replace('_', '-')}"

    with pytest.raises(
        ConfigError, match=f"{flag}: required for payments, together with"
    ):
        check_x402(load(X402Config, "x402", asdict(WHOLE) | {field: ""}))


def test_absent_settings_are_valid() -> None:
    check_x402(X402Config())


def test_token_on_an_evm_chain_requires_its_domain() -> None:
    with pytest.raises(ConfigError, match="--x402-name: required for payments"):
        check_x402(replace(WHOLE, network="eip155:8453"))


def test_facilitator_must_be_a_url() -> None:
    with pytest.raises(ConfigError, match="expected http:// or https://"):
        check_x402(replace(WHOLE, facilitator="f.example"))
