"""What `shoal workers` asks for and prints."""

import argparse
import asyncio
import json
from typing import Any

import pytest

from cli.coordinators import Sites
from shoal.cli import workers
from shoal.cli.api import ApiError

ORDER: dict[str, Any] = {
    "name": "wire:w/m",
    "state": "draining",
    "by": "al",
    "since": 0.0,
    "workers": ["wire:w/m"],
    "running": 2,
}
PATH = "/admin/workers/wire:w/m"


async def run(url: str, *words: str) -> int:
    parser = argparse.ArgumentParser()
    workers.add_arguments(parser)
    args = parser.parse_args([*words, "--url", url, "--api-key", "sk-test"])
    return await asyncio.to_thread(workers.run, args)


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
        (["drain"], {}, "draining wire:w/m: it still runs 2 jobs"),
        (["drain", "--within", "5m"], {"running": 0}, "drained wire:w/m"),
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
    monkeypatch.setattr(workers, "POLL_INTERVAL", 0.0)
    ended = {"workers": [], "running": 0}
    url = await sites({f"{PATH}/drain": ORDER, PATH: ORDER | ended})

    await run(url, "drain", "wire:w/m", "--wait")

    drained = "drained wire:w/m: no worker of this name is connected now\n"
    assert capsys.readouterr().out == drained


async def test_an_empty_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        await run("http://127.0.0.1:1", "pause", "")

    assert "expected the name of a worker, got ''" in capsys.readouterr().err


@pytest.mark.parametrize("state", ["active", "paused"])
async def test_a_drain_that_another_operator_ends_is_an_error(
    sites: Sites, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    monkeypatch.setattr(workers, "POLL_INTERVAL", 0.0)
    url = await sites({f"{PATH}/drain": ORDER, PATH: ORDER | {"state": state}})

    with pytest.raises(ApiError, match=f"wire:w/m is {state} now: its drain was ended"):
        await run(url, "drain", "wire:w/m", "--wait")
