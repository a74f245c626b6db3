"""What the files of a service start, as systemd and launchd would start it."""

import os
import plistlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from live.programs import PATIENCE, eventually
from shoal.cli.pool.serve import command as serve
from shoal.cli.pool.service import define_service, environment_text
from shoal.cli.pool.service.managers import (
    WITH_VARIABLES,
    ServiceDefinition,
    launchd_agent,
    systemd_unit,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="other services")

TOKEN = "9f2c71d4e8a6b035$7c1d5e2"


def by_systemd(service: ServiceDefinition, environment: Path) -> Sequence[str]:
    unit = systemd_unit(service, environment).splitlines()
    (line,) = (each for each in unit if each.startswith("ExecStart="))
    words = shlex.split(line.removeprefix("ExecStart="))
    plain = (each.replace("%%", "%").replace("$$", "$") for each in words)
    return [*WITH_VARIABLES, str(environment), *plain]  # as EnvironmentFile= does


def by_launchd(service: ServiceDefinition, environment: Path) -> Sequence[str]:
    agent = plistlib.loads(launchd_agent(service, environment, environment.parent))
    words: Sequence[str] = agent["ProgramArguments"]
    return words


@pytest.mark.parametrize("start", [by_systemd, by_launchd])
def test_coordinator_runs_as_its_service_says(tmp_path: Path, start: object) -> None:
    assert callable(start)
    data, environment = tmp_path / "100% data", tmp_path / "my env"
    arguments = ["--port", "0", "--no-discovery", "--data-dir", str(data)]
    service = define_service(serve, [*arguments, "--join-token", TOKEN], {})
    environment.write_text(environment_text(service.variables))
    bare = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}

    running = subprocess.Popen(
        start(service, environment),
        env=bare,
        cwd=service.folder,
        stdout=subprocess.DEVNULL,
    )
    try:
        eventually((data / "url").exists, "it serves")
        words = [service.words[0], "join-line", "--data-dir", str(data)]
        line = subprocess.check_output(words, env=bare, text=True)
        running.terminate()
        assert running.wait(PATIENCE) == 0
    finally:
        running.kill()
        running.wait()

    assert shlex.split(line)[-2:] == ["--token", TOKEN]
