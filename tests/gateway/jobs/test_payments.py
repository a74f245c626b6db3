"""Jobs paid by x402, with a local facilitator over real sockets."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from gateway.facilitator import SOLANA, Facilitator, run_facilitator
from gateway.providers import provider
from gateway.serving import Pool, eventually, serving
from gateway.shoal_worker import ONE_TASK, shoal_worker
from protocols.contexts import SIGNER
from protocols.dispatch.recorded import CASES
from shoal.domain.errors import ConfigError
from shoal.domain.ids import JobId
from shoal.gateway.jobs.x402 import Seller, X402Payments
from shoal.pool.inputs import WorkerPaired
from shoal.protocols.dispatch import Config
from transports.certificates import issue

WIRES = {"dispatch": Config(open=True)}
PAY_TO = "4Nd1mBQtrMJVYVfKf2PJy9NZUZdTAsp7D4xWLs4gDB4T"
ASSET = "4zMMC9srt5Ri5X14GAgXhaHii3GnPAEERYPJgZJDncDU"
CHAT = '{"job_type":"LLM_INFER","user_id":"u","payload":{"prompt":"x"}}'
FAST = "/v1/jobs/commit/fast"
PAID = CASES["x402-solana-paid"]["request"]["headers"]["decoded"]
NOTHING_ACCEPTED: dict[str, Any] = {"jobs": [], "next": None}


@dataclass(frozen=True, slots=True)
class PaidResponse:
    """A response with decoded payment headers."""

    status: int
    body: str
    headers: Mapping[str, str]

    @property
    def required(self) -> Any:
        return self._decoded("PAYMENT-REQUIRED")

    @property
    def paid(self) -> Any:
        return self._decoded("PAYMENT-RESPONSE")

    def _decoded(self, name: str) -> Any:
        text = self.headers.get(name)
        return None if text is None else json.loads(base64.b64decode(text))


@asynccontextmanager
async def selling(
    folder: Path, facilitator: Facilitator, **options: Any
) -> AsyncIterator[Pool]:
    """Run a coordinator that charges for jobs."""
    payments = X402Payments(
        Seller(facilitator.url, PAY_TO, facilitator.network, ASSET, **options)
    )
    try:
        async with serving(folder, wires=WIRES, payments=payments) as pool:
            yield pool
    finally:
        await payments.close()


@pytest.fixture(scope="module", autouse=True)
def few_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For the clients of facilitators, which else read all of the system's."""
    issued = issue(tmp_path_factory.mktemp("authority"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(issued.authority))
        yield


@pytest.fixture
async def facilitator() -> AsyncIterator[Facilitator]:
    async with run_facilitator() as running:
        yield running


@pytest.fixture
async def pool(tmp_path: Path, facilitator: Facilitator) -> AsyncIterator[Pool]:
    async with selling(tmp_path, facilitator) as running:
        yield running


def encoded(payment: object) -> str:
    return base64.b64encode(json.dumps(payment).encode()).decode()


async def commit(
    pool: Pool,
    body: str = CHAT,
    path: str = FAST,
    headers: Mapping[str, str] | None = None,
) -> PaidResponse:
    async with pool.session.post(
        pool.url + path,
        data=body,
        headers={"Content-Type": "application/json"} | dict(headers or {}),
    ) as response:
        return PaidResponse(response.status, await response.text(), response.headers)


async def pay(pool: Pool, payment: object = PAID, **more: str) -> PaidResponse:
    return await commit(pool, headers={"PAYMENT-SIGNATURE": encoded(payment)} | more)


async def accepted(pool: Pool) -> Any:
    async with pool.session.get(f"{pool.url}/v1/jobs") as response:
        return await response.json()


def balance(pool: Pool, account: str) -> int:
    return pool.hub.books.balance(account)


SAME = [
    "x402-solana-fast-unpaid",
    "x402-solana-cheap-unpaid",
    "x402-solana-x-payment-ignored",
    "x402-solana-paid",
    "x402-solana-invalid-payment",
    "x402-solana-wrong-amount",
]
"""The recorded exchanges that must match."""


@pytest.mark.parametrize("name", SAME)
async def test_exchange_matches_the_recording(
    pool: Pool, facilitator: Facilitator, name: str
) -> None:
    case = CASES[name]
    asked, answered = case["request"], case["response"]
    headers = {}
    if asked["headers"] is not None:
        headers = {asked["headers"]["name"]: encoded(asked["headers"]["decoded"])}
    if name == "x402-solana-invalid-payment":
        facilitator.refuses = "insufficient_funds"

    answer = await commit(pool, asked["body"], asked["path"], headers)

    assert answer.status == answered["status"]
    assert answer.headers["Content-Type"].startswith("application/json")
    if answered["status"] == 201:
        assert json.loads(answer.body).keys() == {"job_id"}
    else:
        assert answer.body == answered["body"]
        assert await accepted(pool) == NOTHING_ACCEPTED
    required = answered["payment_required_header_decoded"]
    if required is not None:
        host = pool.url.removeprefix("http://")
        url = required["resource"]["url"].replace("<host>", host)
        required = required | {"resource": required["resource"] | {"url": url}}
    assert answer.required == required
    assert answer.paid == answered["payment_response_header_decoded"]
    assert facilitator.calls == [each["path"] for each in case["facilitator_calls"]]


async def test_every_recorded_exchange_is_tested() -> None:
    recorded = {name for name, case in CASES.items() if case["kind"] == "x402"}

    assert recorded == {
        *SAME,
        "x402-solana-paid-task-on-fast",
        "x402-solana-paid-bad-body",
        "x402-monad-fast-unpaid",
    }


async def test_price_depends_on_the_job_and_not_on_the_path(
    pool: Pool, facilitator: Facilitator
) -> None:
    # The original charges the price of a chat, three times its own quote.
    asked = CASES["x402-solana-paid-task-on-fast"]["request"]
    dear = {"PAYMENT-SIGNATURE": encoded(asked["headers"]["decoded"])}

    answer = await commit(pool, asked["body"], asked["path"], dear)

    assert answer.status == 402
    (terms,) = answer.required["accepts"]
    assert terms["amount"] == "3000"
    assert facilitator.calls == []
    payment = PAID | {"accepted": terms}
    headers = {"PAYMENT-SIGNATURE": encoded(payment)}
    assert (await commit(pool, asked["body"], asked["path"], headers)).status == 201


async def test_invalid_request_is_not_charged(
    pool: Pool, facilitator: Facilitator
) -> None:
    case = CASES["x402-solana-paid-bad-body"]
    headers = {"PAYMENT-SIGNATURE": encoded(PAID)}

    answer = await commit(pool, case["request"]["body"], FAST, headers)

    assert answer.status == case["response"]["status"]
    assert answer.body == case["response"]["body"]
    assert answer.paid is None
    # The original requires the payment first.
    assert facilitator.calls == []


async def test_missing_network_is_named(
    tmp_path: Path, facilitator: Facilitator
) -> None:
    facilitator.network = "eip155:10143"
    domain = {"name": "USDC", "version": "2"}
    async with selling(tmp_path, facilitator, extra=domain) as pool:
        answer = await commit(pool)

    assert answer.status == 402
    (terms,) = answer.required["accepts"]
    assert (terms["network"], terms["asset"]) == ("eip155:10143", ASSET)
    assert terms["extra"] == domain


async def test_facilitator_receives_the_payment_and_its_terms(
    pool: Pool, facilitator: Facilitator
) -> None:
    await pay(pool)

    verified, settled = facilitator.bodies
    assert verified == settled
    assert verified["x402Version"] == 2
    assert verified["paymentPayload"]["payload"] == {"transaction": "AAAA"}
    assert verified["paymentRequirements"] == PAID["accepted"]


async def test_receipt_names_the_payment(pool: Pool) -> None:
    async with provider(pool) as worker:
        job_id = json.loads((await pay(pool)).body)["job_id"]
        await worker.complete((await worker.job())["job_id"], {"text": "y"})
        async with pool.session.get(f"{pool.url}/v1/jobs/{job_id}") as response:
            receipt = (await response.json())["coordinator_receipt"]

    assert json.loads(receipt["body"])["payment_ref"] == "TX"


async def test_payment_is_credited_to_the_charged_account(pool: Pool) -> None:
    await pay(pool)

    assert balance(pool, "user:open/u") == 0
    assert balance(pool, "pool:held") == 10_000
    assert balance(pool, "world") == -10_000


async def test_payment_of_a_failed_job_stays_credited(pool: Pool) -> None:
    job_id = json.loads((await pay(pool)).body)["job_id"]

    await pool.session.delete(f"{pool.url}/v1/jobs/{job_id}")

    assert balance(pool, "user:open/u") == 10_000
    assert balance(pool, "pool:held") == 0


BROKEN = {
    "no base64": "%%%",
    "no JSON": base64.b64encode(b"{").decode(),
    "no object": encoded([1]),
    "another version": encoded({"x402Version": 1, "scheme": "exact"}),
    "nothing in it": encoded({"x402Version": 2}),
    "nested deep": base64.b64encode(b"[" * 4000).decode(),
    "no text": base64.b64encode(b"\xff\xfe").decode(),
    "empty": "",
}


async def test_unreadable_payment_is_requested_again(
    pool: Pool, facilitator: Facilitator, subtests: pytest.Subtests
) -> None:
    for name, header in BROKEN.items():
        answer = await commit(pool, headers={"PAYMENT-SIGNATURE": header})

        with subtests.test(name):
            assert (answer.status, answer.body) == (402, "{}")
            assert "expected an x402 version 2 payment" in answer.required["error"]
            assert facilitator.calls == []


OTHERS = {
    "less": {"amount": "9999"},
    "more": {"amount": "10001"},
    "to another": {"payTo": ASSET},
    "in another token": {"asset": PAY_TO},
    "on another chain": {"network": "solana:other"},
    "by another scheme": {"scheme": "upto"},
    "for longer": {"maxTimeoutSeconds": 301},
    "fees by another": {"extra": {"feePayer": PAY_TO}},
}


async def test_payment_on_other_terms_is_rejected(
    pool: Pool, facilitator: Facilitator, subtests: pytest.Subtests
) -> None:
    for name, change in OTHERS.items():
        answer = await pay(pool, PAID | {"accepted": PAID["accepted"] | change})

        with subtests.test(name):
            assert answer.status == 402
            assert answer.required["error"] == "No matching payment requirements"
            assert facilitator.calls == []


async def test_unsettled_payment_is_rejected(
    pool: Pool, facilitator: Facilitator
) -> None:
    facilitator.settlement = {
        "success": False,
        "errorReason": "transaction_failed",
        "transaction": "",
    }

    answer = await pay(pool)

    assert (answer.status, answer.body) == (402, "{}")
    assert answer.required["error"] == "transaction_failed"
    assert answer.paid["success"] is False
    assert await accepted(pool) == NOTHING_ACCEPTED
    assert balance(pool, "world") == 0


async def test_one_payment_pays_for_one_job(
    pool: Pool, facilitator: Facilitator
) -> None:
    # A facilitator that settles a payment twice and reports success.
    first = await pay(pool)

    second = await pay(pool)

    assert (first.status, second.status) == (201, 402)
    assert second.required["error"] == "payment_already_used"
    assert len((await accepted(pool))["jobs"]) == 1
    assert balance(pool, "world") == -10_000


SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the same": ({"transaction": "AAAA"}, {"transaction": "AAAA"}),
    "an authorization, signed again": (
        {"signature": "0x1", "authorization": {"from": "0xAb", "nonce": "0x0A"}},
        {"signature": "0x2", "authorization": {"from": "0xab", "nonce": "0xa"}},
    ),
    "a transaction, signed again": (
        {"transaction": base64.b64encode(b"\1" + b"s" * 64 + b"message").decode()},
        {"transaction": base64.b64encode(b"\1" + b"t" * 64 + b"message").decode()},
    ),
    "in an unknown form": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
}


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nonces": (
        {"authorization": {"from": "0xab", "nonce": "0x0a"}},
        {"authorization": {"from": "0xab", "nonce": "0x0b"}},
    ),
    "payers": (
        {"authorization": {"from": "0xab", "nonce": "0x0a"}},
        {"authorization": {"from": "0xac", "nonce": "0x0a"}},
    ),
    "transactions": ({"transaction": "AAAA"}, {"transaction": "AAAB"}),
    "forms": ({"transaction": ""}, {"authorization": {"from": "a", "nonce": "x"}}),
}


async def pay_twice(
    pool: Pool, facilitator: Facilitator, first: Any, second: Any
) -> tuple[PaidResponse, PaidResponse]:
    """Pay with two payloads, each of which the facilitator settles."""
    paid = await pay(pool, PAID | {"payload": first})
    facilitator.transaction = "TX2"
    return paid, await pay(pool, PAID | {"payload": second})


@pytest.mark.parametrize("payloads", SPELLINGS.values(), ids=SPELLINGS)
async def test_facilitator_that_settles_twice_pays_for_one_job(
    pool: Pool, facilitator: Facilitator, payloads: tuple[Any, Any]
) -> None:
    paid, again = await pay_twice(pool, facilitator, *payloads)

    assert (paid.status, again.status) == (201, 402)
    assert again.required["error"] == "payment_already_used"
    assert len((await accepted(pool))["jobs"]) == 1


@pytest.mark.parametrize("payloads", DIFFERENT.values(), ids=DIFFERENT)
async def test_different_payments_pay_for_different_jobs(
    pool: Pool, facilitator: Facilitator, payloads: tuple[Any, Any]
) -> None:
    paid, other = await pay_twice(pool, facilitator, *payloads)

    assert (paid.status, other.status) == (201, 201)


async def test_concurrent_use_of_one_payment_gives_one_job(
    pool: Pool, facilitator: Facilitator
) -> None:
    facilitator.holds = True

    async with asyncio.TaskGroup() as tasks:
        both = [tasks.create_task(pay(pool)) for _ in range(2)]
        await eventually(lambda: facilitator.calls.count("/settle") == 2)
        facilitator.settling.set()

    assert sorted(each.result().status for each in both) == [201, 402]


async def test_used_payment_survives_a_restart(
    tmp_path: Path, facilitator: Facilitator
) -> None:
    async with selling(tmp_path, facilitator) as pool:
        await pay(pool)
    async with selling(tmp_path, facilitator) as pool:
        again = await pay(pool)

    assert again.status == 402


async def test_repeated_key_is_not_charged_again(
    pool: Pool, facilitator: Facilitator
) -> None:
    first = await pay(pool, **{"Idempotency-Key": "k"})

    second = await commit(pool, headers={"Idempotency-Key": "k"})

    assert (first.status, second.status) == (201, 201)
    assert first.body == second.body
    assert facilitator.calls == ["/verify", "/settle"]


async def test_concurrent_requests_of_one_key_pay_once(
    pool: Pool, facilitator: Facilitator
) -> None:
    facilitator.holds = True
    other = PAID | {"payload": {"transaction": "BBBB"}}
    key = {"Idempotency-Key": "k"}

    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(pay(pool, **key))
        await eventually(lambda: "/settle" in facilitator.calls)
        second = await pay(pool, other, **key)
        facilitator.settling.set()
    third = await pay(pool, other, **key)

    assert (first.result().status, second.status, third.status) == (201, 503, 201)
    assert third.body == first.result().body
    assert facilitator.calls == ["/verify", "/settle"]


async def test_paid_job_runs_after_a_disconnect(
    pool: Pool, facilitator: Facilitator
) -> None:
    facilitator.holds = True
    async with ClientSession() as leaving:
        asking = asyncio.ensure_future(
            leaving.post(
                pool.url + FAST,
                data=CHAT,
                headers={
                    "Content-Type": "application/json",
                    "PAYMENT-SIGNATURE": encoded(PAID),
                },
            )
        )
        await eventually(lambda: "/settle" in facilitator.calls)
        asking.cancel()
        await asyncio.wait([asking])

    facilitator.settling.set()

    await eventually(lambda: len(pool.hub.pool.jobs) == 1)
    (opened,) = pool.hub.pool.jobs.values()
    assert opened.job.terms.payment_ref == "TX"


async def test_ineligible_private_job_is_not_charged(
    pool: Pool, facilitator: Facilitator
) -> None:
    body = json.dumps(json.loads(CHAT) | {"privacy_class": "PRIVATE"})

    answer = await commit(pool, body, headers={"PAYMENT-SIGNATURE": encoded(PAID)})

    assert answer.status == 422
    assert facilitator.calls == []


async def test_eligible_private_job_is_charged(
    pool: Pool, facilitator: Facilitator
) -> None:
    body = json.dumps(json.loads(CHAT) | {"privacy_class": "PRIVATE"})
    async with shoal_worker(pool, ONE_TASK, signer=SIGNER):
        (worker,) = pool.hub.pool.workers.values()
        await pool.hub.process(WorkerPaired("open", "u", worker.offer.public_key))

        answer = await commit(pool, body, headers={"PAYMENT-SIGNATURE": encoded(PAID)})

    assert answer.status == 201
    assert facilitator.calls == ["/verify", "/settle"]


async def test_job_rejected_by_a_full_queue_is_not_charged(
    tmp_path: Path, facilitator: Facilitator
) -> None:
    payments = X402Payments(Seller(facilitator.url, PAY_TO, SOLANA, ASSET))
    try:
        async with serving(
            tmp_path, wires=WIRES, payments=payments, queue_max=1
        ) as pool:
            await pay(pool)
            facilitator.calls.clear()
            answer = await pay(pool)
    finally:
        await payments.close()

    assert answer.status == 429
    assert facilitator.calls == []


@pytest.mark.parametrize("path", ["/supported", "/verify", "/settle"])
async def test_failing_facilitator_rejects_jobs_with_a_reason(
    pool: Pool, facilitator: Facilitator, path: str, subtests: pytest.Subtests
) -> None:
    for status in (500, 302, 404):
        facilitator.statuses[path] = status

        answer = await pay(pool)

        with subtests.test(status=status):
            assert answer.status == 503
            assert "Retry-After" in answer.headers
            text = json.loads(answer.body)["error"]
            assert text.startswith("payments cannot be checked, the facilitator fails:")
            assert str(status) in text
            assert ("may have gone through" in text) == (path == "/settle")
            assert await accepted(pool) == NOTHING_ACCEPTED


async def test_unreachable_facilitator_rejects_jobs_until_it_returns(
    tmp_path: Path,
) -> None:
    absent = Facilitator(url="http://127.0.0.1:1")
    async with selling(tmp_path, absent) as pool:
        answer = await pay(pool)

        assert answer.status == 503
        assert await accepted(pool) == NOTHING_ACCEPTED


async def test_clients_are_not_told_the_address_of_the_facilitator(
    pool: Pool, facilitator: Facilitator, caplog: pytest.LogCaptureFixture
) -> None:
    facilitator.network = "eip155:8453"  # another than the seller's

    answer = await pay(pool)

    assert answer.status == 503
    assert "it does not accept such payments" in json.loads(answer.body)["error"]
    assert facilitator.url not in answer.body
    assert facilitator.url in caplog.text  # whoever runs the coordinator is


async def test_invalid_facilitator_address_is_named() -> None:
    payments = X402Payments(Seller("http://[::1?key=s3cret", PAY_TO, SOLANA, ASSET))
    try:
        with pytest.raises(
            ConfigError, match=r"--x402-facilitator http://\[::1:"
        ) as caught:
            await payments.prepare()
        assert "s3cret" not in str(caught.value)
    finally:
        await payments.close()


async def test_facilitator_without_the_network_is_a_configuration_error(
    facilitator: Facilitator,
) -> None:
    payments = X402Payments(Seller(facilitator.url, PAY_TO, "eip155:8453", ASSET))
    try:
        with pytest.raises(
            ConfigError, match="does not accept exact payments on eip155:8453"
        ):
            await payments.prepare()
    finally:
        await payments.close()


@pytest.mark.parametrize(
    ("decimals", "amount"), [(6, "10000"), (18, "10000000000000000"), (2, "1")]
)
def test_price_is_in_the_smallest_unit_of_the_token(decimals: int, amount: str) -> None:
    seller = Seller("http://f", PAY_TO, SOLANA, ASSET, decimals)

    assert seller.amount(10_000) == amount


def test_fraction_of_a_unit_is_rounded_up() -> None:
    assert Seller("http://f", PAY_TO, SOLANA, ASSET, 2).amount(10_001) == "2"


async def test_quotes_and_reads_are_free(pool: Pool, facilitator: Facilitator) -> None:
    for path in ("/v1/health", "/v1/quote?job_type=TASK", "/v1/jobs"):
        async with pool.session.get(pool.url + path) as response:
            assert response.status == 200

    assert facilitator.calls == []
    assert await pool.gateway.store.job(JobId("job1")) is None  # type: ignore[union-attr]  # a pool of `serving` has one
