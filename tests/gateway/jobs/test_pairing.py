"""Pairing codes: creation, claims, limits and guesses."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.keys import make_key, request
from gateway.providers import COMMIT, call, committed, provider
from gateway.serving import Pool, serving
from gateway.shoal_worker import ONE_TASK, shoal_worker
from originals.dispatch import sdk_reports
from protocols.dispatch.recorded import SIGNERS
from shoal.coordinator.auth_throttle import BLOCK_AFTER, CODE_FAILURES_MAX
from shoal.gateway.context import PaidJobsGateway
from shoal.gateway.jobs import pairing
from shoal.gateway.jobs.pairing import LIFETIME, WAITING_MAX
from shoal.protocols.dispatch import Config
from shoal.store.port import PairingCode

pytestmark = pytest.mark.shared_pool

A, B = (SIGNERS[name].public_key.hex() for name in "AB")
CREATE, CLAIM, LIST = ("/v1/trust/create", "/v1/trust/claim", "/v1/trust/list")
UNSOUND = "00" * 32  # a key of small order: any signature is valid


@pytest.fixture(scope="module")
def pool_options() -> dict[str, Any]:
    return {"wires": {"dispatch": Config(open=True)}}


async def code_of(pool: Pool, user: str = "u1") -> str:
    """Create a code; return it."""
    status, answer = await call(pool, "POST", CREATE, {"user_id": user})
    assert status == 201, answer
    return str(answer["pairing_code"])


async def claim(pool: Pool, code: str, key: str = A) -> tuple[int, Any]:
    body = {"pairing_code": code, "provider_pubkey": key}
    return await call(pool, "POST", CLAIM, body)


async def partners(pool: Pool, user: str = "u1") -> list[str]:
    status, answer = await call(pool, "GET", f"{LIST}?user_id={user}")
    assert status == 200, answer
    return [each["provider_pubkey"] for each in answer["providers"]]


async def test_worker_that_claims_a_code_gets_private_jobs(pool: Pool) -> None:
    code = await code_of(pool)
    assert re.fullmatch("[0-9A-F]{15}", code)  # 60 bits

    status, answer = await claim(pool, code)

    assert (status, answer["user_id"]) == (200, "u1")
    assert await partners(pool) == [A]
    async with shoal_worker(pool, ONE_TASK, signer=SIGNERS["A"]) as worker:
        job_id = await committed(pool, privacy_class="PRIVATE")
        assert (await worker.job()).job_id == job_id


@pytest.mark.own_pool
async def test_worker_that_has_not_proved_its_key_cannot_be_paired(pool: Pool) -> None:
    code = await code_of(pool)
    async with provider(pool):  # as original workers are
        status, answer = await claim(pool, code)
        private = COMMIT | {"privacy_class": "PRIVATE"}
        refused, why = await call(pool, "POST", "/v1/jobs/commit/fast", private)

    assert status == 400
    assert answer["error"].startswith("unproven_key: this worker has not proved its")
    assert "--dispatch-trust-unproven" in answer["error"]
    assert sdk_reports(refused, why) == (
        "Privacy enforcement: no_trusted_worker: only paired workers may run a private "
        "job, and no worker is paired with the user; one that is connected has not "
        "proved its key: "
        "it gets private jobs only if the coordinator runs with "
        "--dispatch-trust-unproven"
    )
    assert await partners(pool) == []
    async with shoal_worker(pool, ONE_TASK, signer=SIGNERS["A"]):
        assert (await claim(pool, code))[0] == 200


async def test_worker_that_names_a_key_is_paired_if_the_coordinator_trusts_it(
    tmp_path: Path,
) -> None:
    wires = {"dispatch": Config(open=True, trust_unproven=True)}
    async with serving(tmp_path, wires=wires) as pool, provider(pool) as worker:
        assert (await claim(pool, await code_of(pool)))[0] == 200
        job_id = await committed(pool, privacy_class="PRIVATE")
        assert (await worker.job())["job_id"] == job_id


async def test_revoked_worker_gets_no_more_private_jobs(pool: Pool) -> None:
    code = await code_of(pool)
    await claim(pool, code)
    async with shoal_worker(pool, ONE_TASK, signer=SIGNERS["A"]) as worker:
        running = await committed(pool, privacy_class="PRIVATE")
        await worker.job()
        waiting = await committed(pool, privacy_class="PRIVATE")

        revoked = await call(pool, "DELETE", f"/v1/trust/{A.upper()}?user_id=u1")
        private = COMMIT | {"privacy_class": "PRIVATE"}
        refused, _ = await call(pool, "POST", "/v1/jobs/commit/fast", private)
        await worker.answer('{"done":true}')
        public = await committed(pool)
        given = await worker.job(1)

    assert revoked == (200, {"user_id": "u1", "provider_pubkey": A})
    assert refused == 422
    assert given.job_id == public != waiting
    assert (await call(pool, "GET", f"/v1/jobs/{running}"))[1]["status"] == "completed"
    assert await partners(pool) == []


async def test_code_of_a_revoked_worker_does_not_pair_it_again(pool: Pool) -> None:
    code = await code_of(pool)
    await claim(pool, code)

    await call(pool, "DELETE", f"/v1/trust/{A}?user_id=u1")

    assert await claim(pool, code) == (400, {"error": "invalid_code"})
    assert await partners(pool) == []


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        (f"{A}?user_id=u2", 404, "this worker is not paired with the user"),
        (f"{B}?user_id=u1", 404, "this worker is not paired with the user"),
        (A, 400, "Missing user_id query param"),
        (f"{A}?user_id=", 400, "Missing user_id query param"),
        ("abc?user_id=u1", 400, "provider_pubkey: expected an Ed25519 public key"),
    ],
)
async def test_only_a_pairing_of_the_user_can_be_revoked(
    pool: Pool, path: str, status: int, error: str
) -> None:
    await claim(pool, await code_of(pool))

    found, answer = await call(pool, "DELETE", f"/v1/trust/{path}")

    assert found == status
    assert answer["error"].startswith(error)
    assert await partners(pool) == [A]


async def test_revocation_outlives_a_restart(tmp_path: Path) -> None:
    wires = {"dispatch": Config(open=True)}
    async with serving(tmp_path, wires=wires) as pool:
        await claim(pool, await code_of(pool))
        await claim(pool, await code_of(pool), B)
        await call(pool, "DELETE", f"/v1/trust/{A}?user_id=u1")

    async with serving(tmp_path, wires=wires) as pool:
        assert await partners(pool) == [B]


async def test_code_is_claimed_once(pool: Pool) -> None:
    code = await code_of(pool)
    assert (await claim(pool, code))[0] == 200

    assert await claim(pool, code) == (400, {"error": "already_claimed"})
    assert await claim(pool, code, B) == (400, {"error": "already_claimed"})
    assert await partners(pool) == [A]


async def test_one_of_two_concurrent_claims_succeeds(pool: Pool) -> None:
    code = await code_of(pool)

    answers = await asyncio.gather(*(claim(pool, code, key) for key in (A, B)))

    assert sorted(status for status, _ in answers) == [200, 400]
    assert len(await partners(pool)) == 1


@pytest.mark.own_pool
async def test_code_expires(pool: Pool) -> None:
    assert pool.gateway is not None
    past = pool.gateway.clock.wall() - 1
    old = PairingCode("ABCDEF", "open", "u1", past)
    await pool.gateway.store.pairing.add(old)

    assert await claim(pool, "ABCDEF") == (400, {"error": "expired"})
    assert await partners(pool) == []


async def test_code_is_valid_for_an_hour(pool: Pool) -> None:
    assert pool.gateway is not None
    before = pool.gateway.clock.wall()

    (found,) = await pool.gateway.store.pairing.find(await code_of(pool))

    assert LIFETIME == 3600
    assert 0 <= found.expires_at - LIFETIME - before < 60


async def test_code_is_claimed_as_people_write_it(pool: Pool) -> None:
    code = await code_of(pool)

    written = f" {code[:5].lower()}-{code[5:10]} {code[10:]}\n"
    assert (await claim(pool, written, A.upper()))[0] == 200
    assert await partners(pool) == [A]


@pytest.mark.own_pool
async def test_interrupted_claim_is_completed_by_the_next(pool: Pool) -> None:
    assert pool.gateway is not None
    code = await code_of(pool)
    # As if the coordinator had been killed at that moment.
    pairing, at = pool.gateway.store.pairing, pool.gateway.clock.wall()
    assert await pairing.claim(code, A, at)
    assert await partners(pool) == []

    assert await claim(pool, code) == (400, {"error": "already_claimed"})

    assert await partners(pool) == [A]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "Missing pairing_code or provider_pubkey"),
        ([], "the body: expected"),
        ({"pairing_code": "ABCDEF"}, "Missing pairing_code or provider_pubkey"),
        ({"provider_pubkey": A}, "Missing pairing_code or provider_pubkey"),
        ({"pairing_code": "", "provider_pubkey": A}, "Missing pairing_code"),
        ({"pairing_code": 5, "provider_pubkey": A}, "pairing_code: expected"),
        ({"pairing_code": "ABCDEF", "provider_pubkey": 5}, "provider_pubkey: expected"),
    ],
)
async def test_invalid_claim_is_rejected(pool: Pool, body: Any, said: str) -> None:
    status, answer = await call(pool, "POST", CLAIM, body)

    assert status == 400
    assert said in answer["error"]


@pytest.mark.parametrize("key", ["p", A[:-1], A + "0", "g" * 64, f" {A}", UNSOUND])
async def test_invalid_key_is_rejected_and_the_code_stays_valid(
    pool: Pool, key: str
) -> None:
    code = await code_of(pool)

    status, answer = await claim(pool, code, key)

    assert status == 400
    assert answer["error"].startswith("provider_pubkey: ")
    assert (await claim(pool, code))[0] == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "Missing user_id"),
        ({"user_id": ""}, "Missing user_id"),
        ({"user_id": None}, "Missing user_id"),
        ({"user_id": {}}, "user_id: expected"),
        ({"user_id": "u" * 257}, "user_id: more than 256 characters"),
    ],
)
async def test_code_without_a_user_is_rejected(
    pool: Pool, body: Any, said: str
) -> None:
    status, answer = await call(pool, "POST", CREATE, body)

    assert status == 400
    assert said in answer["error"]


async def test_list_without_a_user_is_rejected(pool: Pool) -> None:
    for query in ("", "?user_id=", "?other=1"):
        expected = (400, {"error": "Missing user_id query param"})
        assert await call(pool, "GET", LIST + query) == expected


@pytest.mark.own_pool
async def test_guesses_are_rate_limited(pool: Pool) -> None:
    code = await code_of(pool)

    for number in range(BLOCK_AFTER):
        guess = f"{number:05X}{code[5:]}"
        assert await claim(pool, guess) == (400, {"error": "invalid_code"})

    for presented in (f"{99:05X}{code[5:]}", code):
        status, answer = await claim(pool, presented)
        assert (status, list(answer)) == (429, ["error"])
        assert "wrong pairing codes from this address" in answer["error"]
    assert await partners(pool) == []


@pytest.mark.own_pool
async def test_code_has_a_budget_of_failures(pool: Pool) -> None:
    # As if somebody had seen the beginning of a code.
    code, other = await code_of(pool), await code_of(pool)
    for number in range(CODE_FAILURES_MAX):
        guess = f"{code[:5]}{number:010X}"
        assert await claim(pool, guess) == (400, {"error": "invalid_code"})

    status, answer = await claim(pool, code)

    assert status == 429
    assert "too many wrong codes that begin like this one" in answer["error"]
    assert (await claim(pool, other))[0] == 200


@pytest.mark.own_pool
@pytest.mark.parametrize("digits", [1, 4, 5, 14])
async def test_beginning_of_a_code_is_no_code(pool: Pool, digits: int) -> None:
    code = await code_of(pool)

    assert await claim(pool, code[:digits]) == (400, {"error": "invalid_code"})
    assert await claim(pool, " - ") == (400, {"error": "invalid_code"})


@pytest.mark.own_pool
async def test_unclaimed_codes_are_limited(pool: Pool) -> None:
    assert pool.gateway is not None
    at = pool.gateway.clock.wall() + 60
    for number in range(WAITING_MAX):
        code = PairingCode(f"{number:06X}", "open", "u1", at)
        assert await pool.gateway.store.pairing.add(code)

    status, answer = await call(pool, "POST", CREATE, {"user_id": "u2"})

    assert status == 429
    assert "100 pairing codes of this key are unclaimed" in answer["error"]
    # Other addresses have their own limit.
    assert (await request(pool, "POST", CREATE, {"user_id": "u2"}))[0] == 201


@pytest.mark.own_pool
async def test_partners_of_a_key_are_limited(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairing, "PAIRED_MAX", 1)
    assert (await claim(pool, await code_of(pool)))[0] == 200

    status, answer = await call(pool, "POST", CREATE, {"user_id": "u2"})

    assert status == 400
    assert "1 workers are paired with the users of this key" in answer["error"]
    assert (await request(pool, "POST", CREATE, {"user_id": "u2"}))[0] == 201


@pytest.mark.parametrize("path", [CREATE, CLAIM])
async def test_anonymous_bodies_are_limited(pool: Pool, path: str) -> None:
    status, answer = await call(pool, "POST", path, {"pairing_code": "a" * 5000})

    assert status == 413
    assert "4096 bytes" in answer["error"]


@pytest.mark.own_pool
async def test_colliding_code_is_redrawn(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pool.gateway is not None
    drawn = iter(["abcdef", "abcdef", "123456"])
    drawing = replace(pool.gateway, new_secret=lambda: next(drawn))
    gateway = drawing.select(PaidJobsGateway)

    codes = [await pairing._new_code(gateway, "open", "u", 1e12) for _ in range(2)]

    assert [each.code for each in codes] == ["ABCDEF", "123456"]


@pytest.mark.own_pool
async def test_partners_are_visible_to_their_owner_only(pool: Pool) -> None:
    key = await make_key(pool)
    status, answer = await request(pool, "POST", CREATE, {"user_id": "u1"}, key=key)
    assert status == 201
    assert (await claim(pool, answer["pairing_code"]))[0] == 200

    assert await partners(pool) == []
    status, mine = await request(pool, "GET", f"{LIST}?user_id=u1", key=key)
    assert [each["provider_pubkey"] for each in mine["providers"]] == [A]
    async with shoal_worker(pool, ONE_TASK, signer=SIGNERS["A"]):
        private = COMMIT | {"privacy_class": "PRIVATE"}
        assert (await call(pool, "POST", "/v1/jobs/commit/fast", private))[0] == 422
        path = "/v1/jobs/commit/fast"
        assert (await request(pool, "POST", path, private, key=key))[0] == 201


async def test_pairing_survives_a_restart(tmp_path: Path) -> None:
    wires = {"dispatch": Config(open=True)}
    async with serving(tmp_path, wires=wires) as pool:
        await claim(pool, await code_of(pool))
        left = await code_of(pool)
    async with serving(tmp_path, wires=wires) as pool:
        await pool.hub.restore()
        assert await partners(pool) == [A]
        assert (await claim(pool, left, B))[0] == 200
        async with shoal_worker(pool, ONE_TASK, signer=SIGNERS["A"]) as worker:
            await committed(pool, privacy_class="PRIVATE")
            await worker.job()
