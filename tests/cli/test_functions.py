"""What is told of a worker that calls functions."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from cli.test_memberships import worker
from shoal.cli.functions import membership_of_calls
from shoal.tasks.processes import Processes
from shoal.worker.agent import Happening
from shoal.worker.blobs import Blobs
from shoal.worker.calls import Functions


@pytest.mark.parametrize(
    ("trust_code", "token", "said"),
    [(True, "", True), (True, "secret", False), (False, "", False)],
)
async def test_code_that_will_not_be_run_is_told_of_when_the_worker_joins(
    *, trust_code: bool, token: str, said: bool
) -> None:
    told: list[Happening] = []

    def tell(name: str, about: Mapping[str, object], happening: Happening) -> None:
        told.append(happening)

    joins = worker([], joint=True)
    joins = replace(joins, there=replace(joins.there, token=token), tell=tell)
    caller = Processes([], 1, trust_code=trust_code)
    blobs = Blobs()
    agent = membership_of_calls(joins, Functions(caller, blobs))

    agent._joined()
    await blobs.close()

    assert [each.event for each in told] == ["joined"]
    assert ("without --token nobody knows" in told[0].reason) is said
