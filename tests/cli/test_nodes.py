"""``shoal nodes``: what it asks for and prints."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cli.commands import shoal
from cli.coordinators import Sites
from gateway.serving import Pool, serving
from shoal.cli.main import main
from shoal.cli.pool import nodes

ORDER: dict[str, Any] = {
    "name": "wire:w/m",
    "state": "draining",
    "by": "al",
    "since": 0.0,
    "workers": ["wire:w/m"],
    "running": 2,
    "approved": [],
}
PATH = "/admin/workers/wire:w/m"


async def run(url: str, *words: str) -> int:
    address = ("--url", url, "--api-key", "sk-test")
    return await asyncio.to_thread(main, ["nodes", *words, *address])


@pytest.mark.parametrize(
    ("words", "order", "line"),
    [
        (["pause"], {}, "paused wire:w/m: it still runs 2 jobs"),
        (["pause"], {"running": 1}, "paused wire:w/m: it still runs 1 job"),
        (["pause"], {"running": 0}, "paused wire:w/m"),
        (
            ["pause"],
            {"workers": []},
            "paused wire:w/m: no worker of this name is connected now; the pause "
            "starts when it connects",
        ),
        (
            ["resume"],
            {"workers": []},
            "resumed wire:w/m: no worker of this name is connected now; if its `shoal "
            "join` has ended, start that again",
        ),
        (["resume"], {}, "resumed wire:w/m"),
        (
            ["approve"],
            {"state": "active", "approved": ["8a", "wire:w/m"]},
            "approved wire:w/m: the key 8a",
        ),
        (
            ["approve"],
            {"state": "pending", "approved": ["8a"]},
            "approved wire:w/m: the key 8a; workers of this name that have not proved "
            "a key are still pending: approve each by its name in `shoal status "
            "--json`",
        ),
        (
            ["approve"],
            {"state": "active", "approved": ["wire:w/m"]},
            "approved wire:w/m",
        ),
        (
            ["approve"],
            {"state": "active", "workers": []},
            "approved wire:w/m: no worker of this name is connected now; the approval "
            "is for the first one that connects",
        ),
        (
            ["approve"],
            {"state": "removed", "workers": []},
            "approved wire:w/m: it is removed; to resume: shoal nodes resume wire:w/m",
        ),
        (["drain"], {}, "draining wire:w/m: it still runs 2 jobs"),
        (
            ["drain", "--within", "5m"],
            {"state": "drained", "running": 0},
            "drained wire:w/m",
        ),
        (["remove"], {"running": 0}, "removed wire:w/m"),
    ],
)
async def test_the_result_is_one_line(
    sites: Sites,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    order: dict[str, Any],
    line: str,
) -> None:
    url = await sites({f"{PATH}/{words[0]}": ORDER | order})

    assert await run(url, *words, "wire:w/m") == 0

    assert capsys.readouterr().out == f"{line}\n"


async def test_the_order_is_printed_as_json(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    url = await sites({f"{PATH}/drain": ORDER})

    await run(url, "drain", "wire:w/m", "--json")

    assert json.loads(capsys.readouterr().out) == ORDER


async def test_a_drain_waits_for_the_jobs(
    sites: Sites,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nodes, "POLL_INTERVAL", 0.0)
    ended = {"state": "drained", "workers": [], "running": 0}
    url = await sites({f"{PATH}/drain": ORDER, PATH: ORDER | ended})

    await run(url, "drain", "wire:w/m", "--wait")

    drained = (
        "drained wire:w/m: no worker of this name is connected now; it gets no jobs "
        "when it connects\n"
    )
    assert capsys.readouterr().out == drained


async def test_an_empty_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("http://127.0.0.1:1", "pause", "") == 2

    assert "expected the name of a node, got ''" in capsys.readouterr().err


@pytest.mark.parametrize("state", ["active", "paused"])
async def test_a_drain_that_another_operator_ends_is_an_error(
    sites: Sites,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
) -> None:
    monkeypatch.setattr(nodes, "POLL_INTERVAL", 0.0)
    url = await sites({f"{PATH}/drain": ORDER, PATH: ORDER | {"state": state}})

    assert await run(url, "drain", "wire:w/m", "--wait") == 1

    reason = f"wire:w/m is {state} now: the drain was ended before its jobs were"
    assert reason in capsys.readouterr().err


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with serving(tmp_path) as running:
        yield running


async def test_machines_are_listed_with_what_they_offer(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await shoal(pool, "nodes", "ls") == 0
    assert capsys.readouterr().out == (
        "no nodes: `shoal join-line` prints the command that adds one\n"
    )

    async with pool.node("otter"), pool.node("beaver", "m2", slots="2"):
        await pool.wait_joined(2)
        assert await shoal(pool, "nodes", "ls") == 0
        head, *rows = capsys.readouterr().out.splitlines()
        assert await shoal(pool, "nodes", "ls", "--json") == 0

    columns = ["NAME", "STATE", "WIRES", "MODELS", "FUNCTIONS", "RUNNING", "SINCE"]
    assert head.split() == columns
    assert [row.split()[:6] for row in rows] == [
        ["beaver", "active", "grandsage", "1", "0", "0/2"],
        ["otter", "active", "grandsage", "1", "0", "0/8"],
    ]
    assert all(row.endswith("Z") for row in rows)
    listed = json.loads(capsys.readouterr().out)["data"]
    names = [each["names"] for each in listed]
    assert names == [["grandsage:beaver"], ["grandsage:otter"]]


async def test_a_machine_is_paused_and_resumed_by_its_name_alone(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with pool.node("otter"):
        await pool.wait_joined()
        assert await shoal(pool, "nodes", "pause", "otter") == 0
        assert await shoal(pool, "nodes", "ls") == 0
    await pool.wait_joined(0)
    assert await shoal(pool, "nodes", "ls") == 0
    assert await shoal(pool, "nodes", "resume", "otter", "--json") == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "paused grandsage:otter"
    assert lines[2].split()[:6] == ["otter", "paused", "grandsage", "1", "0", "0/8"]
    assert lines[4].split()[:6] == ["otter", "paused", "grandsage", "0", "0", "0/0"]
    assert json.loads(lines[5])["state"] == "active"


async def test_a_removed_machine_of_two_wires_is_resumed_by_its_name_alone(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    for wire in ("grandsage", "tealenet"):
        assert await shoal(pool, "nodes", "remove", f"{wire}:otter") == 0
    assert await shoal(pool, "nodes", "resume", "otter", "--json") == 0

    resumed = map(json.loads, capsys.readouterr().out.splitlines()[2:])
    assert [(each["name"], each["state"]) for each in resumed] == [
        ("grandsage:otter", "active"),
        ("tealenet:otter", "active"),
    ]


async def test_an_unknown_name_is_answered_with_similar_ones(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with pool.node("otter"):
        await pool.wait_joined()
        assert await shoal(pool, "nodes", "pause", "oter") == 1
    await pool.wait_joined(0)
    assert await shoal(pool, "nodes", "drain", "otter") == 1

    similar, empty = capsys.readouterr().err.splitlines()
    assert similar.endswith("no node is called oter; did you mean otter?")
    assert "no node is called otter; no nodes: `shoal join-line`" in empty


async def test_a_new_machine_is_approved_by_its_name_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path, approve_nodes=True) as pool, pool.node("otter"):
        await pool.wait_joined()
        assert await shoal(pool, "nodes", "ls") == 0
        assert await shoal(pool, "status") == 0
        assert await shoal(pool, "nodes", "approve", "oter") == 1
        assert await shoal(pool, "nodes", "approve", "otter") == 0
        assert await shoal(pool, "nodes", "ls") == 0
        assert await shoal(pool, "status") == 0

    shown = capsys.readouterr()
    pending, approved = shown.out.split("approved grandsage:otter\n")
    remark = "an operator has to approve it: shoal nodes approve otter"
    assert "no node is called oter; did you mean otter?" in shown.err
    assert pending.count("pending ") == 2
    assert f"otter: {remark}" in pending
    assert f"  {remark}" in pending
    assert "pending" not in approved
    assert remark not in approved
