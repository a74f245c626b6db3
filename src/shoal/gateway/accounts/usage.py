"""The API of usage and cost, by day, key, model and node."""

import csv
import io
import re
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from aiohttp import web

from shoal.coordinator.hub import Hub
from shoal.domain.credentials import Scope, day_of
from shoal.domain.errors import InvalidRequest, ShoalError
from shoal.gateway.context import AccountsGateway
from shoal.gateway.http import responses
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.errors import error_status
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.request_record import record_of
from shoal.store.ledger import MINUTES_KEPT, UsageField, UsagePlace, UsageSum
from shoal.store.port import Store
from shoal.transports.clock import Clock

api = Operations()

FIELDS: tuple[UsageField, ...] = get_args(UsageField)
DEFAULT_DAYS = 30  # with today
ROWS_MAX = 1000  # of one answer
EPOCH = date(1970, 1, 1)
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet takes for the beginning of a formula (OWASP, CSV injection)."""

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)

DateText = Annotated[str, msgspec.Meta(extra_json_schema={"format": "date"})]
Count = Annotated[int, msgspec.Meta(ge=0, lt=10**9)]
EncodedPlace: TypeAlias = tuple[Count, str, str, Count]
"""A ``UsagePlace``."""


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which usage to add up: ``since`` and ``until`` are days in UTC, both included.

    Without them it is that of the last 30 days.  ``by`` lists the fields to group by:
    ``day``, ``key``, ``model`` and ``node``, or some of them.  ``after`` is the
    ``next`` of the page before; a table has all pages from there on.
    """

    since: DateText = ""
    until: DateText = ""
    by: str = ",".join(FIELDS)
    format: Literal["json", "csv"] = "json"
    limit: Annotated[int, msgspec.Meta(ge=1, le=ROWS_MAX)] = ROWS_MAX
    after: str = ""


class UsageRow(msgspec.Struct, frozen=True):
    """Usage added up; null for fields not grouped by, ``cost`` in micro-dollars.

    Model and node are empty for calls of functions, and where they are not known.
    """

    day: str | None
    key: str | None
    model: str | None
    node: str | None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: int


class UsageList(msgspec.Struct, frozen=True):
    """Usage, by day, key, model and node in this order.

    ``next`` is the ``after`` of the next page.  A page may be short, or empty, and have
    a next one.
    """

    data: list[UsageRow]
    next: str | None


class MinutesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many of the last hours to show."""

    hours: Annotated[int, msgspec.Meta(ge=1, le=MINUTES_KEPT // 60)] = 3


class MinuteRow(msgspec.Struct, frozen=True):
    """The jobs done in a minute, which begins ``at``, and the tokens written.

    ``running`` and ``queued`` are the jobs that were open in its middle.
    """

    at: int
    jobs: int
    tokens: int
    running: int
    queued: int


class MinuteList(msgspec.Struct, frozen=True):
    """The minutes of the last hours with a job that ended or was open, in order."""

    data: list[MinuteRow]


@api.get("/admin/usage/minutes", "Show usage of the last hours", Scope.MONITOR)
async def list_minutes(gateway: AccountsGateway, query: MinutesQuery) -> MinuteList:
    since = int(gateway.clock.wall() // 60) - 60 * query.hours
    found = await gateway.store.usage.minutes(since)
    return MinuteList([MinuteRow(60 * minute, *counts) for minute, *counts in found])


async def record_open_jobs(hub: Hub, store: Store, clock: Clock) -> None:
    """Record how many jobs are open now, if any is.  Raises StoreError."""
    pool = hub.pool
    if pool.jobs:
        minute, running = int(clock.wall() // 60), len(pool.jobs) - pool.queued
        await store.usage.record_open_jobs(minute, running, pool.queued)


@api.get(
    "/admin/usage",
    "Add up usage and cost",
    Scope.READ,
    lists=True,
    answer=UsageList,
    text_media=responses.CSV_TYPE,
)
async def list_usage(
    gateway: AccountsGateway, request: web.Request, caller: ApiCaller, query: UsageQuery
) -> web.StreamResponse:
    by = _fields(query.by)
    until = _day(query.until, "until")
    if until is None:
        until = day_of(gateway.clock.wall())
    since = _day(query.since, "since")
    if since is None:
        since = max(0, until - DEFAULT_DAYS + 1)
    sees_all = caller.has_scope(Scope.MONITOR)
    owner = None if sees_all else caller.name

    async def page(after: str) -> UsageList:
        found = await gateway.store.usage.sums(
            since, until, by, query.limit, owner, _place(after)
        )
        rows = [_row(each, names_machines=sees_all) for each in found.sums]
        return UsageList(rows, None if found.next is None else _cursor(found.next))

    found = await page(query.after)
    if query.format == "json":
        return responses.json_response(found)
    name = f"shoal-usage-{_text(since)}-{_text(until)}.csv"
    response = web.StreamResponse(headers=_table_headers(name))
    await response.prepare(request)
    try:
        await responses.write(request, response, _table([UsageRow.__struct_fields__]))
        await responses.write(request, response, _table(map(_cells, found.data)))
        while found.next is not None:
            async with gateway.access.list_turn(caller):
                found = await page(found.next)
                rows = _table(map(_cells, found.data))
            await responses.write(request, response, rows)
        await responses.write(request, response, b"", last=True)
    except responses.ClientGone:
        record_of(request).error = "client_gone"
    except ShoalError as error:
        record_of(request).error = error_status(error).code
        if request.transport is not None:
            request.transport.abort()  # so that the table does not look whole
    return response


def _cursor(place: UsagePlace) -> str:
    return urlsafe_b64encode(msgspec.json.encode(place)).decode().rstrip("=")


def _place(text: str) -> UsagePlace | None:
    """Return the place that the ``next`` of a page names.  Raises InvalidRequest."""
    if not text:
        return None
    try:
        data = b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
        return UsagePlace(*msgspec.json.decode(data, type=EncodedPlace))
    except ValueError as error:
        raise InvalidRequest(
            "after: expected the `next` of a page, or nothing for the first", "after"
        ) from error


def _fields(text: str) -> list[UsageField]:
    """Return the fields that a query names.  Raises InvalidRequest."""
    names = {each.strip() for each in text.split(",") if each.strip()}
    if unknown := sorted(names.difference(FIELDS)):
        raise InvalidRequest(
            f"by: expected some of {', '.join(FIELDS)}, got {unknown[0][:40]!r}", "by"
        )
    return [each for each in FIELDS if each in names]


def _day(text: str, param: str) -> int | None:
    """Return the ``day_of`` a date; None if it is empty.  Raises InvalidRequest."""
    if not text:
        return None
    try:
        if not _DATE.fullmatch(text) or (day := date.fromisoformat(text)) < EPOCH:
            raise ValueError
        return (day - EPOCH).days
    except ValueError as error:
        raise InvalidRequest(
            f"{param}: expected a day such as 2026-11-23, got {text[:40]!r}", param
        ) from error


def _text(day: int) -> str:
    return (EPOCH + timedelta(days=day)).isoformat()


def _row(used: UsageSum, *, names_machines: bool) -> UsageRow:
    node = used.node
    return UsageRow(
        None if used.day is None else _text(used.day),
        used.key,
        used.model,
        node if names_machines or node is None else responses.without_keys(node),
        used.requests,
        used.prompt_tokens,
        used.completion_tokens,
        used.cost,
    )


def _table_headers(name: str) -> Mapping[str, str]:
    return {
        "Content-Type": f"{responses.CSV_TYPE}; charset=utf-8",
        "Content-Disposition": f'attachment; filename="{name}"',
    }


def _table(rows: Iterable[Iterable[str | int]]) -> bytes:
    written = io.StringIO()
    csv.writer(written).writerows(rows)
    return responses.well_formed(written.getvalue()).encode()


def _cells(row: UsageRow) -> Iterable[str | int]:
    return map(_cell, msgspec.structs.astuple(row))


def _cell(value: str | int | None) -> str | int:
    if value is None:
        return ""
    # Workers choose the names of models and nodes.
    if isinstance(value, str) and value.startswith(FORMULA):
        return f"'{value}"
    return value
