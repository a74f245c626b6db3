"""`shoal serve --approve-nodes` and `shoal nodes approve`, with real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from live.programs import (
    KEY,
    TINY,
    TOKEN,
    Pool,
    Program,
    Programs,
    answer_to,
    eventually,
    text_in,
)
from models.tiny_answers import ANSWERS

OPEN = ("--tealenet-open", "--relay-open")  # TealeNet has no tokens
STRICT = ("--approve-nodes", "--dispatch-model", "tiny", *OPEN)
STORY = "Tell me a story."


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Programs]:
    """The programs of a machine with another identity."""
    folder = tmp_path / "other"
    folder.mkdir()
    running = Programs(folder)
    yield running
    running.close()


def states(pool: Pool) -> list[str | None]:
    return sorted((each["suspension"] for each in pool.workers()), key=str)


def nodes(programs: Programs, pool: Pool, *words: str) -> int:
    place = ("--url", pool.url, "--api-key", KEY)
    return programs.run("nodes", *words, *place).wait()


def join(programs: Programs, pool: Pool, wire: str) -> Program:
    place = (pool.url, "--json", "--name", "one", "--token", TOKEN)
    model = ("--wire", wire, "--model", f"tiny={TINY}")
    worker = programs.run("join", *place, *model)
    worker.event("joined")
    return worker


@pytest.mark.parametrize("wire", ["shoal", "tealenet", "dispatch", "grandsage"])
def test_a_machine_gets_jobs_from_its_approval_on(
    programs: Programs, others: Programs, wire: str
) -> None:
    pool = programs.serve(*STRICT)
    machine = join(programs, pool, wire)
    eventually(lambda: states(pool) == ["pending"], "the machine is pending")

    assert nodes(programs, pool, "approve", f"{wire}:nobody") == 0
    assert states(pool) == ["pending"]
    (worker,) = pool.workers()
    assert nodes(programs, pool, "approve", worker["id"].partition("/")[0]) == 0

    assert states(pool) == [None]
    with pool.client() as client, answer_to(client, STORY) as stream:
        assert "".join(text_in(stream)) == ANSWERS[STORY]

    pool.program.kill()
    pool = programs.serve(*STRICT, port=pool.port)
    eventually(lambda: states(pool) == [None], "the machine is still approved")
    if wire == "grandsage":
        return  # which has names, and no keys
    if wire == "shoal":
        machine.terminate()  # while it is here, its namesake is refused
    join(others, pool, wire)
    eventually(lambda: "pending" in states(pool), "its namesake is pending")
