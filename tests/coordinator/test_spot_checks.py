"""Spot checks: jobs repeated on other workers."""

import asyncio
from random import Random

import pytest

from coordinator.hubs import (
    Coordinator,
    ScriptedWorker,
    run_pending,
    running_coordinator,
)
from shoal.coordinator.spot_checks import CHECK_OWNER, SpotChecks, comparable
from shoal.domain.facts import WorkerMarked
from shoal.domain.ids import JobId
from shoal.domain.job import Job, JobTerms, Privacy
from shoal.domain.work import ANY_MODEL, Chat, Completion, Embedding, Task, Work
from simulation.virtual import in_virtual_time

MESSAGES = ({"role": "user", "content": "hi"},)


class DeviatingPool:
    """A coordinator whose workers each give one fixed answer."""

    def __init__(self, coordinator: Coordinator, answers: dict[str, str]) -> None:
        self.its = coordinator
        self.answers = answers
        self.members: dict[str, ScriptedWorker] = {}
        self.done: set[tuple[str, JobId]] = set()
        self.checks = SpotChecks(coordinator.hub, coordinator.store, Random(1), 1.0)

    async def join(self) -> None:
        for name in self.answers:
            self.members[name] = await self.its.join(name)

    async def work(self) -> None:
        """Complete all jobs on all workers."""
        for _ in range(8):
            for name, member in self.members.items():
                for index, run in enumerate(member.runs):
                    if (name, run.job_id) not in self.done:
                        self.done.add((name, run.job_id))
                        member.write(self.answers[name], run=index)
                        member.complete(run=index)
            await run_pending()

    async def marked(self) -> list[str]:
        found = await self.its.store.penalties_since(0.0)
        return [
            each.fact.worker_id for each in found if isinstance(each.fact, WorkerMarked)
        ]


@pytest.mark.parametrize(
    ("answers", "accused"),
    [
        ({"a": "Lima", "b": "Lima", "c": "Lima"}, []),
        ({"a": "Cusco", "b": "Lima", "c": "Lima"}, ["wire:a"]),
        ({"a": "Lima", "b": "Cusco", "c": "Lima"}, ["wire:b"]),
        ({"a": "Lima", "b": "Cusco", "c": "Quito"}, []),
        ({"a": "Lima", "b": "Cusco"}, []),
    ],
    ids=["all agree", "first is alone", "second is alone", "all differ", "only two"],
)
@in_virtual_time
async def test_worker_with_a_deviating_answer_is_marked(
    answers: dict[str, str], accused: list[str]
) -> None:
    async with running_coordinator() as coordinator:
        pool = DeviatingPool(coordinator, answers)
        await pool.join()
        chat = Chat("m", MESSAGES, temperature=0)
        job = Job(
            coordinator.hub.new_id(), chat, owner="al", terms=JobTerms(detached=True)
        )
        async with coordinator.hub.run_job(job):
            pass
        coordinator.hub.subscribe(pool.checks.on_facts)
        checking = asyncio.create_task(pool.checks.run())
        await pool.work()
        checking.cancel()

        assert await pool.marked() == accused
        if accused:
            again = await coordinator.request()
            (culprit,) = [m for n, m in pool.members.items() if f"wire:{n}" in accused]
            assert again.job_id not in [run.job_id for run in culprit.runs]


@pytest.mark.parametrize(
    ("work", "terms", "owner", "compared"),
    [
        (Chat("m", MESSAGES, temperature=0), JobTerms(), "al", True),
        (Completion("m", "a", temperature=0.0), JobTerms(), "al", True),
        (Chat("m", MESSAGES), JobTerms(), "al", False),
        (Chat("m", MESSAGES, temperature=0.7), JobTerms(), "al", False),
        (Chat(ANY_MODEL, MESSAGES, temperature=0), JobTerms(), "al", False),
        (Chat("m", MESSAGES, temperature=0), JobTerms(), CHECK_OWNER, False),
        (
            Chat("m", MESSAGES, temperature=0),
            JobTerms(privacy=Privacy.PRIVATE),
            "al",
            False,
        ),
        (Embedding("m", ("a",)), JobTerms(), "al", False),
        (Task("sum", {"deterministic": True}), JobTerms(), "al", True),
        (Task("sum", {"deterministic": 1}), JobTerms(), "al", False),
        (Task("sum", "text"), JobTerms(), "al", False),
    ],
)
def test_only_deterministic_work_is_compared(
    work: Work, terms: JobTerms, owner: str, *, compared: bool
) -> None:
    assert comparable(Job(JobId("j"), work, owner=owner, terms=terms)) is compared
