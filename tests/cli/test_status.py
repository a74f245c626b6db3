"""What `shoal status` prints of machines."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from cli.coordinators import Sites
from harness.profiles import some_long
from harness.terminal import at_terminal
from shoal.cli.main import main
from shoal.cli.pool.status import status_lines

NOW = 1_000_000.0
KEY = "8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c"
HEAD = "MACHINE  STATE   BUSY  TOKENS/S  CPU  MEM  TEMP  UP"

WORKER: Mapping[str, Any] = {
    "id": "wire:w/m",
    "models": ["m"],
    "kinds": ["chat"],
    "features": ["stop"],
    "slots": 2,
    "busy": 1,
    "draining": "",
    "suspension": None,
    "remark": "",
    "points": 0,
    "cpu": None,
    "memory": None,
    "temperature": None,
    "tokens_per_second": None,
    "unfit": "",
    "queued": 0,
    "speed": 1.0,
    "thermal": "nominal",
    "throttle": 100,
    "tasks": [],
    "public_key": None,
    "proven": False,
    "peer": None,
    "peer_name": "",
    "protection": None,
    "connected_at": None,
    "engine": "",
}
PEER: Mapping[str, Any] = {
    "pending": False,
    "id": "wire:ab",
    "name": "",
    "remark": "",
    "release": "",
    "hardware": None,
    "protection": "noise",
}
STUDIO = {"chip": "Apple M2 Pro", "memory_gb": 32.0, "gpu_memory_gb": None}
SERVER = {"chip": "NVIDIA RTX 4090", "memory_gb": 64.0, "gpu_memory_gb": 24.0}
STATUS: Mapping[str, Any] = {
    "version": "1.2.3",
    "started_at": NOW - 7300,
    "ready": True,
    "why_not": "",
    "models": ["m"],
    "jobs": {"running": 1, "queued": 0},
    "workers": [],
    "nodes": [],
    "peers": [],
    "orders": [],
    "relays": [],
    "unencrypted": {},
    "refused": [],
}


def shown(**said: object) -> list[str]:
    """Return the lines after the two of the pool as a whole."""
    return [*status_lines({**STATUS, **said}, "http://pool:1", NOW)][2:]


def test_the_head_tells_of_the_whole_pool() -> None:
    said = {**STATUS, "workers": [WORKER], "ready": False, "why_not": "disk\nfull"}

    lines = [*status_lines(said, "http://pool:1", NOW)]

    assert lines[:3] == [
        "Shoal 1.2.3 at http://pool:1, up 2 h",
        "1 machine, 1 model, 1 job running, 0 waiting",
        "no jobs are accepted: disk\nfull",
    ]


def test_a_machine_has_a_row_and_beneath_it_its_wires_and_models() -> None:
    measured = {"cpu": 12.4, "memory": 40.0, "temperature": 54.2}
    worker = {
        **WORKER,
        **measured,
        "id": "wire:ab/m",
        "peer_name": "studio",
        "protection": "noise",
        "tokens_per_second": 35.2,
        "connected_at": NOW - 90,
    }
    other = {**worker, "id": "wire:ab/n", "models": ["n"], "busy": 0}
    peer = {**PEER, "name": "studio", "hardware": STUDIO, "release": "1.2.3"}

    assert shown(workers=[worker, other], peers=[peer]) == [
        "",
        "MACHINE  STATE   BUSY  TOKENS/S  CPU  MEM  TEMP   UP",
        "studio   active  1/4   35.2      12%  40%  54 °C  1 min",
        "  Apple M2 Pro, 32 GB; wire (encrypted); Shoal 1.2.3",
        "  m, n",
    ]


def test_models_whose_answers_a_machine_continues_are_named() -> None:
    one = {**WORKER, "id": "wire:ab/m", "features": ["continue", "stop"]}
    other = {**WORKER, "id": "wire:ab/n", "models": ["n"]}
    texts = {**WORKER, "id": "wire:ab/e", "models": ["e"], "kinds": ["embedding"]}

    assert "  m; continues answers" in shown(workers=[one])
    assert "  e, m; continues answers" in shown(workers=[one, texts])
    assert "  m, n; continues answers of m" in shown(workers=[one, other])


def test_jobs_of_this_pool_at_a_machines_other_models_are_not_those_of_others() -> None:
    one = {**WORKER, "id": "wire:ab/m", "busy": 2, "queued": 1}
    other = {**WORKER, "id": "wire:ab/n", "busy": 1, "queued": 2}

    assert not any("other coord" in line for line in shown(workers=[one, other]))
    loaded = shown(workers=[{**one, "queued": 4}, {**other, "queued": 5}])
    assert "  jobs of other coordinators: 3" in loaded


@pytest.mark.parametrize(
    ("said", "state", "remark"),
    [
        ({"unfit": "is too hot"}, "unfit", "is too hot"),
        ({"queued": 2}, "active", "jobs of other coordinators: 2"),
        ({"speed": 0.5}, "active", "at 50% of its speed"),
        (
            {"speed": 0.4, "thermal": "fair", "throttle": 50},
            "active",
            "at 40% of its speed, thermal level fair, its owner lends 50% of its speed",
        ),
        (
            {"speed": 0.5, "throttle": 50},
            "active",
            "its owner lends 50% of its speed",
        ),
        ({"draining": "going home", "unfit": "is paused"}, "leaving", "going home"),
        (
            {"suspension": "draining", "draining": "bye"},
            "draining",
            "drained by an operator",
        ),
        ({"points": 3, "unfit": "is paused"}, "unfit", "3 penalty points"),
        ({"remark": "odd\nname"}, "active", "odd\\nname"),
    ],
)
def test_what_is_wrong_with_a_machine_is_beneath_it(
    said: Mapping[str, object], state: str, remark: str
) -> None:
    row, wires, models, *wrong = shown(workers=[{**WORKER, **said}])[2:]

    assert row.split() == ["w", state, "1/2"]
    assert (wires, models) == ("  wire", "  m")
    assert wrong == [f"  {remark}"]


def test_ids_of_64_digits_are_cut() -> None:
    worker = {**WORKER, "id": f"wire:{KEY}/m", "remark": f"was {KEY}"}

    lines = shown(workers=[worker])

    assert lines[2].startswith("8a88e3dd…")
    assert lines[-1] == "  was 8a88e3dd…"


@pytest.mark.parametrize(
    ("tasks", "told"), [(["f"], "1 function"), (["f", "g"], "2 functions")]
)
def test_functions_are_counted(tasks: list[str], told: str) -> None:
    worker = {**WORKER, "models": [], "kinds": ["call"], "tasks": tasks}

    assert shown(workers=[worker])[-1] == f"  {told}"


def test_nodes_of_a_wire_have_their_own_table() -> None:
    node = {
        "wire": "wire",
        "name": "n1",
        "address": "192.0.2.1:5",
        "state": "alive",
        "since": 0.0,
        "rank": 0,
        "weight": 0.25,
        "coordinator": True,
        "remark": "",
    }
    unknown = {**node, "name": "", "rank": None, "coordinator": False, "remark": "why"}

    *_, head, first, second = shown(nodes=[node, {**unknown, "state": "no answer"}])

    assert head.split() == ["NODE", "ADDRESS", "STATE", "RANK", "WEIGHT"]
    assert first == "wire:n1  192.0.2.1:5  alive      0     25%     coordinator"
    assert second.split() == ["wire", "192.0.2.1:5", "no", "answer", "why"]


def test_a_peer_that_is_not_admitted_is_shown_with_the_reason() -> None:
    refused = {**PEER, "id": "wire:ab\n", "reason": "start it with --open"}

    lines = shown(refused=[refused])

    assert lines[-3:] == [
        "ab\\n     not admitted",
        "  wire (encrypted)",
        "  start it with --open",
    ]


def test_peers_without_models_are_machines_too() -> None:
    server = {**PEER, "name": "Linux Server", "hardware": SERVER, "remark": "is new"}

    assert [each for each in shown(peers=[server]) if each.startswith("  ")] == [
        "  NVIDIA RTX 4090, 64 GB, 24 GB VRAM; wire (encrypted)",
        "  is new",
    ]


def test_a_removed_worker_that_is_gone_is_shown() -> None:
    order = {"name": "wire:w", "by": "al", "since": 0.0, "running": 0}
    orders = [{**order, "state": "removed", "workers": []}]

    lines = shown(orders=orders, unencrypted={"wire": "nodes", "other": "workers"})

    assert lines[0] == "not encrypted, if any connect: nodes (wire), workers (other)"
    assert any(each.startswith("no workers: `shoal join-line`") for each in lines)
    assert lines[-1] == (
        "  removed with the key al, 1970-01-01 00:00Z; to resume: shoal nodes resume "
        "wire:w"
    )


def test_what_needs_attention_is_first_and_the_rest_is_counted() -> None:
    at = {name: {**WORKER, "id": f"wire:{name}/m"} for name in "abcd"}
    order = {"name": "wire:b", "by": "al", "since": 0.0, "running": 0}
    said = {
        **STATUS,
        "workers": [
            at["a"],
            at["b"] | {"suspension": "paused"},
            at["c"] | {"unfit": "is too hot"},
            at["d"] | {"points": 2},
        ],
        "orders": [{**order, "state": "paused", "workers": ["wire:b/m"]}],
        "peers": [{**PEER, "id": "wire:e", "pending": True}],
    }

    def machines_shown(limit: int | None) -> tuple[list[str], str]:
        lines = [*status_lines(said, "http://pool:1", NOW, limit)][4:]
        rows = [each.split()[0] for each in lines if not each.startswith("  ")]
        return rows, lines[-1]

    assert machines_shown(None)[0] == ["e", "c", "d", "b", "a"]
    assert machines_shown(9)[0] == ["e", "c", "d", "b", "a"]
    assert machines_shown(2) == (["e", "c", "and"], "and 3 more machines")


async def test_the_limit_of_machines_is_given(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = [{**WORKER, "id": f"wire:{name}/m"} for name in "ab"]
    url = await sites({"/admin/status": {**STATUS, "workers": workers}})
    given = ["status", "--url", url, "--api-key", "sk-x", "--limit"]

    assert await asyncio.to_thread(main, [*given, "1"]) == 0
    assert capsys.readouterr().out.endswith("\nand 1 more machine\n")

    assert await asyncio.to_thread(main, [*given, "0"]) == 2
    assert "--limit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("relay", "lines"),
    [
        ((False, 0, 0), []),
        (
            (False, 0, 1),
            ["relay: closed; connected: 0 nodes, 1 not registered"],
        ),
        (
            (True, 3, 0),
            ["relay: for any node; connected: 3 nodes"],
        ),
    ],
)
def test_the_relay_is_shown_if_it_is_open_or_used(
    relay: tuple[bool, int, int], lines: Sequence[str]
) -> None:
    fields = ("open", "guests", "strangers")
    told = {"wire": "wire", **dict(zip(fields, relay, strict=True))}

    found = shown(relays=[told])

    assert [each for each in found if each.startswith("relay:")] == lines


async def test_json_is_the_coordinators_own(
    sites: Sites, capsys: pytest.CaptureFixture[str]
) -> None:
    url = await sites({"/admin/status": STATUS})
    place = ("--url", url, "--api-key", "sk-test")

    assert await asyncio.to_thread(main, ["status", "--json", *place]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_watching_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--watch"]) == 2
    assert "--watch needs a terminal, or --json" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="pexpect needs a pty")
@pytest.mark.parametrize("away", some_long([True, False], short=1))
async def test_watching_tells_when_the_coordinator_is_away(
    sites: Sites, away: bool
) -> None:
    import pexpect

    url = await sites({"/admin/status": {**STATUS, "workers": [WORKER]}})

    def watch() -> None:
        address = "http://127.0.0.1:1" if away else url
        arguments = ["status", "--watch", "--url", address, "--api-key", "sk-test"]
        terminal = at_terminal(arguments, columns=80)
        terminal.expect_exact("trying again" if away else "1 machine, 1 model")
        terminal.sendintr()
        terminal.expect(pexpect.EOF)
        terminal.wait()
        assert terminal.exitstatus == 130

    await asyncio.to_thread(watch)


@pytest.mark.parametrize("title", ["studio", "wire:other", ""])
def test_the_command_that_approves_a_machine_is_shown_whole(title: str) -> None:
    key = "8a" * 32
    peer = {**PEER, "id": f"wire:{key}", "name": title, "pending": True}

    (row, _, remark) = shown(peers=[peer])[3:]

    name = title if title == "studio" else key
    assert "pending" in row
    assert remark == f"  an operator has to approve it: shoal nodes approve {name}"
