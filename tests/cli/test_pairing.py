"""What becomes of a pairing code that a worker was given."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.coordinators import NEVER, Sites
from shoal.cli import pairing
from shoal.cli.pairing import check_pairing, pair_up
from shoal.cli.whereto import Target, target
from shoal.domain.errors import ConfigError
from shoal.worker.agent import Happening

KEY = bytes(range(32))
CLAIM = "/v1/trust/claim"


async def place(url: str, wire: str = "dispatch") -> Target:
    return await target(url, wire, "", Path("none"))


async def test_a_code_is_presented_with_the_key(sites: Sites) -> None:
    posted: list[Any] = []
    answer = {"user_id": "u1", "paired_at": "2026-02-09T12:00:05.000Z"}
    url = await sites({CLAIM: answer}, posted=posted)

    told = await pair_up(await place(url), "a1b2c3", KEY)

    assert told == Happening("paired", "trusted by u1")
    assert posted == [{"pairing_code": "A1B2C3", "provider_pubkey": KEY.hex()}]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"error": "invalid_code"}, "no such code: ask for a new one"),
        ({"error": "already_claimed"}, "has been used; if this worker did"),
        ({"error": "expired"}, "has expired: ask for a new one"),
        ({"error": {"message": "too many wrong codes"}}, "too many wrong codes"),
        ({"error": "x" * 10_000}, "x" * 300),
        ({"error": 4}, "knows nothing of pairing codes"),
        (["odd"], "knows nothing of pairing codes"),
    ],
)
async def test_a_refusal_says_what_to_do(
    sites: Sites, answer: object, said: str
) -> None:
    url = await sites({CLAIM: answer}, status=400)

    told = await pair_up(await place(url), "A1B2C3", KEY)

    assert told.event == "unpaired"
    assert "--pairing-code" in told.reason
    assert said in told.reason
    assert len(told.reason) < 400


async def test_a_coordinator_without_pairing_is_told(sites: Sites) -> None:
    told = await pair_up(await place(await sites({})), "A1B2C3", KEY)

    assert told.event == "unpaired"
    assert "knows nothing of pairing codes" in told.reason


async def test_one_that_is_away_is_told() -> None:
    told = await pair_up(await place("http://127.0.0.1:1"), "A1B2C3", KEY)

    assert told.event == "unpaired"
    assert "connection refused; join again" in told.reason
    assert "A1B2C3" not in told.reason


async def test_one_that_does_not_answer_is_not_waited_for(
    sites: Sites,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pairing, "PAIR_LIMIT", 0.05)

    url = await sites({CLAIM: NEVER})
    told = await pair_up(await place(url), "A1B2C3", KEY)

    assert told == Happening("unpaired", "no answer within 0.05 s; join again")


async def test_a_wire_without_codes_is_refused_by_name() -> None:
    there = await place("http://127.0.0.1:1", "grandsage")

    with pytest.raises(ConfigError, match="grandsage has no such codes; --wire disp"):
        check_pairing(there)

    check_pairing(replace(there, protocol=(await place(there.url)).protocol))
