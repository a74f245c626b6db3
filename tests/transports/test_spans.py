"""Whether spans are exported, and what a user is told who lacks the packages."""

import sys
from collections.abc import Mapping

import pytest

from shoal.domain.errors import ConfigError
from shoal.transports.spans import open_spans, wants_spans

URL = "http://127.0.0.1:4318"


@pytest.mark.parametrize(
    ("endpoint", "environment", "wanted"),
    [
        ("", {}, False),
        (URL, {}, True),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": URL}, True),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}, True),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ("", {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": URL}, False),
        (
            "",
            {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_TRACES_EXPORTER": "none"},
            False,
        ),
        (URL, {"OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_setting_or_standard_variable_turns_traces_on(
    endpoint: str, environment: Mapping[str, str], wanted: bool
) -> None:
    assert wants_spans(endpoint, environment) is wanted


async def test_without_a_collector_nothing_is_imported() -> None:
    before = set(sys.modules)

    async with open_spans("", {}, "shoal", "one") as spans:
        assert spans is None

    assert not {each for each in set(sys.modules) - before if "opentelemetry" in each}


async def test_only_http_is_supported(caplog: pytest.LogCaptureFixture) -> None:
    grpc = {"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}

    async with open_spans("", grpc, "shoal", "one") as spans:
        assert spans is None

    assert "OTLP over grpc is not supported" in caplog.text


async def test_missing_packages_are_named_with_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "shoal.transports.otlp_spans", False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)

    with pytest.raises(ConfigError, match=r"traces need the package .*otel"):
        async with open_spans(URL, {}, "shoal", "one"):
            pass
