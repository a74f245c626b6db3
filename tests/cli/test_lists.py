"""Lists that are longer than a page."""

import json
from pathlib import Path

import pytest

from cli.commands import shoal
from gateway.serving import serving
from shoal.domain.facts import Fact, JobCancelled, JobSubmitted
from shoal.domain.ids import JobId
from shoal.domain.job import Job
from shoal.domain.work import Chat
from shoal.ledger import accounts
from shoal.store.sqlite.database import SqliteStore

ACCOUNTS = 1500  # more than one page


async def test_lists_are_complete_or_name_the_next_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = SqliteStore(tmp_path / "shoal.db")
    await store.open()
    names = [f"user:u{number:04}" for number in range(ACCOUNTS)]
    credits = [each for name in names for each in accounts.credit(name, 7)]
    facts: list[Fact] = []
    for name in "abc":
        job = Job(JobId(name), Chat("m", ()))
        facts += [JobSubmitted(job), JobCancelled(job.id, "enough")]
    await store.append(facts, 1.0)
    await store.close()

    async with serving(tmp_path) as pool:
        assert pool.gateway is not None
        pool.gateway.hub.books.apply(credits)
        assert await shoal(pool, "accounts", "ls", "--json") == 0
        listed = json.loads(capsys.readouterr().out)
        assert [each["name"] for each in listed["data"]] == [*names, "world"]
        assert (listed["total"], listed["next"]) == (0, None)

        assert await shoal(pool, "jobs", "ls", "--limit", "2") == 0
        told = capsys.readouterr()
        assert [line.split()[0] for line in told.out.splitlines()[1:]] == ["c", "b"]
        assert told.err == "older ones: --before @2\n"

        assert await shoal(pool, "jobs", "ls", "--limit", "2", "--before", "b") == 0
        told = capsys.readouterr()
        assert [line.split()[0] for line in told.out.splitlines()[1:]] == ["a"]
        assert told.err == ""
