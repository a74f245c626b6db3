"""``pool.jobs``: asynchronous jobs, which run whether or not a client waits."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

import msgspec

from shoal.client.connection import AsyncSendRequest, JsonRequest, SendRequest

JobType: TypeAlias = Literal["LLM_INFER", "TASK"]
JobPolicy: TypeAlias = Literal["FAST", "CHEAP", "AUTO"]
PrivacyClass: TypeAlias = Literal["PUBLIC", "PRIVATE"]

PATH = "/v1/jobs"
OPEN_STATUSES = frozenset({"pending", "assigned"})
WAIT_STEP = 20.0  # seconds that one request waits; below the client's read timeout


class SubmittedJob(msgspec.Struct, frozen=True):
    """A job: ``docs/jobs.md`` describes its fields.

    ``result`` is the output of the worker; of a job that failed, it has an ``error``,
    and ``detail`` says the same to people.  ``receipt`` is the worker's.
    """

    id: str
    status: Literal["pending", "assigned", "completed", "failed"]
    job_type: str
    user_id: str
    policy: str
    privacy_class: str
    price: str
    attempts: int
    created_at: str
    completed_at: str | None
    detail: str | None
    result: Any = None
    receipt: Any = None

    @property
    def is_open(self) -> bool:
        """Whether it has not ended yet."""
        return self.status in OPEN_STATUSES


class JobQuote(msgspec.Struct, frozen=True):
    """The price of a job, such as ``$0.010``, and the policy that it has then."""

    price: str
    policy_resolved: str


class _Committed(msgspec.Struct):
    job_id: str


class _Page(msgspec.Struct):
    jobs: list[SubmittedJob]


class Jobs:
    """The jobs of an API key: prompts and named tasks."""

    def __init__(self, send: SendRequest) -> None:
        self._send = send

    def submit(
        self,
        payload: object,
        *,
        user: str,
        type: JobType = "LLM_INFER",
        policy: JobPolicy = "AUTO",
        privacy: PrivacyClass = "PUBLIC",
    ) -> str:
        """Submit a job.

        Args:
            payload: for ``LLM_INFER`` a dictionary with a ``prompt``, and optionally
                ``model`` and ``max_tokens``; for ``TASK`` one with the ``task_type``
                and its ``input``.
            user: the user of the job, a sub-account of the API key.
            type: what to run.
            policy: which workers are preferred, and the price.
            privacy: ``PRIVATE``: only for workers that are paired with the user.

        Returns:
            The id of the job, which runs whether or not the program waits for it.

        Raises:
            InvalidRequest: the payload or a term is invalid, or no paired worker can
                run the private job.
            ShoalError: the coordinator refuses the job, or is unreachable.
        """
        policy = _resolved(policy, type)
        return self._send(_commit(payload, user, type, policy, privacy)).job_id

    def quote(
        self, type: JobType = "LLM_INFER", policy: JobPolicy = "AUTO"
    ) -> JobQuote:
        """Return the price of a job.

        Raises:
            ShoalError: the coordinator refuses to answer, or is unreachable.
        """
        return self._send(_quote(type, policy))

    def show(self, job_id: str) -> SubmittedJob:
        """Return a job.

        Raises:
            NotFound: there is no such job of this API key.
            ShoalError: the coordinator refuses to answer, or is unreachable.
        """
        return self._send(_show(job_id))

    def wait(self, job_id: str) -> SubmittedJob:
        """Wait until a job has ended, and return it; its own time limits end it.

        Raises as ``show`` does.
        """
        while (job := self._send(_show(job_id, WAIT_STEP))).is_open:
            pass
        return job

    def recent(self, limit: int = 20) -> Sequence[SubmittedJob]:
        """List the newest jobs, at most 100, without their results.

        Raises:
            ShoalError: the coordinator refuses to answer, or is unreachable.
        """
        return self._send(_list(limit)).jobs

    def cancel(self, job_id: str) -> SubmittedJob:
        """Cancel a job that has not ended.

        Raises:
            NotFound: there is no such job of this API key.
            InvalidRequest: it has ended already.
            ShoalError: the coordinator refuses it, or is unreachable.
        """
        return self._send(_cancel(job_id))


class AsyncJobs:
    """``Jobs`` for coroutines, with the same methods."""

    def __init__(self, send: AsyncSendRequest) -> None:
        self._send = send

    async def submit(
        self,
        payload: object,
        *,
        user: str,
        type: JobType = "LLM_INFER",
        policy: JobPolicy = "AUTO",
        privacy: PrivacyClass = "PUBLIC",
    ) -> str:
        """Submit a job; return its id."""
        policy = _resolved(policy, type)
        return (await self._send(_commit(payload, user, type, policy, privacy))).job_id

    async def quote(
        self, type: JobType = "LLM_INFER", policy: JobPolicy = "AUTO"
    ) -> JobQuote:
        """Return the price of a job."""
        return await self._send(_quote(type, policy))

    async def show(self, job_id: str) -> SubmittedJob:
        """Return a job."""
        return await self._send(_show(job_id))

    async def wait(self, job_id: str) -> SubmittedJob:
        """Wait until a job has ended, and return it."""
        while (job := await self._send(_show(job_id, WAIT_STEP))).is_open:
            pass
        return job

    async def recent(self, limit: int = 20) -> Sequence[SubmittedJob]:
        """List the newest jobs, without their results."""
        return (await self._send(_list(limit))).jobs

    async def cancel(self, job_id: str) -> SubmittedJob:
        """Cancel a job that has not ended."""
        return await self._send(_cancel(job_id))


AUTOMATIC: Mapping[str, JobPolicy] = {"LLM_INFER": "FAST", "TASK": "CHEAP"}
"""The policy that AUTO stands for, by the type of the job (``docs/jobs.md``)."""


def _resolved(policy: JobPolicy, type: JobType) -> JobPolicy:
    return AUTOMATIC.get(type, "FAST") if policy == "AUTO" else policy


def _commit(
    payload: object, user: str, type: str, policy: JobPolicy, privacy: str
) -> JsonRequest[_Committed]:
    body = {
        "job_type": type,
        "payload": payload,
        "user_id": user,
        "privacy_class": privacy,
    }
    path = f"{PATH}/commit/{quote(policy.lower(), safe='')}"
    # With a key the request can be sent again, when its answer is lost.
    return JsonRequest(path, _Committed, "POST", body=body, key=uuid.uuid4().hex)


def _quote(type: str, policy: str) -> JsonRequest[JobQuote]:
    query = {"job_type": type, "policy": policy}
    return JsonRequest("/v1/quote", JobQuote, query=query)


def _show(job_id: str, wait: float = 0.0) -> JsonRequest[SubmittedJob]:
    return JsonRequest(_path(job_id), SubmittedJob, query={"wait": repr(wait)})


def _list(limit: int) -> JsonRequest[_Page]:
    return JsonRequest(PATH, _Page, query={"limit": str(limit)})


def _cancel(job_id: str) -> JsonRequest[SubmittedJob]:
    return JsonRequest(_path(job_id), SubmittedJob, "DELETE")


def _path(job_id: str) -> str:
    return f"{PATH}/{quote(job_id, safe='')}"
