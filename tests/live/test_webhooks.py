"""Webhooks are delivered although the coordinator is killed."""

import asyncio
import json

from aiohttp import ClientSession

from gateway.receiver import run_receiver, verify
from gateway.serving import eventually
from live.programs import KEY, Programs

SECRET = "a secret of the receiver's"
# Nobody is paired, so that it fails at once.
JOB = {
    "job_type": "TASK",
    "user_id": "u",
    "payload": {"task_type": "classify"},
    "privacy_class": "PRIVATE",
}


async def test_webhook_is_delivered_after_a_kill_under_the_same_id(
    programs: Programs,
) -> None:
    async with run_receiver(None, 200) as receiver, ClientSession() as session:
        first = programs.start("--webhooks", "any")
        ready = await asyncio.to_thread(first.event, "ready")
        async with session.post(
            ready["url"] + "/v1/jobs/commit/cheap",
            json=JOB | {"webhook": {"url": receiver.url, "secret": SECRET}},
            headers={"Authorization": f"Bearer {KEY}"},
        ) as response:
            job_id = (await response.json())["job_id"]
        await eventually(lambda: receiver.open == 1)
        first.kill()

        programs.start("--webhooks", "any")
        await eventually(lambda: len(receiver.requests) == 2)

    (before, _), (after, body) = receiver.requests
    assert before["webhook-id"] == after["webhook-id"] == f"msg_{job_id}"
    assert verify(after, body, SECRET.encode())
    message = json.loads(body)
    assert message["type"] == "job.failed"
    assert message["data"]["result"] == {"error": "no_trusted_worker"}
