"""The promises of ``docs/promises.md`` on batches, with OpenAI's client."""

import json
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.batches.uploads import CHAT_PATH, ENDED, chat_line, jsonl
from harness.ports import free_port
from harness.slow_imports import openai
from harness.speed import scaled
from live.databases import NAME, copied
from live.laws import LAWS, POSTED, prepare
from live.programs import PRICES, GatedModel, Pool, Program, Programs, eventually

LINES = 1000
WORKERS = ("one", "two", "three")
SLOTS = ("--slots", "4")
WITHIN = scaled(120.0)  # seconds until a batch of LINES has ended
FLOWING = 100  # lines that the model answers while a program is killed


class Echo(Mapping[str, Sequence[str]]):
    """Answers that repeat the question, once its line is allowed.

    A batch then outlives every kill, however fast it runs.
    """

    def __init__(self) -> None:
        self._allowed = 0
        self._changed = threading.Condition()

    def allow(self, lines: int) -> None:
        """Answer the first ``lines`` lines of the batch."""
        with self._changed:
            self._allowed = lines
            self._changed.notify_all()

    def __getitem__(self, question: str) -> Sequence[str]:
        number = int(question.removeprefix("q"))
        with self._changed:
            self._changed.wait_for(lambda: number < self._allowed)
        return [question, "!"]

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


@pytest.fixture
def echo() -> Iterator[Echo]:
    answers = Echo()
    yield answers
    answers.allow(LINES)


@pytest.fixture
def model(echo: Echo) -> Iterator[GatedModel]:
    model = GatedModel(-1, echo)
    yield model
    model.close()


def created(client: "openai.OpenAI", count: int) -> "openai.types.Batch":
    """Upload that many lines, and create a batch of chats."""
    lines = jsonl([chat_line(number, "tiny") for number in range(count)])
    file = client.files.create(file=("in.jsonl", lines), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=CHAT_PATH, completion_window="24h"
    )


def ended(client: "openai.OpenAI", batch: "openai.types.Batch") -> "openai.types.Batch":
    """Wait for the end of a batch."""
    found = batch

    def has_ended() -> bool:
        nonlocal found
        found = client.batches.retrieve(batch.id)
        return found.status in ENDED

    eventually(has_ended, f"the end of {batch.id}", WITHIN)
    return found


def results(client: "openai.OpenAI", batch: "openai.types.Batch") -> dict[str, Any]:
    """Return the lines of the output file by their ids."""
    assert batch.output_file_id is not None
    lines = client.files.content(batch.output_file_id).text.splitlines()
    found = {each["custom_id"]: each for each in map(json.loads, lines)}
    assert len(found) == len(lines), "a line is there twice"
    return found


def test_batch_runs_on_a_real_model(pool: Pool) -> None:
    with pool.client() as client:
        batch = ended(client, created(client, 20))

        assert batch.status == "completed", batch
        found = results(client, batch)
        assert found.keys() == {f"c{number}" for number in range(20)}
        for each in found.values():
            body = each["response"]["body"]
            assert each["response"]["status_code"] == 200
            assert body["choices"][0]["message"]["content"]
            assert body["usage"]["completion_tokens"] > 0
        with client.files.with_streaming_response.content(
            str(batch.output_file_id)
        ) as streamed:
            assert sum(map(len, streamed.iter_bytes())) > 0
        assert next(each.id for each in client.batches.list()) == batch.id


class BatchSite:
    """A coordinator and workers, which are killed and started again."""

    def __init__(self, programs: Programs, model: GatedModel) -> None:
        self._programs = programs
        self._flags = (*model.flags, *SLOTS)
        self._workers: dict[str, Program] = {}
        self.pool = programs.serve(*PRICES, port=free_port())
        self.open_at_kills: list[int] = []
        for name in WORKERS:
            self.enlist(name)

    def enlist(self, name: str) -> None:
        self._workers[name] = self.pool.join(name, *self._flags)

    def kill(self, name: str) -> None:
        """Kill a worker, or the coordinator, and start another in its place."""
        if name in WORKERS:
            self._workers[name].kill()
            self.enlist(name)
            return
        self.pool.program.kill()
        with closing(sqlite3.connect(self.database("killed"))) as sql:
            query = "SELECT count(*) FROM jobs WHERE ended_at IS NULL"
            self.open_at_kills.append(sql.execute(query).fetchone()[0])
        self.pool = self._programs.serve(*PRICES, port=self.pool.port)

    def database(self, name: str) -> Path:
        """Copy the database; return where the copy is."""
        folder = self._programs.folder / name
        if folder.exists():
            shutil.rmtree(folder)
        return copied(self._programs.data, folder)


def wait_for(client: "openai.OpenAI", batch: "openai.types.Batch", enough: int) -> None:
    """Wait until a number of lines are done."""

    def are_done() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed >= enough

    eventually(are_done, f"{enough} lines", WITHIN)


def test_no_line_is_lost_or_done_twice_in_any_kill(
    programs: Programs, model: GatedModel, echo: Echo
) -> None:
    site = BatchSite(programs, model)
    eventually(lambda: len(site.pool.workers()) == len(WORKERS), "the workers")

    with site.pool.client() as client:
        batch = created(client, LINES)
        for enough, name in (
            (100, "one"),
            (250, "coordinator"),
            (400, "two"),
            (550, "coordinator"),
            (650, "three"),
            (800, "coordinator"),
        ):
            echo.allow(enough + FLOWING)
            wait_for(client, batch, enough)
            site.kill(name)
        echo.allow(LINES)
        batch = ended(client, batch)

        assert (batch.status, batch.error_file_id) == ("completed", None), batch
        found = results(client, batch)
    assert found.keys() == {f"c{number}" for number in range(LINES)}
    for name, each in found.items():
        message = each["response"]["body"]["choices"][0]["message"]
        assert message["content"] == name.replace("c", "q") + "!"
    # What is in files is deleted from the database soon.
    eventually(lambda: not results_in(programs.data / NAME), "its results are gone")
    site.pool.program.terminate()
    check_books(site.database("end"))
    # The control: the kills did interrupt lines.  Those of the coordinator need not run
    # again: their workers come back.
    assert sum(site.open_at_kills) > 0
    assert model.requests >= LINES


def check_books(database: Path) -> None:
    """Check that each line has one job that is done, paid and proved once."""
    with closing(sqlite3.connect(database)) as sql:
        prepare(sql)
        for law in (*POSTED, "no job is paid for twice", "every job has ended"):
            assert sql.execute(LAWS[law]).fetchall() == [], law
        for query in (
            "SELECT count(*) FROM jobs WHERE state = 'done'",
            "SELECT count(DISTINCT idempotency_key) FROM jobs WHERE state = 'done'",
            "SELECT count(*) FROM receipts",
            "SELECT count(DISTINCT job_id) FROM receipts",
            "SELECT count(*) FROM transfers WHERE why = 'paid'",
        ):
            assert sql.execute(query).fetchone() == (LINES,), query
        query = "SELECT count(*) FROM batches WHERE ended_at IS NULL"
        assert sql.execute(query).fetchone() == (0,)


def results_in(database: Path) -> int:
    """Return how many results there are in a database that is in use."""
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as sql:
        return int(sql.execute("SELECT count(*) FROM batch_results").fetchone()[0])
