"""Repeats a share of the jobs on other workers and compares the answers."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from msgspec.structs import replace

from shoal.coordinator.hub import Hub
from shoal.domain.errors import ShoalError, StoreError
from shoal.domain.facts import Fact, JobCompleted
from shoal.domain.ids import JobId, WorkerId
from shoal.domain.job import Job, JobTerms, Priority, Privacy
from shoal.domain.outcome import STOP_REASON, Choice, Outcome
from shoal.domain.work import ANY_MODEL, JSON, Chat, Completion, Task
from shoal.pool.inputs import AnswerDisputed
from shoal.store.port import Store

CHECK_OWNER = "spot-checks"
"""Owner of the repeated jobs, which pays for them."""

WAITING_MAX = 100  # jobs that wait for a check; further ones are not checked

log = logging.getLogger("shoal.coordinator")


@dataclass(frozen=True, slots=True)
class CheckedAnswer:
    """One worker's answer; ``essence`` is the part that must be the same."""

    worker_id: WorkerId
    essence: object


class SpotChecks:
    """Repeats jobs whose answer is deterministic on a second worker.

    If the two answers differ, a third worker decides: a worker that is alone with its
    answer gets penalty points.  If all three differ, none does.

    Args:
        share: of the jobs, from 0 to 1.
    """

    def __init__(self, hub: Hub, store: Store, random: Random, share: float) -> None:
        self._hub = hub
        self._store = store
        self._random = random
        self._share = share
        self._waiting: asyncio.Queue[JobId] = asyncio.Queue(WAITING_MAX)

    def on_facts(self, batch: Sequence[Fact]) -> None:
        """Choose a share of the completed jobs for a check."""
        for fact in batch:
            if isinstance(fact, JobCompleted) and self._random.random() < self._share:
                try:
                    self._waiting.put_nowait(fact.job_id)
                except asyncio.QueueFull:
                    return  # checks have low priority

    async def run(self) -> None:
        """Check jobs, one after the other, until cancelled."""
        while True:
            job_id = await self._waiting.get()
            try:
                await self.check(job_id)
            except StoreError as error:
                log.error("cannot check job=%s: %s", job_id, error)

    async def check(self, job_id: JobId) -> None:
        """Repeat a job if its answers are comparable; report a worker that differs.

        Raises StoreError.
        """
        stored = await self._store.job(job_id)
        if stored is None or stored.outcome is None or not comparable(stored.job):
            return
        first = await self._checked(stored.job, job_id, stored.outcome)
        if first is None:
            return
        second = await self._again(stored.job, [first])
        if second is None:
            return
        if second.essence == first.essence:
            log.info("agreed job=%s workers=2", job_id)
            return
        third = await self._again(stored.job, [first, second])
        if third is None:
            log.warning("differ job=%s, and there is no third worker to check", job_id)
            return
        for alone, others in (
            (first, (second, third)),
            (second, (first, third)),
        ):
            if others[0].essence == others[1].essence:
                names = " and ".join(each.worker_id for each in others)
                reason = f"gave another answer than {names}"
                await self._hub.process(AnswerDisputed(alone.worker_id, reason, job_id))
                return
        log.warning("differ job=%s, all three: it is not deterministic", job_id)

    async def _again(
        self, job: Job, before: Sequence[CheckedAnswer]
    ) -> CheckedAnswer | None:
        """Run a job on another worker; None if there is none, or it fails."""
        terms = JobTerms(
            job.terms.policy,
            price=job.terms.price,
            form=job.terms.form,
            avoid=frozenset(each.worker_id for each in before),
        )
        again = replace(
            job,
            id=self._hub.new_id(),
            owner=CHECK_OWNER,
            priority=Priority.LOW,
            session="",
            idempotency_key="",
            terms=terms,
        )
        try:
            async with self._hub.run_job(again) as reader:
                outcome = await reader.outcome()
        except StoreError:
            raise
        except ShoalError as error:
            log.info("not checked job=%s: %s", job.id, error)
            return None
        return await self._checked(again, again.id, outcome)

    async def _checked(
        self, job: Job, job_id: JobId, outcome: Outcome
    ) -> CheckedAnswer | None:
        filed = await self._store.ledger.receipts_of(job_id)
        if not filed:
            return None
        return CheckedAnswer(
            WorkerId(filed[0].claims.worker), comparable_part(job, outcome)
        )


def comparable(job: Job) -> bool:
    """Say whether every worker should give the same answer.

    True for chats and completions at temperature 0, and for tasks whose payload says
    ``deterministic``: workers run their own programs for tasks.
    """
    if job.owner == CHECK_OWNER or job.terms.privacy is Privacy.PRIVATE:
        return False
    match job.work:
        case (
            Chat(model=model, temperature=temperature)
            | Completion(model=model, temperature=temperature)
        ):
            return temperature == 0 and model != ANY_MODEL
        case Task(payload=dict(payload)):
            return payload.get("deterministic") is True
        case _:
            return False


def comparable_part(job: Job, outcome: Outcome) -> object:
    """Return the part of an answer that is the same on every wire, of every engine.

    Only some engines report the stop string that ended a text.
    """
    if not isinstance(job.work, Task):
        choices = outcome.choices or (Choice({"content": outcome.text}),)
        return [(_told_by_all(choice.fields), choice.logprobs) for choice in choices]
    try:
        return json.loads(outcome.text)
    except (ValueError, RecursionError):
        return outcome.text


def _told_by_all(fields: Mapping[str, JSON]) -> Mapping[str, JSON]:
    return {
        name: value for name, value in fields.items() if value and name != STOP_REASON
    }
