"""What handlers see of the coordinator."""

from typing import get_type_hints

import pytest

from shoal.gateway.all_operations import OPERATIONS
from shoal.gateway.context import Gateway, JobsGateway, ModerationOf
from shoal.gateway.job_service import JobService

SEEN = {each.sees.__name__: each.sees for each in OPERATIONS if each.sees is not None}
PARTS = get_type_hints(Gateway) | {"jobs": JobService, "moderation_for": ModerationOf}


@pytest.mark.parametrize("kind", sorted(SEEN))
def test_handlers_see_a_few_parts_of_the_gateway(kind: str) -> None:
    parts = get_type_hints(SEEN[kind])

    assert parts.items() <= PARTS.items()
    assert len(parts) < len(PARTS) / 2, "name what the handlers of the room need"


def test_handlers_that_run_jobs_reach_the_hub_through_the_job_service() -> None:
    assert "hub" not in get_type_hints(JobsGateway), "the hub may be elsewhere"
