"""Deployments with a timetable: what they ask for at a time of the week."""

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache

from msgspec import structs

from shoal.config.schedule import is_open, parse_window
from shoal.domain.facts import DeploymentSet
from shoal.pool.models.machine import PlacementRules
from shoal.transports.clock import Clock

LOOK_EVERY = 30.0  # seconds between looks at timetables, whose unit is a minute


_window = lru_cache(1024)(parse_window)  # with each placement


def local_time(clock: Clock) -> datetime:
    """Return the local time, as an operator at this machine sees it."""
    return datetime.fromtimestamp(clock.wall(), UTC).astimezone()


def is_due(deployment: DeploymentSet, local: datetime) -> bool:
    """Return whether a deployment keeps its model loaded at a local time."""
    return is_open([_window(each) for each in deployment.schedule], local)


def deployments_at(
    deployments: Mapping[str, DeploymentSet], local: datetime, rules: PlacementRules
) -> Mapping[str, DeploymentSet]:
    """Return what deployments ask for at a local time.

    Outside of its times one keeps nothing loaded: its model is loaded for requests, as
    it says, and unloaded when it was idle for as long as it says, or as any model.
    """
    if not any(each.schedule for each in deployments.values()):
        return deployments
    return {
        name: each
        if is_due(each, local)
        else structs.replace(
            each,
            replicas=0,
            most=0,
            pinned=False,
            idle=rules.idle if each.idle is None else each.idle,
        )
        for name, each in deployments.items()
    }
