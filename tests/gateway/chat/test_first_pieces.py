"""The wait for the first pieces of an answer, before the headers of its response."""

import asyncio

from shoal.coordinator.answer import Answer
from shoal.domain.ids import JobId, LeaseNumber, WorkerId
from shoal.gateway.chat.job_answers import first_pieces


async def test_pieces_of_a_worker_that_is_lost_at_once_are_not_the_end() -> None:
    answer = Answer(JobId("j"))
    waiting = asyncio.create_task(first_pieces(answer.open_reader()))
    answer.grant(LeaseNumber(1), WorkerId("a"), continues=False)
    await asyncio.sleep(0)

    answer.append(["Once"], 0.0)
    # Before its reader was scheduled, another worker begins anew.
    answer.grant(LeaseNumber(2), WorkerId("b"), continues=False)
    await asyncio.sleep(0)
    answer.append(["Twice"], 0.0)

    assert await waiting == ["Twice"]
