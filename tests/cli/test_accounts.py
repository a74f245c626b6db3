"""``shoal accounts`` at a complete coordinator."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cli.commands import shoal
from gateway.serving import Pool, serving


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with serving(tmp_path) as running:
        yield running


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["credit", "alice", "1.5"], "balance of user:alice: $2.500"),
        (["credit", "user:alice/bob", "0.25"], "balance of user:alice/bob: $0.250"),
        (["budget", "alice", "20"], "overdraft limit of user:alice: $20.000"),
        (["budget", "alice", "0"], "overdraft limit of user:alice: $0.000"),
        (["budget", "alice", "none"], "overdraft limit of user:alice: unlimited"),
    ],
)
async def test_a_change_prints_what_it_changed(
    pool: Pool, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    await shoal(pool, "accounts", "credit", "alice", "1")
    capsys.readouterr()

    assert await shoal(pool, "accounts", *words) == 0

    assert capsys.readouterr().out == f"{line}\n"


async def test_a_change_prints_the_account_as_json(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await shoal(pool, "accounts", "credit", "alice", "1", "--json") == 0
    assert await shoal(pool, "accounts", "budget", "alice", "2", "--json") == 0

    credited, limited = map(json.loads, capsys.readouterr().out.splitlines())
    assert (credited["balance"], credited["budget"]) == (1_000_000, None)
    assert (limited["balance"], limited["budget"]) == (1_000_000, 2_000_000)
    assert [each["why"] for each in limited["transfers"]] == ["credited"]


async def test_accounts_and_their_transfers_are_listed(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    await shoal(pool, "accounts", "ls")
    await shoal(pool, "accounts", "credit", "alice", "1")
    assert capsys.readouterr().out.startswith("no transfers yet; jobs are free")

    assert await shoal(pool, "accounts", "ls") == 0
    head, alice, world, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["ACCOUNT", "BALANCE", "WITH", "SUBS", "OVERDRAFT"]
    assert alice.split() == ["user:alice", "$1.000", "$1.000", "unlimited"]
    assert (world.split()[:2], total) == (["world", "-$1.000"], "total $0.000")

    assert await shoal(pool, "accounts", "show", "alice") == 0
    *_, empty, transfers, transfer = capsys.readouterr().out.splitlines()
    assert (empty, transfers.split()[0]) == ("", "AT")
    assert transfer.split()[2:5] == ["world", "user:alice", "$1.000"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["credit", "alice", "much"], "expected dollars such as $0.010 or 5"),
        (["budget", "alice", "no"], "expected dollars such as $0.010 or 5"),
        (["credit", "world", "5"], "only accounts of keys can be credited"),
        (["show", "nobody"], "the account user:nobody does not exist"),
    ],
)
async def test_refusals_name_the_reason(
    pool: Pool, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert await shoal(pool, "accounts", *words) == 1

    assert reason in capsys.readouterr().err
