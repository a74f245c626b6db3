"""The operators' API of deployments, with a machine that carries out nothing."""

from typing import Any

import pytest

from gateway.serving import Pool
from gateway.shoal_worker import EVERYTHING, shoal_worker
from shoal.domain.work import JobKind
from shoal.domain.worker import LoadableModel, ModelLibrary, Offer

LIBRARY = ModelLibrary((LoadableModel("qwen3", 10**9),), 10**10)
MACHINE = Offer(frozenset({JobKind.MODEL}), slots=2, library=LIBRARY)


async def put(pool: Pool, name: str, **body: object) -> tuple[int, Any]:
    async with pool.session.put(
        f"{pool.url}/admin/deployments/{name}", headers=pool.headers(), json=body
    ) as response:
        return response.status, await response.json()


async def test_what_stands_for_any_model_cannot_be_deployed(pool: Pool) -> None:
    async with (
        shoal_worker(pool, MACHINE, name="anna"),
        shoal_worker(pool, EVERYTHING, name="ben"),
    ):
        for name in ("*", "*models"):
            status, answer = await put(pool, name)

            assert status == 404, answer
        status, answer = await put(pool, "qwen3")

        assert status == 200, answer


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("context", 1 << 60, "context: expected 1 to 16777216"),
        ("slots", 0, "slots: expected 1 to 1024"),
        ("idle", -1, "idle: expected 0 to 2592000"),
        ("replicas", 10**6, "replicas: expected 0 to 1000"),
        ("most", 0, "most: expected 1 to 1000"),
        ("schedule", ["8:00"] * 33, "schedule: expected at most 32 times"),
        (
            "exclusive_group",
            "a\n",
            "exclusive_group: expected up to 256 printable characters",
        ),
        ("hub", "qwen", "hub: expected ORGANIZATION/NAME[:QUANTIZATION], not 'qwen'"),
    ],
)
async def test_a_number_out_of_its_range_is_named(
    pool: Pool, field: str, value: int, says: str
) -> None:
    status, answer = await put(pool, "qwen3", **{field: value})

    assert (status, answer["error"]["message"]) == (400, says)
    assert answer["error"]["param"] == field


async def test_a_deployment_outside_of_its_times_says_so(pool: Pool) -> None:
    async with shoal_worker(pool, MACHINE, name="anna"):
        status, answer = await put(pool, "qwen3", schedule=["noon"])
        assert status == 400
        assert answer["error"]["message"].startswith("schedule 'noon': expected a time")

        never = ["mon 0:00-0:01", "tue 0:00-0:01"]
        status, answer = await put(pool, "qwen3", schedule=never, exclusive_group="g")
        assert status == 200, answer
        assert (answer["schedule"], answer["exclusive_group"]) == (never, "g")
        if answer["why"] is not None:  # but in these minutes
            assert answer["why"].startswith("it is kept loaded only at mon 0:00")
