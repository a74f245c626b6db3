"""What is known of a request in the end: for its log line and the metrics."""

import re
from dataclasses import dataclass

from aiohttp import web

from shoal.domain.ids import JobId
from shoal.domain.outcome import Usage
from shoal.domain.work import Job, Kind
from shoal.runtime.ids import new_id
from shoal.runtime.reading import Reader

REQUEST_ID = "x-request-id"

_SANE = re.compile(r"[!-~]{1,128}", re.ASCII)


@dataclass(slots=True)
class Record:
    """One request.  Times are of the clock that ``began`` is of."""

    id: str
    began: float
    owner: str = ""
    model: str = ""
    kind: Kind | None = None
    job_id: JobId | None = None
    reader: Reader | None = None
    first_output: float | None = None
    usage: Usage | None = None
    held: int = 0  # bytes of its body
    error: str = ""  # the error's code, if it came to one
    upgraded: bool = False  # whether it became a WebSocket, which ends as clients do

    def asked(self, job: Job) -> None:
        """Note the job that the request became."""
        self.owner, self.model, self.kind = job.owner, job.model, job.kind

    def reading(self, reader: Reader) -> None:
        """Note who answers; of an idempotency key it may be an earlier job."""
        self.reader = reader
        self.job_id = reader.job_id

    @property
    def headers(self) -> dict[str, str]:
        """What an answer says about itself."""
        headers = {REQUEST_ID: self.id}
        if self.job_id is not None:
            headers["x-shoal-job"] = self.job_id
        if self.reader is not None and self.reader.worker_id is not None:
            worker = self.reader.worker_id
            # A worker's name is its own choice; a header takes only some characters.
            headers["x-shoal-worker"] = ascii(worker)[1:-1]
            headers["x-shoal-attempts"] = str(self.reader.attempts)
        return headers


RECORD = web.RequestKey("record", Record)


def record_of(request: web.Request) -> Record:
    """Return the record that the application began for a request."""
    return request[RECORD]


def begin(request: web.Request, now: float) -> Record:
    """Begin a request's record, under the client's own id if it can be one."""
    given = request.headers.get(REQUEST_ID, "")
    sane = _SANE.fullmatch(given) is not None
    record = Record(given if sane else new_id(), now)
    request[RECORD] = record
    return record
