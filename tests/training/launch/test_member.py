"""Members of a run: real scripts, and a real coordinator in the same process."""

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.runs.test_endpoints import RUN, TOKEN, beside, link, next_of, open_run
from gateway.serving import WAIT_MAX, Pool, serving
from shoal.domain.errors import ConfigError
from shoal.training.launch import member_reports
from shoal.training.launch import script as script_files
from shoal.training.launch.member import (
    MemberPlan,
    MemberResult,
    ScriptFailed,
    headline,
    run_member,
)
from shoal.training.launch.script import (
    COORDINATOR_FINGERPRINT,
    COORDINATOR_URL,
    pack_script,
)
from shoal.training.run_events import Message
from shoal.training.run_link import EVENTS, RunLink


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    async with serving(tmp_path) as running:
        yield running


@pytest.fixture(autouse=True)
def joined(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COORDINATOR_URL, pool.url)
    monkeypatch.setenv(COORDINATOR_FINGERPRINT, "")


def plan(node: int = 0, nodes: int = 1, **changes: Any) -> MemberPlan:
    whole: MemberPlan = {
        "token": TOKEN,
        "node": node,
        "nodes": nodes,
        "processes": 1,
        "script": "script.py",
        "arguments": [],
        "environment": {},
        "backend": "shoal",
        "whole_machine": True,
        "name": "a test",
        "output": True,
    }
    return {**whole, **changes}  # type: ignore[typeddict-item]  # its keys


def archive(folder: Path, text: str) -> bytes:
    script = folder / "script.py"
    script.write_text(text)
    return pack_script(script, [])


async def run(plan: MemberPlan, archive: bytes) -> MemberResult:
    return await beside(run_member, plan, archive)


async def watched(link: RunLink, ends: int) -> list[Message]:
    """Return the events of a run, up to so many ends of members."""
    events: list[Message] = []
    while sum(each["event"] == "ended" for each in events) < ends:
        message = await beside(link.receive, WAIT_MAX)
        assert message is not None, events
        if "event" in message:
            events.append(message)
    return events


def watcher_of(pool: Pool) -> Any:
    return link(pool, purpose=EVENTS, greeting=lambda: [{"watch": 0}])


def lines_of(events: list[Message], rank: int) -> list[object]:
    lines: list[object] = []
    for each in events:
        printed = each.get("lines", [])
        if each.get("rank") == rank:
            assert isinstance(printed, list)
            lines += printed
    return lines


MEETING = """
import os, sys
names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT EXTRA SHOAL_RUN"
print(*(os.environ[each] for each in names.split()), *sys.argv[1:])
"""


async def test_members_meet_at_the_address_of_the_first(
    pool: Pool, tmp_path: Path
) -> None:
    files = archive(tmp_path, MEETING)
    options: Mapping[str, Any] = {
        "processes": 2,
        "environment": {"EXTRA": "x"},
        "arguments": ["--epochs", "3"],
    }
    async with open_run(pool), watcher_of(pool) as watcher:
        later = asyncio.create_task(run(plan(1, 2, **options), files))
        await run(plan(0, 2, **options), files)
        await later
        events = await watched(watcher, 2)

    printed = {rank: str(lines_of(events, rank)[0]).split() for rank in range(4)}
    assert {each[0] for each in printed.values()} == {"0", "1", "2", "3"}
    assert [each[1] for each in printed.values()] == ["0", "1", "0", "1"]
    assert {tuple(each[2:]) for each in printed.values()} == {
        ("4", "127.0.0.1", printed[0][4], "x", RUN, "--epochs", "3")
    }


STARTS = """
import os, time
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(start)
while start == "0":
    time.sleep(0.05)
"""


async def test_script_begins_anew_on_all_machines_when_a_part_starts_elsewhere(
    pool: Pool, tmp_path: Path
) -> None:
    files = archive(tmp_path, STARTS)
    fresh: Message = {"member": 0, "round": -1, "nodes": []}
    async with open_run(pool), watcher_of(pool) as watcher:
        members = [asyncio.create_task(run(plan(node, 2), files)) for node in range(2)]
        before = [await next_of(watcher, "lines") for _ in members]
        async with link(pool, purpose=EVENTS, greeting=lambda: [fresh]):
            await asyncio.gather(*members)
        events = await watched(watcher, 4)

    assert sorted(str(each["rank"]) for each in before) == ["0", "1"]
    for rank in range(2):
        assert [*lines_of(events, rank)] == ["1"]
    remarks = [each["text"] for each in events if each["event"] == "remark"]
    assert remarks == ["machine 0 restarts: the script restarts on 2 machines"]


async def test_what_a_script_leaves_is_returned(pool: Pool, tmp_path: Path) -> None:
    files = archive(
        tmp_path,
        "import os; open(os.environ['SHOAL_OUTPUT'] + '/model', 'w').write('trained')",
    )
    async with open_run(pool):
        result = await run(plan(), files)

    assert result["files"] == {"model": b"trained"}


async def test_large_files_are_stored_in_pieces_at_the_coordinator(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_files, "TOGETHER_MAX", 4)
    monkeypatch.setattr(script_files, "PIECE_MAX", 5)
    files = archive(
        tmp_path,
        "import os; open(os.environ['SHOAL_OUTPUT'] + '/model', 'w').write('trained')",
    )
    async with open_run(pool):
        result = await run(plan(), files)

    pieces = result["files"]["model"]
    assert isinstance(pieces, list)
    stored = [pool.hub.blobs.read(bytes.fromhex(each)) for each in pieces]
    assert [bytes(await each) for each in stored] == [b"train", b"ed"]


async def test_numbers_that_a_script_prints_are_reported(
    pool: Pool, tmp_path: Path
) -> None:
    script = """
from shoal.training.launch.script_lines import report, report_hash
print("step=1 loss=2.5")
report(step=2, samples_per_s=100)
report_hash(2, bytes(32))
"""
    async with open_run(pool), watcher_of(pool) as watcher:
        await run(plan(), archive(tmp_path, script))
        events = await watched(watcher, 1)

    values: dict[str, object] = {}
    for each in events:
        if isinstance(reported := each.get("values"), dict):
            values |= reported
    assert values == {"step": 2, "loss": 2.5, "samples_per_s": 100}
    hashes = [(each["hash_step"], each["hash"]) for each in events if "hash" in each]
    assert hashes == [(2, "0" * 64)]
    assert lines_of(events, 0) == ["step=1 loss=2.5"]


async def test_progress_bar_is_reported_while_it_moves(
    pool: Pool, tmp_path: Path
) -> None:
    script = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    print(end=" 10%|#\\r", file=sys.stderr)
    time.sleep(0.05)
print("100%|##########", file=sys.stderr)
"""
    seen = tmp_path / "seen"
    async with open_run(pool), watcher_of(pool) as watcher:
        running = asyncio.create_task(
            run(plan(arguments=[str(seen)]), archive(tmp_path, script))
        )
        moving = await next_of(watcher, "lines")
        seen.touch()
        await running
        events = await watched(watcher, 1)

    assert moving["lines"] == [" 10%|#\r"]
    assert lines_of(events, 0)[-1] == "100%|##########"


async def test_failed_script_is_quoted_and_ends_its_other_processes(
    pool: Pool, tmp_path: Path
) -> None:
    script = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("zap")
time.sleep(1000)
"""
    async with open_run(pool), watcher_of(pool) as watcher:
        with pytest.raises(ScriptFailed) as failed:
            await run(plan(processes=2), archive(tmp_path, script))
        events = await watched(watcher, 1)

    first, *_, last = str(failed.value).splitlines()
    assert first.startswith("rank 1 of script.py on ")
    assert first.endswith("ended with status 1; its last lines:")
    assert last == "ValueError: zap"
    assert str(events[-1]["text"]).endswith("ended with status 1: ValueError: zap")


async def test_killed_script_is_named_with_its_signal(
    pool: Pool, tmp_path: Path
) -> None:
    script = "import os, sys; print('x', file=sys.stderr); os.kill(os.getpid(), 9)"
    async with open_run(pool):
        with pytest.raises(ScriptFailed, match=signal.SIGKILL.name) as failed:
            await run(plan(), archive(tmp_path, script))

    assert headline(str(failed.value)).endswith("was ended by SIGKILL")


async def test_flood_of_output_delays_nothing_and_is_counted(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_reports, "UNSENT_LINES_MAX", 100)
    script = "for n in range(20_000): print(n, chr(1) * 3000 * (n < 99))"
    async with open_run(pool), watcher_of(pool) as watcher:
        await run(plan(), archive(tmp_path, script))
        events = await watched(watcher, 1)

    lines = [str(each) for each in lines_of(events, 0)]
    left_out = [each for each in lines if each.endswith("lines left out")]
    assert left_out
    counted = sum(int(each.split()[1]) for each in left_out)
    assert counted + len(lines) - len(left_out) == 20_000
    assert lines[-1] == "19999 "


async def test_worker_without_http_runs_no_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COORDINATOR_URL, "")

    with pytest.raises(ConfigError, match="http"):
        await run(plan(), archive(tmp_path, ""))
