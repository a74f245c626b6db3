"""The files of ``examples/deploy``: ``live/test_reverse_proxies.py`` runs two."""

import configparser
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.test_documented_commands import check_command
from shoal.app.node import check_node
from shoal.cli.main import EXIT_STORE_BROKEN
from shoal.config import ServeConfig
from shoal.config.loader import load
from shoal.domain.addresses import host_and_port

FOLDER = Path(__file__).parents[2] / "examples" / "deploy"
UNIT = FOLDER / "shoal.service"
PROGRAM = "/opt/shoal/bin/shoal"


def service() -> configparser.SectionProxy:
    """Return the section of the unit that says what it runs."""
    parser = configparser.RawConfigParser(strict=False)
    parser.read(UNIT, "utf-8")
    return parser["Service"]


def test_unit_runs_a_command_that_exists() -> None:
    program, *words = shlex.split(service()["ExecStart"])

    assert program == PROGRAM
    check_command(words)


def test_unit_does_not_restart_what_does_not_heal() -> None:
    hopeless = service()["RestartPreventExitStatus"].split()

    assert hopeless == ["2", str(EXIT_STORE_BROKEN)]


def test_unit_waits_for_open_answers() -> None:
    assert float(service()["TimeoutStopSec"]) > ServeConfig().drain


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(PROGRAM, sys.executable))

    verified = subprocess.run(
        ["systemd-analyze", "verify", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert verified.stderr == ""


def test_settings_of_a_node_are_accepted() -> None:
    node = load(ServeConfig, "serve", {}, FOLDER / "node.toml", {})

    check_node(node)
    host, port = host_and_port(node.node) or ("", 0)
    assert port not in (0, node.port)
    text = (FOLDER / "Caddyfile.nodes").read_text("utf-8")
    assert f"{host}:{node.port} " in text
    assert all(name in text for name in node.allowed_host)


def test_settings_are_those_of_a_coordinator_behind_a_proxy() -> None:
    settings = load(ServeConfig, "serve", {}, FOLDER / "shoal.toml", {})

    assert settings.host == "127.0.0.1"
    assert "127.0.0.1" in settings.trusted_proxy
    for file in ("nginx.conf", "Caddyfile"):
        text = (FOLDER / file).read_text("utf-8")
        assert f"{settings.host}:{settings.port}" in text
        assert all(name in text for name in settings.allowed_host)
