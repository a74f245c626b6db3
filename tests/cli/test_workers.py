"""What `shoal workers` asks for and prints."""

import argparse
import asyncio
import json
from typing import Any

import pytest

from cli.coordinators import Sites
from shoal.cli import workers

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
        (["pause"], {"workers": []}, "paused wire:w/m: it is not connected"),
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

    assert capsys.readouterr().out == "drained wire:w/m: it is not connected\n"
