"""What deployments with a timetable ask for, by the time of the week."""

from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from shoal.coordinator.placer import deployments_at, is_due
from shoal.domain.facts import DeploymentSet
from shoal.pool.models.machine import PlacementRules

RULES = PlacementRules()
MONDAY = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("schedule", "due"),
    [
        ((), True),
        (("8:00-18:00",), True),
        (("18:00-8:00",), False),
        (("18:00-8:00", "mon 12:00-12:01"), True),
        (("tue-sun 0:00-24:00",), False),
    ],
)
def test_a_deployment_is_due_at_its_times(schedule: Sequence[str], due: bool) -> None:
    deployment = DeploymentSet("a", 1, "al", schedule=tuple(schedule))

    assert is_due(deployment, MONDAY) is due


def test_outside_of_its_times_a_deployment_keeps_nothing() -> None:
    always = DeploymentSet("always", 2, "al", pinned=True)
    night = DeploymentSet(
        *("night", 2, "al", 4),
        pinned=True,
        context=8192,
        exclusive_group="gpu",
        schedule=("18:00-8:00",),
    )
    patient = DeploymentSet("patient", 1, "al", idle=60.0, schedule=("18:00-8:00",))
    all_of_them = {each.name: each for each in (always, night, patient)}

    found = deployments_at(all_of_them, MONDAY, RULES)

    assert found["always"] == always
    closed = found["night"]
    assert (closed.replicas, closed.most, closed.pinned) == (0, 0, False)
    assert closed.idle == RULES.idle, "else it would never be unloaded"
    assert (closed.context, closed.exclusive_group) == (8192, "gpu")
    assert found["patient"].idle == 60.0


def test_without_timetables_nothing_is_copied() -> None:
    deployments = {"a": DeploymentSet("a", 1, "al")}

    assert deployments_at(deployments, MONDAY, RULES) is deployments
