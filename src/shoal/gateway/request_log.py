"""One log line for each request: who asked for what, and how it went.

Never what was asked or answered, and no keys: only their names.
"""

import logging
from collections.abc import Mapping

from aiohttp import web

from shoal.gateway.record import Record

PATH_MAX = 200  # characters
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})  # asked for again and again

log = logging.getLogger("shoal.http")


def log_request(
    request: web.Request, record: Record, status: int, seconds: float
) -> None:
    """Log a request that has ended after so many seconds."""
    level = logging.DEBUG if request.path in QUIET else logging.INFO
    if log.isEnabledFor(level):
        fields = _fields(request, record, status, seconds)
        pairs = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        log.log(level, "%s", pairs, extra={"fields": fields})


def _fields(
    request: web.Request, record: Record, status: int, seconds: float
) -> Mapping[str, object]:
    fields: dict[str, object] = {
        "request": record.id,
        "method": request.method,
        "path": request.path[:PATH_MAX],
        "status": status,
        "ms": round(1000 * seconds, 1),
        "peer": request.remote,
    }
    if record.first_output is not None:
        fields["first_output_ms"] = round(
            1000 * (record.first_output - record.began), 1
        )
    if record.usage is not None:
        fields["tokens_in"] = record.usage.prompt_tokens
        fields["tokens_out"] = record.usage.completion_tokens
    worker = record.reader.worker_id if record.reader is not None else None
    more = {
        "key": record.owner,
        "job": record.job_id,
        "model": record.model,
        "worker": worker,
        "error": record.error,
    }
    return fields | {name: value for name, value in more.items() if value}


def _shown(value: object) -> str:
    # Names come from clients and workers: quoted, they cannot forge a line.
    return ascii(value) if isinstance(value, str) else str(value)
