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
    "suspension": None,
    "remark": "",
    "points": 0,
    "cpu": None,
    "memory": None,
    "unfit": "",
    "queued": 0,
    "speed": 1.0,
    "thermal": "nominal",
    "throttle": 100,
    "tasks": [],
    "peer": None,
    "peer_name": "",
    "protection": None,
}


REFUSED: Mapping[str, Any] = {
    "id": "wire:ab\n",
    "name": "",
    "hardware": None,
    "remark": "",
}
STUDIO: Mapping[str, Any] = {
    "id": "wire:ab",
    "name": "Studio",
    "remark": "speaks version 2",
    "hardware": {
        "chip": "Apple M2 Pro",
        "memory_gb": 32.0,
        "gpu_memory_gb": None,
        "tier": 2,
    },
}
SERVER: Mapping[str, Any] = {
    "id": "wire:cd",
    "name": "Linux Server",
    "remark": "",
    "hardware": {
        "chip": "NVIDIA RTX 4090",
        "memory_gb": 64.0,
        "gpu_memory_gb": 24.0,
        "tier": 1,
    },
}


async def printed(
    sites: Sites, capsys: pytest.CaptureFixture[str], **said: object
) -> str:
    """Return the line of a worker with these fields."""
    told = {
        "ready": True,
        "why_not": "",
        "jobs": {"running": 1, "queued": 0},
        "workers": [{**WORKER, **said}],
        "nodes": [],
        "peers": [],
        "orders": [],
        "relays": [],
        "unencrypted": {},
        "refused": [],
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
        (
            {"protection": "teale", "queued": 2},
            "encrypted  jobs of other coordinators: 2",
        ),
        ({"protection": "tls", "speed": 0.5}, "TLS  at 50% of its speed"),
        (
            {"speed": 0.4, "thermal": "fair", "throttle": 50},
            "at 40% of its speed, thermal level fair, its owner lends 50% of its speed",
        ),
        (
            {"speed": 0.5, "throttle": 50},
            "1 of 2 busy  its owner lends 50% of its speed",
        ),
        ({"draining": "going home", "unfit": "is paused"}, "going home"),
        ({"suspension": "draining", "draining": "bye"}, "drained by an operator"),
        ({"points": 3, "unfit": "is paused"}, "3 penalty points"),
        ({"remark": "odd\nname"}, "odd\\nname"),
    ],
)
async def test_worker_line_shows_its_state(
    sites: Sites,
    capsys: pytest.CaptureFixture[str],
    said: Mapping[str, object],
    end: str,
) -> None:
    line = await printed(sites, capsys, **said)

    assert line.startswith("  wire:w/m  m  1 of 2 busy")
    assert line.endswith(end)


async def test_nodes_of_a_wire_have_their_own_table(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    node = {
        "wire": "wire",
        "name": "n1",
        "address": "192.0.2.1:5",
        "state": "alive",
        "since": 0.0,
        "score": 316.0,
        "rank": 0,
        "weight": 0.25,
        "coordinator": True,
        "remark": "",
        "hardware": {"chip": "M2", "memory_gb": 24.0, "gpu_cores": 10},
    }
    unknown = {**node, "name": "", "rank": None, "coordinator": False, "remark": "why"}
    unknown["hardware"] = None
    told = {
        "ready": True,
        "why_not": "",
        "jobs": {"running": 0, "queued": 0},
        "workers": [],
        "peers": [],
        "orders": [],
        "relays": [],
        "unencrypted": {},
        "refused": [],
        "nodes": [node, {**unknown, "since": None, "state": "no answer"}],
    }
    parser = argparse.ArgumentParser()
    status.add_arguments(parser)
    url = await sites({"/admin/status": told})
    args = parser.parse_args(["--url", url, "--api-key", "sk-test"])
    assert await asyncio.to_thread(status.run, args) == 0

    *_, head, first, second = capsys.readouterr().out.splitlines()
    columns = ["node", "address", "state", "since", "rank", "weight", "hardware"]
    assert head.split() == columns
    assert first == (
        "wire:n1  192.0.2.1:5  alive      1970-01-01 00:00Z  0     25%     M2, 24 GB  "
        "coordinator"
    )
    assert second.split() == ["wire", "192.0.2.1:5", "no", "answer", "why"]


async def test_a_peer_that_is_not_admitted_is_shown_with_the_reason(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {
        "ready": True,
        "why_not": "",
        "jobs": {"running": 0, "queued": 0},
        "workers": [],
        "nodes": [],
        "peers": [],
        "orders": [],
        "relays": [],
        "unencrypted": {},
        "refused": [{**REFUSED, "reason": "start it with --open"}],
    }
    parser = argparse.ArgumentParser()
    status.add_arguments(parser)
    url = await sites({"/admin/status": told})
    args = parser.parse_args(["--url", url, "--api-key", "sk-test"])
    assert await asyncio.to_thread(status.run, args) == 0

    *_, line = capsys.readouterr().out.splitlines()
    assert line == "  wire:ab\\n  not admitted: start it with --open"


async def test_peers_are_shown_by_their_names_with_their_machines(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {
        "ready": True,
        "why_not": "",
        "jobs": {"running": 0, "queued": 0},
        "workers": [{**WORKER, "id": "wire:ab/m", "peer_name": "Studio"}],
        "nodes": [],
        "peers": [STUDIO, SERVER],
        "orders": [],
        "relays": [],
        "unencrypted": {},
        "refused": [{**SERVER, "id": "wire:ef", "reason": "start it with --open"}],
    }
    parser = argparse.ArgumentParser()
    status.add_arguments(parser)
    url = await sites({"/admin/status": told})
    args = parser.parse_args(["--url", url, "--api-key", "sk-test"])
    assert await asyncio.to_thread(status.run, args) == 0

    server = "NVIDIA RTX 4090, 64 GB, 24 GB VRAM, tier 1"
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  Studio (wire:ab/m)  m  1 of 2 busy  Apple M2 Pro, 32 GB, tier 2"
        "  speaks version 2",
        f"  Linux Server (wire:cd)  {server}  no models",
        f"  Linux Server (wire:ef)  {server}  not admitted: start it with --open",
    ]


async def test_a_removed_worker_that_is_gone_is_shown(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    order = {"name": "wire:w", "by": "al", "since": 0.0, "running": 0}
    told = {
        "ready": True,
        "why_not": "",
        "jobs": {"running": 0, "queued": 0},
        "workers": [],
        "nodes": [],
        "peers": [],
        "refused": [],
        "unencrypted": {"wire": "nodes", "other": "workers"},
        "orders": [
            {**order, "state": "removed", "workers": []},
            {**order, "state": "paused", "workers": ["wire:w/m"]},
        ],
        "relays": [],
    }
    parser = argparse.ArgumentParser()
    status.add_arguments(parser)
    url = await sites({"/admin/status": told})
    args = parser.parse_args(["--url", url, "--api-key", "sk-test"])
    assert await asyncio.to_thread(status.run, args) == 0

    _, unencrypted, advice, line = capsys.readouterr().out.splitlines()
    assert unencrypted == (
        "connections without encryption: nodes (wire), workers (other)"
    )
    assert advice.startswith("no workers: run")
    assert line == (
        "  wire:w  removed with the key al, 1970-01-01 00:00Z; to resume: shoal "
        "workers resume wire:w"
    )


@pytest.mark.parametrize(
    ("tasks", "shown"), [(["f"], "1 function"), (["f", "g"], "2 functions")]
)
async def test_functions_of_a_worker_without_models_are_counted(
    sites: Sites, capsys: pytest.CaptureFixture[str], tasks: list[str], shown: str
) -> None:
    line = await printed(sites, capsys, models=[], tasks=tasks)

    assert line == f"  wire:w/m  {shown}  1 of 2 busy"


@pytest.mark.parametrize(
    ("relay", "lines"),
    [
        ((False, 0, 0, 0), []),
        (
            (False, 2, 0, 0),
            ["relay: for this pool's workers; connected: 2 of the pool"],
        ),
        (
            (False, 2, 0, 1),
            [
                "relay: for this pool's workers; connected: 2 of the pool, 1 not "
                "admitted"
            ],
        ),
        (
            (True, 0, 3, 0),
            ["relay: for any node; connected: 0 of the pool, 3 other nodes"],
        ),
    ],
)
async def test_the_relay_is_shown_if_it_is_open_or_used(
    sites: Sites,
    capsys: pytest.CaptureFixture[str],
    relay: tuple[bool, int, int, int],
    lines: list[str],
) -> None:
    fields = ("open", "members", "guests", "strangers")
    told = {
        "ready": True,
        "why_not": "",
        "jobs": {"running": 0, "queued": 0},
        "workers": [WORKER],
        "nodes": [],
        "peers": [],
        "refused": [],
        "orders": [],
        "unencrypted": {},
        "relays": [{"wire": "wire", **dict(zip(fields, relay, strict=True))}],
    }
    parser = argparse.ArgumentParser()
    status.add_arguments(parser)
    url = await sites({"/admin/status": told})
    args = parser.parse_args(["--url", url, "--api-key", "sk-test"])
    assert await asyncio.to_thread(status.run, args) == 0

    assert capsys.readouterr().out.splitlines()[2:] == lines
