"""Pairing codes that a worker presents as it joins."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.coordinators import NEVER, Sites
from shoal.cli.worker import run_worker
from shoal.cli.worker.join_target import JoinTarget, resolve_target
from shoal.cli.worker.run_worker import pair_worker, pairing_at
from shoal.domain.errors import ConfigError
from shoal.worker.agent import WorkerEvent

KEY = bytes(range(32))
CLAIM = "/v1/trust/claim"


async def target_at(url: str, wire: str = "dispatch") -> JoinTarget:
    return await resolve_target(url, wire, "", Path("none"))


async def test_pairing_code_is_presented_with_the_key(sites: Sites) -> None:
    posted: list[Any] = []
    answer = {"user_id": "u1", "paired_at": "2026-02-09T12:00:05.000Z"}
    url = await sites({CLAIM: answer}, posted=posted)

    event = await pair_worker(await target_at(url), "a1b2c3", KEY)

    assert event == WorkerEvent("paired", "trusted by u1")
    assert posted == [{"pairing_code": "A1B2C3", "provider_pubkey": KEY.hex()}]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"error": "invalid_code"}, "no such code: ask for a new one"),
        ({"error": "already_claimed"}, "has been used; if this worker did"),
        ({"error": "expired"}, "has expired: ask for a new one"),
        ({"error": {"message": "too many wrong codes"}}, "too many wrong codes"),
        ({"error": "x" * 10_000}, "x" * 300),
        ({"error": 4}, "does not know pairing codes"),
        (["odd"], "does not know pairing codes"),
    ],
)
async def test_refused_code_has_a_remedy(
    sites: Sites, answer: object, message: str
) -> None:
    url = await sites({CLAIM: answer}, status=400)

    event = await pair_worker(await target_at(url), "A1B2C3", KEY)

    assert event.kind == "unpaired"
    assert "--pairing-code" in event.reason
    assert message in event.reason
    assert len(event.reason) < 400


async def test_coordinator_without_pairing_is_reported(sites: Sites) -> None:
    event = await pair_worker(await target_at(await sites({})), "A1B2C3", KEY)

    assert event.kind == "unpaired"
    assert "does not know pairing codes" in event.reason


async def test_unreachable_coordinator_is_reported() -> None:
    event = await pair_worker(await target_at("http://127.0.0.1:1"), "A1B2C3", KEY)

    assert event.kind == "unpaired"
    assert "connection refused; join again" in event.reason
    assert "A1B2C3" not in event.reason


async def test_silent_coordinator_times_out(
    sites: Sites,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_worker, "PAIR_TIMEOUT", 0.05)

    url = await sites({CLAIM: NEVER})
    event = await pair_worker(await target_at(url), "A1B2C3", KEY)

    assert event == WorkerEvent("unpaired", "no answer within 0.05 s; join again")


async def test_wire_without_pairing_codes_is_rejected_by_name() -> None:
    target = await target_at("http://127.0.0.1:1", "grandsage")

    with pytest.raises(
        ConfigError, match="grandsage has no pairing codes; use --wire disp"
    ):
        pairing_at(target)

    pairing_at(replace(target, protocol=(await target_at(target.url)).protocol))
