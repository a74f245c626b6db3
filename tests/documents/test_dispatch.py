"""A worker and a coordinator written from Dispatch's document alone."""

import asyncio
from typing import Any

import pytest

from documents.dispatch import Coordinator, Rejection, Worker
from documents.serving import at_any_path, beside, chat, get, post, until
from live.programs import PATIENCE, TINY, Pool, Programs
from models.tiny_answers import ANSWERS

TASK = {"task_type": "classify", "input": "This product is amazing."}
JOB = {"policy": "CHEAP", "privacy_class": "PUBLIC", "user_id": "user_abc123"}


def run_job(job: dict[str, Any]) -> Any:
    if job["job_type"] == "TASK":
        assert job["payload"].keys() >= {"task_type", "input"}
        return {"sentiment": "positive", "confidence": 0.5}
    return {"text": f"{job['payload']['prompt']}, {job['payload']['max_tokens']}"}


def reject(job: dict[str, Any]) -> Any:
    raise Rejection("Ollama not available")


async def ended(pool: Pool, committed: dict[str, Any]) -> dict[str, Any]:
    job: dict[str, Any] = await get(pool, f"/v1/jobs/{committed['job_id']}?wait=30")
    return job


@pytest.mark.short
async def test_a_worker_joins_and_answers_chats_and_tasks(programs: Programs) -> None:
    pool = programs.serve("--dispatch-open")
    worker = Worker(pool.url, run_job)

    async with asyncio.timeout(PATIENCE), beside(worker.run()):
        await worker.acknowledged.wait()
        assert await chat(pool, "dispatch", "hello", max_tokens=64) == "hello, 64"
        task = {"job_type": "TASK", "payload": TASK, "user_id": "ada"}
        done = await ended(pool, await post(pool, "/v1/jobs/commit/cheap", task))

    assert done["result"] == {"sentiment": "positive", "confidence": 0.5}
    for assigned in worker.of("job_assign"):
        assert assigned.keys() >= {"job_id", "payload", *JOB}
    assert worker.of("error") == []


@pytest.mark.parametrize("apart", [False, True])
async def test_receipts_over_canonical_json_are_verified(
    programs: Programs, apart: bool
) -> None:
    pool = programs.serve("--dispatch-open")
    metrics = {"cpu_pct": 45.2, "mem_pct": 62.1, "active_jobs": 1}
    optional = {"pricing_hint": "$0.010"}
    worker = Worker(pool.url, run_job, optional=optional, metrics=metrics, apart=apart)

    async with asyncio.timeout(PATIENCE), beside(worker.run()):
        await worker.acknowledged.wait()
        task = {"job_type": "TASK", "payload": TASK, "user_id": "ada"}
        committed = await post(pool, "/v1/jobs/commit/fast", task)
        done = await ended(pool, committed)
        while not done.get("receipt"):  # one that is sent apart comes later
            done = await ended(pool, committed)

    assert done["receipt"]["verified"] is True
    assert worker.of("error") == []


async def test_a_rejected_job_goes_to_another_worker(programs: Programs) -> None:
    pool = programs.serve("--dispatch-open")
    rejecting = Worker(pool.url, reject)

    async with asyncio.timeout(PATIENCE), beside(rejecting.run()):
        await rejecting.acknowledged.wait()
        asking = asyncio.create_task(chat(pool, "dispatch", "hello", max_tokens=64))
        await until(lambda: rejecting.of("job_assign"))
        other = Worker(pool.url, run_job)
        async with beside(other.run()):
            assert await asking == "hello, 64"

    assert rejecting.of("error") == []


async def test_a_worker_serves_a_coordinator(programs: Programs) -> None:
    coordinator = Coordinator()
    prompt = {"prompt": "ping", "max_tokens": 64}

    async with asyncio.timeout(PATIENCE), at_any_path(coordinator.handle) as address:
        worker = programs.run(
            *("join", f"ws://{address}", "--wire", "dispatch", "--json"),
            *("--model", f"tiny={TINY}", "--price", "$0.010"),
        )
        await coordinator.registered.wait()
        await coordinator.complain("invalid_message", "Failed to parse")
        answer = await coordinator.ask(
            "a1b2c3d4-e5f6-7890-abcd-ef1234567890",
            job_type="LLM_INFER",
            payload=prompt,
            **JOB,
        )
        await until(lambda: coordinator.heartbeats)
        assert worker.process.poll() is None

    assert answer["type"] == "job_complete"
    assert answer["output"]["text"] == ANSWERS["ping"]
    assert coordinator.verifies(answer)
    assert coordinator.unexpected == []
    registration = coordinator.registration
    assert registration["provider_type"] == "DESKTOP"
    assert {"LLM_INFER"} <= {*registration["capabilities"]} <= {"LLM_INFER", "TASK"}
    assert registration["pricing_hint"] == "$0.010"
    assert registration.keys() <= {
        "type", "provider_pubkey", "provider_type", "capabilities", "pricing_hint",
    }  # fmt: skip
    assert coordinator.heartbeats[0].keys() <= {"type", "provider_pubkey", "metrics"}


async def test_a_worker_with_tasks_serves_a_coordinator(
    programs: Programs,
) -> None:
    coordinator = Coordinator()
    tasks = programs.folder / "their_tasks.py"
    tasks.write_text(TASKS)

    async with asyncio.timeout(PATIENCE), at_any_path(coordinator.handle) as address:
        programs.run(
            *("join", f"http://{address}", "--wire", "dispatch", "--json"),
            *("--tasks", str(tasks)),
        )
        await coordinator.registered.wait()
        answer = await coordinator.ask("1", job_type="TASK", payload=TASK, **JOB)
        unknown = await coordinator.ask(
            "2", job_type="TASK", payload={"task_type": "juggle", "input": ""}, **JOB
        )

    assert answer["output"] == {"sentiment": "positive", "length": 24}
    assert coordinator.verifies(answer)
    assert "output" in unknown or "reason" in unknown
    assert coordinator.registration["capabilities"] == ["TASK"]


TASKS = """
import shoal


@shoal.task(name="classify")
def classify(input):
    return {"sentiment": "positive", "length": len(input)}
"""
