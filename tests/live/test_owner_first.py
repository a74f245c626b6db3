"""``shoal join --pause-above`` and its siblings: owners first, with real processes."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import shoal
from live.programs import (
    KEY,
    PATIENCE,
    TESTS,
    GatedModel,
    Programs,
    answer_to,
    eventually,
    text_in,
)
from models.tiny_answers import ANSWERS
from tasks import demo_tasks
from tasks.callers import Gate

STORY = "Tell me a story."
HOT, COOL = 95, 40  # °C
RULE = ("--pause-above", "80")


@pytest.fixture
def heat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the temperature that the driver of a GPU reports to workers."""
    folder = tmp_path / "driver"
    folder.mkdir()
    driver, measured = folder / "nvidia-smi", folder / "temperature"
    driver.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *temperature*) echo "0x0000000000000000, $(cat {measured})"; '
        "esac\n"
    )
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def set_(celsius: int) -> None:
        measured.write_text(str(celsius))

    set_(COOL)
    return set_


def test_a_running_answer_is_handed_over_and_completed(
    programs: Programs,
    slow_model: GatedModel,
    heat: Callable[[int], None],
) -> None:
    pool = programs.serve()
    flags = slow_model.flags
    worker = pool.joined("one", *flags, *RULE)
    with pool.client() as client, answer_to(client, STORY) as stream:
        chunks = iter(stream)
        job_id = next(chunks).id
        pieces = text_in(chunks)
        text = next(pieces)
        pool.joined("two", *flags)

        heat(HOT)
        paused = worker.event("paused")
        slow_model.go_on.set()
        text += "".join(pieces)

    assert (paused["reason"], paused["throttle"]) == ("hotter than 80 °C", 0)
    assert text == ANSWERS[STORY]
    explained = "\n".join(pool.admin(f"jobs/{job_id}/explain")["lines"])
    assert "handed over: hotter than 80 °C" in explained
    assert "done by attempt 2" in explained
    assert slow_model.requests == 2


def test_the_owners_order_ends_a_pause_by_a_rule(
    programs: Programs, slow_model: GatedModel, heat: Callable[[int], None]
) -> None:
    pool = programs.serve()
    heat(HOT)
    worker = pool.join("one", *slow_model.flags, *RULE)
    worker.event("paused")
    worker.event("joined")
    eventually(
        lambda: pool.workers()[0]["unfit"] == "paused: hotter than 80 °C",
        "the coordinator knows why",
    )

    assert programs.run("throttle", "100").wait() == 0

    assert worker.event("resumed")["throttle"] == 100
    eventually(lambda: not pool.workers()[0]["unfit"], "the worker gets jobs")


@pytest.mark.parametrize("durable", [True, False])
async def test_a_running_call_is_handed_over(
    programs: Programs,
    heat: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    durable: bool,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    ports = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")
    pool = programs.serve(*ports)
    tasks = ("--tasks", "tasks.demo_tasks", "--slots", "1")
    worker = pool.joined("one", *tasks, *RULE)
    gate = Gate.make(tmp_path)
    with shoal.Pool(pool.url, KEY, durable=durable) as client:
        waiting = client.submit(demo_tasks.waits, *gate.args)
        await gate.reached()
        await asyncio.to_thread(pool.joined, "two", *tasks)

        heat(HOT)
        await asyncio.to_thread(worker.event, "paused")
        await gate.reached()  # by the other worker
        await gate.open()

        await asyncio.to_thread(waiting.result, PATIENCE)
