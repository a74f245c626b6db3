"""Credentials of running calls, with which functions make calls of their own.

A lease of a function's job carries a grant, from which the worker derives a credential
for each call (``domain.credentials``).  Nothing is stored: a credential is valid while
its call runs since that lease, for the owner of the job.
"""

from collections.abc import Mapping
from typing import NamedTuple

from shoal.coordinator.answer import Answer
from shoal.domain.credentials import lease_grant, read_call_credential
from shoal.domain.errors import KeyExpired
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.work import Call, CallStream, Task, Work
from shoal.pool.state import PoolState


class LeasedCall(NamedTuple):
    """A call of a lease; its number is that in a call stream, else 0."""

    job_id: JobId
    lease: LeaseNumber
    number: int


class CallGrants:
    """Issues grants, and verifies the credentials that are derived from them.

    ``secret`` is known to all coordinators of the pool, so that calls that run on at
    another one keep their credentials; empty: no grant is issued.
    """

    def __init__(
        self, secret: bytes, pool: PoolState, answers: Mapping[JobId, Answer]
    ) -> None:
        self._secret = secret
        self._pool = pool
        self._answers = answers
        self._submitted: dict[LeasedCall, dict[JobId, None]] = {}
        self._moved: dict[LeasedCall, LeasedCall] = {}

    def issue(self, job_id: JobId, lease: LeaseNumber, work: Work) -> str:
        """Return the grant of a lease; empty: its work runs no function."""
        if not self._secret or not isinstance(work, Task | Call | CallStream):
            return ""
        return lease_grant(self._secret, job_id, lease)

    def move(self, carried: LeasedCall, call: LeasedCall) -> None:
        """Let a call that a stream has carried go on as a job of its own."""
        self._moved[carried] = call

    def read(self, credential: str) -> LeasedCall | None:
        """Return the call of a credential, which may have ended; None: a wrong one."""
        found = self._secret and read_call_credential(self._secret, credential)
        if not found:
            return None
        job_id, lease, number = found
        call = LeasedCall(JobId(job_id), LeaseNumber(lease), number)
        return self._moved.get(call, call)

    def owner(self, call: LeasedCall) -> str:
        """Return the owner of a running call.  Raises KeyExpired if it has ended."""
        if not self._runs(call):
            raise KeyExpired("the call that this credential was for has ended")
        return self._pool.jobs[call.job_id].job.owner

    def submitted_by(self, call: LeasedCall) -> dict[JobId, None]:
        """Return the jobs that a running call has submitted; the caller adds to it."""
        if call not in self._submitted:
            for ended in [each for each in self._submitted if not self._runs(each)]:
                del self._submitted[ended]
        return self._submitted.setdefault(call, {})

    def _runs(self, call: LeasedCall) -> bool:
        job = self._pool.jobs.get(call.job_id)
        if job is None or not job.is_run_since(call.lease):
            return False
        if not isinstance(job.job.work, CallStream):
            return call.number == 0
        listener = self._answers[call.job_id].listener
        return listener is not None and listener.runs(call.number)
