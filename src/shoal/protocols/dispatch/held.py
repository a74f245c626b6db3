"""What one worker was given, and how much is heard of what it was not given."""

import re

from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import RunJob
from shoal.protocols.dispatch.answers import Given
from shoal.protocols.dispatch.javascript import well_formed

_OUR_IDS = re.compile(r"[!-~]+")  # what is recorded is logged, too

STRAYS_MAX = 64  # words about other jobs that are passed on: each one is stored
UNSIGNED_MAX = 256  # ended jobs whose receipt may still come by itself


class Held:
    """The jobs of one connection."""

    def __init__(self) -> None:
        self._given: dict[tuple[JobId, LeaseNumber], Given] = {}
        self._unsigned: dict[JobId, None] = {}  # ended without a receipt, oldest first
        self._strays = STRAYS_MAX

    def give(self, job: RunJob) -> None:
        """Note that the worker was given a job."""
        formed = bool(job.terms.form)
        continues = well_formed(job.continues)
        given = Given(job.job_id, job.lease, job.work.kind, formed, continues)
        self._given[job.job_id, job.lease] = given

    def find(self, job_id: str, lease: int = 0) -> Given | None:
        """Return a job that the worker has, by its lease; 0 stands for the oldest.

        Linear in the jobs without a lease: workers that name none have a single one.
        """
        wanted = JobId(job_id)
        if lease:
            return self._given.get((wanted, LeaseNumber(lease)))
        same = (each for each in self._given.values() if each.job_id == wanted)
        return next(same, None)

    def take_back(self, job_id: JobId, lease: LeaseNumber) -> bool:
        """Forget a job; say whether the worker had it."""
        return self._given.pop((job_id, lease), None) is not None

    def end(self, given: Given, *, signed: bool) -> None:
        """Note that the worker has ended a job: another word about others is heard."""
        del self._given[given.job_id, given.lease]
        self._strays = min(self._strays + 1, STRAYS_MAX)
        if not signed:
            self._unsigned[given.job_id] = None
            if len(self._unsigned) > UNSIGNED_MAX:
                del self._unsigned[next(iter(self._unsigned))]

    def awaits_receipt(self, job_id: JobId) -> bool:
        """Say whether a job was ended without a receipt; it is asked once."""
        if job_id not in self._unsigned:
            return False
        del self._unsigned[job_id]
        return True

    def hears_stray(self, job_id: str) -> bool:
        """Say whether one more word about a job of others is passed on.

        It is if there can be such a job at all.
        """
        if not self._strays or not _OUR_IDS.fullmatch(job_id):
            return False
        self._strays -= 1
        return True
