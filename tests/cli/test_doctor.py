"""`shoal doctor`: what it finds, and what it advises."""

import asyncio
import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cli.coordinators import Sites
from gateway.serving import KEY, serving
from shoal.cli.local.doctor.checks import (
    Check,
    Examined,
    Severity,
    check_clock,
    check_disk,
    check_firewall,
    check_keys,
    check_port,
)
from shoal.cli.main import main
from shoal.client.coordinator import CoordinatorApi
from shoal.config import ServeConfig
from shoal.config.secret_files import KEY_FILE


@pytest.fixture
def examined(tmp_path: Path) -> Examined:
    """A machine on which no program of the system answers."""
    api = CoordinatorApi(None, None, tmp_path)
    return Examined(api, ServeConfig(data_dir=tmp_path), run=lambda command: "")


def found(check: Check, examined: Examined) -> tuple[Severity, str]:
    """Return the only finding of a check, with its remedy."""
    (finding,) = check(examined)
    return finding.severity, f"{finding.text}: {finding.remedy}"


def test_a_taken_port_is_found(examined: Examined) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        serve = replace(examined.serve, port=port)

        severity, text = found(check_port, replace(examined, serve=serve))

    assert severity is Severity.FAILED
    assert f"cannot listen on 127.0.0.1:{port}" in text
    assert "shoal serve --port" in text
    assert found(check_port, replace(examined, serve=serve))[0] is Severity.OK


@pytest.mark.skipif(sys.platform == "win32", reason="has no such permissions")
def test_keys_that_others_can_read_are_found(examined: Examined) -> None:
    key = examined.folder / KEY_FILE
    key.write_text("sk-x")
    examined.folder.chmod(0o700)
    key.chmod(0o644)

    severity, text = found(check_keys, examined)
    key.chmod(0o600)

    assert severity is Severity.WARNING
    assert text.endswith(f": chmod go= {key}")
    assert found(check_keys, examined)[0] is Severity.OK


def test_disk_is_that_of_the_first_folder_that_exists(examined: Examined) -> None:
    serve = replace(examined.serve, data_dir=examined.folder / "not" / "yet")

    severity, text = found(check_disk, replace(examined, serve=serve))

    assert severity in (Severity.OK, Severity.WARNING)
    assert f"free at {examined.folder}" in text


@pytest.mark.parametrize(
    ("host", "active", "severity", "part"),
    [
        ("127.0.0.1", "ufw", Severity.OK, "from this machine only"),
        ("0.0.0.0", "ufw", Severity.WARNING, "sudo ufw allow 4010/tcp"),
        ("0.0.0.0", "firewalld", Severity.WARNING, "--add-port=4010/tcp"),
        ("0.0.0.0", "", Severity.OK, "no firewall found"),
    ],
)
def test_a_firewall_matters_only_where_others_may_connect(
    examined: Examined, host: str, active: str, severity: Severity, part: str
) -> None:
    def run(command: Sequence[str]) -> str:
        return "active\n" if active and command[-1] == active else ""

    serve = replace(examined.serve, host=host)

    told, text = found(check_firewall, replace(examined, serve=serve, run=run))

    assert told is severity
    assert part in text


@pytest.mark.parametrize(("told", "severity"), [("yes", "OK"), ("no", "WARNING")])
def test_a_clock_that_nobody_sets_is_found(
    examined: Examined, told: str, severity: str
) -> None:
    output = f"NTPSynchronized={told}\n"
    run = replace(examined, run=lambda command: output)

    assert found(check_clock, run)[0] is Severity[severity]


async def test_a_pool_is_examined_with_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path) as pool:
        place = ("--json", "--url", pool.url, "--data-dir", str(tmp_path))
        key = ("--api-key", KEY)
        good = await asyncio.to_thread(main, ["doctor", *place, *key])
        findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        bad = await asyncio.to_thread(main, ["doctor", *place, "--api-key", "sk-no"])
        refused = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    by_subject = {each["subject"]: each for each in findings}
    assert good == 0
    assert f"answers at {pool.url}" in by_subject["coordinator"]["text"]
    assert by_subject["API key"]["text"] == "accepted"
    assert by_subject["nodes"]["severity"] == "warning"
    assert "shoal join-line" in by_subject["nodes"]["remedy"]
    assert {"version", "disk", "keys", "clocks", "engine", "models"} <= {*by_subject}
    assert bad == 1
    (wrong,) = (each for each in refused if each["severity"] == "failed")
    assert wrong["subject"] == "API key"
    assert "SHOAL_API_KEY" in wrong["remedy"]


async def test_another_program_is_no_coordinator(
    sites: Sites, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = await sites({"/healthz": {"status": "ok"}})
    place = ("--url", url, "--api-key", "sk-x", "--data-dir", str(tmp_path))

    await asyncio.to_thread(main, ["doctor", *place])

    shown = capsys.readouterr().out
    assert f"warning coordinator {url} is not a Shoal coordinator" in shown
    assert "→ to start a pool here: shoal serve" in shown
