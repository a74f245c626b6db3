"""The API of the event log."""

from typing import Annotated

import msgspec
from aiohttp import web

from shoal.domain.credentials import Scope
from shoal.domain.ids import JobId
from shoal.gateway.context import Gateway
from shoal.gateway.dashboard.event_log import (
    EVENT_LOG,
    EventLog,
    PoolEvent,
    concerns,
    to_event,
)
from shoal.gateway.dashboard.fact_events import subjects
from shoal.gateway.http.operation import Operations
from shoal.store.port import Store

api = Operations()

LISTED_MAX = 1000
EVENT_NUMBER_MAX = 2**53  # what JavaScript can count to

EventNumber = Annotated[int, msgspec.Meta(ge=0, le=EVENT_NUMBER_MAX)]


class EventQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many events to list, newest first, with numbers below ``before``.

    ``worker`` is the id of a worker, or the part of it that names its machine.
    """

    limit: Annotated[int, msgspec.Meta(ge=1, le=LISTED_MAX)] = 100
    before: EventNumber | msgspec.UnsetType = msgspec.UNSET
    job: str = ""
    worker: str = ""


class EventList(msgspec.Struct, frozen=True):
    """Events, newest first; ``next`` is the ``before`` of the next page.

    A page may be short, or empty, and have a next one.
    """

    data: list[PoolEvent]
    next: int | None


@api.get("/admin/events", "List events, newest first", Scope.MONITOR, lists=True)
async def list_events(
    gateway: Gateway, request: web.Request, query: EventQuery
) -> EventList:
    log = request.app[EVENT_LOG]
    if query.job:
        return await _list_of_job(gateway.store, query)
    return await _list_of_pool(gateway.store, log, query)


async def _list_of_pool(store: Store, log: EventLog, query: EventQuery) -> EventList:
    limit = query.limit
    before = None if query.before is msgspec.UNSET else query.before
    latest = log.latest(limit, before, query.worker)
    if len(latest) == limit:
        return EventList(latest, latest[-1].number)
    older, more = await log.older(store, limit - len(latest), before, query.worker)
    return EventList(latest + older, more)


async def _list_of_job(store: Store, query: EventQuery) -> EventList:
    """List the history of a job, whose events are numbered from 1."""
    history = await store.history(JobId(query.job))
    events = [
        to_event(number, each.at, each.fact, subject)
        for number, (each, subject) in enumerate(
            zip(history, subjects(history), strict=True), start=1
        )
    ]
    end = len(events) + 1 if query.before is msgspec.UNSET else query.before
    found = [
        each
        for each in reversed(events)
        if each.number < end and concerns(each.worker, query.worker)
    ]
    page = found[: query.limit]
    return EventList(page, page[-1].number if len(found) > len(page) else None)
