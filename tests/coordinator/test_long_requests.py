"""A request that is too long for one worker reaches another, or its client."""

from coordinator.hubs import Coordinator, run_pending, run_script
from shoal.domain.errors import ContextExceeded
from shoal.domain.facts import JobRequeued
from shoal.domain.outcome import Fault
from shoal.domain.vocabulary import Failed
from shoal.pool.explanation import explain
from simulation.virtual import scripted

TOO_LONG = "the input length exceeds the context length"
SMALL = "This model's maximum context length is 2048 tokens"
PROMPT = "word " * 2000


@scripted(run_script)
async def test_request_goes_on_until_a_worker_reads_it(
    coordinator: Coordinator,
) -> None:
    workers = [await coordinator.join(name) for name in "abc"]
    client = await coordinator.request(prompt=PROMPT)
    for worker, said in zip(workers, (TOO_LONG, SMALL), strict=False):
        run = worker.runs[0]
        worker.emit(Failed(run.job_id, run.lease, said, Fault.CONTEXT))
        await run_pending()
    workers[2].write("read")
    workers[2].complete()
    await run_pending()
    assert client.text == "read"

    # The first two are not asked again, nor held up for shorter ones.
    long = await coordinator.request(prompt=PROMPT + "more")
    short = await coordinator.request(prompt="short")
    for worker in (workers[0], workers[2]):
        worker.write("read")
        worker.complete()
    await run_pending()

    assert (long.text, short.text) == ("read", "read")
    assert [len(worker.runs) for worker in workers] == [2, 1, 2]
    history = await coordinator.store.history(client.job_id)
    assert [
        each.fact.too_long for each in history if isinstance(each.fact, JobRequeued)
    ] == [True, True]
    told = "\n".join(explain(history))
    refused = "refused by wire:a for its length, back in the queue"
    assert f"{refused}: {TOO_LONG}" in told
    assert f"passed over: wire:b: refused it for its length: {SMALL}" in told


@scripted(run_script)
async def test_request_that_no_worker_reads_fails_and_is_then_refused_at_once(
    coordinator: Coordinator,
) -> None:
    workers = [await coordinator.join(name) for name in "ab"]
    client = await coordinator.request(prompt=PROMPT)
    for worker, said in zip(workers, (SMALL, TOO_LONG), strict=True):
        run = worker.runs[0]
        worker.emit(Failed(run.job_id, run.lease, said, Fault.CONTEXT))
        await run_pending()

    assert isinstance(client.error, ContextExceeded)
    expected = f"{TOO_LONG} (the longest context here: 2048 tokens)"
    assert str(client.error) == expected

    again = await coordinator.request(prompt=PROMPT)

    assert isinstance(again.error, ContextExceeded)
    assert "the longest context here: 2048 tokens" in str(again.error)
    assert [len(worker.runs) for worker in workers] == [1, 1]
