"""What `shoal status` prints of workers."""

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from cli.coordinators import Sites
from shoal.cli import status

WORKER: Mapping[str, Any] = {
    "id": "wire:w/m",
    "models": ["m"],
    "slots": 2,
    "busy": 1,
    "draining": "",
    "remark": "",
    "points": 0,
    "cpu": None,
    "memory": None,
    "unfit": "",
    "queued": 0,
    "speed": 1.0,
    "peer": None,
    "protection": None,
}


async def printed(
    sites: Sites, capsys: pytest.CaptureFixture[str], **said: object
) -> str:
    """Return the line of a worker of which this is told."""
    told = {
        "ready": True,
        "why_not": "",
        "jobs": {"running": 1, "queued": 0},
        "workers": [{**WORKER, **said}],
    }
    parser = argparse.ArgumentParser()
    status.add_arguments(parser)
    url = await sites({"/admin/status": told})
    args = parser.parse_args(["--url", url, "--api-key", "sk-test"])
    assert await asyncio.to_thread(status.run, args) == 0
    return capsys.readouterr().out.splitlines()[1]


@pytest.mark.parametrize(
    ("said", "end"),
    [
        ({}, "1 of 2 busy"),
        ({"cpu": 45.2, "memory": 62.1}, "cpu 45%, memory 62%"),
        ({"protection": "plain"}, "plaintext"),
        ({"protection": "noise", "unfit": "is too hot"}, "Noise  is too hot"),
        ({"protection": "teale", "queued": 2}, "encrypted  jobs of others there: 2"),
        ({"protection": "tls", "speed": 0.5}, "TLS  at 50% of its speed"),
        ({"draining": "going home", "unfit": "is paused"}, "going home"),
        ({"points": 3, "unfit": "is paused"}, "3 points against it"),
        ({"remark": "odd\nname"}, "odd\\nname"),
    ],
)
async def test_line_of_a_worker_says_how_it_is(
    sites: Sites,
    capsys: pytest.CaptureFixture[str],
    said: Mapping[str, object],
    end: str,
) -> None:
    line = await printed(sites, capsys, **said)

    assert line.startswith("  wire:w/m  m  1 of 2 busy")
    assert line.endswith(end)
